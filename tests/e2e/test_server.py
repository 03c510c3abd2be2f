"""Real ``vllm serve`` on the CPU: follows real training, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fresh import fresh_vllm
from tests.e2e.servers import Load, Server, plain_vllm_serve, serving
from tests.e2e.world import Follower, World
from vllm_delta_sync.engine.compat.patches import allow_list

VERSIONS = 2
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("follower")]


def follow(world: World, server: Server, also: Callable[[list[dict[str, str]]], None] = lambda digests: None) -> None:
    """Publish under load; what is served after each version, and said after the last, is what a fresh vLLM makes of it.

    ``also``: done in the end, with the digests of each version.
    """
    checkpoints = [world.save()]
    served: list[dict[str, Any]] = [{"digests": server.digests()}]
    before = server.outputs()
    with Load(server) as load:
        for _ in range(VERSIONS):
            version = world.publish()
            status = server.wait_served(version)
            assert (status["served"]["version"], status["lag"]) == (version, 0)
            assert status["served"]["fingerprint"] == status["head"]["fingerprint"]
            checkpoints.append(world.save())
            served.append({"digests": server.digests()})
    load.check()
    served[-1]["outputs"] = server.outputs()
    assert served[-1]["outputs"] != before, "the versions do not differ enough to tell"
    outcome = server.post("/delta_sync/verify").json()
    assert outcome["verdict"] is True
    assert outcome["fingerprint"] == server.status()["head"]["fingerprint"]
    also([each["digests"] for each in served])
    assert served == fresh_vllm(world.root, checkpoints)


def test_follows_training_bit_for_bit(follower: Follower) -> None:
    world, server = follower.world, follower.server

    def also(digests: list[dict[str, str]]) -> None:
        check_answers(server, world.version)
        check_rollback(server, world.version, digests)

    follow(world, server, also)


@pytest.mark.slow
def test_plain_vllm_serve_follows_bit_for_bit(tmp_path: Path) -> None:
    """Set up by variables, and codec ``tiled``."""
    world = World(tmp_path, "llama", notice="tcp://127.0.0.1:*", codec="tiled")
    command = plain_vllm_serve(world.base, "--worker-extension-cls", "vllm_delta_sync.engine.WorkerExtension")
    environment = {
        "VLLM_PLUGINS": allow_list(None),
        "DELTA_SYNC_BUCKET": world.url,
        "DELTA_SYNC_NOTICE": str(world.publisher.notice_address),
        "DELTA_SYNC_POLL_SECONDS": "0.5",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    with serving(tmp_path / "server.log", command, environment) as server:
        server.wait_served(0)
        follow(world, server)
    world.close()


def check_answers(server: Server, version: int) -> None:
    """Header and spans of plain, several-prompt, several-choice and chat requests; streams: receiver/test_spans.py."""
    body = {"model": "tiny", "prompt": ["the", "fox"], "n": 2, "max_tokens": 5, "ignore_eos": True}
    response = server.post("/v1/completions", body)
    assert response.headers["x-delta-sync-version"] == str(version)
    assert response.json()["delta_sync"] == {
        "run": server.status()["run"],
        "spans": [{"index": index, "version": version, "start": 0, "end": 5} for index in range(4)],
    }
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "fox"}], "max_tokens": 4, "ignore_eos": True}
    answer = server.post("/v1/chat/completions", chat)
    assert answer.json()["delta_sync"]["spans"] == [{"index": 0, "version": version, "start": 0, "end": 4}]


def check_rollback(server: Server, head: int, digests: list[dict[str, str]]) -> None:
    """Back to versions in the undo log, held there, and forward again on release."""
    first = head - VERSIONS
    assert server.status()["undo"][:VERSIONS] == list(reversed(range(first, head)))
    assert server.post("/delta_sync/rollback", {"version": 999}).json()["error"]["kind"] == "not_found"
    for route, version in (("rollback", head - 1), ("sync", first)):
        status = server.post(f"/delta_sync/{route}", {"version": version}).json()
        assert (status["served"]["version"], status["state"]) == (version, "held")
        assert server.digests() == digests[version - first]
        assert server.versions() == [version]
    assert server.post("/delta_sync/sync", {}).json()["error"]["kind"] == "busy"
    assert server.post("/delta_sync/release").json()["holding"] is False
    server.wait_served(head)
    assert server.post("/delta_sync/hold").json()["state"] == "held"
    assert server.post("/delta_sync/release").json()["state"] == "idle"
    assert server.digests() == digests[VERSIONS]
