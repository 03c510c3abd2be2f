"""Which of several API servers leads, in real processes: one at a time, and another when it is killed."""

import asyncio
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import api_server
from tests.support.running import context_of_processes
from tests.support.services import WAIT, wait_until
from tests.support.world import World
from vllm_delta_sync.engine.api import api_servers as meeting
from vllm_delta_sync.errors import EngineError

SERVERS = context_of_processes(api_server.__name__)


class Process:
    """One of tests/support/api_server.py. If it does not answer in time, the test fails."""

    def __init__(self, world: World, root: Path, folder: Path, index: int, count: int) -> None:
        self._requests, theirs = SERVERS.Pipe()
        arguments = (theirs, root / "base", world.url, meeting.ApiServerGroup(folder, index, count))
        self._process = SERVERS.Process(target=api_server.run, args=arguments)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def read(self) -> Any:
        assert self._requests.poll(WAIT)
        return self._requests.recv()

    def ask(self, action: str, argument: Any = None) -> Any:
        self._requests.send({"action": action, "argument": argument})
        return self.read()

    def status(self) -> Any:
        return self.ask("status")

    def end(self) -> None:
        self._process.kill()
        self._process.join(WAIT)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: that of a socket."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def processes(world: World, tmp_path: Path, folder: Path) -> Iterator[list[Process]]:
    found = [Process(world, tmp_path, folder, index, 3) for index in range(3)]
    try:
        for process in found:
            assert process.read() == "ready"
        yield found
    finally:
        for process in found:
            process.end()


def leader_of(processes: list[Process]) -> Process:
    (leader,) = (process for process in processes if process.status()["role"] == "leader")
    return leader


def test_one_leads_at_a_time_and_each_answers(world: World, processes: list[Process]) -> None:
    leader = leader_of(processes)
    others = [process for process in processes if process is not leader]
    wait_until(lambda: leader.status()["seen"] == 0)
    # Errors and actions come back whole.
    for process in (leader, *others):
        assert process.ask("sync", 7)["error"]["kind"] == "not_found"
    world.train(1)
    wait_until(lambda: others[0].status()["seen"] == 1)
    back = others[0].ask("rollback", 0)
    assert (back["served"]["version"], back["state"], back["role"]) == (0, "held", "follower")
    assert [process.status()["seen"] for process in processes] == [0, 0, 0]
    assert others[1].ask("release")["state"] == "idle"
    # A leader that is held polls nothing and changes nothing, and its last poll ages in each status.
    others[0].ask("hold")
    wait_until(lambda: [process.status()["polled_seconds"] > 1.5 for process in processes] == [True] * 3)
    others[0].ask("release")
    wait_until(lambda: [process.status()["seen"] for process in others] == [1, 1])
    # One that stands still is not replaced: what it might yet do nobody knows. The others show what it last said.
    os.kill(leader.pid, signal.SIGSTOP)
    try:
        world.train(2)
        assert [process.status()["role"] for process in others] == ["follower", "follower"]
        assert [process.status()["seen"] for process in others] == [1, 1]
    finally:
        os.kill(leader.pid, signal.SIGCONT)
    wait_until(lambda: [process.status()["seen"] for process in processes] == [2, 2, 2])
    # It is killed, and another takes over and serves what comes next.
    alive = list(processes)
    for version in (3, 4):
        assert sorted(process.status()["role"] for process in alive) == ["follower"] * (len(alive) - 1) + ["leader"]
        leader = leader_of(alive)
        world.train(version)
        for process in alive:
            reached = process.ask("sync")
            assert reached["served"]["version"] == version, reached
            status = process.status()
            assert (status["served"]["version"], status["seen"]) == (version, version)
            assert [each["pid"] for each in status["servers"] if each["role"] == "leader"] == [leader.pid]
            assert {each["pid"] for each in status["servers"]} == {process.pid for process in alive}
            assert process.ask("verify")["verdict"] is True
        if version == 3:
            leader.end()
            alive.remove(leader)
            wait_until(lambda: "leader" in [process.status().get("role") for process in alive])
            wait_until(lambda: all("role" in process.status() for process in alive))
            wait_until(lambda: len(leader_of(alive).status()["servers"]) == len(alive))


@pytest.mark.slow
def test_request_that_the_leader_has_not_seen_counts_in_its_follower(folder: Path, processes: list[Process]) -> None:
    """A version that it asked for is waited for there, not refused as unreachable."""
    leader = leader_of(processes)

    async def ask() -> list[bool]:
        follower = meeting.FollowerClient(meeting.ApiServerGroup(folder, 3, 4))
        following = asyncio.create_task(follower.follow())
        await asyncio.wait_for(follower.leader_known.wait(), WAIT)
        os.kill(leader.pid, signal.SIGSTOP)
        try:
            held = follower.request("hold", None)
            seen = [follower.status()["requested"]]
            asked = follower.request("sync", 0)
            seen.append(follower.status()["requested"])
        finally:
            os.kill(leader.pid, signal.SIGCONT)
        await asyncio.wait_for(asyncio.wrap_future(held), WAIT)
        await asyncio.wait_for(asyncio.wrap_future(asked), WAIT)
        deadline = time.monotonic() + WAIT
        while follower.status()["requested"] and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        following.cancel()
        return [*seen, follower.status()["requested"]]

    assert asyncio.run(ask()) == [False, True, False]


def test_one_that_is_being_stopped_does_not_lead(processes: list[Process]) -> None:
    """All of a server's processes are stopped at once, and the leader may end first."""
    leader = leader_of(processes)
    stopping, other = (process for process in processes if process is not leader)
    stopping.ask("stop")
    leader.end()
    wait_until(lambda: other.status().get("role") == "leader")
    wait_until(lambda: stopping.status().get("role") == "follower")
    other.ask("stop")
    other.end()
    wait_until(lambda: "error" in stopping.status())
    assert stopping.status()["error"]["kind"] == "busy"


def test_one_that_cannot_lead_leaves_it_to_another(folder: Path, processes: list[Process]) -> None:
    """Although it listens already, and the others have connected to it."""
    leader = leader_of(processes)
    others = [process for process in processes if process is not leader]
    (folder / api_server.CANNOT_START).touch()
    leader.end()
    wait_until(lambda: "leader" in [process.status().get("role") for process in others])
    assert not (folder / api_server.CANNOT_START).exists()


def client(index: int, count: int) -> Any:
    return SimpleNamespace(engine_core=SimpleNamespace(client_index=index, client_count=count))


def test_who_is_alone_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert meeting.find_api_server_group(client(0, 1)) is None
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    with pytest.raises(EngineError, match="--api-server-count is 2"):
        meeting.find_api_server_group(client(0, 2))


def test_children_of_one_process_meet_in_a_private_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=os.getpid()))
    first, second = (meeting.find_api_server_group(client(index, 2)) for index in range(2))
    assert first is not None
    assert second is not None
    assert (first.index, second.index) == (0, 1)
    assert first.socket == second.socket
    assert first.folder.stat().st_mode & 0o777 == 0o700
    os.close(first.open_lock())
    assert meeting.find_api_server_group(client(0, 2)) == first
    assert "leader.lock" in [path.name for path in first.folder.iterdir()]
    first.folder.chmod(0o755)
    with pytest.raises(EngineError, match="only this user can enter"):
        meeting.find_api_server_group(client(0, 2))
