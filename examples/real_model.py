"""Reinforcement learning of a real language model on two CPU cores, with weights that reach vLLM through a bucket.

    python examples/real_model.py CHECKPOINT                        # about 15 minutes; writes real-out/
    python examples/real_model.py CHECKPOINT --bucket s3://runs/1   # through any store that delta-sync knows

The task: name the capital of a country, in at most eight words; each is worth half of the reward. `delta-sync serve`
answers while the trainer learns from the answers before, and takes over each optimizer step as one version. At the end
prove_served.py checks that it has the trainer's weights bit for bit, and answers exactly like a freshly loaded vLLM.

OUT gets summary.json, details.json, real.png, the logs, the bucket, the served weights (checkpoint) and the trainer's
float32 weights (masters). Exit status: 0 all of this holds, and from 40 steps on the reward rose by three standard
errors; 1 it does not, or something failed; 2 wrong usage; 130 interrupted.
"""

import os

if __name__ == "__main__":  # before torch is imported: threads sleep while they wait, as trainer and server share cores
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}

import argparse
import copy
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pandas as pd  # type: ignore[import-untyped]
import prove_served  # type: ignore[import-not-found]
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer_side import Publisher, PublishResult
from vllm_delta_sync import DeltaSyncError
from vllm_delta_sync.urls import check_url

CAPITALS = """
Vienna Austria, Ottawa Canada, Santiago Chile, Beijing China, Havana Cuba, Copenhagen Denmark, Cairo Egypt, Helsinki
Finland, Paris France, Berlin Germany, Accra Ghana, Athens Greece, Budapest Hungary, Reykjavik Iceland, Jakarta
Indonesia, Tehran Iran, Baghdad Iraq, Dublin Ireland, Rome Italy, Kingston Jamaica, Tokyo Japan, Nairobi Kenya, Beirut
Lebanon, Tripoli Libya, Oslo Norway, Lima Peru, Warsaw Poland, Lisbon Portugal, Bucharest Romania, Moscow Russia,
Belgrade Serbia, Madrid Spain, Stockholm Sweden, Damascus Syria, Bangkok Thailand, Ankara Turkey, Kyiv Ukraine, Hanoi
Vietnam"""
CAPITAL_OF = {country: capital for capital, country in (pair.split() for pair in CAPITALS.split(","))}
ASKED = ("What is the capital of Japan?", "What is the capital of Belgium?", "Who wrote Hamlet?")
MAX_WORDS, MAX_TOKENS = 8, 24  # of an answer
PROMPTS, SAMPLES = 6, 8  # questions per step, and answers to each
CLIP_LOW, CLIP_HIGH, MAX_NORM = 0.8, 1.28, 1.0
WINDOW, JUDGED_STEPS, ERRORS = 10, 40, 3.0  # the rise: mean reward of the last ten steps minus the first ten
START_SECONDS, WAIT_SECONDS, END_SECONDS = 600, 120, 10
FLAGS = "--generation-config vllm --max-model-len 256 --max-num-seqs 64 --enforce-eager"


def reward(capital: str, answer: dict[str, Any]) -> float:
    """Half for naming the capital, half for an answer that ends by itself within ``MAX_WORDS`` words."""
    short = len(answer["text"].split()) <= MAX_WORDS and answer["finish_reason"] == "stop"
    return 0.5 * (capital in answer["text"]) + 0.5 * short


@contextmanager
def serving(options: argparse.Namespace, notice: str, core: int) -> Iterator[httpx.Client]:
    """A server that computes on one core, once it answers. All its processes end with the block."""
    with socket.socket() as probe:  # finds a free port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("delta-sync")), "serve", str(options.checkpoint), *FLAGS.split()]
    command += ["--bucket", options.bucket, "--notice", notice, "--host", "127.0.0.1", "--port", str(port)]
    settings = {"VLLM_CPU_OMP_THREADS_BIND": str(core), "VLLM_CPU_KVCACHE_SPACE": "1"}
    # vLLM closes idle connections after 5 s, which a slow step exceeds.
    environment = os.environ | settings | {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600", "VLLM_NO_USAGE_STATS": "1"}
    log = options.out / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_SECONDS + 30, trust_env=False)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with suppress(httpx.TransportError):
                if client.get("/health").is_success:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
                sys.exit(f"real_model: the server did not start; the end of {log}:\n{tail}")
            time.sleep(0.2)
        yield client
    finally:
        client.close()  # first: a server that ends waits for open connections
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def sample(server: httpx.Client, prompts: Sequence[list[int]], count: int, temperature: float) -> list[Any]:
    """``count`` answers to each prompt, those to one prompt one after the other; of each the text, the tokens, and the
    log-prob and the version that each was sampled with. A version is None until a new server has proven its weights."""
    body = {"prompt": prompts, "n": count, "max_tokens": MAX_TOKENS, "temperature": temperature}
    body |= {"logprobs": 0, "return_token_ids": True}
    found = server.post("/v1/completions", json=body).raise_for_status().json()
    answers: list[Any] = sorted(found["choices"], key=lambda choice: choice["index"])
    for answer in answers:
        answer["versions"], answer["logprobs"] = [None] * len(answer["token_ids"]), answer["logprobs"]["token_logprobs"]
    for span in found["delta_sync"]["spans"]:
        places = slice(span["start"], span["end"])
        answers[span["index"]]["versions"][places] = [span["version"]] * (places.stop - places.start)
    return answers


def chat(tokenizer: Any, question: str) -> list[int]:
    """Token ids of a question in the model's chat format, with an empty system prompt."""
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


def padded(rows: Sequence[Sequence[Any]]) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


@contextmanager
def as_served(model: Any) -> Iterator[None]:
    """The weights as they are served, rounded to bfloat16, while the block computes the loss and its gradients.

    Float32 weights are another policy than the one that answers: they move at each step, and most of their roundings
    stay. The loss then clips what has not reached the server yet, and the reward does not rise.
    """
    weights = list(model.parameters())
    masters = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.copy_(weight.bfloat16())
        try:
            with torch.enable_grad():
                yield
        finally:
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)


def answer_logprobs(model: Any, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> Tensor:
    """Log-prob of each token of the answers under the weights being trained, (n, longest) float32; 0 in the padding."""
    tokens = padded([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    # Matrices in bfloat16, as the server computes, where the processor has instructions for them.
    fast = any(has for name, has in torch.cpu.get_capabilities().items() if name.endswith("bf16"))
    with torch.autocast("cpu", torch.bfloat16, enabled=fast):
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        # The state before each token predicts it; only these go through the large output layer.
        ends = [(len(prompt) - 1, len(answer)) for prompt, answer in zip(prompts, answers, strict=True)]
        states = torch.cat([row[start : start + length] for row, (start, length) in zip(hidden, ends, strict=True)])
        logits = model.lm_head(states).float()
    chosen = torch.tensor([token for answer in answers for token in answer])
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, chosen[:, None]).squeeze(-1)
    return pad_sequence(logprobs.split([length for _, length in ends]), batch_first=True)


def policy_loss(logprobs: Tensor, sampled: Tensor, known: Tensor, advantages: Tensor) -> Tensor:
    """Clipped policy-gradient loss, averaged over the tokens of known version.

    The ratio to the log-probs that the server sampled with, by the version that it served at that token, is the
    importance weight that corrects for that version's age. ``advantages`` (n, 1), the others (n, longest).
    """
    ratio = torch.where(known, logprobs - sampled, 0.0).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(CLIP_LOW, CLIP_HIGH) * advantages)
    return -(surrogate * known).sum() / known.sum().clamp(min=1)


def train(model: Any, tokenizer: Any, publisher: Publisher, server: httpx.Client, options: Any) -> pd.DataFrame:
    """Sample, learn and publish, one version per step, until the last is served; returns the figures of each step."""
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0), random.Random(options.seed)
    steps: list[dict[str, Any]] = []
    results: list[PublishResult] = []
    pauses_ms: dict[int | None, float] = {}

    def rollout() -> tuple[list[str], list[list[int]], list[Any]]:
        countries = rng.sample(sorted(CAPITAL_OF), PROMPTS)
        prompts = [chat(tokenizer, f"What is the capital of {country}?") for country in countries]
        answers = sample(server, prompts, SAMPLES, temperature=1.0)
        return [one for one in countries for _ in range(SAMPLES)], [p for p in prompts for _ in range(SAMPLES)], answers

    def poll() -> None:
        status = server.get("/delta_sync/status").raise_for_status().json()
        if status["last_error"] is not None:
            sys.exit(f"real_model: the server stopped following: {status['last_error']['message']}")
        pauses_ms.update({commit["version"]: commit["timings_ms"]["pause"] for commit in status["recent"]})

    with ThreadPoolExecutor(1) as pool, tqdm(range(1, options.steps + 1), unit="step") as bar:
        coming = pool.submit(rollout)
        for step in bar:
            countries, prompts, answers = coming.result()
            if step < options.steps:
                coming = pool.submit(rollout)  # the server answers while this process learns
            rewards = torch.tensor([reward(CAPITAL_OF[one], two) for one, two in zip(countries, answers, strict=True)])
            groups = rewards.view(-1, SAMPLES)
            spread = groups.std(dim=1, unbiased=False, keepdim=True) + 1e-6
            advantages = ((groups - groups.mean(dim=1, keepdim=True)) / spread).view(-1, 1)
            known = padded([[version is not None for version in answer["versions"]] for answer in answers])
            sampled = padded([answer["logprobs"] for answer in answers])
            with as_served(model):
                logprobs = answer_logprobs(model, prompts, [answer["token_ids"] for answer in answers])
                policy_loss(logprobs, sampled, known, advantages).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            ages = [publisher.version - version for a in answers for version in a["versions"] if version is not None]
            # Compares and returns; encoding and upload run in the background, beside the next step.
            results.append(publisher.publish(step=step, wait=True))
            poll()
            steps.append({"step": step, "reward": float(rewards.mean()), "age": sum(ages) / max(1, len(ages))})
            bar.set_postfix_str(f"reward {pd.DataFrame(steps[-WINDOW:]).reward.mean():.2f}")
    publisher.flush()
    server.get(f"/delta_sync/wait?version={publisher.version}&timeout={WAIT_SECONDS}").raise_for_status()
    poll()
    for figures, result in zip(steps, results, strict=True):
        figures |= {"changed": result.changed / result.total, "pause_ms": pauses_ms.get(result.version)}
        figures |= {"payload_bytes": result.payload_bytes, "full_bytes": result.full_bytes}
    return pd.DataFrame(steps)


def run(options: argparse.Namespace) -> bool:
    """Run the example; whether everything held."""
    began, out = time.monotonic(), options.out
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    # float32 masters: bfloat16, which is served, would round most steps away.
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32)
    # vLLM's worker spins for a while after each message, so server and trainer get cores of their own.
    core, *others = cores = sorted(os.sched_getaffinity(0))
    questions = [chat(tokenizer, f"What is the capital of {country}?") for country in CAPITAL_OF]
    (out / "prompts.json").write_text(json.dumps(questions))
    shown = [chat(tokenizer, question) for question in ASKED]
    # Version 0 is a reference to the checkpoint, which uploads nothing.
    with Publisher(model, options.bucket, base=options.checkpoint, notice="tcp://127.0.0.1:*") as publisher:
        print("starting delta-sync serve on the checkpoint", flush=True)
        with serving(options, str(publisher.notice_address), core) as server:
            server.get(f"/delta_sync/wait?version=0&timeout={WAIT_SECONDS}").raise_for_status()
            before = sample(server, shown, 1, temperature=0.0)
            os.sched_setaffinity(0, others[:4] or cores)
            torch.set_num_threads(len(others[:4] or cores))
            steps = train(model, tokenizer, publisher, server, options)
            os.sched_setaffinity(0, cores)
            trained, after = time.monotonic(), sample(server, shown, 1, temperature=0.0)
            model.save_pretrained(out / "masters")
            for part in (copy.deepcopy(model).to(torch.bfloat16), tokenizer):
                part.save_pretrained(out / "checkpoint")
            served = ["--server", str(server.base_url), "--bucket", options.bucket, "--core", str(core)]
            files = [f"--{name}={out / path}" for name, path in
                     (("checkpoint", "checkpoint"), ("prompts", "prompts.json"), ("log", "fresh.log"))]  # fmt: skip
            # In this process, so that an interrupt ends the fresh vLLM too.
            proven = prove_served.prove(prove_served.parse([*served, *files, "--", *FLAGS.split()]))
    first, last = steps.reward.head(WINDOW), steps.reward.tail(WINDOW)
    rise, error = last.mean() - first.mean(), ((first.var() + last.var()) / WINDOW) ** 0.5
    summary = {"proven": proven, "steps": len(steps), "learning_rate": options.lr, "seed": options.seed}
    summary |= {"reward_first": first.mean(), "reward_last": last.mean(), "standard_error": error}
    texts = [(asked, b["text"], a["text"]) for asked, b, a in zip(ASKED, before, after, strict=True)]
    summary |= {"pause_ms": steps.pause_ms.median(), "answers": texts, "training_seconds": trained - began}
    summary |= {"seconds": time.monotonic() - began, **steps[["changed", "payload_bytes", "full_bytes", "age"]].mean()}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    steps.to_json(out / "details.json", orient="records", indent=2)
    chart = pd.DataFrame({"reward": steps.reward, "mean of ten steps": steps.reward.rolling(WINDOW).mean()})
    chart["MB of a version"], chart["generation paused [ms]"] = steps.payload_bytes / 1e6, steps.pause_ms
    panels = [("reward", "mean of ten steps"), ("MB of a version",), ("generation paused [ms]",)]
    title = [f"{summary['full_bytes'] / 1e6:.0f} MB of weights, learning rate {options.lr:g}", "", ""]
    axes = chart.set_index(steps.step).plot(subplots=panels, figsize=(9, 9), ylim=(0, None), title=title)
    axes[0].figure.savefig(out / "real.png", dpi=110, bbox_inches="tight")
    for question, one, two in texts:
        print(f"\n{question}\n  before: {one!r}\n  after:  {two!r}")
    sent, full = summary["payload_bytes"], summary["full_bytes"]
    print(f"\nreward {first.mean():.3f} → {last.mean():.3f} in {len(steps)} steps, standard error {error:.3f}")
    print(f"{summary['changed']:.2%} of the weights changed per step at learning rate {options.lr:g}")
    print(f"{sent / 1e6:.2f} MB per version instead of {full / 1e6:.0f} MB, {full / sent:.0f} times less")
    print(f"generation paused per version: {summary['pause_ms']:.0f} ms; weights {summary['age']:.2f} versions old")
    print(f"written: {out / 'summary.json'} and {out / 'real.png'}, after {summary['seconds']:.0f} s")
    learned = len(steps) < JUDGED_STEPS or rise >= ERRORS * error
    if not learned:
        print(f"FAILED: the reward rose by {rise:.3f}, not by {ERRORS:g} standard errors; give it more --steps")
    return learned and proven


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a chat model in bfloat16, with its tokenizer")
    add("--steps", type=int, default=60, help="optimizer steps, one version each (default: 60)")
    add("--lr", type=float, default=3e-6, help="learning rate (default: 3e-6)")
    add("--seed", type=int, default=0, help="of the questions (default: 0)")
    add("--out", type=Path, default=Path("real-out"), help="directory to write, made anew (default: real-out)")
    add("--bucket", help="URL of an unused run (default: OUT/bucket)")
    options = parser.parse_args(arguments)
    options.bucket, marker = options.bucket or str(options.out / "bucket"), options.out / ".delta-sync-real"
    if options.steps < 2:
        parser.error("--steps must be at least 2")
    try:
        check_url(options.bucket)  # not after OUT was emptied
    except DeltaSyncError as error:
        parser.error(str(error))
    if not (options.checkpoint / "config.json").exists():
        parser.error(f"{options.checkpoint} is not a checkpoint folder: it has no config.json")
    if options.out.exists() and not marker.exists():
        parser.error(f"{options.out} was not made by this script; give another directory with --out")
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    marker.touch()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return 0 if run(options) else 1
    except KeyboardInterrupt:
        print("interrupted; the server has ended")
        return 130
    except (DeltaSyncError, OSError, httpx.HTTPError) as error:
        print(f"real_model: {error}; the server's log is in {options.out}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
