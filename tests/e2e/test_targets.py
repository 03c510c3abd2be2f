"""Real ``vllm serve``: back beyond the undo log, and a hold that outlives kill -9."""

from typing import Any

import pytest

from tests.e2e.servers import Server
from tests.e2e.world import Follower, kill

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("follower")]
BODY = {
    "model": "tiny",
    "prompt": [5, 6, 7, 8],
    "max_tokens": 24,
    "temperature": 0,
    "logprobs": 1,
    "ignore_eos": True,
    "return_token_ids": True,
}


def answer(server: Server) -> tuple[Any, list[int | None], str]:
    """Greedy tokens with log probabilities, the versions that they are said to come from, and the run."""
    response = server.post("/v1/completions", BODY)
    assert response.status_code == 200, response.text
    found = response.json()
    choice = found["choices"][0]
    versions = [span["version"] for span in found["delta_sync"]["spans"]]
    return (choice["token_ids"], choice["logprobs"]["token_logprobs"]), versions, found["delta_sync"]["run"]


def told(server: Server, action: str, **body: Any) -> dict[str, Any]:
    response = server.post(f"/delta_sync/{action}", body or None)
    assert response.status_code == 200, response.text
    status: dict[str, Any] = response.json()
    assert server.post("/delta_sync/verify").json()["verdict"]
    return status


@pytest.mark.slow
def test_back_beyond_the_log_and_held_across_a_kill(follower: Follower) -> None:
    world, server = follower.world, follower.server
    first = world.version
    while len(undo := server.status()["undo"]) == 0 or undo[-1] <= first + 1:
        server.wait_served(world.publish())
        assert world.version < first + 30, "the undo log takes no end"
    beyond = first + 1
    newest = answer(server)
    assert newest[1:] == ([world.version], world.publisher.run)

    assert told(server, "target", target=str(beyond))["state"] == "idle"
    second = answer(server)
    assert (second[0] != newest[0], second[1]) == (True, [beyond])
    told(server, "target", target="head")
    assert answer(server) == newest

    assert told(server, "rollback", version=beyond)["state"] == "held"
    held = answer(server)
    assert held == second
    missing = server.post("/delta_sync/rollback", {"version": 999})
    assert (missing.status_code, missing.json()["error"]["kind"]) == (404, "not_found")
    kill(server)

    server = follower.start()
    server.wait_served(beyond)
    assert answer(server) == held
    status = told(server, "hold")
    assert (status["served"]["version"], status["holding"], status["state"]) == (beyond, True, "held")
    assert (status["commits"], status["head"]["version"]) == (1, world.version)
    server.post("/delta_sync/release")
    server.wait_served(world.version)
    assert answer(server) == newest
