"""A controller that is lost between pause and resume, in a real server: the engine core's watchdog ends the pause."""

import re
import signal

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from tests.e2e.servers import PLAIN, Load, Server
from tests.e2e.world import Follower, expect_served, no_process_left

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("follower")]
LOST = "controller.after_commit"
OVER = "the lost pause is over"


def expect_reverted(told: str, version: int) -> None:
    """Nobody has confirmed that the version is right on all ranks."""
    end = rf"ranks held \[{version}\], reverted, generation goes on with version {version - 1}$"
    assert re.search(end, told), told


@pytest.mark.slow
def test_generation_goes_on_when_the_controller_stands_still(follower: Follower) -> None:
    """Between commit and resume the process of the API server is stopped; once it goes on, so does the commit."""
    world, server = follower.world, follower.server
    world.faults.arm(LOST, "stop")
    with Load(server, threads=1) as load:
        version = world.publish()
        try:
            server.wait_logged(f"fault: stop at {LOST}")
            expect_reverted(server.wait_logged(OVER), version)
            assert psutil.Process(server.process.pid).status() == psutil.STATUS_STOPPED
        finally:
            # Whoever waits for its answers would wait for ever.
            server.process.send_signal(signal.SIGCONT)
        server.wait_served(version)
    assert all(answer.json()["usage"]["completion_tokens"] == Load.TOKENS for answer in load.answers)
    expect_served(world, server, version)
    server.wait_served(world.publish())
    expect_served(world, server, version + 1)


@pytest.mark.parametrize("mode", ["wait", pytest.param("keep", marks=pytest.mark.slow)])
def test_pause_that_comes_during_a_commit_answers_requests_like_any_other(follower: Follower, mode: str) -> None:
    """vLLM refuses requests during its own /pause from 0.33 on, and keeps them waiting before."""
    world, server = follower.world, follower.server
    served = world.version
    assert server.post(f"/pause?mode={mode}").status_code == 200
    usual = answer_while_paused(server)
    check_paused_until_resumed(server, served)
    world.faults.arm(LOST, "wait")
    world.publish()
    server.wait_logged(f"fault: wait at {LOST}")
    assert not server.log_lines(OVER)
    assert server.post(f"/pause?mode={mode}").status_code == 200
    assert server.log_lines(OVER)
    assert answer_while_paused(server) == usual
    check_paused_until_resumed(server, served)
    world.faults.let_go()
    server.wait_served(served + 1)
    expect_served(world, server, served + 1)


def answer_while_paused(server: Server) -> int | None:
    """The status of the answer to a request; None if there is none within two seconds."""
    body = {"model": "tiny", "prompt": "fox", "max_tokens": 1}
    try:
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=2.0, verify=PLAIN).status_code
    except httpx.ReadTimeout:
        return None


def check_paused_until_resumed(server: Server, version: int) -> None:
    assert server.get("/is_paused").json() == {"is_paused": True}
    assert server.post("/resume").status_code == 200
    assert server.get("/is_paused").json() == {"is_paused": False}
    assert server.versions() == [version]


@pytest.mark.slow
def test_generation_goes_on_when_the_controller_is_lost(follower: Follower) -> None:
    """Between commit and resume its thread hangs for ever. If the process is killed, the engine ends with it."""
    world, server = follower.world, follower.server
    world.faults.arm(LOST, "hang")
    with Load(server, threads=1) as load:
        version = world.publish()
        server.wait_logged(f"fault: hang at {LOST}")
        expect_reverted(server.wait_logged(OVER), version)
    assert all(answer.json()["usage"]["completion_tokens"] == Load.TOKENS for answer in load.answers)
    assert server.versions() == [version - 1]
    with no_process_left(server):
        server.process.kill()


@pytest.mark.slow
def test_rank_that_hangs_in_a_commit_ends_the_server(follower: Follower) -> None:
    """Its controller is lost too, and nobody can tell what it holds: all processes end, and leave nothing behind."""
    world, server = follower.world, follower.server
    world.faults.arm("rank.after_scatter", "hang")
    world.publish()
    server.wait_logged("fault: hang at rank.after_scatter")
    with no_process_left(server):
        server.process.send_signal(signal.SIGSTOP)
        server.wait_logged("ending the engine: a pause was lost, and its ranks could not be brought to one version")
        server.process.send_signal(signal.SIGCONT)
        assert server.process.wait(300) == 1
