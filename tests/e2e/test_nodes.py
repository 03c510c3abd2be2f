"""One engine over two machines (``--nnodes 2``): one controller, a cache on each machine, and what happens when the
ranks of the second one are lost in the middle of an update.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.e2e import warm
from tests.e2e.nodes import Nodes, cannot_make, two_nodes
from tests.e2e.servers import Server, delta_sync_serve, end_group, eventually, plain_vllm_serve, serving
from tests.e2e.warm import WarmProcess
from tests.e2e.world import World, expect_served, kill, no_process_left
from tests.support.answers import closed_port
from vllm_delta_sync import open_run
from vllm_delta_sync.engine import WORKER_EXTENSION

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
END_SECONDS = 120.0


class Pair:
    """Starts a server whose rank 0 is on machine 0, with everything else, and whose rank 1 is on machine 1.

    Attributes:
        caches: of each machine; both know them by the path of the first.
    """

    def __init__(self, world: World, nodes: Nodes) -> None:
        self._world, self._nodes = world, nodes
        self.caches = (world.root / "cache", world.root / "cache of the other machine")
        for cache in self.caches:
            cache.mkdir(mode=0o700)

    def follow(self) -> AbstractContextManager[tuple[Server, WarmProcess]]:
        """A server of the run; also the process of machine 1 that holds its worker."""
        flags = ["--bucket", self._world.url, "--cache-dir", str(self.caches[0]), "--poll-seconds", "0.2"]
        return self._serve(delta_sync_serve(self._world.base, *flags))

    def fresh(self, checkpoint: Path) -> AbstractContextManager[tuple[Server, WarmProcess]]:
        """A server that vLLM starts from a checkpoint, and that follows nothing."""
        return self._serve(plain_vllm_serve(checkpoint, "--worker-extension-cls", WORKER_EXTENSION))

    @contextmanager
    def _serve(self, command: list[str]) -> Iterator[tuple[Server, WarmProcess]]:
        master = ["--master-addr", self._nodes.addresses[0], "--master-port", str(closed_port())]
        command = [*command, "--tensor-parallel-size", "2", "--nnodes", "2", *master, "--node-rank"]
        inside = self._nodes.inside(*self.caches, [*command, "1", "--headless"])
        other = warm.start(inside, self._world.root / "other.log", self._environment(1))
        try:
            log = self._world.root / "server.log"
            with serving(log, [*command, "0"], self._environment(0)) as server:
                yield server, other
        finally:
            end_group(other)

    def _environment(self, node: int) -> dict[str, str]:
        return {
            **self._world.faults.environment,
            **self._nodes.environment(node),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(node % (os.cpu_count() or 1)),
            "DELTA_SYNC_STATE_DIR": str(self._world.root / f"state of {node}"),
        }


def lose(world: World, server: Server, other: WarmProcess, moment: str) -> None:
    """Kill the worker of machine 1 at a moment of an update: both machines end, so that they are started again."""
    world.faults.arm(moment, "hang", rank=1)
    world.publish()
    eventually(lambda: world.faults.happened, moment)
    (worker,) = psutil.Process(other.pid).children(recursive=True)
    with no_process_left(server):
        os.kill(worker.pid, signal.SIGKILL)
        assert server.process.wait(END_SECONDS) == 1
    assert "the connection to rank 1, on another node, is lost" in server.logged()
    other.wait(END_SECONDS)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not in shared memory, of which the second machine has its own."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        yield Path(made)


def test_two_machines_follow_as_one_and_come_back(folder: Path) -> None:
    if why_not := cannot_make():
        pytest.skip(why_not)
    world = World(folder, "llama_one_kv_head")
    with two_nodes() as nodes:
        pair = Pair(world, nodes)
        with pair.follow() as (server, other):
            server.wait_served(0)
            before = server.outputs()
            for version in (1, 2):
                assert world.publish() == version
                server.wait_served(version)
                expect_served(world, server, version)
            status = server.status()
            assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
            run = open_run(world.url)
            objects = [ref for version in (1, 2) for ref in run.manifest(version).objects]
            assert [sorted(os.listdir(cache)) for cache in pair.caches] == [sorted(ref.sha256 for ref in objects)] * 2
            lose(world, server, other, "rank.in_stage")

        with pair.follow() as (server, other):
            server.wait_served(3)
            expect_served(world, server, 3)
            lose(world, server, other, "rank.before_scatter")

        with pair.follow() as (server, other):
            server.wait_served(4)
            server.wait_commits(1)
            expect_served(world, server, 4)
            patched = server.digests(), server.outputs()
            kill(server)
            other.wait(END_SECONDS)

        with pair.fresh(world.save()) as (server, _):
            assert (server.digests(), server.outputs()) == patched
        assert patched[1] != before, "the versions do not differ enough to tell"
    world.close()
