"""Reinforcement learning against a live vLLM server that follows the trainer's weights through a bucket.

    python examples/rl_loop.py                           # about 5 minutes on two cores, no GPU; writes demo-out/
    python examples/rl_loop.py --bucket s3://runs/first  # through any store that delta-sync knows

A policy of 3 M parameters learns to write words backwards. Its answers come from `delta-sync serve`, a vLLM server that
applies every published version between two engine steps. At the end the script proves that the server has the trainer's
weights bit for bit, and answers exactly like a vLLM that loaded them afresh.
"""

import argparse
import ctypes
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

if __name__ == "__main__":
    # torch's threads sleep while they wait for each other: spinning is expensive when all cores are busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import httpx
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer_side import Publisher, PublishResult
from vllm_delta_sync import DeltaSyncError, open_run

PROMPTS, SAMPLES = 16, 8  # words per step, and answers to each: the batch of one optimizer step
RATE, EPS, MAX_NORM = 3e-4, 1e-2, 10.0
CLIP_LOW, CLIP_HIGH = 0.8, 1.28
MAX_AGE = 16  # tokens sampled by weights that are more versions old do not count
WARM_UP_TARGET, WARM_UP_BATCH, WARM_UP_RATE, WARM_UP_LIMIT = 0.28, 128, 1.5e-3, 600

MODEL_NAME = "policy"
CONNECTIONS = 4
REQUEST_SECONDS, START_SECONDS, END_SECONDS = 120.0, 600.0, 6.0  # for an answer; for a server to start, and to end
VERDICT_SECONDS = 90.0  # reserved at the end for the second server's start and the comparison
COMPARED_WORDS = 36
SMOOTH_STEPS, REWARD_STEPS = 20, 10
NEEDED_RISE, NEEDED_VERSIONS = 0.25, 100
CLAIMS = ("weights_bit_identical", "tokens_equal", "logprobs_equal")
MARKER = ".delta-sync-demo"
WRITTEN = ("base", "checkpoint", "bucket", "server.log", "fresh-server.log", "summary.json", "details.json", "demo.png")

_start = time.monotonic()


class DemoError(Exception):
    """An error that ends the demo; the message says what to do."""


def report(text: str) -> None:
    """Print a line with the time since the start."""
    print(f"[{time.monotonic() - _start:5.1f} s] {text}", flush=True)


# ---- The task: a prompt is a word and ">", the right answer is the word reversed and the end token.

SEPARATOR = ">"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
MIN_LETTERS, MAX_LETTERS = 4, 8
MAX_ANSWER_TOKENS = MAX_LETTERS + 2
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = (PAD, EOS, UNKNOWN, SEPARATOR, *ALPHABET, *ALPHABET.upper(), *"01234567")
IDS = {entry: number for number, entry in enumerate(VOCABULARY)}


def random_word(rng: random.Random) -> str:
    """A word of 4 to 8 independent letters; every length is equally likely."""
    return "".join(rng.choices(ALPHABET, k=rng.randint(MIN_LETTERS, MAX_LETTERS)))


def encode(text: str) -> list[int]:
    """Token ids, one per character, exactly as the checkpoint's tokenizer gives them."""
    return [IDS.get(character, IDS[UNKNOWN]) for character in text]


def prompt_ids(word: str) -> list[int]:
    """Token ids of the prompt for a word."""
    return encode(word + SEPARATOR)


def reward(word: str, text: str, finished: bool) -> float:
    """1.0 if the policy gave the exact answer and ended it itself, else 0.0."""
    return 1.0 if finished and text == word[::-1] else 0.0


# ---- The policy: a Qwen3 of 3.2 M parameters in bf16, the served dtype. The optimizer works on fp32 masters.


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, 64 entries, nothing added around a text."""
    tokenizer = Tokenizer(WordLevel(IDS, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, model_max_length=64
    )


def make_model(seed: int) -> Qwen3ForCausalLM:
    """A newly initialised policy, all parameters bf16, embeddings tied."""
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
        dtype="bfloat16",
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
        # On these processors torch multiplies bf16 matrices element by element, ten times slower than fp32 ones.
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.forward = partial(_multiply_in_fp32, module)  # type: ignore[method-assign]
    return model


def _multiply_in_fp32(layer: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(inputs.float(), layer.weight.float()).to(inputs.dtype)


class Masters:
    """AdamW on fp32 copies of a bf16 model's parameters, which accumulate steps that bf16 would round away."""

    def __init__(self, model: torch.nn.Module, rate: float, eps: float) -> None:
        self._served = list(model.parameters())
        self._masters = [parameter.detach().float().requires_grad_() for parameter in self._served]
        self._optimizer = torch.optim.AdamW(self._masters, lr=rate, eps=eps, weight_decay=0.0)

    def step(self, max_norm: float) -> None:
        """Apply and clear the model's gradients, and round the masters into the model."""
        for served, master in zip(self._served, self._masters, strict=True):
            master.grad = None if served.grad is None else served.grad.float()
            served.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, max_norm)
        self._optimizer.step()
        with torch.no_grad():
            for served, master in zip(self._served, self._masters, strict=True):
                served.copy_(master)


@dataclass(frozen=True)
class Batch:
    """Prompt and answer in a row, padded on the right.

    ``tokens`` (n, length) int64; ``answers`` (n, length - 1) bool marks positions whose *next* token the policy wrote.
    """

    tokens: torch.Tensor
    answers: torch.Tensor

    def spread(self, rows: Sequence[Sequence[float]]) -> torch.Tensor:
        """Values per answer token, laid out as ``answers``: (n, length - 1) float32, 0 elsewhere."""
        values = torch.zeros(self.answers.shape)
        for number, row in enumerate(rows):
            values[number, self.answers[number]] = torch.tensor(row, dtype=torch.float32)
        return values


def make_batch(prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> Batch:
    """Lay out prompts and answers, both token ids, as one batch."""
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    tokens = torch.full((len(prompts), length), IDS[PAD], dtype=torch.int64)
    written = torch.zeros((len(prompts), length - 1), dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        written[row, len(prompt) - 1 : end - 1] = True
    return Batch(tokens, written)


def next_token_logprobs(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Log-probability of every next token, (n, length - 1) float32; padding positions are meaningless."""
    logits = model(input_ids=batch.tokens[:, :-1], use_cache=False).logits.float()
    return torch.log_softmax(logits, dim=-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)


def warm_up(model: torch.nn.Module, seed: int) -> None:
    """Supervised steps until the policy answers about 28 % of the words correctly: RL needs some rewards."""
    rng = random.Random(seed)
    masters = Masters(model, WARM_UP_RATE, eps=1e-8)
    for step in range(WARM_UP_LIMIT):
        words = [random_word(rng) for _ in range(WARM_UP_BATCH)]
        batch = make_batch([prompt_ids(word) for word in words], [[*encode(word[::-1]), IDS[EOS]] for word in words])
        logprobs = next_token_logprobs(model, batch)
        # Every batch is new, so this estimate is unbiased.
        chance = float((logprobs.detach() * batch.answers).sum(dim=1).exp().mean())
        if step % 10 == 0:
            report(f"warm-up {step:3d}  p(right) {chance:.3f} of {WARM_UP_TARGET}")
        if chance >= WARM_UP_TARGET:
            return
        (-(logprobs * batch.answers).sum() / batch.answers.sum()).backward()
        masters.step(max_norm=1.0)


# ---- The loss: group-normalised advantages, and a clipped ratio against the log-probs that the server sampled with.


def group_advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Reward minus the mean of its group, over the group's standard deviation; ``rewards`` (n,) float32, same shape.

    A group whose answers all earned the same reward gets zeros.
    """
    groups = rewards.view(-1, group)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, unbiased=False, keepdim=True) + 1e-6)).flatten()


def policy_loss(
    logprobs: torch.Tensor, sampled: torch.Tensor, ages: torch.Tensor, advantages: torch.Tensor, answers: torch.Tensor
) -> torch.Tensor:
    """Clipped policy-gradient loss, averaged over the tokens that count.

    Args:
        logprobs: (n, length) float32 under the weights being trained, with gradient.
        sampled: (n, length) float32 as the server reported them, under the version that it served at that token: the
            ratio to them is the importance weight that corrects for that version's age.
        ages: (n, length) float32, how many versions ago each token was sampled.
        advantages: (n,) float32, one per sequence.
        answers: (n, length) bool, True where the policy wrote the token.
    """
    counted = answers & (ages <= MAX_AGE)
    ratio = torch.where(counted, logprobs - sampled, 0.0).exp()
    weight = advantages[:, None]
    surrogate = torch.minimum(ratio * weight, ratio.clamp(CLIP_LOW, CLIP_HIGH) * weight)
    return -(surrogate * counted).sum() / counted.sum().clamp(min=1)


# ---- The server: a vLLM process started by this script, used over HTTP.


@dataclass(frozen=True)
class Answer:
    """One answer. ``tokens`` ends with the end token if ``finished``; ``logprobs`` and ``versions`` are per token.

    A version is None if the server had not yet proven which version it served.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int | None]
    finished: bool


def parse_answers(body: Any) -> list[Answer]:
    """The choices of one ``/v1/completions`` answer, with the version of each token from ``delta_sync.spans``.

    Raises:
        DemoError: a field is missing, or the fields are inconsistent.
    """
    answers = []
    try:
        spans = body.get("delta_sync", {"spans": []})["spans"]  # a server that follows no run sends none
        for choice in sorted(body["choices"], key=lambda choice: choice["index"]):
            tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            versions: list[int | None] = [None] * len(tokens)
            for span in spans:
                if span["index"] == choice["index"]:
                    versions[span["start"] : span["end"]] = [span["version"]] * (span["end"] - span["start"])
            if not len(tokens) == len(logprobs) == len(versions):
                raise DemoError(f"{len(tokens)} tokens, {len(logprobs)} log-probs, {len(versions)} versions")
            answers.append(Answer(choice["text"], tokens, logprobs, versions, choice["finish_reason"] == "stop"))
    except (KeyError, TypeError) as error:
        raise DemoError(f"the answer of /v1/completions lacks {error}") from error
    return answers


class Server:
    """A vLLM server in its own process session, and its HTTP client. Leaving the block ends all its processes."""

    def __init__(self, name: str, command: Sequence[str], log: Path, port: int, core: int) -> None:
        self.name, self.log = name, log
        arguments = f"--host 127.0.0.1 --port {port} --served-model-name {MODEL_NAME} --generation-config vllm"
        arguments += " --dtype bfloat16 --max-model-len 64 --max-num-seqs 128 --enforce-eager"
        environment = os.environ | {
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # vLLM closes idle connections after 5 s, which a slow step exceeds
            "VLLM_NO_USAGE_STATS": "1",
        }
        environment.pop("OMP_WAIT_POLICY", None)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*command, *arguments.split()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=REQUEST_SECONDS, trust_env=False)
        if "DELTA_SYNC_ADMIN_TOKEN" in os.environ:
            self._client.headers["Authorization"] = f"Bearer {os.environ['DELTA_SYNC_ADMIN_TOKEN']}"
        self._pool = ThreadPoolExecutor(CONNECTIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Close the client first: a server that is asked to end waits for its open connections.
        self._client.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        try:
            self._process.terminate()
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()

    def check_alive(self, seconds: float) -> None:
        """Raise DemoError with the end of the log if the process has ended, or ends within ``seconds``."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
        raise DemoError(f"{self.name} ended with status {status}; the end of {self.log}:\n{tail}")

    def request(self, method: str, path: str, body: object = None) -> Any:
        """Send a request and return the decoded JSON of the answer.

        Raises:
            DemoError: the server has ended, or answers with a status of 400 and above.
        """
        try:
            response = self._client.request(method, path, json=body)
        except httpx.TransportError as error:
            self.check_alive(2.0)
            raise DemoError(f"{self.name}: {method} {path}: {error!r}; see {self.log}") from error
        if response.status_code >= 500:
            self.check_alive(10.0)  # vLLM ends when its engine has died
        if response.status_code >= 400:
            raise DemoError(f"{self.name}: {method} {path}: HTTP {response.status_code}: {response.text[:500]}")
        return response.json()

    def wait_ready(self) -> None:
        """Return once it answers."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self.check_alive(0.2)
            try:
                if self._client.get("/health", timeout=5.0).status_code == 200:
                    return
            except httpx.TransportError:
                continue
        raise DemoError(f"{self.name} did not answer within {START_SECONDS:.0f} s; see {self.log}")

    def wait_version(self, version: int) -> None:
        """Return once it serves the version, or a later one."""
        self.request("GET", f"/delta_sync/wait?version={version}&timeout=60")

    def sample(self, prompts: list[list[int]], samples: int, temperature: float) -> list[Answer]:
        """``samples`` answers to each prompt, prompt by prompt; several connections share the prompts."""
        share = -(-len(prompts) // CONNECTIONS)
        body = {"model": MODEL_NAME, "n": samples, "max_tokens": MAX_ANSWER_TOKENS, "temperature": temperature}
        body |= {"logprobs": 0, "return_token_ids": True}
        bodies = [body | {"prompt": prompts[start : start + share]} for start in range(0, len(prompts), share)]
        found = self._pool.map(lambda body: self.request("POST", "/v1/completions", body), bodies)
        return [answer for body in found for answer in parse_answers(body)]

    def greedy(self, words: Sequence[str]) -> list[Answer]:
        """Greedy answers, one request after the other: kernels round by batch shape, so all batches must be equal."""
        return [self.sample([prompt_ids(word)], 1, temperature=0.0)[0] for word in words]


def free_port() -> int:
    """A free TCP port on the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_with_parent() -> None:
    """Have Linux send the child process SIGTERM when this script is killed (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)


# ---- Training: rollouts, loss, optimizer step, publish. While the server answers, it stages the previous version.


class Training:
    """The training loop, and its records: ``steps``, figures of each, and ``pauses_ms`` of the server by version."""

    def __init__(self, model: torch.nn.Module, publisher: Publisher, server: Server, steps: int, seed: int) -> None:
        self.steps: list[dict[str, Any]] = []
        self.pauses_ms: dict[int, float] = {}
        self._model, self._publisher, self._server, self._wanted = model, publisher, server, steps
        self._masters = Masters(model, RATE, EPS)
        self._rng = random.Random(seed + 1)

    def run(self, seconds: float) -> None:
        """Publish one version per step until all steps or the seconds are used up; wait until the last is served."""
        deadline = time.monotonic() + seconds
        pending: tuple[dict[str, Any], PublishResult] | None = None
        for step in range(1, self._wanted + 1):
            words = [random_word(self._rng) for _ in range(PROMPTS)]
            answers = self._server.sample([prompt_ids(word) for word in words], SAMPLES, temperature=1.0)
            # The upload has finished meanwhile, so its figures are available.
            self._note(pending)
            figures = self._learn([word for word in words for _ in range(SAMPLES)], answers)
            # Waits for the previous version, compares and returns; encoding and upload run beside the next rollouts.
            pending = {"step": step} | figures, self._publisher.publish(step=step, wait=True)
            if time.monotonic() > deadline:
                break
        self._publisher.flush()
        self._server.wait_version(self._publisher.version)
        self._note(pending)

    def _learn(self, words: list[str], answers: list[Answer]) -> dict[str, Any]:
        """One optimizer step on ``SAMPLES`` answers to each word; the mean reward, and the mean age of tokens."""
        rewards = [reward(word, one.text, one.finished) for word, one in zip(words, answers, strict=True)]
        batch = make_batch([prompt_ids(word) for word in words], [one.tokens for one in answers])
        # A token of an unknown version counts as too old.
        now = self._publisher.version
        ages = [[math.inf if known is None else now - known for known in one.versions] for one in answers]
        loss = policy_loss(
            next_token_logprobs(self._model, batch),
            batch.spread([one.logprobs for one in answers]),
            batch.spread(ages),
            group_advantages(torch.tensor(rewards), SAMPLES),
            batch.answers,
        )
        loss.backward()
        self._masters.step(MAX_NORM)
        known = [age for row in ages for age in row if age < math.inf]
        return {"reward": sum(rewards) / len(rewards), "lag": sum(known) / max(1, len(known))}

    def _note(self, pending: tuple[dict[str, Any], PublishResult] | None) -> None:
        """Record a step's figures with those of its version and of the server; print a line now and then."""
        if pending is None:
            return
        step, result = pending
        status = self._server.request("GET", "/delta_sync/status")
        if status["last_error"] is not None:
            raise DemoError(f"the server stopped following: {status['last_error']['message']}")
        self.pauses_ms |= {commit["version"]: commit["timings_ms"]["pause"] for commit in status["recent"]}
        step |= {"version": result.version, "served": status["served"] and status["served"]["version"]}
        step |= {"changed": result.changed, "total": result.total}
        step |= {"payload_bytes": result.payload_bytes, "full_bytes": result.full_bytes}
        step |= {f"{name}_s": seconds for name, seconds in result.seconds.items()}
        self.steps.append(step)
        if step["step"] % 10 == 0 or step["step"] == 1 or self._wanted <= 50:
            pause = f"{list(self.pauses_ms.values())[-1]:.1f} ms" if self.pauses_ms else "not seen"
            report(
                f"step {step['step']:3d}  reward {mean(self.steps[-SMOOTH_STEPS:], 'reward'):.3f}  "
                f"version {step['version']}  served {step['served']}  "
                f"changed {100 * step['changed'] / step['total']:.2f} %  "
                f"payload {bytes_text(step['payload_bytes'])} of {bytes_text(step['full_bytes'])}  "
                f"pause {pause}  lag {step['lag']:.2f}"
            )


def mean(steps: list[dict[str, Any]], name: str) -> float:
    """Mean of a figure over steps."""
    return round(float(np.mean([step[name] for step in steps])), 4)


def bytes_text(count: float) -> str:
    """``count`` bytes in a readable unit."""
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


# ---- The verdict: three claims, each with its measurement.


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
        "tokens_equal": bool(pairs) and all(one.tokens == two.tokens for one, two in pairs),
        "logprobs_equal": bool(pairs) and all(one.logprobs == two.logprobs for one, two in pairs),
        "compared_tokens": sum(len(one.tokens) for one in running),
        "largest_logprob_difference": max(differences, default=0.0),
    }


# ---- The output at the end.


def summarise(steps: list[dict[str, Any]], pauses_ms: dict[int, float], verdict: dict[str, bool]) -> dict[str, Any]:
    """The content of summary.json. Rewards are means of the first and the last 10 steps, or of fewer."""
    window = max(1, min(REWARD_STEPS, len(steps) // 3))
    sums = {name: sum(step[name] for step in steps) for name in ("payload_bytes", "full_bytes", "changed", "total")}
    p50, p99 = np.percentile(list(pauses_ms.values()), [50, 99]).round(3).tolist() if pauses_ms else (None, None)
    return {
        "verdict": verdict,
        "reward": {"first": mean(steps[:window], "reward"), "last": mean(steps[-window:], "reward")},
        "versions": steps[-1]["version"],
        "payload_bytes": sums["payload_bytes"],
        "full_bytes": sums["full_bytes"],
        "changed_share": round(sums["changed"] / sums["total"], 6),
        "pause_ms": {"p50": p50, "p99": p99},
        "seconds": round(time.monotonic() - _start, 1),
    }


def draw(steps: list[dict[str, Any]], pauses_ms: dict[int, float], path: Path) -> None:
    """Write the picture: reward, payload and pause over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, middle, bottom) = pyplot.subplots(3, 1, figsize=(9, 9), sharex=True, layout="constrained")
    numbers, rewards = [step["step"] for step in steps], [step["reward"] for step in steps]
    top.plot(numbers, rewards, color="0.8", linewidth=1, label="one step")
    if len(rewards) >= SMOOTH_STEPS:
        smooth = np.convolve(rewards, np.ones(SMOOTH_STEPS) / SMOOTH_STEPS, mode="valid")
        top.plot(numbers[SMOOTH_STEPS - 1 :], smooth, color="C0", linewidth=2, label=f"mean of {SMOOTH_STEPS} steps")
    top.set(ylabel="reward", ylim=(0, 1), title="The server's policy learns to reverse words")
    top.legend(loc="upper left", frameon=False)
    middle.plot(numbers, [step["payload_bytes"] / 1e3 for step in steps], color="C2")
    full = steps[0]["full_bytes"] / 1e3
    middle.axhline(full, color="C3", linestyle="--", label=f"all weights: {full:,.0f} kB")
    middle.set(ylabel="payload [kB]", yscale="log")
    middle.set_yticks([100, 300, 1000, 3000, 10000], [100, 300, "1 000", "3 000", "10 000"])
    middle.minorticks_off()
    middle.legend(loc="center right", frameon=False)
    bottom.plot(*zip(*sorted(pauses_ms.items()), strict=True), ".", color="C1", markersize=3)
    bottom.set(ylabel="generation paused [ms]", xlabel="step (one weight version each)", ylim=(0, None))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def print_closing(summary: dict[str, Any], details: dict[str, Any], out: Path) -> None:
    """Print the verdict and the figures."""
    verdict, reward_, pause = summary["verdict"], summary["reward"], summary["pause_ms"]
    payload, full = summary["payload_bytes"], summary["full_bytes"]
    claims = {
        "weights_bit_identical": f"served weights bit-identical to the trainer's ({details['fingerprint']})",
        "tokens_equal": f"greedy tokens equal to a freshly loaded vLLM's ({details['compared_tokens']} tokens)",
        "logprobs_equal": f"their log-probs equal (largest difference {details['largest_logprob_difference']:g})",
    }
    paused = f"{pause['p50']:.1f} ms median, {pause['p99']:.1f} ms p99" if pause["p50"] is not None else "unknown"
    print(
        "",
        *(f"{'✓' if verdict[name] else '✗'} {text}" for name, text in claims.items()),
        f"reward {reward_['first']:.3f} → {reward_['last']:.3f} over {summary['versions']} weight versions "
        f"in {summary['seconds']:.0f} s",
        f"sent {bytes_text(payload)} instead of {bytes_text(full)}, {full / max(1, payload):.1f} times less: "
        f"{100 * summary['changed_share']:.1f} % of the weights changed per step",
        "  (a toy, with the learning rate it needs to learn in minutes, changes more of its bf16 weights per step",
        "  than LLM-size reinforcement learning, where it is about 1 %)",
        f"generation paused per version: {paused}",
        f"answers were sampled by weights {mean(details['steps'], 'lag'):.2f} versions old on average",
        f"written: {out / 'summary.json'} and {out / 'demo.png'}",
        sep="\n",
    )


def shortcomings(summary: dict[str, Any], steps: int) -> list[str]:
    """Why the demo failed; empty if it succeeded. A run of few steps need not learn."""
    failures = [f"{claim} does not hold" for claim, holds in summary["verdict"].items() if not holds]
    first, last = summary["reward"]["first"], summary["reward"]["last"]
    if steps >= NEEDED_VERSIONS and summary["versions"] < NEEDED_VERSIONS:
        failures.append(f"only {summary['versions']} versions were published; give it more --max-seconds")
    if steps >= NEEDED_VERSIONS and last - first < NEEDED_RISE:
        failures.append(f"the reward rose from {first:.3f} to {last:.3f} only; give it more --max-seconds")
    return failures


# ---- The demo from start to end.


def prepare_output(out: Path) -> None:
    """Make the directory, or clear what an earlier run of this script wrote into it; refuse any other directory."""
    if out.exists() and not (out / MARKER).exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DemoError(f"{out} was not made by this script; give another directory with --out")
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()
    for path in (out / name for name in WRITTEN):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def run(options: argparse.Namespace) -> int:
    """Run the demo; return the exit status."""
    transformers.utils.logging.disable_progress_bar()
    out = options.out.resolve()
    prepare_output(out)
    base, checkpoint, bucket = out / "base", out / "checkpoint", options.bucket or str(out / "bucket")
    if not bucket.startswith("hf://"):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # for vLLM: everything that it needs is local
    programs = Path(sys.executable).parent
    # vLLM's worker spins for a second after its last message, so the server computes on one core and the trainer on the
    # others. One thread in both servers also makes them comparable: greedy output depends on the number of threads.
    server_core, *others = available = sorted(os.sched_getaffinity(0))
    trainer_cores = others[:4] or available

    report("warming up a 3 M parameter policy (supervised)")
    model, tokenizer = make_model(options.seed), make_tokenizer()
    warm_up(model, options.seed)
    for part in (model, tokenizer):
        part.save_pretrained(base)

    # Version 0 is a reference to the base, which uploads nothing.
    with Publisher(model, bucket, base=base, notice="tcp://127.0.0.1:*") as publisher:
        report("starting vllm serve on the base checkpoint")
        command = [str(programs / "delta-sync"), "serve", str(base), "--bucket", bucket]
        command += ["--notice", str(publisher.notice_address)]
        port = options.port or free_port()
        with Server("the server", command, out / "server.log", port, server_core) as server:
            server.wait_ready()
            server.wait_version(0)
            report("training: the server answers, the trainer learns and publishes")
            torch.set_num_threads(len(trainer_cores))
            os.sched_setaffinity(0, trainer_cores)
            training = Training(model, publisher, server, options.steps, options.seed)
            training.run(max(30.0, options.max_seconds - VERDICT_SECONDS - (time.monotonic() - _start)))
            os.sched_setaffinity(0, available)
            for part in (model, tokenizer):
                part.save_pretrained(checkpoint)

            report("rescanning the weights that are served")
            identical, fingerprint = prove_weights(server, bucket, checkpoint)
            words = [random_word(random.Random(options.seed + 2 + number)) for number in range(COMPARED_WORDS)]
            running = server.greedy(words)

    report("starting a fresh vLLM on the trainer's checkpoint, to compare answers")
    # It follows no run, but has the same worker extension, for equal kernels.
    command = [str(programs / "vllm"), "serve", str(checkpoint)]
    command += ["--worker-extension-cls", "vllm_delta_sync.engine.WorkerExtension"]
    with Server("the fresh server", command, out / "fresh-server.log", free_port(), server_core) as server:
        server.wait_ready()
        compared = compare_answers(running, server.greedy(words))

    verdict = {CLAIMS[0]: identical} | {name: compared[name] for name in CLAIMS[1:]}
    summary = summarise(training.steps, training.pauses_ms, verdict)
    details = {"fingerprint": fingerprint} | compared | {"steps": training.steps}
    for name, content in (("summary", summary), ("details", details)):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    draw(training.steps, training.pauses_ms, out / "demo.png")
    print_closing(summary, details, out)
    failures = shortcomings(summary, options.steps)
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; exits with status 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="OUT gets summary.json, demo.png, details.json, the logs, both checkpoints and the bucket.\nExit "
        "status: 0 the verdict holds (and, from 100 steps on, the reward rose by 0.25 over 100 versions or more),\n"
        "1 it does not or something failed, 2 wrong usage, 130 interrupted.",
    )
    add = parser.add_argument
    add("--steps", type=int, default=300, help="optimizer steps, one version each (default: 300)")
    add("--out", type=Path, default=Path("demo-out"), help="directory to write, made anew (default: demo-out)")
    add("--seed", type=int, default=0, help="of the model and the words (default: 0)")
    add("--max-seconds", type=float, default=1200.0, help="end in about this time, proof included (default: 1200)")
    add("--port", type=int, default=0, help="of the server (default: any free one)")
    bucket = os.environ.get("DELTA_SYNC_BUCKET")
    add("--bucket", default=bucket, help="URL of an unused run (default: $DELTA_SYNC_BUCKET, else OUT/bucket)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    return options


def main() -> int:
    """Exit status: see ``--help``."""
    options = parse_options()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return run(options)
    except KeyboardInterrupt:
        print("interrupted; the server has ended")
        return 130
    except (DemoError, DeltaSyncError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
