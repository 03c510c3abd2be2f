"""Several API servers of several engines: one leads, the others show what it shows and pass on what they are asked."""

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.e2e.exacting import ASKED, Mover, race
from tests.e2e.fresh import PROMPTS
from tests.e2e.servers import PLAIN, Server, eventually
from tests.e2e.world import World, ranks_bound

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("stores")]
PATIENCE_SECONDS = 60.0
RACE_SECONDS = 20
FLAGS = ["--poll-seconds", "0.2", "--data-parallel-size", "2"]


class Each:
    """A connection to every API server behind one port, by what it calls itself.

    A connection stays with the process that accepted it, and new ones go to the process that has the fewest.
    """

    def __init__(self, server: Server) -> None:
        self.by_role: dict[str, list[httpx.Client]] = {"leader": [], "follower": []}
        self._clients: list[httpx.Client] = []
        found: set[int] = set()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(found) < 2 and time.monotonic() < deadline:
            client = httpx.Client(base_url=server.url, timeout=PATIENCE_SECONDS, verify=PLAIN)
            self._clients.append(client)
            status = client.get("/delta_sync/status").json()
            if status["server"] not in found:
                found.add(status["server"])
                self.by_role[status["role"]].append(client)
        assert len(found) == 2, "some of the API servers were not reached"

    def close(self) -> None:
        for client in self._clients:
            client.close()


def served(client: httpx.Client) -> int | None:
    found = client.get("/delta_sync/status").json()["served"]
    return None if found is None else int(found["version"])


def digests_of(client: httpx.Client) -> list[dict[str, str]]:
    """Per engine, SHA-256 of every runtime parameter, from vLLM's own weight checker."""
    found = client.post("/weight_checker", json={"action": "checksum"}).json()["checksums"]
    engines: dict[str, dict[str, str]] = {}
    for name, digest in found.items():
        engine, _, parameter = name.partition(":")
        engines.setdefault(engine, {})[parameter] = digest
    return list(engines.values())


def spans_of(client: httpx.Client, engine: int) -> set[int]:
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(engine)}).json()
    return {span["version"] for span in answer["delta_sync"]["spans"]}


@pytest.mark.slow
def test_one_leads_and_the_others_pass_on(tmp_path: Path) -> None:
    world = World(tmp_path, "llama_one_kv_head")
    with world.serve(*FLAGS, environment=ranks_bound(2)) as server, closing(Each(server)) as each:
        (leader,), (follower,) = each.by_role["leader"], each.by_role["follower"]
        both = (leader, follower)
        for step in (1, 2):
            assert world.publish() == step
            for client in both:
                assert client.get("/delta_sync/wait", params={"version": step, "timeout": 60}).status_code == 200
                assert [spans_of(client, engine) for engine in (0, 1)] == [{step}, {step}]
        # In a pause of vLLM's own, which the commit does not end.
        assert leader.post("/pause?mode=keep").status_code == 200
        assert world.publish() == 3
        assert follower.post("/delta_sync/sync").json()["served"]["version"] == 3
        assert leader.get("/is_paused").json() == {"is_paused": True}
        assert leader.post("/resume").status_code == 200
        status = follower.get("/delta_sync/status").json()
        assert status["role"] == "follower"
        assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
        assert sorted(one["role"] for one in status["servers"]) == ["follower", "leader"]

        first, second = digests_of(follower)
        assert first == second
        assert follower.post("/delta_sync/verify").json()["verdict"] is True
        back = follower.post("/delta_sync/rollback", json={"version": 1}).json()
        assert (back["served"]["version"], back["state"], back["role"]) == (1, "held", "follower")
        assert [served(client) for client in both] == [1, 1]
        refused = follower.post("/delta_sync/sync", json={"version": 9})
        assert refused.status_code == leader.post("/delta_sync/sync", json={"version": 9}).status_code == 404
        assert follower.post("/delta_sync/release").json()["state"] == "idle"
        eventually(lambda: served(leader) == 3, "released, it follows again")

        # Each API server keeps its own clients to one version, on both engines, whichever of them moves.
        asked = {
            f"{name} of the {role}": (client, *ASKED[name])
            for role, (client,) in each.by_role.items()
            for name in ASKED
        }
        race(Mover(server, 1, 3), asked, RACE_SECONDS)
        assert follower.post("/delta_sync/release").status_code == 200

        first_leader = next(one["pid"] for one in status["servers"] if one["role"] == "leader")
        os.kill(first_leader, signal.SIGKILL)
        # vLLM ends all of a server with an API server that fails: there is nobody left to follow it.
        assert server.process.wait(PATIENCE_SECONDS) == 1
    world.close()
