"""A controller that is lost between pause and resume, in a real server: the engine core's watchdog ends the pause."""

import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from tests.e2e.fresh import PROMPTS
from tests.e2e.servers import PLAIN, Server, delta_sync_serve, serving
from tests.support.faults.inject import Faults
from tests.support.tiny import make_model, save_checkpoint, train_steps
from trainer_side import Publisher

LEASE_S = 3.0
TOKENS = 230
pytestmark = pytest.mark.e2e


SHORT = {"DELTA_SYNC_PAUSE_SECONDS": str(LEASE_S)}


def wait_for_log(server: Server, text: str, timeout: float = 300) -> str:
    """Block until the server's log holds a line with that text, and return the line."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        lines = [line for line in server.log.read_text(errors="replace").splitlines() if text in line]
        if lines:
            return lines[0]
        time.sleep(0.05)
    raise AssertionError(f"no {text!r} within {timeout} s:\n{server.log.read_text()[-4000:]}")


@contextmanager
def request_in_flight(server: Server) -> Iterator[list[Any]]:
    """Requests one after the other from before the block to its end; their answers."""
    answers: list[Any] = []
    over = threading.Event()
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}

    def ask() -> None:
        while not over.is_set():
            answers.append(server.post("/v1/completions", body).json())

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        over.set()
        thread.join(120)


@pytest.mark.slow
def test_generation_goes_on_when_the_controller_is_lost(tmp_path: Path) -> None:
    """Between commit and resume its thread hangs. Where it is the process that stands still: tests/e2e/test_faults.py.

    Where the process is killed instead, the engine ends with it.
    """
    model = make_model("qwen3")
    base = save_checkpoint(model, tmp_path / "base")
    url = str(tmp_path / "run")
    faults = Faults(tmp_path)
    faults.arm("controller.after_commit", "hang")
    environment = {**faults.environment, **SHORT}
    command = delta_sync_serve(base, "--bucket", url, "--poll-seconds", "0.2")
    with Publisher(model, bucket=url, base=base) as publisher:
        with serving(base, tmp_path / "server.log", command, environment) as server:
            server.wait_served(0)
            with request_in_flight(server) as answers:
                next(train_steps(model, lr=3e-5))
                publisher.publish(step=1, wait=True)
                wait_for_log(server, "fault: hang at controller.after_commit")
                expect_reverted(wait_for_log(server, "the lost pause is over"), 1)
            assert all(answer["usage"]["completion_tokens"] == TOKENS for answer in answers)
            assert spans_of(server) == [{"index": 0, "version": 0, "start": 0, "end": 5}]
            children = psutil.Process(server.process.pid).children(recursive=True)
            server.process.kill()
            assert psutil.wait_procs(children, timeout=120)[1] == []


def expect_reverted(told: str, version: int) -> None:
    """Nobody has confirmed that the version is right on all ranks."""
    end = rf"ranks held \[{version}\], reverted, generation goes on with version {version - 1}$"
    assert re.search(end, told), told


def spans_of(server: Server) -> list[dict[str, Any]]:
    """What a short request says of the weights that answered it."""
    body = {"model": "tiny", "prompt": "fox", "max_tokens": 5, "ignore_eos": True}
    spans: list[dict[str, Any]] = server.post("/v1/completions", body).json()["delta_sync"]["spans"]
    return spans


@pytest.mark.slow
def test_pauses_of_others_stay_what_they_are(tmp_path: Path) -> None:
    """vLLM's own /pause before a commit holds after it; one that comes during a commit waits for its end."""
    model = make_model("qwen3")
    base = save_checkpoint(model, tmp_path / "base")
    url = str(tmp_path / "run")
    steps = train_steps(model, lr=3e-5)
    faults = Faults(tmp_path)
    environment = {**faults.environment, **SHORT, "VLLM_SERVER_DEV_MODE": "1"}
    command = delta_sync_serve(base, "--bucket", url, "--poll-seconds", "0.2")
    with Publisher(model, bucket=url, base=base) as publisher:
        with serving(base, tmp_path / "server.log", command, environment) as server:
            server.wait_served(0)
            assert server.post("/pause?mode=keep").status_code == 200
            next(steps)
            publisher.publish(step=1, wait=True)
            server.wait_served(1)
            check_paused_until_resumed(server, 1)
            faults.arm("controller.after_commit", "hang")
            next(steps)
            publisher.publish(step=2, wait=True)
            wait_for_log(server, "fault: hang at controller.after_commit")
            assert "the lost pause is over" not in server.log.read_text()
            assert server.post("/pause?mode=keep").status_code == 200
            assert "the lost pause is over" in server.log.read_text()
            check_paused_until_resumed(server, 1)


def check_paused_until_resumed(server: Server, version: int) -> None:
    assert server.get("/is_paused").json() == {"is_paused": True}
    assert server.post("/resume").status_code == 200
    assert server.get("/is_paused").json() == {"is_paused": False}
    assert [span["version"] for span in spans_of(server)] == [version]


def test_pause_that_comes_during_a_commit_answers_requests_like_any_other(tmp_path: Path) -> None:
    """vLLM refuses requests during its own /pause from 0.33 on, and keeps them waiting before."""
    model = make_model("qwen3")
    base = save_checkpoint(model, tmp_path / "base")
    url = str(tmp_path / "run")
    faults = Faults(tmp_path)
    environment = {**faults.environment, **SHORT, "VLLM_SERVER_DEV_MODE": "1"}
    command = delta_sync_serve(base, "--bucket", url, "--poll-seconds", "0.2")
    with Publisher(model, bucket=url, base=base) as publisher:
        with serving(base, tmp_path / "server.log", command, environment) as server:
            server.wait_served(0)
            assert server.post("/pause?mode=wait").status_code == 200
            usual = answer_while_paused(server)
            check_paused_until_resumed(server, 0)
            faults.arm("controller.after_commit", "hang")
            next(train_steps(model, lr=3e-5))
            publisher.publish(step=1, wait=True)
            wait_for_log(server, "fault: hang at controller.after_commit")
            assert server.post("/pause?mode=wait").status_code == 200
            assert "the lost pause is over" in server.log.read_text()
            assert answer_while_paused(server) == usual
            check_paused_until_resumed(server, 0)


def answer_while_paused(server: Server) -> int | None:
    """The status of the answer to a request; None if there is none within two seconds."""
    body = {"model": "tiny", "prompt": "fox", "max_tokens": 1}
    try:
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=2.0, verify=PLAIN).status_code
    except httpx.ReadTimeout:
        return None


@pytest.mark.slow
def test_rank_that_hangs_in_a_commit_ends_the_server(tmp_path: Path) -> None:
    """Its controller is lost too, and nobody can tell what it holds: all processes end, and leave nothing behind."""
    model = make_model("qwen3")
    base = save_checkpoint(model, tmp_path / "base")
    url = str(tmp_path / "run")
    faults = Faults(tmp_path)
    faults.arm("rank.after_scatter", "hang")
    environment = {**faults.environment, **SHORT}
    command = delta_sync_serve(base, "--bucket", url, "--poll-seconds", "0.2")
    with Publisher(model, bucket=url, base=base) as publisher:
        with serving(base, tmp_path / "server.log", command, environment) as server:
            server.wait_served(0)
            children = psutil.Process(server.process.pid).children(recursive=True)
            next(train_steps(model, lr=3e-5))
            publisher.publish(step=1, wait=True)
            wait_for_log(server, "fault: hang at rank.after_scatter")
            server.process.send_signal(signal.SIGSTOP)
            wait_for_log(server, "ending the engine: a pause was lost and could not be settled")
            server.process.send_signal(signal.SIGCONT)
            assert server.process.wait(300) == 1
            assert psutil.wait_procs(children, timeout=120)[1] == []
