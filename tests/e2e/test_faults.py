"""Faults in real processes: what is served afterwards, proven by its fingerprint, and whether requests are answered.

The first half happens to one server of two tensor-parallel ranks that survives it all; docs/DESIGN.md has the table.
"""

import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from tests.e2e.servers import Server, delta_sync_serve, serving
from tests.e2e.test_pause_lease import TOKENS, expect_reverted, request_in_flight, spans_of, wait_for_log
from tests.e2e.trainer import Trainer
from tests.support.faults.inject import Faults
from tests.support.forge import BAD_VERSIONS
from tests.support.tiny import make_model, save_checkpoint
from vllm_delta_sync import open_run

pytestmark = pytest.mark.e2e
FAMILY = "qwen3"
SECONDS = 300.0


def wait_until(condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(0.02)


class World:
    """A trainer's process, a run, and faults; servers come and go."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root / "run")
        self.base = save_checkpoint(make_model(FAMILY, seed=5), root / "base")
        self.faults = Faults(root)
        self.disk_is_full = False
        self.trainer = Trainer(FAMILY, self.base, self.url)

    def serve(self, *flags: str, prefix: tuple[str, ...] = (), **environment: str) -> Any:
        command = [*prefix, *delta_sync_serve(self.base, "--bucket", self.url, *flags)]
        settings = {**self.faults.environment, "VLLM_SERVER_DEV_MODE": "1", **environment}
        return serving(self.base, self.root / "server.log", command, settings, cold=bool(prefix))

    def log(self) -> str:
        return (self.root / "server.log").read_text(errors="replace")


def expect_served(world: World, server: Server, version: int) -> None:
    """The version is served, bit for bit, by a server that answers with it."""
    status = server.status()
    assert status["served"]["version"] == version, status
    assert status["served"]["fingerprint"] == open_run(world.url).manifest(version).fingerprint
    assert server.post("/delta_sync/verify").json()["verdict"] is True
    body = {"model": "tiny", "prompt": "the fox", "max_tokens": 1, "ignore_eos": True}
    answer = server.post("/v1/completions", body).json()
    assert [span["version"] for span in answer["delta_sync"]["spans"]] == [version]


def sync(server: Server) -> dict[str, Any]:
    answer: dict[str, Any] = server.post("/delta_sync/sync", {}).json()
    return answer


def full_disk(folder: Path) -> tuple[str, ...]:
    """A command prefix under which ``folder`` is a disk of one page; nothing where that is not allowed."""
    mount = 'mount -t tmpfs -o size=4k tmpfs "$0" && exec "$@"'
    probe = ("unshare", "-Urm", "sh", "-c", mount, str(folder))
    if shutil.which("unshare") and subprocess.run([*probe, "true"], capture_output=True, check=False).returncode == 0:
        return probe
    return ()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("faults"))
    yield world
    world.trainer.close()


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[Server]:
    """Two ranks that take a version only when they are asked to, and whose cache disk is full."""
    cache = world.root / "cache"
    cache.mkdir()
    # Looked after so rarely that nothing happens but what the tests ask for.
    flags = {
        "--poll-seconds": "600",
        "--policy": "manual",
        "--tensor-parallel-size": "2",
        "--cache-dir": str(cache),
        "--undo-bytes": "1500000",
    }
    world.disk_is_full = bool(full_disk(cache))
    with world.serve(
        *chain.from_iterable(flags.items()), prefix=full_disk(cache), VLLM_CPU_OMP_THREADS_BIND="0|1"
    ) as server:
        assert sync(server)["served"]["version"] == 0
        yield server


@pytest.mark.parametrize(
    ("at", "do", "kind", "rank"),
    [
        ("rank.before_scatter", "raise", "engine", 0),
        ("rank.before_scatter", "raise", "engine", 1),
        ("rank.after_scatter", "raise", "engine", 0),
        ("rank.after_scatter", "raise", "engine", 1),
        ("rank.in_stage", "raise", "engine", 0),
        ("rank.in_stage", "memory", "memory", 1),
        ("rank.before_scatter", "memory", "memory", 0),
    ],
)
def test_one_rank_fails(world: World, server: Server, at: str, do: str, kind: str, rank: int) -> None:
    before = server.status()["served"]["version"]
    version = world.trainer.step()
    world.faults.arm(at, do, rank)
    assert sync(server)["error"]["kind"] == kind
    assert world.faults.happened
    expect_served(world, server, before)
    assert sync(server)["served"]["version"] == version
    expect_served(world, server, version)


def test_cache_disk_is_full(world: World, server: Server) -> None:
    if not world.disk_is_full:
        pytest.skip("no file system can be mounted here; tests/bucket/test_cache.py fills a disk by other means")
    version = world.trainer.step()
    sync(server)
    expect_served(world, server, version)
    assert "No space left on device" in world.log()


def test_object_is_corrupt(world: World, server: Server) -> None:
    before = server.status()["served"]["version"]
    bad = next(bad for bad in BAD_VERSIONS if bad.name == "truncated object")
    forgery = bad.write(Path(world.url))
    assert sync(server)["error"]["kind"] == bad.kind
    expect_served(world, server, before)
    forgery.remove()
    version = world.trainer.step()
    sync(server)
    expect_served(world, server, version)


def test_undo_log_runs_out_of_memory(world: World, server: Server) -> None:
    """The oldest commits leave the log; the way back to them goes through the bucket then."""
    start = server.status()["served"]["version"]
    for _ in range(5):
        version = world.trainer.step()
        sync(server)
    status = server.status()
    assert 0 < len(status["undo"]) < 5
    oldest = status["undo"][-1]
    for back in (oldest, start):
        assert server.post("/delta_sync/rollback", {"version": back}).status_code == 200
        expect_served(world, server, back)
    server.post("/delta_sync/release")
    sync(server)
    expect_served(world, server, version)


def test_engine_sleeps(world: World, server: Server) -> None:
    before = server.status()["served"]["version"]
    assert server.post("/sleep?level=1").status_code == 200
    version = world.trainer.step()
    assert sync(server)["error"]["kind"] == "busy"
    assert server.status()["served"]["version"] == before
    assert server.post("/wake_up").status_code == 200
    assert sync(server)["served"]["version"] == version
    expect_served(world, server, version)


def test_native_weight_update_is_looked_into(world: World, server: Server) -> None:
    """vLLM refuses it, as no transfer engine is set up; the weights are checked all the same."""
    assert server.post("/update_weights", {"update_info": {}}).status_code >= 400
    version = world.trainer.step()
    sync(server)
    assert "after update_weights" in world.log()
    expect_served(world, server, version)


def test_weights_change_while_a_version_is_staged(world: World, server: Server) -> None:
    """Between staging and pause the checkpoint is loaded again: nothing is committed on top of it, and it is mended."""
    version = world.trainer.step()
    world.faults.arm("controller.before_pause", "wait")
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(sync(server)))
    asking.start()
    wait_until(lambda: world.faults.happened, "staging")
    assert server.post("/collective_rpc", {"method": "reload_weights"}).status_code == 200
    world.faults.let_go()
    asking.join(SECONDS)
    assert answers[0]["error"]["kind"] == "engine"
    assert "reload_weights" in answers[0]["error"]["message"]
    # A server that does not follow looks after its weights all the same.
    assert server.wait_error("fingerprint")["served"] is None
    assert sync(server)["served"]["version"] == version
    expect_served(world, server, version)


def test_trainer_is_killed_in_the_middle_of_a_publish(world: World, server: Server) -> None:
    """Last: its run ends with it."""
    before = server.status()["served"]["version"]
    world.trainer.die()
    assert sync(server)["served"]["version"] == before
    expect_served(world, server, before)
    assert open_run(world.url).verify(world.base).head == before


def kill(server: Server) -> None:
    """SIGKILL to the API server; every process of it is gone soon."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(children, timeout=120)[1] == []


HUNG = "a rank hangs in a commit"
BRIEF = ["--poll-seconds", "0.2", "--pause-seconds", "10"]
FROM_BUCKET = ["--load-format", "delta_sync"]


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, Server]]:
    """A server of one rank that follows at once, and whose pauses end soon."""
    world = World(tmp_path_factory.mktemp("brief"))
    with ExitStack() as stack:
        stack.callback(world.trainer.close)
        server = stack.enter_context(world.serve(*BRIEF))
        server.wait_served(0)
        yield world, server


def test_generation_goes_on_when_the_controller_stands_still(brief: tuple[World, Server]) -> None:
    """Between commit and resume the process of the API server is stopped; once it goes on, so does the commit."""
    world, server = brief
    world.faults.arm("controller.after_commit", "stop")
    with request_in_flight(server) as answers:
        assert world.trainer.step() == 1
        try:
            wait_for_log(server, "fault: stop at controller.after_commit")
            expect_reverted(wait_for_log(server, "the lost pause is over"), 1)
            assert psutil.Process(server.process.pid).status() == psutil.STATUS_STOPPED
        finally:
            # Whoever waits for its answers would wait for ever.
            server.process.send_signal(signal.SIGCONT)
        server.wait_served(1)
    assert all(answer["usage"]["completion_tokens"] == TOKENS for answer in answers)
    assert spans_of(server) == [{"index": 0, "version": 1, "start": 0, "end": 5}]
    expect_served(world, server, 1)
    server.wait_served(world.trainer.step())
    expect_served(world, server, 2)


def test_server_ends_and_comes_back(brief: tuple[World, Server]) -> None:
    """Last of its server. Ended by itself as nobody can tell what a rank holds, and killed in a commit.

    Started again, it serves the head: from its checkpoint in one commit, from the bucket without any.
    """
    world, first = brief
    end(world, first, HUNG)
    version = world.trainer.step()
    with world.serve(*BRIEF) as server:
        server.wait_served(version)
        assert server.status()["commits"] == 1
        end(world, server, "rank.after_scatter")
    version = world.trainer.step()
    with world.serve(*BRIEF, *FROM_BUCKET) as server:
        server.wait_served(version)
        assert server.status()["commits"] == 0
        expect_served(world, server, version)


@pytest.mark.slow
def test_server_is_killed_while_idle_and_while_staging(tmp_path: Path) -> None:
    """Started again each time, it serves the head, in one commit."""
    world = World(tmp_path)
    with ExitStack() as stack:
        stack.callback(world.trainer.close)
        version = 0
        for moment in ("", "rank.in_stage", "rank.before_scatter"):
            with world.serve(*BRIEF) as server:
                server.wait_served(version)
                assert server.status()["commits"] == min(version, 1)
                version = world.trainer.step()
                server.wait_served(version)
                end(world, server, moment)
            version = world.trainer.step()
        with world.serve(*BRIEF) as server:
            server.wait_served(version)
            assert server.status()["commits"] == 1
            expect_served(world, server, version)


def end(world: World, server: Server, moment: str) -> None:
    """Bring a server down at a moment of its work; no process of it is left."""
    if not moment:
        kill(server)
        return
    children = psutil.Process(server.process.pid).children(recursive=True)
    if moment == HUNG:
        world.faults.arm("rank.before_scatter", "stop")
        world.trainer.step()
        assert server.process.wait(SECONDS) == 1
        assert psutil.wait_procs(children, timeout=120)[1] == []
        assert "ending the engine" in world.log()
        return
    world.faults.arm(moment, "hang")
    world.trainer.step()
    wait_until(lambda: world.faults.happened, moment)
    kill(server)
