"""TRL's AsyncGRPOTrainer and a real vLLM server on this machine's CPU, with the weights through a bucket.

    python examples/trl_async.py --steps 300

The trainer teaches a toy model to write words backwards. Each weight sync publishes the changed weights as a version;
`delta-sync serve` applies it between two engine steps. At the end the script compares the server's weights and answers
with the trainer's checkpoint and with a vLLM that loads it afresh.

The output directory gets summary.json, details.json, log_history.json (TRL's complete log), trl.png, the servers' logs,
both checkpoints and the bucket. Exit status: 0 every claim holds (and, from 100 steps on, the reward rose by 0.25), 1 a
claim does not hold or an error occurred, 2 wrong usage, 130 interrupted.
"""

import os

if __name__ == "__main__":
    # Before torch and TRL are imported: threads sleep while they wait for each other, and the network is not used.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import argparse
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pandas as pd  # type: ignore[import-untyped]
import torch
from datasets import Dataset
from matplotlib.figure import Figure
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, RolloutSample, _AsyncRolloutLoop

from trainer_side.integrations.trl import DeltaWeightTransfer
from vllm_delta_sync import DeltaSyncError, open_run
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.tensors.checkpoint import Checkpoint
from vllm_delta_sync.urls import check_url

SAMPLES, BATCH, MAX_ANSWER_TOKENS = 8, 128, 10  # answers to one word, and per optimizer step; tokens of an answer
WARM_UP_TARGET, WARM_UP_STEPS = 0.28, 600
MARKER = ".delta-sync-trl"

# Metrics in TRL's log. VersionedRolloutLoop adds the first: the versions that sampled the batch's tokens, on average.
SERVED_VERSION, STALENESS, WEIGHT_SYNC = "sample/served_version", "sample/staleness_mean", "perf/weight_sync_s"
VERSION, PAYLOAD, CHANGED = "delta_sync/version", "delta_sync/payload_bytes", "delta_sync/changed_percent"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
PAD, EOS, UNKNOWN, SEPARATOR = "<pad>", "<eos>", "<unk>", ">"


def say(text: str) -> None:
    print(time.strftime("%X"), text, flush=True)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, nothing added around a text."""
    vocabulary = (PAD, EOS, UNKNOWN, SEPARATOR, *ALPHABET, *ALPHABET.upper(), *"01234567")
    ids = {entry: number for number, entry in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNKNOWN}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **special)
    made.chat_template = "{{ messages | map(attribute='content') | join }}{{ '>' if add_generation_prompt }}"
    # How to parse an answer into a message; TRL knows that only for the chat templates of large models.
    content = {"close_pattern": EOS, "content": "text"}
    made.response_template = {"defaults": {"role": "assistant"}, "fields": {"content": content}}
    return made


TOKENIZER = make_tokenizer()


def random_words(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(ALPHABET, k=rng.randint(4, 8))) for _ in range(count)]


def make_dataset(count: int, seed: int) -> Dataset:
    """Random words, each as a conversation (``prompt``) and alone (``word``)."""
    words = random_words(count, seed)
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": word}] for word in words], "word": words})


def exact_reversal(completion_ids: list[list[int]], word: list[str], **_columns: object) -> list[float]:
    """Reward of each answer: 1.0 for the reversed word and the end token after it, else 0.0."""
    right = TOKENIZER([one[::-1] + EOS for one in word]).input_ids
    return [float(ids == wanted) for ids, wanted in zip(completion_ids, right, strict=True)]


def warmed_up_model() -> Qwen3ForCausalLM:
    """A Qwen3 of 3.2 M parameters that answers 28 % of the words correctly: reinforcement learning needs rewards."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    special = {"pad_token_id": TOKENIZER.pad_token_id, "eos_token_id": TOKENIZER.eos_token_id, "bos_token_id": None}
    config = Qwen3Config(vocab_size=len(TOKENIZER), tie_word_embeddings=True, **sizes, **heads, **special)
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, weight_decay=0.0)
    for step in range(WARM_UP_STEPS):
        words = random_words(BATCH, seed=1_000_000 + step)
        texts = [word + SEPARATOR + word[::-1] + EOS for word in words]
        tokens = TOKENIZER(texts, padding=True, return_tensors="pt").input_ids
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        behind_separator = (given == TOKENIZER.convert_tokens_to_ids(SEPARATOR)).cumsum(1) > 0
        answers = behind_separator & (wanted != TOKENIZER.pad_token_id)
        logits = model(input_ids=given, use_cache=False).logits
        losses = cross_entropy(logits.transpose(1, 2), wanted, reduction="none") * answers
        chance = float((-losses.detach().sum(dim=1)).exp().mean())
        if chance >= WARM_UP_TARGET:
            break
        (losses.sum() / answers.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    say(f"after {step} supervised steps the policy answers right with a probability of {chance:.3f}")
    return model


def on_cpu() -> None:
    """Let TRL train without a GPU: it asks CUDA for the GPU's name, and has a tree attention for GPUs only."""
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
    packing.tree_attention = tree_attention


def tree_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **tree: Any
) -> tuple[Tensor, None]:
    """Attention in a tree of samples, in which TRL computes shared prefixes once: a token sees those on its path.

    The tree's tokens lie in segments; segment s has those from ``tree_cu_seqlens_q[s]`` on. ``tree_kv_index`` has the
    tokens from the root to the end of each segment, path after path; that of s begins at ``tree_cu_seqlens_k[s]``.
    """
    if tree.get("sliding_window") or tree.get("softcap"):
        raise ValueError("this attention has no sliding window and no softcap; train a model without them")
    lengths, path_lengths = tree["tree_cu_seqlens_q"].diff(), tree["tree_cu_seqlens_k"].diff()
    on_path = torch.zeros(len(lengths), query.shape[2], dtype=torch.bool)
    on_path[torch.arange(len(lengths)).repeat_interleave(path_lengths), tree["tree_kv_index"]] = True
    # The tokens of a path lie in its order in the tree, so the lower triangle hides what comes after a token.
    seen = on_path.repeat_interleave(lengths, dim=0).tril()
    outputs = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True)
    return outputs.transpose(1, 2), None


class VersionedRolloutLoop(_AsyncRolloutLoop):
    """TRL's own rollout loop, in TRL's rollout process; adds ``SERVED_VERSION`` to each sample's metrics."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Prompt and answer → its mean version, for each time that it was sampled.
        self._versions: dict[tuple[int, ...], list[float]] = {}

    async def _post(self, path: str, payload: dict[str, Any], *limits: Any, **more: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await super()._post(path, payload, *limits, **more)
        tokens = (*payload["prompt"], *answer["choices"][0]["token_ids"])
        self._versions.setdefault(tokens, []).append(mean_version(answer))
        return answer

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        samples: list[RolloutSample] = await super()._score_group(group)
        for sample in samples:
            sample.metrics[SERVED_VERSION] = self._versions[tuple(sample.input_ids.tolist())].pop(0)
        return samples


def mean_version(answer: dict[str, Any]) -> float:
    """The version of the weights that sampled a token of an answer, on average."""
    # Until the server has proven its version it names none: it was started from the run's base, which is version 0.
    spans = answer.get("delta_sync", {"spans": []})["spans"]
    total: int = sum((span["version"] or 0) * (span["end"] - span["start"]) for span in spans)
    return total / len(answer["choices"][0]["token_ids"])


class Progress(TrainerCallback):
    """Prints a line now and then, and collects for how long the server generated nothing, by version."""

    def __init__(self, server: httpx.Client) -> None:
        self.pauses_ms: dict[int, float] = {}
        self._server = server

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **more: Any) -> None:
        if "reward" in logs and (state.global_step % 10 == 0 or state.max_steps < 50):
            self.poll()
            step, reward, lag = state.global_step, logs["reward"], state.global_step - logs[SERVED_VERSION]
            say(f"step {step:3d}  reward {reward:.3f}  lag {lag:.2f}  versions {len(self.pauses_ms)}")

    def poll(self) -> None:
        """Read the server's status, which has the last 64 commits; exit if it no longer follows the run."""
        status = self._server.get("/delta_sync/status").raise_for_status().json()
        if status["last_error"] is not None:
            sys.exit(f"trl_async: the server stopped following the run: {status['last_error']['message']}")
        self.pauses_ms |= {one["version"]: one["timings_ms"]["pause"] for one in status["recent"]}


def train(out: Path, steps: int, url: str, transfer: DeltaWeightTransfer, progress: Progress) -> Any:
    """Train from OUT/base to OUT/checkpoint; return TRL's trainer once the last version is durable."""
    # For a toy that learns in minutes; large models want smaller steps.
    learning = {"learning_rate": 3e-4, "adam_epsilon": 1e-2, "max_grad_norm": 10.0, "epsilon_high": 0.28}
    without_gpu = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False}
    settings = AsyncGRPOConfig(
        output_dir=str(out / "trl"),
        vllm_server_base_url=url,
        max_steps=steps,
        num_generations=SAMPLES,
        per_device_train_batch_size=BATCH,
        max_completion_length=MAX_ANSWER_TOKENS,
        token_budget=0,  # each step learns from as many answers; otherwise TRL asks the server how long a row may be
        max_inflight_tasks=BATCH,
        queue_maxsize=SAMPLES,  # waiting answers make the batch older if training is slower than the server
        save_strategy="no",
        disable_tqdm=True,
        **learning,
        **without_gpu,
    )
    on_cpu()
    trainer = AsyncGRPOTrainer(
        model=str(out / "base"),
        reward_funcs=exact_reversal,
        args=settings,
        train_dataset=make_dataset(4096, seed=1),
        callbacks=[progress, transfer.callback],  # the second ends training at a step when SIGTERM comes
        weight_transfer=transfer,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.rollout_worker._loop_cls = VersionedRolloutLoop
    trainer.train()
    if trainer.state.global_step < steps:
        raise KeyboardInterrupt
    for part in (trainer.model.to(torch.bfloat16), TOKENIZER):
        part.save_pretrained(out / "checkpoint")
    return trainer


@contextmanager
def serving(log: Path, core: int, *command: str) -> Iterator[httpx.Client]:
    """Client of a vLLM server, which ends with the block. It uses one core, so that two servers round alike."""
    port = free_port()
    program = [str(Path(sys.executable).with_name(command[0])), *command[1:], "--port", str(port)]
    program += ["--host", "127.0.0.1", "--uvicorn-log-level", "warning", "--generation-config", "vllm"]
    program += ["--dtype", "bfloat16", "--max-model-len", "64", "--max-num-seqs", "128", "--enforce-eager"]
    ours = ("DELTA_SYNC_", "VLLM_", "OMP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)} | {
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # vLLM closes idle connections after 5 s, which a slow step exceeds
        "VLLM_NO_USAGE_STATS": "1",
    }
    with (
        log.open("w") as file,
        subprocess.Popen(program, stdout=file, stderr=file, env=environment, start_new_session=True) as process,
    ):
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=150, trust_env=False) as client:
                deadline = time.monotonic() + 600
                while True:
                    with suppress(httpx.TransportError):
                        if client.get("/health", timeout=5).is_success:
                            break
                    if process.poll() is not None or time.monotonic() > deadline:
                        sys.exit(f"trl_async: no answer; the end of {log}:\n{log.read_text(errors='replace')[-2000:]}")
                    time.sleep(0.2)
                yield client
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # any child processes that are left


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def greedy(server: httpx.Client, words: list[str]) -> list[dict[str, Any]]:
    """Answers to words, one request after the other: kernels round by batch shape."""
    body = {"max_tokens": MAX_ANSWER_TOKENS, "temperature": 0, "logprobs": 0, "return_token_ids": True}
    answers = [server.post("/v1/completions", json={**body, "prompt": word + SEPARATOR}) for word in words]
    return [answer.raise_for_status().json()["choices"][0] for answer in answers]


def run(options: argparse.Namespace, out: Path) -> None:
    """Train, compare, write the results; exits with the claims that do not hold."""
    start = time.monotonic()
    cores = sorted(os.sched_getaffinity(0))
    # vLLM's worker spins for a second after its last message, which would slow down a trainer on the same core.
    server_core, trainer_cores = cores[0], cores[1:5] or cores
    base, checkpoint, bucket = out / "base", out / "checkpoint", options.bucket or str(out / "bucket")
    notice = f"tcp://127.0.0.1:{free_port()}"
    say("warming up a policy of 3 M parameters")
    for part in (warmed_up_model().to(torch.bfloat16), TOKENIZER):
        part.save_pretrained(base)
    say("starting delta-sync serve on the base checkpoint; there is no run yet")
    command = ["delta-sync", "serve", str(base), "--bucket", bucket, "--notice", notice]
    with serving(out / "server.log", server_core, *command) as server:
        say("AsyncGRPOTrainer: its worker asks the server, its weight syncs go through the bucket")
        os.sched_setaffinity(0, trainer_cores)
        torch.set_num_threads(len(trainer_cores))
        progress, transfer = Progress(server), DeltaWeightTransfer(bucket, base=base, notice=notice)
        trainer = train(out, options.steps, str(server.base_url), transfer, progress)
        os.sched_setaffinity(0, cores)
        server.get(f"/delta_sync/wait?version={trainer.model_version}&timeout=120").raise_for_status()
        progress.poll()
        scan = server.post("/delta_sync/verify").raise_for_status().json()
        words = random_words(36, seed=2)
        running = greedy(server, words)
    say("starting a fresh vLLM on the trainer's checkpoint, to compare answers")
    command = ["vllm", "serve", str(checkpoint), "--worker-extension-cls", "vllm_delta_sync.engine.WorkerExtension"]
    with serving(out / "fresh-server.log", server_core, *command) as server:
        fresh = greedy(server, words)

    stored = Checkpoint(checkpoint)
    parts = [fingerprint_tensor(name, stored.bits(name)) for name in stored.specs]
    fingerprints = {
        "server": scan["fingerprint"],
        "run": open_run(bucket).head().fingerprint,
        "checkpoint": sum(parts, start=Fingerprint()).hex(),
    }
    history, versions, pauses_ms = trainer.state.log_history, trainer.model_version, progress.pauses_ms
    # The first weight sync is version 1, before step 1: step k trains version k.
    steps = [{**line, "lag": line["step"] - line[SERVED_VERSION]} for line in history if "reward" in line]
    syncs = [line for line in history if VERSION in line]
    logged = [sync[VERSION] for sync in syncs]
    verdict = {
        "weights_bit_identical": bool(scan["verdict"]) and len(set(fingerprints.values())) == 1,
        "tokens_equal": [one["token_ids"] for one in running] == [one["token_ids"] for one in fresh],
        "logprobs_equal": [one["logprobs"] for one in running] == [one["logprobs"] for one in fresh],
        "each_sync_is_a_version": logged == list(range(1, versions + 1)) and versions == options.steps + 1,
        "sync_metrics_in_trls_log": len(steps) == options.steps and all(WEIGHT_SYNC in step for step in steps),
    }
    frames = pd.DataFrame(steps), pd.DataFrame(syncs), pd.Series(pauses_ms)
    full_bytes = 2 * trainer.model.num_parameters()
    summary = {"verdict": verdict, "versions": versions, **figures(*frames, full_bytes)}
    summary["seconds"] = round(time.monotonic() - start, 1)
    compared = sum(len(one["token_ids"]) for one in running)
    details = {"fingerprints": fingerprints, "compared_tokens": compared, "steps": steps, "pauses_ms": pauses_ms}
    for name, content in (("summary", summary), ("details", details), ("log_history", history)):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    draw(out / "trl.png", *frames, full_bytes)
    print(json.dumps(summary, indent=2))
    failures = [f"{claim} does not hold" for claim, holds in verdict.items() if not holds]
    first, last = summary["reward"].values()
    if options.steps >= 100 and last - first < 0.25:
        age = summary["staleness"]["by_spans"]
        failures.append(
            f"the reward rose from {first:.3f} to {last:.3f} only, on answers of weights {age:.2f} versions old; where "
            "other programs share the cores, answers are older and training learns less"
        )
    if failures:
        sys.exit("\n".join(f"FAILED: {failure}" for failure in failures))


def figures(steps: pd.DataFrame, syncs: pd.DataFrame, pauses_ms: pd.Series, full_bytes: int) -> dict[str, Any]:
    """The figures of summary.json. ``full_bytes``: those of all weights."""
    rewards, waits, tenth = steps["reward"], steps[WEIGHT_SYNC], max(1, len(steps) // 10)
    return {
        "reward": {"first": round(rewards.head(tenth).mean(), 4), "last": round(rewards.tail(tenth).mean(), 4)},
        "payload_bytes": int(syncs[PAYLOAD].sum()),
        "full_bytes": len(syncs) * full_bytes,
        "changed_share": round(syncs[CHANGED].mean() / 100, 6),
        "pause_ms": {"p50": round(pauses_ms.quantile(0.5), 3), "p99": round(pauses_ms.quantile(0.99), 3)},
        "weight_sync_s": {"p50": round(waits.median(), 4), "max": round(waits.max(), 4)},
        "staleness": {"by_spans": round(steps["lag"].mean(), 3), "by_trl": round(steps[STALENESS].mean(), 3)},
    }


def draw(path: Path, steps: pd.DataFrame, syncs: pd.DataFrame, pauses_ms: pd.Series, full_bytes: int) -> None:
    """trl.png: reward, staleness, bytes and pauses over the steps."""
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    reward, staleness, payload, pause = figure.subplots(2, 2, sharex=True).flat
    for axis, name, color in ((reward, "reward", "C0"), (staleness, "lag", "C4"), (staleness, STALENESS, "C7")):
        axis.plot(steps["step"], steps[name], color=color, alpha=0.3)
        axis.plot(steps["step"], steps[name].rolling(20, min_periods=1).mean(), color=color, label=name)
    payload.plot(syncs[VERSION], syncs[PAYLOAD] / 1e3)
    payload.axhline(full_bytes / 1e3, color="C3", linestyle="--", label=f"all weights: {full_bytes / 1e3:,.0f} kB")
    pause.plot(pauses_ms, ".")
    reward.set(ylabel="reward", ylim=(0, 1), title="AsyncGRPOTrainer learns to reverse words")
    staleness.set(ylabel="staleness [versions]", ylim=(0, None), title="Age of the weights that sampled a batch")
    payload.set(ylabel="bytes of a weight sync [kB]", ylim=(0, None), xlabel="version")
    pause.set(ylabel="generation paused [ms]", ylim=(0, None), xlabel="version")
    staleness.legend()
    payload.legend()
    figure.savefig(path, dpi=110)


def prepare(path: Path) -> Path:
    """Make the output directory, or clear that of an earlier run; exits if it has other files."""
    if (path / MARKER).exists():
        shutil.rmtree(path)
    elif path.is_file() or (path.exists() and any(path.iterdir())):
        sys.exit(f"trl_async: {path} holds files that this example did not write; give another directory with --out")
    path.mkdir(parents=True, exist_ok=True)
    (path / MARKER).touch()
    return path


def main(arguments: list[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps, one weight sync each (default 300)")
    parser.add_argument("--out", type=Path, default=Path("trl-out"), help="directory to write (default trl-out)")
    parser.add_argument("--bucket", help="URL of an unused run (default OUT/bucket)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"argument --steps: {options.steps} is not a number of at least 1")
    try:
        if options.bucket:
            check_url(options.bucket)  # not after OUT was emptied, and a server started
    except DeltaSyncError as error:
        parser.error(str(error))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        run(options, prepare(options.out.resolve()))
    except KeyboardInterrupt:
        say("interrupted; trainer and server have ended")
        return 130
    except httpx.HTTPStatusError as error:
        sys.exit(f"trl_async: {error.request.url}: {error.response.text}")
    except (DeltaSyncError, OSError, httpx.TransportError) as error:
        sys.exit(f"trl_async: {error}; the servers' logs are in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
