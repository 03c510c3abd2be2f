"""Faults in real processes: what is served afterwards, proven by its fingerprint, and whether requests are answered.

The first half happens to one server of two tensor-parallel ranks that survives it all; docs/design/failures.md has
the table.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import Server, eventually
from tests.e2e.world import Follower, World, expect_served, kill, no_process_left, ranks_bound, waiting
from tests.support.forge import BAD_VERSIONS
from tests.support.running import small_disk
from vllm_delta_sync import open_run

pytestmark = pytest.mark.e2e
SECONDS = 300.0
FLAGS = {
    # Looked after so rarely that nothing happens but what the tests ask for.
    "--poll-seconds": "600",
    "--policy": "manual",
    "--tensor-parallel-size": "2",
}
two_ranks = pytest.mark.xdist_group("two ranks")
one_rank = pytest.mark.xdist_group("follower")


def sync(server: Server) -> dict[str, Any]:
    answer: dict[str, Any] = server.post("/delta_sync/sync", {}).json()
    return answer


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("faults"))
    yield world
    world.close()


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[Server]:
    """Two ranks that take a version only when they are asked to."""
    with world.serve(*chain.from_iterable(FLAGS.items()), environment=ranks_bound(2)) as server:
        assert sync(server)["served"]["version"] == 0
        yield server


@pytest.mark.parametrize(
    ("at", "do", "kind", "rank"),
    [
        ("rank.before_scatter", "raise", "engine", 1),
        ("rank.after_scatter", "raise", "engine", 0),
        ("rank.in_stage", "memory", "memory", 1),
        pytest.param("rank.before_scatter", "raise", "engine", 0, marks=pytest.mark.slow),
        pytest.param("rank.after_scatter", "raise", "engine", 1, marks=pytest.mark.slow),
        pytest.param("rank.in_stage", "raise", "engine", 0, marks=pytest.mark.slow),
        pytest.param("rank.before_scatter", "memory", "memory", 0, marks=pytest.mark.slow),
    ],
)
@two_ranks
def test_one_rank_fails(world: World, server: Server, at: str, do: str, kind: str, rank: int) -> None:
    before = server.status()["served"]["version"]
    version = world.publish()
    world.faults.arm(at, do, rank)
    assert sync(server)["error"]["kind"] == kind
    assert world.faults.happened
    expect_served(world, server, before)
    assert sync(server)["served"]["version"] == version
    expect_served(world, server, version)


@two_ranks
def test_object_is_corrupt(world: World, server: Server) -> None:
    before = server.status()["served"]["version"]
    bad = next(bad for bad in BAD_VERSIONS if bad.name == "truncated object")
    forgery = bad.write(Path(world.url))
    assert sync(server)["error"]["kind"] == bad.kind
    expect_served(world, server, before)
    forgery.remove()
    version = world.publish()
    sync(server)
    expect_served(world, server, version)


@two_ranks
def test_engine_sleeps(world: World, server: Server) -> None:
    before = server.status()["served"]["version"]
    assert server.post("/sleep?level=1").status_code == 200
    version = world.publish()
    assert sync(server)["error"]["kind"] == "busy"
    assert server.status()["served"]["version"] == before
    # Trainers update weights before they wake up the rest.
    assert server.post("/wake_up?tags=weights").status_code == 200
    assert sync(server)["served"]["version"] == version
    assert server.post("/wake_up?tags=kv_cache").status_code == 200
    expect_served(world, server, version)


@two_ranks
def test_native_weight_update_is_looked_into(world: World, server: Server) -> None:
    """vLLM refuses it, as no transfer engine is set up; the weights are checked all the same."""
    assert server.post("/update_weights", {"update_info": {}}).status_code >= 400
    version = world.publish()
    sync(server)
    assert "after update_weights" in server.log.read_text()
    expect_served(world, server, version)


@two_ranks
def test_trainer_is_killed_in_the_middle_of_a_publish(world: World, server: Server) -> None:
    before = server.status()["served"]["version"]
    world.die_in_a_publish()
    assert sync(server)["served"]["version"] == before
    expect_served(world, server, before)
    assert open_run(world.url).verify(world.base).head == before
    world.begin()
    version = world.publish()
    assert sync(server)["served"]["version"] == version == before + 1
    expect_served(world, server, version)


@pytest.mark.slow
def test_cache_disk_is_full(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    prefix = tuple(small_disk(cache, "4k"))
    world = World(tmp_path)
    flags = chain.from_iterable(FLAGS.items())
    with world.serve(*flags, "--cache-dir", str(cache), prefix=prefix, environment=ranks_bound(2)) as server:
        version = world.publish()
        sync(server)
        expect_served(world, server, version)
        assert "No space left on device" in server.log.read_text()
    world.close()


HUNG = "a rank hangs in a commit"


@one_rank
@pytest.mark.slow
def test_server_ends_and_comes_back(follower: Follower) -> None:
    """Ended by itself as nobody can tell what a rank holds, and killed in a commit.

    Started again, it serves the head: from its checkpoint in one commit, from the bucket without any.
    """
    end(follower, HUNG)
    version = follower.world.publish()
    server = follower.start()
    server.wait_served(version)
    server.wait_commits(1)
    end(follower, "rank.after_scatter")
    version = follower.world.publish()
    server = follower.start("--load-format", "delta_sync")
    server.wait_served(version)
    assert server.status()["commits"] == 0
    expect_served(follower.world, server, version)


@pytest.mark.slow
@one_rank
@pytest.mark.parametrize("moment", ["", "rank.in_stage", "rank.before_scatter"])
def test_server_is_killed_while_idle_and_while_staging(follower: Follower, moment: str) -> None:
    """Started again each time, it serves the head, in one commit."""
    follower.server.wait_served(follower.world.publish())
    end(follower, moment)
    version = follower.world.publish()
    server = follower.start()
    server.wait_served(version)
    server.wait_commits(1)
    expect_served(follower.world, server, version)


def end(follower: Follower, moment: str) -> None:
    """Bring a server down at a moment of its work; no process of it is left."""
    world, server = follower.world, follower.server
    if not moment:
        kill(server)
        return
    if moment == HUNG:
        world.faults.arm("rank.before_scatter", "stop")
        with no_process_left(server), waiting(server):
            world.publish()
            assert server.process.wait(SECONDS) == 1
        assert "ending the engine" in server.logged()
        return
    world.faults.arm(moment, "hang")
    world.publish()
    eventually(lambda: world.faults.happened, moment)
    kill(server)
