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
import http.client
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, RolloutSample, _AsyncRolloutLoop
from trl.experimental.async_grpo.packing import TREE_ATTENTION

from trainer_side.integrations.trl import DeltaWeightTransfer
from vllm_delta_sync import open_run
from vllm_delta_sync.engine import WORKER_EXTENSION
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.tensors.checkpoint import Checkpoint

STEPS, LEARNING_STEPS, NEEDED_RISE = 300, 100, 0.25
"""Default number of steps; the number from which the reward must rise, from the first tenth of steps to the last."""
SAMPLES, BATCH, WORDS = 8, 128, 4096
"""Answers to one word, answers per optimizer step, words in the data set."""
MAX_ANSWER_TOKENS = 10
COMPARED_WORDS = 36
WARM_UP_TARGET, WARM_UP_STEPS = 0.28, 600
START_SECONDS, END_SECONDS, SERVED_SECONDS, POLL_SECONDS = 600.0, 15.0, 120.0, 1.0
SMOOTH_STEPS = 20
MARKER = ".delta-sync-trl"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
Log = dict[str, Any]

SERVED_VERSION = "sample/served_version"
"""Metric of TRL's log that ``VersionedRolloutLoop`` adds: the versions that sampled the batch's tokens, on average."""
TRL_STALENESS, WEIGHT_SYNC, METRICS = "sample/staleness_mean", "perf/weight_sync_s", "delta_sync/"

PAD, EOS, UNKNOWN, SEPARATOR = "<pad>", "<eos>", "<unk>", ">"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = (PAD, EOS, UNKNOWN, SEPARATOR, *ALPHABET, *ALPHABET.upper(), *"01234567")
IDS = {entry: number for number, entry in enumerate(VOCABULARY)}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}" + SEPARATOR + "{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "fields": {"content": {"close_pattern": EOS, "content": "text"}},
}
"""How to parse an answer into a message; TRL knows that only for the chat templates of large models."""


class ExampleError(Exception):
    """An error that ends the example; the message gives the reason."""


# The task: a prompt is a word and ``>``, the right answer is the reversed word and the end token.


def encode(text: str) -> list[int]:
    """Token ids, one per character, as the tokenizer gives them."""
    return [IDS.get(character, IDS[UNKNOWN]) for character in text]


def random_words(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(ALPHABET, k=rng.randint(4, 8))) for _ in range(count)]


def make_dataset(count: int, seed: int) -> Dataset:
    """Random words, each as a conversation (``prompt``) and alone (``word``)."""
    words = random_words(count, seed)
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": word}] for word in words], "word": words})


def exact_reversal(completion_ids: list[list[int]], word: list[str], **_columns: object) -> list[float]:
    """Reward of each answer: 1.0 for the reversed word and the end token after it, else 0.0."""
    right = ([*encode(one[::-1]), IDS[EOS]] for one in word)
    return [float(ids == wanted) for ids, wanted in zip(completion_ids, right, strict=True)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, nothing added around a text."""
    tokenizer = Tokenizer(WordLevel(IDS, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, model_max_length=64
    )
    made.chat_template, made.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    return made


def warmed_up_model(seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 3.2 M parameters, taught until it answers 28 % of the words correctly: reinforcement learning needs
    some rewards."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=IDS[PAD],
        eos_token_id=IDS[EOS],
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, weight_decay=0.0)
    for step in range(WARM_UP_STEPS):
        words = random_words(BATCH, 1_000_000 * (seed + 1) + step)
        rows = [torch.tensor([*encode(word + SEPARATOR + word[::-1]), IDS[EOS]]) for word in words]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IDS[PAD])
        # The answer follows the separator.
        answers = ((tokens == IDS[SEPARATOR]).cumsum(1)[:, :-1] > 0) & (tokens[:, 1:] != IDS[PAD])
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, 1:, None]).squeeze(-1) * answers
        chance = float(logprobs.detach().sum(dim=1).exp().mean())
        if chance >= WARM_UP_TARGET:
            break
        (-logprobs.sum() / answers.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    say(f"after {step} supervised steps the policy answers right with a probability of {chance:.3f}")
    return model


def save(model: Any, path: Path) -> None:
    """Write the checkpoint that servers load: bfloat16 weights, configuration, tokenizer."""
    model.to(torch.bfloat16).save_pretrained(path)
    make_tokenizer().save_pretrained(path)


# TRL: training without a GPU, and which version sampled each answer.


@contextmanager
def on_cpu() -> Iterator[None]:
    """Make an ``AsyncGRPOTrainer`` inside this block on a machine without a GPU.

    TRL asks CUDA for the GPU's name to know its peak FLOPs, which stay unknown here, and computes with a tree
    attention for GPUs only, which ``tree_attention`` replaces at the end of the block.
    """
    with patch.object(async_grpo_trainer, "get_peak_flops_per_device", lambda accelerator, dtype: None):
        yield
    AttentionInterface.register(TREE_ATTENTION, tree_attention)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **tree: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of each segment of a tree of samples to the path from the root to its end.

    TRL packs the samples of a step into a tree, in which a shared prefix is computed once.

    Args:
        query, key, value: (1, heads, tokens, width); keys and values may have fewer heads.
        tree: ``tree_kv_index`` (rows,) is the token of each row of all paths, laid end to end; ``tree_cu_seqlens_q``
            and ``_k`` (segments + 1,) where segments begin among the tokens, and paths among the rows;
            ``tree_max_seqlen_q`` and ``_k`` the longest segment and path.

    Returns:
        (1, tokens, heads, width), and no weights. Raises ValueError: scores are to be capped.
    """
    if softcap:
        raise ValueError(f"softcap is {softcap}, which this attention does not have; train a model without it")
    starts, path_starts = tree["tree_cu_seqlens_q"], tree["tree_cu_seqlens_k"]
    row, column = torch.arange(tree["tree_max_seqlen_q"]), torch.arange(tree["tree_max_seqlen_k"])
    lengths, paths = starts.diff()[:, None], path_starts.diff()[:, None]
    # Segments are padded to the longest: there are many short ones, for which a mask over all tokens would be wasteful.
    asks, answers = row < lengths, column < paths
    tokens = torch.where(asks, starts[:-1, None] + row, 0)
    rows = tree["tree_kv_index"][torch.where(answers, path_starts[:-1, None] + column, 0)]
    depth = (paths - lengths + row)[:, :, None]
    seen = answers[:, None, :] & (column <= depth)
    if sliding_window:
        seen &= column > depth - sliding_window
    # A padded query must attend to something: otherwise its softmax is NaN, and so are the gradients of all keys.
    seen[:, :, 0] |= ~asks
    keys, values = key[0][:, rows].transpose(0, 1), value[0][:, rows].transpose(0, 1)
    gqa = query.shape[1] != key.shape[1]
    outputs = scaled_dot_product_attention(
        query[0][:, tokens].transpose(0, 1), keys, values, attn_mask=seen[:, None], scale=scaling, enable_gqa=gqa
    )
    return outputs.transpose(1, 2)[asks].unsqueeze(0), None


_sampled_by: ContextVar[list[int]] = ContextVar("sampled_by")


class VersionedRolloutLoop(_AsyncRolloutLoop):
    """TRL's own rollout loop, in TRL's rollout process; adds ``SERVED_VERSION`` to each sample's metrics."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._versions: dict[str, float] = {}

    async def _generate_one(self, *arguments: Any, **options: Any) -> Any:
        # Each call is a separate task, so that other calls' answers do not reach this context.
        sampled_by: list[int] = []
        _sampled_by.set(sampled_by)
        outcome = await super()._generate_one(*arguments, **options)
        self._versions |= {sequence.rollout_id: float(np.mean(sampled_by)) for sequence in outcome[2]}
        return outcome

    async def _post(self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3) -> dict[str, Any]:
        answer: dict[str, Any] = await super()._post(path, payload, timeout, max_retries)
        _sampled_by.get().extend(versions_of(answer))
        return answer

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        samples: list[RolloutSample] = await super()._score_group(group)
        sequences = (sequence for conversation in group.completions_sequences for sequence in conversation)
        for sample, sequence in zip(samples, sequences, strict=True):
            sample.metrics[SERVED_VERSION] = self._versions.pop(sequence.rollout_id)
        return samples


def versions_of(answer: dict[str, Any]) -> list[int]:
    """The weight version of each token of a ``/v1/completions`` answer with one choice.

    Tokens sampled before the server had proven its version count as version 0: it was started from the run's base.
    """
    (choice,) = answer["choices"]
    whole = {"version": None, "start": 0, "end": len(choice["token_ids"])}
    spans = answer.get("delta_sync", {}).get("spans", [whole])
    return [span["version"] or 0 for span in spans for _ in range(span["start"], span["end"])]


class Progress(TrainerCallback):
    """Prints a line now and then, and collects the pauses of the server, whose status keeps the last 64 commits.

    Attributes:
        pauses_ms: how long the server generated nothing, for each version that it applied.
    """

    def __init__(self, server: "Server") -> None:
        self.pauses_ms: dict[int, float] = {}
        self._server, self._polled, self._rewards = server, 0.0, list[float]()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
        if logs is None or "reward" not in logs:
            return
        self._rewards.append(logs["reward"])
        if time.monotonic() - self._polled > POLL_SECONDS:
            self.poll()
        if state.global_step % 10 == 0 or state.max_steps < 50:
            reward, lag = np.mean(self._rewards[-SMOOTH_STEPS:]), state.global_step - logs[SERVED_VERSION]
            say(f"step {state.global_step:3d}  reward {reward:.3f}  lag {lag:.2f}  versions {len(self.pauses_ms)}")

    def poll(self) -> None:
        """Read the server's status. Raises ExampleError: the server has ended, or no longer follows the run."""
        status = self._server.request("GET", "/delta_sync/status")
        if status["last_error"] is not None:
            raise ExampleError(f"the server stopped following the run: {status['last_error']['message']}")
        self.pauses_ms |= {one["version"]: one["timings_ms"]["pause"] for one in status["recent"]}
        self._polled = time.monotonic()


def train(out: Path, bucket: str, notice: str, options: argparse.Namespace, progress: Progress, url: str) -> Any:
    """Train from OUT/base to OUT/checkpoint; return TRL's trainer once the last version is durable."""
    base = out / "base"
    settings = AsyncGRPOConfig(
        output_dir=str(out / "trl"),
        vllm_server_base_url=url,
        max_steps=options.steps,
        seed=options.seed,
        num_generations=SAMPLES,
        per_device_train_batch_size=BATCH,
        max_completion_length=MAX_ANSWER_TOKENS,
        # Each step learns from as many answers; otherwise TRL asks the server how long a row may be.
        token_budget=0,
        max_staleness=4,
        max_inflight_tasks=BATCH,
        # Waiting answers make the batch older if training is slower than the server.
        queue_maxsize=SAMPLES,
        weight_sync_steps=1,
        # For a toy that learns in minutes; large models want smaller steps.
        learning_rate=3e-4,
        adam_epsilon=1e-2,
        max_grad_norm=10.0,
        epsilon_high=0.28,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    with on_cpu():
        trainer = AsyncGRPOTrainer(
            model=str(base),
            reward_funcs=exact_reversal,
            args=settings,
            train_dataset=make_dataset(WORDS, options.seed + 1),
            callbacks=[progress],
            weight_transfer=DeltaWeightTransfer(bucket, base=base, notice=notice),
        )
    trainer.remove_callback(PrinterCallback)
    trainer.rollout_worker._loop_cls = VersionedRolloutLoop
    trainer.train()
    save(trainer.model, out / "checkpoint")
    return trainer


# The servers.


class Server:
    """A vLLM server on the loopback address; ``with`` starts it, and ends it with all its processes.

    Attributes:
        url: of its API. process: the command.
    """

    def __init__(self, name: str, log: Path, core: int, model: Path, *arguments: str) -> None:
        """Args: core: the only core that it uses, which also makes two servers round alike."""
        port = free_port()
        self.url, self._name, self._log = f"http://127.0.0.1:{port}", name, log
        # TRL names the model by the path that it was loaded from.
        names = ("--served-model-name", "policy", str(model))
        sizes = ("--dtype", "bfloat16", "--max-model-len", "64", "--max-num-seqs", "128", "--enforce-eager")
        quiet = ("--generation-config", "vllm", "--uvicorn-log-level", "warning")
        command = Path(sys.executable).with_name(arguments[0])
        place = ("--host", "127.0.0.1", "--port", str(port))
        self._command = [str(command), "serve", str(model), *arguments[1:], *place, *names, *sizes, *quiet]
        ours = ("DELTA_SYNC_", "VLLM_", "OMP_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self._environment = kept | {
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # vLLM closes idle connections after 5 s, which a slow training step exceeds.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
            "VLLM_NO_USAGE_STATS": "1",
        }

    def __enter__(self) -> Self:
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )
        try:
            self._await_health()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ask it to end, and kill any remaining processes."""
        self.process.terminate()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def request(self, method: str, path: str, body: object = None, seconds: float = 120.0) -> Any:
        """The decoded JSON answer. Raises ExampleError: no answer, or an error."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with DIRECT.open(request, timeout=seconds) as response:
                text = response.read()
        except (OSError, http.client.HTTPException) as error:
            shown = error.read()[:500].decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else error
            raise ExampleError(f"{self._name}: {method} {path}: {shown}; see {self._log}") from error
        return json.loads(text) if text else None

    def greedy(self, words: list[str]) -> list[Log]:
        """``token_ids`` and ``logprobs`` of the answers, one request after the other: kernels round by batch shape."""
        body = {"model": "policy", "max_tokens": MAX_ANSWER_TOKENS, "temperature": 0, "logprobs": 0}
        prompts = [encode(word + SEPARATOR) for word in words]
        sent = [{**body, "prompt": prompt, "return_token_ids": True} for prompt in prompts]
        choices = [self.request("POST", "/v1/completions", one)["choices"][0] for one in sent]
        return [{"token_ids": one["token_ids"], "logprobs": one["logprobs"]["token_logprobs"]} for one in choices]

    def _await_health(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.request("GET", "/health", seconds=5.0)
                return
            except ExampleError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    end = "\n".join(self._log.read_text(errors="replace").splitlines()[-25:])
                    raise ExampleError(f"{self._name} does not answer; the end of {self._log}:\n{end}") from None
            time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# The example from start to end.


def run(options: argparse.Namespace, out: Path) -> list[str]:
    """Train, compare, write the results; return the claims that do not hold."""
    start = time.monotonic()
    cores = sorted(os.sched_getaffinity(0))
    # vLLM's worker spins for a second after its last message, which would slow down a trainer on the same core.
    server_core, trainer_cores = cores[0], cores[1:5] or cores
    base, checkpoint, bucket = out / "base", out / "checkpoint", options.bucket or str(out / "bucket")
    notice = f"tcp://127.0.0.1:{free_port()}"
    say("warming up a policy of 3 M parameters")
    save(warmed_up_model(options.seed), base)
    say("starting delta-sync serve on the base checkpoint; there is no run yet")
    following = ("delta-sync", "--bucket", bucket, "--notice", notice)
    with Server("the server", out / "server.log", server_core, base, *following) as server:
        progress = Progress(server)
        say("AsyncGRPOTrainer: its worker asks the server, its weight syncs go through the bucket")
        os.sched_setaffinity(0, trainer_cores)
        torch.set_num_threads(len(trainer_cores))
        trainer = train(out, bucket, notice, options, progress, server.url)
        os.sched_setaffinity(0, cores)
        say("rescanning the weights that are served")
        server.request("GET", f"/delta_sync/wait?version={trainer.model_version}&timeout={SERVED_SECONDS:.0f}")
        progress.poll()
        scan = server.request("POST", "/delta_sync/verify")
        words = random_words(COMPARED_WORDS, options.seed + 2)
        running = server.greedy(words)
    say("starting a fresh vLLM on the trainer's checkpoint, to compare answers")
    plain = ("vllm", "--worker-extension-cls", WORKER_EXTENSION)
    with Server("the fresh server", out / "fresh-server.log", server_core, checkpoint, *plain) as server:
        fresh = server.greedy(words)
    history, size = trainer.state.log_history, sum(one.numel() for one in trainer.model.parameters())
    fingerprints = {
        "server": scan["fingerprint"],
        "run": open_run(bucket).head().fingerprint,
        "checkpoint": checkpoint_fingerprint(checkpoint),
    }
    verdict = {
        "weights_bit_identical": bool(scan["verdict"]) and len(set(fingerprints.values())) == 1,
        "tokens_equal": [one["token_ids"] for one in running] == [one["token_ids"] for one in fresh],
        "logprobs_equal": [one["logprobs"] for one in running] == [one["logprobs"] for one in fresh],
        **claims_about_trl(history, options.steps, trainer.model_version),
    }
    summary = {"verdict": verdict, "versions": trainer.model_version, **figures(history, size, progress.pauses_ms)}
    summary["seconds"] = round(time.monotonic() - start, 1)
    details = {
        "fingerprints": fingerprints,
        "compared_tokens": sum(len(one["token_ids"]) for one in running),
        "steps": steps_of(history),
        "pauses_ms": progress.pauses_ms,
    }
    for name, content in (("summary", summary), ("details", details), ("log_history", history)):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    draw(out / "trl.png", history, size, progress.pauses_ms)
    print(json.dumps(summary, indent=2))
    failures = [f"{claim} does not hold" for claim, holds in verdict.items() if not holds]
    first, last = summary["reward"].values()
    if options.steps >= LEARNING_STEPS and last - first < NEEDED_RISE:
        failures.append(f"the reward rose from {first:.3f} to {last:.3f} only")
    return failures


def checkpoint_fingerprint(path: Path) -> str:
    """Fingerprint of a checkpoint directory, computed from its files alone."""
    checkpoint, total = Checkpoint(path), Fingerprint()
    for name in checkpoint.specs:
        total += fingerprint_tensor(name, checkpoint.bits(name))
    return total.hex()


def steps_of(history: list[Log]) -> list[Log]:
    """The step lines of TRL's log. The first weight sync is version 1, before step 1: step k trains version k."""
    return [{**line, "lag": line["step"] - line[SERVED_VERSION]} for line in history if "reward" in line]


def syncs_of(history: list[Log]) -> list[Log]:
    """The lines of TRL's log about a version."""
    return [line for line in history if f"{METRICS}version" in line]


def claims_about_trl(history: list[Log], steps: int, versions: int) -> dict[str, bool]:
    """Each weight sync of TRL is one version in the bucket, and its metrics are in TRL's own log."""
    logged, learnt = [line[f"{METRICS}version"] for line in syncs_of(history)], steps_of(history)
    return {
        "each_sync_is_a_version": logged == list(range(1, steps + 2)) and versions == steps + 1,
        "sync_metrics_in_trls_log": len(learnt) == steps and all(WEIGHT_SYNC in line for line in learnt),
    }


def figures(history: list[Log], size: int, pauses_ms: dict[int, float]) -> Log:
    """The figures of summary.json. ``size``: elements of the model, of 2 bytes each."""
    steps, syncs = steps_of(history), syncs_of(history)
    rewards, tenth = [step["reward"] for step in steps], max(1, len(steps) // 10)
    waited, pauses = [step[WEIGHT_SYNC] for step in steps], list(pauses_ms.values())
    return {
        "reward": {"first": round(np.mean(rewards[:tenth]), 4), "last": round(np.mean(rewards[-tenth:]), 4)},
        "payload_bytes": int(sum(sync[f"{METRICS}payload_bytes"] for sync in syncs)),
        "full_bytes": len(syncs) * 2 * size,
        "changed_share": round(np.mean([sync[f"{METRICS}changed_percent"] / 100 for sync in syncs]), 6),
        "pause_ms": {f"p{share}": round(np.percentile(pauses, share), 3) for share in (50, 99)},
        "weight_sync_s": {"p50": round(np.median(waited), 4), "max": round(max(waited), 4)},
        "staleness": {
            "by_spans": round(np.mean([step["lag"] for step in steps]), 3),
            "by_trl": round(np.mean([step[TRL_STALENESS] for step in steps]), 3),
        },
    }


def draw(path: Path, history: list[Log], size: int, pauses_ms: dict[int, float]) -> None:
    """trl.png: reward, staleness, bytes and pauses over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, 2, figsize=(11, 6.5), sharex=True, layout="constrained")
    (reward, staleness), (payload, pause), steps, syncs = upper, lower, steps_of(history), syncs_of(history)
    numbers = np.array([step["step"] for step in steps])
    for axis, name, color in ((reward, "reward", "C0"), (staleness, "lag", "C4"), (staleness, TRL_STALENESS, "C7")):
        values = [step[name] for step in steps]
        axis.plot(numbers, values, color=color, alpha=0.3, linewidth=1, label=name)
        if len(values) >= SMOOTH_STEPS:
            smooth = np.convolve(values, np.ones(SMOOTH_STEPS) / SMOOTH_STEPS, mode="valid")
            axis.plot(numbers[SMOOTH_STEPS - 1 :], smooth, color=color, linewidth=2)
    sent = [sync[f"{METRICS}payload_bytes"] / 1e3 for sync in syncs]
    payload.plot([sync[f"{METRICS}version"] for sync in syncs], sent, color="C2")
    payload.axhline(2e-3 * size, color="C3", linestyle="--", label=f"all weights: {2e-3 * size:,.0f} kB")
    pause.plot(list(pauses_ms), list(pauses_ms.values()), ".", color="C1", markersize=3)
    reward.set(ylabel="reward", ylim=(0, 1), title="AsyncGRPOTrainer learns to reverse words")
    staleness.set(ylabel="staleness [versions]", ylim=(0, None), title="Age of the weights that sampled a batch")
    payload.set(ylabel="bytes of a weight sync [kB]", xlabel="version", ylim=(0, 2.2e-3 * size))
    pause.set(ylabel="generation paused [ms]", xlabel="version", ylim=(0, None))
    for axis in (staleness, payload):
        axis.legend(frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def prepare(path: Path) -> Path:
    """Make the output directory, or clear that of an earlier run. Raises ExampleError: it has other files."""
    path = path.resolve()
    if path.exists() and not (path / MARKER).exists() and (path.is_file() or any(path.iterdir())):
        raise ExampleError(f"{path} holds files that this example did not write; give another directory with --out")
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    (path / MARKER).touch()
    return path


def say(text: str) -> None:
    print(time.strftime("%X"), text, flush=True)


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """The command line; exits with status 2 on a wrong one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps, one weight sync each (default 300)")
    parser.add_argument("--out", type=Path, default=Path("trl-out"), help="directory to write (default trl-out)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the words (default 0)")
    parser.add_argument("--bucket", help="URL of an unused run (default OUT/bucket)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"argument --steps: {options.steps} is not a number of at least 1")
    return options


def main(arguments: list[str]) -> int:
    """Run the example; returns the exit status."""
    options = parse_options(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        failures = run(options, prepare(options.out))
    except KeyboardInterrupt:
        say("interrupted; trainer and server have ended")
        return 130
    except (ExampleError, DeltaSyncError, OSError) as error:
        print(f"trl_async: {error}", file=sys.stderr)
        return 1
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
