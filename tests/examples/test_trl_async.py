"""``examples/trl_async.py``: what needs no server (task, attention, rollout loop, verdict), and slow: the script."""

import json
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from accelerate import PartialState
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from examples import trl_async
from examples.trl_async import EOS, SERVED_VERSION, TOKENIZER, VERSION, WEIGHT_SYNC, exact_reversal
from tests.support.answers import Answer, Asked, answering
from tests.support.running import run_python
from vllm_delta_sync import open_run

SECONDS = 60.0
GROUPS, SAMPLES = 3, 2


def completion(prompt: list[int]) -> dict[str, Any]:
    """An answer of the server: the reversed word, whose first token an older version has sampled than the others."""
    tokens, version = [*prompt[-2::-1], TOKENIZER.eos_token_id], len(prompt)
    choice = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": "stop"}
    choice["logprobs"] = {"token_logprobs": [-0.5] * len(tokens)}
    spans = [(version - 1, 0, 1), (version, 1, len(tokens))]
    listed = [{"index": 0, "version": number, "start": start, "end": end} for number, start, end in spans]
    return {"choices": [choice], "delta_sync": {"run": "r", "spans": listed}}


def answer(asked: Asked) -> Answer:
    body = json.dumps(completion(json.loads(asked.body)["prompt"])).encode()
    return Answer(200, body, {"Content-Type": "application/json"})


@pytest.fixture
def server_url() -> Iterator[str]:
    with answering() as server:
        server.reply = answer
        yield server.url


def test_each_sample_of_trls_loop_carries_the_version_that_sampled_it(server_url: str) -> None:
    PartialState()
    context = get_context("spawn")
    made: queue.Queue[Any] = queue.Queue()
    loop = trl_async.VersionedRolloutLoop(
        model_name="policy",
        dataset=trl_async.make_dataset(GROUPS, seed=5),
        reward_funcs=[exact_reversal],
        processing_class=TOKENIZER,
        eos_token_ids=[TOKENIZER.eos_token_id],
        rollout_buffer=made,
        model_version_value=context.Value("i", 0),
        heartbeat_value=context.Value("d", 0.0),
        failed_event=threading.Event(),
        exception_info_queue=queue.Queue(),
        metrics_queue=queue.Queue(),
        num_generations=SAMPLES,
        max_inflight_tasks=4,
        vllm_server_url=server_url,
        max_tokens=trl_async.MAX_ANSWER_TOKENS,
    )
    running = threading.Thread(target=loop.run, daemon=True)
    running.start()
    for sample in [made.get(timeout=SECONDS) for _ in range(GROUPS * SAMPLES)]:
        (message,) = sample.prompt
        letters = len(message["content"])
        assert sample.metrics["reward"] == 1.0
        assert sample.metrics[SERVED_VERSION] == pytest.approx(letters + 1 - 1 / (letters + 1))
    loop._loop.call_soon_threadsafe(loop._stop_event.set)
    running.join(SECONDS)
    assert not running.is_alive()


STEPS = 3


def logged() -> list[dict[str, Any]]:
    """TRL's log of a training: version 1 before the first step, and one after each."""
    sent = {"delta_sync/payload_bytes": 100.0, "delta_sync/changed_percent": 5.0}
    seen = {SERVED_VERSION: 0.5, WEIGHT_SYNC: 0.1, "sample/staleness_mean": 1.0}
    history: list[dict[str, Any]] = [{VERSION: 1, "step": 0, **sent}]
    for step in range(1, STEPS + 1):
        history += [{"reward": step / 10, "step": step, **seen}, {VERSION: step + 1, "step": step, **sent}]
    return history


class Stubs:
    """Stand in for training and both servers: ``history`` is TRL's log, ``scanned`` what the server holds.

    Attributes:
        logprob, ending: of each token of the second server's answers, and their last token.
    """

    def __init__(self) -> None:
        self.history, self.scanned, self.logprob, self.ending = logged(), "", -0.5, EOS
        self.last_error: dict[str, str] | None = None

    def train(self, out: Path, steps: int, url: str, transfer: Any, progress: trl_async.Progress) -> Any:
        model = Qwen3ForCausalLM.from_pretrained(out / "base")
        transfer.init_weight_transfer()
        for version in range(1, steps + 2):
            if version > 1:
                model.model.norm.weight.data += 1
            transfer.send_weights(model.named_parameters())
        transfer.destroy()
        self.scanned = self.scanned or open_run(str(out / "bucket")).head().fingerprint
        model.save_pretrained(out / "checkpoint")
        return SimpleNamespace(model=model, model_version=steps + 1, state=SimpleNamespace(log_history=self.history))

    @contextmanager
    def serving(self, log: Path, core: int, *command: str) -> Iterator[httpx.Client]:
        self.follows = command[0] == "delta-sync"
        with httpx.Client(transport=httpx.MockTransport(self.answer), base_url="http://server") as client:
            yield client

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/completions":
            logprob, ending = (-0.5, EOS) if self.follows else (self.logprob, self.ending)
            tokens = TOKENIZER.encode(json.loads(request.content)["prompt"][-2::-1] + ending)
            choice = {"token_ids": tokens, "logprobs": {"token_logprobs": [logprob] * len(tokens)}}
            return httpx.Response(200, json={"choices": [choice]})
        assert self.follows
        recent = [{"version": version, "timings_ms": {"pause": 2.0}} for version in range(1, STEPS + 2)]
        document = {"last_error": self.last_error, "recent": recent, "verdict": True, "fingerprint": self.scanned}
        return httpx.Response(200, json=document)


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Stubs:
    stubs = Stubs()
    monkeypatch.setattr(trl_async, "train", stubs.train)
    monkeypatch.setattr(trl_async, "serving", stubs.serving)
    monkeypatch.setattr(trl_async, "WARM_UP_TARGET", 0.0)
    return stubs


def read(out: Path) -> list[Any]:
    return [json.loads((out / f"{name}.json").read_text()) for name in ("summary", "details", "log_history")]


def test_what_holds_is_written_as_the_verdict(stubs: Stubs, tmp_path: Path) -> None:
    cores, out = os.sched_getaffinity(0), tmp_path / "out"
    for _ in range(2):  # the second time in the directory of the first
        assert trl_async.main(["--steps", str(STEPS), "--out", str(out)]) == 0
    assert os.sched_getaffinity(0) == cores
    summary, details, history = read(out)
    assert set(summary["verdict"].values()) == {True}
    assert len(summary["verdict"]) == 5
    assert (summary["versions"], summary["payload_bytes"]) == (STEPS + 1, 100 * (STEPS + 1))
    size = sum(tensor.numel() for tensor in load_file(out / "checkpoint" / "model.safetensors").values())
    assert summary["full_bytes"] == 2 * size * (STEPS + 1)
    assert summary["reward"] == {"first": 0.1, "last": 0.3}
    assert summary["pause_ms"] == {"p50": 2.0, "p99": 2.0}
    assert summary["staleness"] == {"by_spans": 1.5, "by_trl": 1.0}
    assert history == stubs.history
    assert [step["lag"] for step in details["steps"]] == [0.5, 1.5, 2.5]
    assert details["compared_tokens"] > 36
    assert (out / "trl.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("wrong", "claim"),
    [
        ({"history": logged()[:-1]}, "each_sync_is_a_version"),
        ({"history": [*logged(), logged()[-1]]}, "each_sync_is_a_version"),
        ({"history": [line for line in logged() if line.get("reward") != 0.2]}, "sync_metrics_in_trls_log"),
        ({"scanned": "0" * 32}, "weights_bit_identical"),
        ({"logprob": -0.5 - 1e-9}, "logprobs_equal"),
        ({"ending": "a"}, "tokens_equal"),
        ({"last_error": {"message": "no space left"}}, "no space left"),
    ],
)
def test_what_does_not_hold_ends_with_1(
    wrong: dict[str, Any], claim: str, stubs: Stubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl_async, "draw", lambda *_: None)  # takes half of the time
    vars(stubs).update(wrong)
    with pytest.raises(SystemExit) as ended:
        trl_async.main(["--steps", str(STEPS), "--out", str(tmp_path / "out")])
    assert claim in str(ended.value.code)


@pytest.mark.e2e
@pytest.mark.slow
def test_the_example_holds_and_its_files_say_so(tmp_path: Path) -> None:
    """The whole script, with TRL's own trainer and worker and two real vLLM servers."""
    out = tmp_path / "out"
    run_python("examples/trl_async.py", "--steps", "4", "--out", str(out), seconds=1200)
    summary, details, history = read(out)
    assert set(summary["verdict"].values()) == {True}
    assert len(set(details["fingerprints"].values())) == 1
    assert details["compared_tokens"] > 30
    assert summary["versions"] == 5
    assert 0 < summary["payload_bytes"] < summary["full_bytes"]
    changed = [line["delta_sync/changed_percent"] for line in history if "delta_sync/version" in line]
    assert changed[0] == 0, "before the first step nothing has changed"
    assert all(percent > 0 for percent in changed[1:])
    # The first step trains version 1, on answers of version 0 or 1, whose bits are the same.
    lags = [step["lag"] for step in details["steps"]]
    assert len(lags) == 4
    assert 0 <= lags[0] <= 1
    assert min(lags) >= 0
    assert details["pauses_ms"]["5"] > 0
    assert (out / "trl.png").stat().st_size > 10_000
