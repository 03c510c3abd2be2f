"""The demo's own pieces, without vLLM: task, characters, loss, masters, answers of the server, and its processes."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.demo import characters, policy, task
from examples.demo.__main__ import parse_options
from examples.demo.loss import CLIP_HIGH, CLIP_LOW, group_advantages, policy_loss
from examples.demo.output import MARKER, prepare_output
from examples.demo.processes import Child, DemoError, free_port
from examples.demo.record import Record
from examples.demo.rollouts import ServerClient, ServerError, parse_completions
from examples.demo.screen import make_screen
from examples.demo.settings import Cores, TrainerSettings
from examples.demo.verdict import Verdict, checkpoint_fingerprint, prove_answers


def test_reward_is_earned_by_the_finished_reversal_alone() -> None:
    assert task.reward("abcde", "edcba", finished=True) == 1.0
    assert task.reward("abcde", "edcba", finished=False) == 0.0
    assert task.reward("abcde", "edcb", finished=True) == 0.0
    assert task.reward("abcde", "abcde", finished=True) == 0.0


def test_words_keep_to_their_lengths_and_letters() -> None:
    rng = random.Random(3)
    words = [task.random_word(rng) for _ in range(500)]
    assert {len(word) for word in words} == {4, 5, 6, 7, 8}
    assert set("".join(words)) == set(task.ALPHABET)
    assert all(len(task.answer_of(word)) + 1 <= task.MAX_ANSWER_TOKENS for word in words)


def test_tokenizer_round_trip_survives_saving(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    policy.make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "delta>ATLED07"
    assert len(tokenizer) == 64
    assert tokenizer.encode(text) == characters.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([*characters.encode("ab"), characters.EOS_ID], skip_special_tokens=True) == "ab"
    assert tokenizer.eos_token_id == characters.EOS_ID


def test_a_batch_marks_the_positions_whose_next_token_was_written() -> None:
    batch = policy.make_batch([[5, 6, 3], [7, 3]], [[6, 5, 1], [7, 1]])
    assert batch.tokens.tolist() == [[5, 6, 3, 6, 5, 1], [7, 3, 7, 1, 0, 0]]
    written = [batch.tokens[row, 1:][batch.answers[row]].tolist() for row in range(2)]
    assert written == [[6, 5, 1], [7, 1]]


def test_advantages_are_normalised_within_groups() -> None:
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]), group=4)
    assert advantages[:4].mean().abs() < 1e-6
    assert advantages[:4].std(unbiased=False) == pytest.approx(1.0, abs=1e-4)
    assert advantages[0] > 0 > advantages[1]
    assert advantages[4:].tolist() == [0.0] * 4


def test_on_policy_gradient_is_the_advantage_over_the_token_count() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -0.7, -9.0]], requires_grad=True)
    answers = torch.tensor([[True, True, False], [True, True, False]])
    loss = policy_loss(logprobs, logprobs.detach(), torch.tensor([1.0, -2.0]), answers)
    loss.value.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.25, -0.25, 0.0], [0.5, 0.5, 0.0]]))
    assert (loss.clipped, loss.drift) == (0.0, 0.0)


def test_ratios_beyond_the_clip_stop_to_push_only_in_the_direction_they_went() -> None:
    sampled = torch.zeros(1, 2)
    ratio = torch.tensor([[CLIP_HIGH + 0.1, CLIP_LOW - 0.1]])
    answers = torch.ones(1, 2, dtype=torch.bool)
    for advantage, moving in ((1.0, [False, True]), (-1.0, [True, False])):
        logprobs = ratio.log().requires_grad_()
        loss = policy_loss(logprobs, sampled, torch.tensor([advantage]), answers)
        loss.value.backward()
        assert logprobs.grad is not None
        assert (logprobs.grad != 0).tolist() == [moving]
        assert loss.clipped == 0.5


def test_masters_keep_what_bf16_cannot_hold() -> None:
    model = torch.nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    masters = policy.Masters(model, rate=2e-4, eps=1e-8)
    bits = []
    for _ in range(40):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        masters.step(max_norm=1e9)
        bits.append(float(model.weight.detach()[0, 0]))
    assert bits[0] == 1.0, "a step smaller than half the distance to the next bf16 number shows nothing"
    assert bits[-1] < 1.0, "many of them do"


def test_saved_checkpoints_have_the_fingerprint_of_their_bits_alone(tmp_path: Path) -> None:
    model, tokenizer = policy.make_model(seed=5), policy.make_tokenizer()
    policy.save(model, tokenizer, tmp_path / "a")
    policy.save(model, tokenizer, tmp_path / "b")
    same = checkpoint_fingerprint(tmp_path / "a")
    assert same == checkpoint_fingerprint(tmp_path / "b")
    with torch.no_grad():
        model.model.norm.weight[0] = -model.model.norm.weight[0]
    policy.save(model, tokenizer, tmp_path / "c")
    assert same != checkpoint_fingerprint(tmp_path / "c")


def answer(spans: list[dict[str, Any]] | None, count: int = 3) -> dict[str, Any]:
    """Body of ``/v1/completions`` with two choices of ``count`` tokens."""
    choices = [
        {
            "index": index,
            "text": "ab",
            "token_ids": list(range(count)),
            "logprobs": {"token_logprobs": [-0.5] * count},
            "finish_reason": "stop",
        }
        for index in (1, 0)
    ]
    return {"choices": choices} | ({} if spans is None else {"delta_sync": {"run": "r", "spans": spans}})


def test_spans_give_every_token_its_version() -> None:
    spans: list[dict[str, Any]] = [
        {"index": 0, "version": 6, "start": 0, "end": 2},
        {"index": 0, "version": 7, "start": 2, "end": 3},
        {"index": 1, "version": None, "start": 0, "end": 3},
    ]
    ((first,), (second,)) = parse_completions(answer(spans), samples=1)
    assert first.versions == [6, 6, 7]
    assert second.versions == [None] * 3
    assert parse_completions(answer(None), samples=2)[0][0].versions == [None] * 3


def test_answers_that_lack_something_are_refused() -> None:
    with pytest.raises(ServerError, match="spans cover 2"):
        parse_completions(answer([{"index": i, "version": 1, "start": 0, "end": 2} for i in (0, 1)]), samples=1)
    broken = answer(None)
    del broken["choices"][0]["token_ids"]
    with pytest.raises(ServerError, match="token_ids"):
        parse_completions(broken, samples=1)


class _ClosingHandler(BaseHTTPRequestHandler):
    """Keeps connections, but drops each after its first answer, as a server does with idle ones."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        status = 200 if self.path == "/fine" else 503
        body = json.dumps({"path": self.path}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, format: str, *values: object) -> None:
        return


@pytest.fixture
def server_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _ClosingHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_the_client_reopens_connections_that_the_server_closed(server_url: str) -> None:
    with ServerClient(server_url, "policy") as client:
        assert [client.request("GET", "/fine")["path"] for _ in range(3)] == ["/fine"] * 3
        with pytest.raises(ServerError, match="HTTP 503"):
            client.request("GET", "/else")


def test_the_client_says_that_nobody_is_there() -> None:
    with free_port() as port, ServerClient(f"http://127.0.0.1:{port}", "policy") as client:
        with pytest.raises(ServerError, match="GET /health"):
            client.request("GET", "/health", seconds=2.0)


def test_the_verdict_compares_exactly() -> None:
    ((one,), (two,)) = parse_completions(answer(None), samples=1)
    verdict = Verdict(weights_bit_identical=True)
    prove_answers(verdict, [one], [two])
    assert verdict.holds
    two.logprobs[1] += 1e-9
    prove_answers(verdict, [one], [two])
    assert verdict.claims() == {"weights_bit_identical": True, "tokens_equal": True, "logprobs_equal": False}
    with pytest.raises(DemoError, match="0 of the fresh one"):
        prove_answers(verdict, [one], [])


def step_event(step: int, reward: float) -> dict[str, Any]:
    """A ``step`` event as the trainer sends it."""
    return {
        "event": "step",
        "step": step,
        "reward": reward,
        "version": step,
        "served": step,
        "lag": 0.5,
        "changed": 10,
        "total": 1000,
        "payload_bytes": 15,
        "full_bytes": 2000,
        "rollout_s": 0.1,
        "train_s": 0.1,
        "publish_s": 0.01,
        "sample": ["delta", "atled", 1.0],
        "pauses_ms": [[step, float(step)]],
    }


def test_the_summary_has_the_documented_fields() -> None:
    record = Record(versions=30)
    for step in range(1, 31):
        record.add(step_event(step, reward=step / 30))
    summary = record.summary(Verdict(True, True, True), seconds=12.0)
    assert summary["verdict"] == {"weights_bit_identical": True, "tokens_equal": True, "logprobs_equal": True}
    assert summary["reward"] == {"first": pytest.approx(5.5 / 30, abs=1e-4), "last": pytest.approx(25.5 / 30, abs=1e-4)}
    assert summary["pause_ms"] == {"p50": 15.5, "p99": pytest.approx(29.71)}
    del summary["verdict"], summary["reward"], summary["pause_ms"]
    assert summary == {
        "versions": 30,
        "payload_bytes": 450,
        "full_bytes": 60_000,
        "changed_share": 0.01,
        "seconds": 12.0,
    }


@pytest.mark.parametrize("terminal", [True, False])
def test_both_screens_show_a_step(terminal: bool, tmp_path: Path) -> None:
    from rich.console import Console

    with (tmp_path / "screen").open("w+", encoding="utf-8") as file:
        screen = make_screen(Console(file=file, force_terminal=terminal, width=120), steps=12)
        screen.phase("training")
        screen.warm_up(0, 0.1, 0.28)
        record = Record()
        record.add(step_event(1, 0.25))
        screen.step(record.steps[0], record)
        screen.close()
        file.seek(0)
        text = file.read()
    assert all(part in text for part in ("training", "0.250", "1.00 %"))
    assert ("╭" in text) is terminal


def test_the_picture_is_drawn_even_for_a_short_record(tmp_path: Path) -> None:
    from examples.demo.picture import draw

    record = Record()
    record.add(step_event(1, 0.25))
    draw(record, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_output_is_cleared_only_where_it_is_the_demos_own(tmp_path: Path) -> None:
    own = prepare_output(tmp_path / "own")
    own.write("summary.json", {"a": 1})
    (own.path / "notes.txt").write_text("mine")
    own.bucket.mkdir()
    again = prepare_output(tmp_path / "own")
    assert sorted(path.name for path in again.path.iterdir()) == [MARKER, "notes.txt"]
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "summary.json").write_text("{}")
    with pytest.raises(DemoError, match="did not write"):
        prepare_output(foreign)
    assert (foreign / "summary.json").read_text() == "{}"
    with pytest.raises(DemoError, match="is a file"):
        prepare_output(foreign / "summary.json")


def test_cores_and_settings() -> None:
    cores = Cores.share_out()
    available = os.sched_getaffinity(0)
    assert {cores.server, *cores.trainer} <= available
    assert len(available) == 1 or cores.server not in cores.trainer
    settings = TrainerSettings("out", "bucket", 12, 3, cores.trainer)
    assert TrainerSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


def test_the_command_line_refuses_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_options(["--steps", "12"]).steps == 12
    for wrong in (["--steps", "0"], ["--port", "x"], ["--unknown"]):
        with pytest.raises(SystemExit) as exit_info:
            parse_options(wrong)
        assert exit_info.value.code == 2
    assert "usage" in capsys.readouterr().err


FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(os.getpid(), inner.pid, flush=True)
time.sleep(600)
"""


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    """Whether all these processes end within the bound; those that only wait to be reaped have ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(_ended(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_child_that_ignores_requests_is_killed_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("examples.demo.processes.TERM_SECONDS", 0.5)
    with Child("family", [sys.executable, "-c", FAMILY], tmp_path / "log", talk=True) as child:
        pids = [int(pid) for pid in child.lines.readline().split()]
        assert len(pids) == 2
    assert gone([*pids, child.process.pid])


def test_children_end_when_their_asker_is_killed(tmp_path: Path) -> None:
    asker = (
        "import sys\nfrom pathlib import Path\nfrom examples.demo import processes\nprocesses.TERM_SECONDS = 0.5\n"
        f"child = processes.Child('family', [sys.executable, '-c', {FAMILY!r}], Path(sys.argv[1]), talk=True)\n"
        "print(child.lines.readline(), child.process.pid, flush=True)\nsys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", asker, str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdin is not None
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    assert len(pids) == 3
    assert gone(pids)


def test_a_child_that_dies_shows_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with Child("the server", command, tmp_path / "server.log") as child:
        child.process.wait(120)
        assert child.exit_code == 1
        assert "no such model" in child.tail()
