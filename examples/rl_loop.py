"""Reinforcement learning against a live vLLM server that follows the trainer's weights through a bucket.

    python examples/rl_loop.py                           # about 5 minutes on two cores, no GPU; writes demo-out/
    python examples/rl_loop.py --bucket s3://runs/first  # through any store that delta-sync knows

A policy of 3 M parameters learns to write words backwards. Its answers come from `delta-sync serve`, a vLLM server that
applies every published version between two engine steps. At the end the script proves that the server has the trainer's
weights bit for bit, and answers exactly like a vLLM that loaded them afresh. OUT gets summary.json, details.json,
demo.png, the logs, both checkpoints and the bucket.

Exit status: 0 all of this holds, and from 100 steps on the reward rose by 0.25; 1 it does not, or something failed; 2
wrong usage; 130 interrupted.
"""

import argparse
import copy
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # torch's threads sleep while they wait for each other: spinning is expensive when all cores are busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import httpx
import numpy as np
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file, save
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer_side import Publisher, PublishResult
from vllm_delta_sync import DeltaSyncError, open_run
from vllm_delta_sync.urls import check_url

PROMPTS, SAMPLES = 16, 8  # words per step, and answers to each: the batch of one optimizer step
RATE, EPS, MAX_NORM = 3e-4, 1e-2, 10.0
CLIP_LOW, CLIP_HIGH = 0.8, 1.28
MAX_AGE = 16  # tokens sampled by weights that are more versions old do not count
WARM_UP_TARGET, WARM_UP_BATCH, WARM_UP_RATE, WARM_UP_LIMIT = 0.28, 128, 1.5e-3, 600

START_SECONDS, END_SECONDS = 600.0, 6.0  # for a server to start, and to end
GRACE_SECONDS = 20.0  # after SIGTERM; Kubernetes and Slurm kill after 30
SMOOTH_STEPS, REWARD_STEPS = 20, 10
NEEDED_RISE, NEEDED_STEPS = 0.25, 100  # a run of fewer steps need not learn
MARKER = ".delta-sync-demo"

Steps = list[dict[str, Any]]  # figures of each
Pauses = dict[int, float]  # of the server, in ms, by version
_start = time.monotonic()


def report(text: str) -> None:
    print(f"[{time.monotonic() - _start:5.1f} s] {text}", flush=True)


# ---- The task: a prompt is a word and ">", the right answer is the word reversed and the end token.

PAD, EOS, UNKNOWN, SEPARATOR = "<pad>", "<eos>", "<unk>", ">"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = (PAD, EOS, UNKNOWN, SEPARATOR, *ALPHABET, *ALPHABET.upper(), *"01234567")
IDS = {entry: number for number, entry in enumerate(VOCABULARY)}
MAX_ANSWER_TOKENS = 10


def random_words(rng: random.Random, count: int) -> list[str]:
    """Words of 4 to 8 independent letters; every length is equally likely."""
    return ["".join(rng.choices(ALPHABET, k=rng.randint(4, 8))) for _ in range(count)]


def prompt_ids(word: str) -> list[int]:
    """Token ids of the prompt for a word, one per character, as the checkpoint's tokenizer gives them."""
    return [IDS[character] for character in word + SEPARATOR]


def right_answer(word: str) -> list[int]:
    """Token ids of the right answer, which the policy ends itself."""
    return [IDS[character] for character in (*reversed(word), EOS)]


def reward(word: str, tokens: list[int]) -> float:
    """1.0 for exactly the right answer, else 0.0."""
    return float(tokens == right_answer(word))


# ---- The policy: a Qwen3 of 3.2 M parameters. It learns in fp32, and what is published is rounded to bf16.


def make_model(seed: int) -> Qwen3ForCausalLM:
    """A newly initialised policy in fp32, which accumulates steps that bf16, the served dtype, would round away."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64}
    settings |= {"vocab_size": len(VOCABULARY), "tie_word_embeddings": True, "eos_token_id": IDS[EOS]}
    config = Qwen3Config(**settings, dtype="bfloat16", attn_implementation="eager")
    return Qwen3ForCausalLM(config).float()


def save_checkpoint(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write what a server loads: weights in bf16, configuration, and a tokenizer with one token per character."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel(IDS, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    files = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN)
    files.save_pretrained(folder)


def next_token_logprobs(model: nn.Module, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> Tensor:
    """Log-probability of every next token of prompt and answer, (n, length - 1); meaningless in the padding."""
    rows = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = pad_sequence(rows, batch_first=True, padding_value=IDS[PAD])
    # Matrices in bf16, as the server computes, where the processor has instructions for them; elsewhere fp32 is faster.
    fast = any(has for name, has in torch.cpu.get_capabilities().items() if name.endswith("bf16"))
    with torch.autocast("cpu", torch.bfloat16, enabled=fast):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
    return torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def align(prompts: Sequence[list[int]], values: Sequence[Sequence[float]], fill: float = 0.0) -> Tensor:
    """Lay out a value for each token of the answers as ``next_token_logprobs`` does, with ``fill`` elsewhere."""
    rows = [torch.tensor([fill] * (len(prompt) - 1) + [*row]) for prompt, row in zip(prompts, values, strict=True)]
    return pad_sequence(rows, batch_first=True, padding_value=fill)


def warm_up(model: nn.Module, seed: int) -> None:
    """Supervised steps until the policy answers about 28 % of the words correctly: RL needs some rewards."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_UP_RATE, weight_decay=0.0)
    for step in range(WARM_UP_LIMIT):
        words = random_words(rng, WARM_UP_BATCH)
        prompts, answers = [prompt_ids(word) for word in words], [right_answer(word) for word in words]
        written = align(prompts, [[1.0] * len(answer) for answer in answers])
        logprobs = next_token_logprobs(model, prompts, answers) * written
        # Every batch is new, so this estimate is unbiased.
        chance = float(logprobs.detach().sum(dim=1).exp().mean())
        if step % 10 == 0:
            report(f"warm-up {step:3d}  p(right) {chance:.3f} of {WARM_UP_TARGET}")
        if chance >= WARM_UP_TARGET:
            return
        (-logprobs.sum() / written.sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


# ---- The loss: group-normalised advantages, and a clipped ratio against the log-probs that the server sampled with.


def group_advantages(rewards: Tensor) -> Tensor:
    """(groups, answers): reward minus the mean of its group, over the standard deviation; zeros if all are equal."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, unbiased=False, keepdim=True) + 1e-6)


def policy_loss(logprobs: Tensor, sampled: Tensor, ages: Tensor, advantages: Tensor) -> Tensor:
    """Clipped policy-gradient loss, averaged over the tokens that count.

    ``logprobs`` (n, length) are under the weights being trained, with gradient, and ``sampled`` as the server reported
    them, under the version that it served at that token: the ratio is the importance weight that corrects for the age
    of that version. ``ages`` are in versions, inf where the policy wrote no token; ``advantages`` (n, 1).
    """
    counted = ages <= MAX_AGE
    ratio = torch.where(counted, logprobs - sampled, 0.0).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(CLIP_LOW, CLIP_HIGH) * advantages)
    return -(surrogate * counted).sum() / counted.sum().clamp(min=1)


# ---- The server: a vLLM process started by this script, used over HTTP.


@dataclass(frozen=True)
class Answer:
    """The tokens of one answer, and log-prob and version of each; None: the server had not yet proven which it was."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int | None]


@dataclass(frozen=True)
class Server:
    """What this script asks of a server."""

    client: httpx.Client

    def request(self, method: str, path: str, body: object = None) -> Any:
        """Send a request and return the JSON of the answer; exit if it is an error."""
        response = self.client.request(method, path, json=body)
        if response.is_error:
            sys.exit(f"demo: {method} {path}: HTTP {response.status_code}: {response.text}")
        return response.json()

    def sample(self, prompts: Sequence[list[int]], temperature: float) -> list[Answer]:
        """An answer to each prompt."""
        body = {"model": "policy", "prompt": prompts, "max_tokens": MAX_ANSWER_TOKENS, "temperature": temperature}
        body |= {"logprobs": 0, "return_token_ids": True}
        found = self.request("POST", "/v1/completions", body)
        answers = []
        for choice in sorted(found["choices"], key=lambda choice: choice["index"]):
            tokens = choice["token_ids"]
            answers.append(Answer(tokens, choice["logprobs"]["token_logprobs"], [None] * len(tokens)))
        for span in found.get("delta_sync", {"spans": []})["spans"]:  # a server that follows no run sends none
            for position in range(span["start"], span["end"]):
                answers[span["index"]].versions[position] = span["version"]
        return answers

    def greedy(self, words: Sequence[str]) -> list[Answer]:
        """Greedy answers, one request after the other: kernels round by batch shape, so all batches must be equal."""
        return [self.sample([prompt_ids(word)], temperature=0.0)[0] for word in words]


@contextmanager
def serving(command: Sequence[str], log: Path, core: int) -> Iterator[Server]:
    """A vLLM server that computes on one core, once it answers. All its processes end with the block."""
    with socket.socket() as probe:  # finds a free port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = f"--host 127.0.0.1 --port {port} --served-model-name policy --generation-config vllm"
    arguments += " --dtype bfloat16 --max-model-len 64 --max-num-seqs 128 --enforce-eager"
    environment = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # vLLM closes idle connections after 5 s, which a slow step exceeds
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment.pop("OMP_WAIT_POLICY", None)
    token = os.environ.get("DELTA_SYNC_ADMIN_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with log.open("wb") as file:
        words = [*command, *arguments.split()]
        process = subprocess.Popen(words, stdout=file, stderr=file, env=environment, start_new_session=True)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120, trust_env=False)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with suppress(httpx.TransportError):
                if client.get("/health", timeout=5.0).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
                sys.exit(f"demo: the server did not start; the end of {log}:\n{tail}")
            time.sleep(0.2)
        yield Server(client)
    finally:
        client.close()  # first, since a server that is asked to end waits for its open connections
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # any child processes that are left
        process.wait()


# ---- Training: rollouts, loss, optimizer step, publish. While the server answers, it stages the previous version.


def train(model: nn.Module, publisher: Publisher, server: Server, steps: int, seed: int) -> tuple[Steps, Pauses]:
    """Publish one version per step, and wait until the last is served; its figures, and the server's pauses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPS, weight_decay=0.0)
    rng = random.Random(seed + 1)
    done: Steps = []
    pauses_ms: Pauses = {}
    results: list[PublishResult] = []
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())  # ends after the step, so that its weights are published
    for step in range(1, steps + 1):
        words = [word for word in random_words(rng, PROMPTS) for _ in range(SAMPLES)]
        prompts = [prompt_ids(word) for word in words]
        answers = server.sample(prompts, temperature=1.0)
        if results:  # the upload of the previous step has finished meanwhile, so its figures are available
            complete(done, results[-1], server, pauses_ms)

        rewards = torch.tensor([reward(word, answer.tokens) for word, answer in zip(words, answers, strict=True)])
        sampled = align(prompts, [answer.logprobs for answer in answers])
        # A token of an unknown version counts as too old.
        versions = [[-math.inf if known is None else known for known in answer.versions] for answer in answers]
        ages = publisher.version - align(prompts, versions, fill=-math.inf)
        logprobs = next_token_logprobs(model, prompts, [answer.tokens for answer in answers])
        policy_loss(logprobs, sampled, ages, group_advantages(rewards.view(-1, SAMPLES)).view(-1, 1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

        # Waits for the previous version, compares and returns; encoding and upload run beside the next rollouts.
        results.append(publisher.publish(step=step, wait=True))
        lag = float(ages[ages.isfinite()].mean().nan_to_num())
        done.append({"step": step, "reward": float(rewards.mean()), "lag": lag})
        if ended.is_set():
            publisher.flush(timeout=GRACE_SECONDS)
            report(f"SIGTERM: the run is left at version {publisher.version}, step {step}")
            raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    publisher.flush()
    server.request("GET", f"/delta_sync/wait?version={publisher.version}&timeout=60")
    complete(done, results[-1], server, pauses_ms)
    return done, pauses_ms


def complete(done: Steps, result: PublishResult, server: Server, pauses_ms: Pauses) -> None:
    """Add the figures of its version and of the server to the last step; print a line now and then."""
    status = server.request("GET", "/delta_sync/status")
    if status["last_error"] is not None:
        sys.exit(f"demo: the server stopped following: {status['last_error']['message']}")
    pauses_ms |= {commit["version"]: commit["timings_ms"]["pause"] for commit in status["recent"]}
    step, served = done[-1], status["served"] and status["served"]["version"]
    step |= {"version": result.version, "served": served, "changed": result.changed, "total": result.total}
    step |= {"payload_bytes": result.payload_bytes, "full_bytes": result.full_bytes}
    step |= {f"{name}_s": seconds for name, seconds in result.seconds.items()}
    if len(done) < 10 or len(done) % 10 == 0:
        pause = f"{pauses_ms[served]:.1f} ms" if served in pauses_ms else "none"
        report(
            f"step {step['step']:3d}  reward {mean(done[-SMOOTH_STEPS:], 'reward'):.3f}  served {served}  "
            f"changed {100 * result.changed / result.total:.2f} %  "
            f"payload {result.payload_bytes / 1e6:.2f} MB of {result.full_bytes / 1e6:.2f} MB  "
            f"pause {pause}  lag {step['lag']:.2f}"
        )


def mean(steps: Steps, name: str) -> float:
    """Mean of a figure over steps."""
    return round(float(np.mean([step[name] for step in steps])), 4)


# ---- The verdict: three claims, each with its measurement; and the files that are written at the end.


def prove_weights(server: Server, bucket: str, checkpoint: Path) -> tuple[bool, str]:
    """Whether the server's weights, rescanned, are the run's head, and that is the trainer's checkpoint, bit for bit.

    Reading the head checks its tensors against its fingerprint, which links the two comparisons.
    """
    scan = server.request("POST", "/delta_sync/verify")
    with open_run(bucket) as run:
        same = scan["verdict"] and scan["fingerprint"] == run.head().fingerprint
        published = dict(run.tensors())
    same = same and save(published) == save(load_file(checkpoint / "model.safetensors"))
    return same, scan["fingerprint"]


def compare_answers(running: list[Answer], fresh: list[Answer]) -> dict[str, Any]:
    """Whether greedy tokens and log-probs of the running and the fresh server are equal, exactly."""
    pairs = list(zip(running, fresh, strict=True))
    differences = [abs(a - b) for one, two in pairs for a, b in zip(one.logprobs, two.logprobs, strict=False)]
    return {
        "tokens_equal": all(one.tokens == two.tokens for one, two in pairs),
        "logprobs_equal": all(one.logprobs == two.logprobs for one, two in pairs),
        "compared_tokens": sum(len(one.tokens) for one in running),
        "largest_logprob_difference": max(differences),
    }


def draw(steps: Steps, pauses_ms: Pauses, path: Path) -> None:
    """Write the picture: reward, payload and pause over the steps."""
    figure = Figure(figsize=(9, 9), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    numbers, rewards = [step["step"] for step in steps], [step["reward"] for step in steps]
    top.plot(numbers, rewards, color="0.8", label="one step")
    smooth = [mean(steps[max(0, end - SMOOTH_STEPS) : end], "reward") for end in numbers]
    top.plot(numbers, smooth, label=f"mean of {SMOOTH_STEPS} steps")
    top.set(ylabel="reward", ylim=(0, 1), title="The server's policy learns to reverse words")
    middle.plot(numbers, [step["payload_bytes"] / 1e3 for step in steps], color="C2", label="one version")
    middle.axhline(steps[0]["full_bytes"] / 1e3, color="C3", linestyle="--", label="all weights")
    middle.set(ylabel="payload [kB]", yscale="log")
    bottom.plot(list(pauses_ms), list(pauses_ms.values()), ".", color="C1", label="one commit")
    bottom.set(ylabel="generation paused [ms]", xlabel="step (one weight version each)", ylim=(0, None))
    for axis in (top, middle, bottom):
        axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


def conclude(verdict: dict[str, bool], details: dict[str, Any], pauses_ms: Pauses, out: Path) -> bool:
    """Write the files and print verdict and figures; whether the demo succeeded."""
    steps = details["steps"]
    window = max(1, min(REWARD_STEPS, len(steps) // 3))
    first, last = mean(steps[:window], "reward"), mean(steps[-window:], "reward")
    sums = {name: sum(step[name] for step in steps) for name in ("payload_bytes", "full_bytes", "changed", "total")}
    payload, full, changed = sums["payload_bytes"], sums["full_bytes"], round(sums["changed"] / sums["total"], 6)
    p50, p99 = np.percentile(list(pauses_ms.values()), [50, 99]).round(3).tolist()
    seconds = round(time.monotonic() - _start, 1)
    summary = {"verdict": verdict, "reward": {"first": first, "last": last}, "versions": steps[-1]["version"]}
    summary |= {"payload_bytes": payload, "full_bytes": full, "changed_share": changed}
    summary |= {"pause_ms": {"p50": p50, "p99": p99}, "seconds": seconds}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (out / "details.json").write_text(json.dumps(details, indent=2) + "\n")
    draw(steps, pauses_ms, out / "demo.png")

    claims = (
        f"served weights bit-identical to the trainer's ({details['fingerprint']})",
        f"greedy tokens equal to a freshly loaded vLLM's ({details['compared_tokens']} tokens)",
        f"their log-probs equal (largest difference {details['largest_logprob_difference']:g})",
    )
    print()
    for claim, holds in zip(claims, verdict.values(), strict=True):
        print("✓" if holds else "✗", claim)
    print(f"reward {first:.3f} → {last:.3f} over {summary['versions']} weight versions in {seconds:.0f} s")
    print(
        f"sent {payload / 1e6:.2f} MB instead of {full / 1e6:.2f} MB, {full / payload:.1f} times less: "
        f"{100 * changed:.1f} % of the weights changed per step\n"
        "  (a toy, with the learning rate it needs to learn in minutes, changes more of its bf16 weights per step\n"
        "  than LLM-size reinforcement learning, where it is about 1 %)"
    )
    print(f"generation paused per version: {p50:.1f} ms median, {p99:.1f} ms p99")
    print(f"answers were sampled by weights {mean(steps, 'lag'):.2f} versions old on average")
    print(f"written: {out / 'summary.json'} and {out / 'demo.png'}")
    learned = len(steps) < NEEDED_STEPS or last - first >= NEEDED_RISE
    if not learned:
        print(f"FAILED: the reward rose by {last - first:.3f}, less than {NEEDED_RISE}; give it more --steps")
    return learned and all(verdict.values())


# ---- The demo from start to end.


def run(options: argparse.Namespace) -> bool:
    """Run the demo; whether it succeeded."""
    out = options.out.resolve()
    if (out / MARKER).exists():  # an earlier run made it
        shutil.rmtree(out)
    elif out.exists() and (out.is_file() or any(out.iterdir())):
        sys.exit(f"demo: {out} was not made by this script; give another directory with --out")
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()
    base, checkpoint, bucket = out / "base", out / "checkpoint", options.bucket or str(out / "bucket")
    if not bucket.startswith("hf://"):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # for vLLM: everything that it needs is local
    programs = Path(sys.executable).parent
    # vLLM's worker spins for a second after its last message, so the server computes on one core and the trainer on the
    # others. One thread in both servers also makes them comparable: greedy output depends on the number of threads.
    server_core, *others = available = sorted(os.sched_getaffinity(0))
    trainer_cores = others[:4] or available

    report("warming up a 3 M parameter policy (supervised)")
    model = make_model(options.seed)
    warm_up(model, options.seed)
    save_checkpoint(model, base)

    # Version 0 is a reference to the base, which uploads nothing.
    with Publisher(model, bucket, base=base, notice="tcp://127.0.0.1:*") as publisher:
        report("starting vllm serve on the base checkpoint")
        command = [str(programs / "delta-sync"), "serve", str(base), "--bucket", bucket]
        command += ["--notice", str(publisher.notice_address)]
        with serving(command, out / "server.log", server_core) as server:
            server.request("GET", "/delta_sync/wait?version=0&timeout=60")
            report("training: the server answers, the trainer learns and publishes")
            torch.set_num_threads(len(trainer_cores))
            os.sched_setaffinity(0, trainer_cores)
            steps, pauses_ms = train(model, publisher, server, options.steps, options.seed)
            os.sched_setaffinity(0, available)
            save_checkpoint(model, checkpoint)

            report("rescanning the weights that are served")
            proven, fingerprint = prove_weights(server, bucket, checkpoint)
            words = random_words(random.Random(options.seed + 2), 36)
            running = server.greedy(words)

    report("starting a fresh vLLM on the trainer's checkpoint, to compare answers")
    # It follows no run, but has the same worker extension, for equal kernels.
    command = [str(programs / "vllm"), "serve", str(checkpoint)]
    command += ["--worker-extension-cls", "vllm_delta_sync.engine.WorkerExtension"]
    with serving(command, out / "fresh-server.log", server_core) as server:
        compared = compare_answers(running, server.greedy(words))

    verdict = {"weights_bit_identical": proven} | {name: compared[name] for name in ("tokens_equal", "logprobs_equal")}
    return conclude(verdict, {"fingerprint": fingerprint} | compared | {"steps": steps}, pauses_ms, out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=300, help="optimizer steps, one version each (default: 300)")
    add("--out", type=Path, default=Path("demo-out"), help="directory to write, made anew (default: demo-out)")
    add("--seed", type=int, default=0, help="of the model and the words (default: 0)")
    bucket = os.environ.get("DELTA_SYNC_BUCKET")
    add("--bucket", default=bucket, help="URL of an unused run (default: $DELTA_SYNC_BUCKET, else OUT/bucket)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    try:
        if options.bucket:
            check_url(options.bucket)  # not after minutes of warming up
    except DeltaSyncError as error:
        parser.error(str(error))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return 0 if run(options) else 1
    except KeyboardInterrupt:
        print("interrupted; the server has ended")
        return 130
    except (DeltaSyncError, OSError, httpx.TransportError) as error:
        print(f"demo: {error}; the logs of the servers are in {options.out}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
