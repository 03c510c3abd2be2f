"""The TRL example's own parts, without vLLM: words, reward, the rollout loop that notes versions, record."""

import json
import pickle
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from transformers import AutoTokenizer
from trl.chat_template_utils import parse_response

from examples.demo import task
from examples.demo.characters import EOS_ID, encode
from examples.trl_async.__main__ import STEPS, parse_options
from examples.trl_async.names import SERVED_VERSION, TRL_STALENESS, WEIGHT_SYNC
from examples.trl_async.record import Proof, Record
from examples.trl_async.rollouts import VersionedRolloutLoop, versions_of
from examples.trl_async.words import exact_reversal, make_dataset, make_tokenizer

SECONDS = 30.0
GROUPS, SAMPLES = 3, 2


def test_a_conversation_is_the_prompt_of_the_demo_and_survives_saving(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    (row,) = make_dataset(1, seed=3)
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    assert prompt == encode(task.prompt_of(row["word"]))
    answer = [*encode(task.answer_of(row["word"])), EOS_ID]
    message = parse_response(tokenizer, answer, prefix=prompt)
    assert message == {"role": "assistant", "content": task.answer_of(row["word"])}


def test_the_reward_is_for_the_finished_reversal_alone_and_goes_to_another_process() -> None:
    right = [*encode("atled"), EOS_ID]
    answers = [right, right[:-1], encode("delta"), [*right, EOS_ID]]
    reward = pickle.loads(pickle.dumps(exact_reversal))  # noqa: S301  as TRL hands it to its rollout process
    assert reward(completion_ids=answers, word=["delta"] * 4, prompts=[], completions=[]) == [1.0, 0.0, 0.0, 0.0]


def completion(body: dict[str, Any]) -> dict[str, Any]:
    """An answer of the server: the reversed word, whose first token an older version has sampled than the others."""
    prompt = body["prompt"]
    tokens = [*prompt[-2::-1], EOS_ID]
    choice = {
        "index": 0,
        "text": "",
        "token_ids": tokens,
        "logprobs": {"token_logprobs": [-0.5] * len(tokens)},
        "finish_reason": "stop",
    }
    version = len(prompt)
    spans = [(version - 1, 0, 1), (version, 1, len(tokens))]
    told = [{"index": 0, "version": number, "start": start, "end": end} for number, start, end in spans]
    return {"choices": [choice], "delta_sync": {"run": "r", "spans": told}}


class _Completions(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps(completion(body)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *values: object) -> None:
        return


@pytest.fixture
def server_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Completions) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_each_sample_of_trls_loop_carries_the_version_that_sampled_it(server_url: str) -> None:
    PartialState()
    context = get_context("spawn")
    samples: queue.Queue[Any] = queue.Queue()
    loop = VersionedRolloutLoop(
        model_name="policy",
        dataset=make_dataset(GROUPS, seed=5),
        reward_funcs=[exact_reversal],
        processing_class=make_tokenizer(),
        eos_token_ids=[EOS_ID],
        rollout_buffer=samples,
        model_version_value=context.Value("i", 0),
        heartbeat_value=context.Value("d", 0.0),
        failed_event=threading.Event(),
        exception_info_queue=queue.Queue(),
        metrics_queue=queue.Queue(),
        num_generations=SAMPLES,
        max_inflight_tasks=4,
        vllm_server_url=server_url,
        max_tokens=task.MAX_ANSWER_TOKENS,
    )
    running = threading.Thread(target=loop.run, daemon=True)
    running.start()
    made = [samples.get(timeout=SECONDS) for _ in range(GROUPS * SAMPLES)]
    loop._loop.call_soon_threadsafe(loop._stop_event.set)
    running.join(SECONDS)
    assert not running.is_alive()
    for sample in made:
        (message,) = sample.prompt
        letters = len(message["content"])
        assert sample.metrics["reward"] == 1.0
        assert sample.metrics[SERVED_VERSION] == pytest.approx(letters + 1 - 1 / (letters + 1))


def test_what_was_not_proven_yet_was_sampled_by_the_base() -> None:
    answer = completion({"prompt": encode("delta>")})
    assert versions_of(answer) == [5, 6, 6, 6, 6, 6]
    answer["delta_sync"]["spans"][0]["version"] = None
    assert versions_of(answer) == [0, 6, 6, 6, 6, 6]
    del answer["delta_sync"]
    assert versions_of(answer) == [0] * 6


def sync(version: int, payload: int, percent: float) -> dict[str, float]:
    """A line of TRL's log about one version."""
    return {
        "delta_sync/version": version,
        "delta_sync/payload_bytes": payload,
        "delta_sync/changed_percent": percent,
        "epoch": 0.1,
    }


def learnt(reward: float, served: float, seconds: float) -> dict[str, float]:
    """A line of TRL's log about one step."""
    return {
        "reward": reward,
        SERVED_VERSION: served,
        TRL_STALENESS: 0.0,
        "perf/rollout_wait_s": 0.1,
        "perf/fwd_bwd_s": 0.2,
        "perf/optimizer_s": 0.3,
        WEIGHT_SYNC: seconds,
    }


def recorded(steps: int) -> tuple[Record, list[dict[str, float]]]:
    """A run of some steps, and TRL's log of it."""
    record = Record(parameters=1000, full_bytes_each=2000, versions=steps + 1)
    history = [sync(1, 0, 0.0)]
    for step in range(1, steps + 1):
        history += [learnt(step / steps, step - 0.5, step / 100), sync(step + 1, 100, 5.0)]
    seen = [record.take(number, line) for number, line in enumerate(history)]
    assert [one is None for one in seen] == [True, *[False, True] * steps]
    return record, history


def test_trls_log_becomes_steps_and_syncs() -> None:
    record = Record(parameters=1000, full_bytes_each=2000)
    assert record.take(0, sync(1, 0, 0.0)) is None
    assert record.take(1, sync(2, 70, 2.5)) is None
    step = record.take(1, learnt(0.25, 0.5, 0.04))
    assert step == {
        "step": 1,
        "reward": 0.25,
        "lag": 0.5,
        "trl_lag": 0.0,
        "version": 2,
        "changed": 25.0,
        "total": 1000,
        "payload_bytes": 70,
        "full_bytes": 2000,
        "rollout_s": 0.1,
        "train_s": 0.5,
        "publish_s": 0.04,
    }
    record.add({**step, "pauses_ms": [[1, 3.0], [2, 5.0]]})
    summary = record.summary(Proof(), seconds=9.0)
    assert (summary["payload_bytes"], summary["full_bytes"], summary["changed_share"]) == (70, 4000, 0.0125)
    assert summary["staleness"] == {"by_spans": 0.5, "by_trl": 0.0}
    assert summary["weight_sync_s"] == {"p50": 0.04, "max": 0.04}
    assert record.details(Proof())["pauses_ms"] == {"1": 3.0, "2": 5.0}


def test_the_claims_about_trl_need_every_version_and_every_step() -> None:
    record, history = recorded(3)

    def claims(lines: list[dict[str, float]]) -> tuple[bool, bool]:
        proof = Proof()
        record.judge(proof, 3, lines)
        return proof.each_sync_is_a_version, proof.sync_metrics_in_trls_log

    assert claims(history) == (True, True)
    assert claims(history[:-1]) == (False, True)
    assert claims([line for line in history if line.get(SERVED_VERSION) != 1.5]) == (True, False)
    del history[3][WEIGHT_SYNC]
    assert claims(history) == (True, False)


def test_the_reward_is_compared_by_tenths() -> None:
    record = Record()
    for step in range(1, 41):
        record.add({"reward": step / 40, "pauses_ms": []})
    first, last = record.first_and_last_reward()
    assert first == pytest.approx(2.5 / 40)
    assert last == pytest.approx(38.5 / 40)


def test_the_command_line() -> None:
    options = parse_options(["--steps", "7", "--bucket", "s3"])
    assert (options.steps, options.bucket, str(options.out), options.seed) == (7, "s3", "trl-out", 0)
    assert parse_options([]).steps == STEPS
    with pytest.raises(SystemExit):
        parse_options(["--steps", "0"])
