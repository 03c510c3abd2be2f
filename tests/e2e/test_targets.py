"""Real ``vllm serve``: back beyond the undo log, from branch to branch, and a hold that outlives kill -9."""

from typing import Any

import pytest

from tests.e2e.servers import Server
from tests.e2e.world import Follower, kill
from tests.support.tiny import make_model, train_steps
from trainer_side import Publisher
from vllm_delta_sync.client import open_run
from vllm_delta_sync.maintenance.branch import branch

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


def branched(url: str, version: int, other: str) -> str:
    """A branch from a version, with two of its own."""
    branch(open_run(url), version, other)
    model = make_model("qwen3", seed=5)
    steps = train_steps(model, lr=1e-4, seed=2)
    with Publisher(model, bucket=other) as publisher:
        for step in (1, 2):
            next(steps)
            publisher.publish(step=step, wait=True)
    return other


@pytest.mark.slow
def test_back_beyond_the_log_to_a_branch_and_held_across_a_kill(follower: Follower) -> None:
    world, server = follower.world, follower.server
    first = world.version
    while len(undo := server.status()["undo"]) == 0 or undo[-1] <= first + 1:
        server.wait_served(world.publish())
        assert world.version < first + 30, "the undo log takes no end"
    beyond = first + 1
    other = branched(world.url, beyond, str(world.root / "other"))
    main_run, other_run = (open_run(url).info.run for url in (world.url, other))
    newest = answer(server)
    assert newest[1:] == ([world.version], main_run)

    assert told(server, "target", target=str(beyond))["state"] == "idle"
    second = answer(server)
    assert (second[0] != newest[0], second[1]) == (True, [beyond])
    status = told(server, "target", target="head", bucket=other)
    assert (status["run"], status["served"]["version"], status["target"]) == (other_run, 2, "head")
    on_branch = answer(server)
    assert (on_branch[0] not in (second[0], newest[0]), on_branch[1:]) == (True, ([2], other_run))
    refused = server.post("/delta_sync/target", {"target": "head", "bucket": f"{world.base}/run"})
    assert refused.status_code == 400
    # Version 0 of the branch is the version of the run that it comes from.
    told(server, "rollback", version=0)
    assert answer(server) == (second[0], [0], other_run)
    told(server, "target", target="head")
    assert answer(server) == on_branch
    told(server, "target", target="head", bucket=world.url)
    assert answer(server) == newest

    assert told(server, "rollback", version=beyond)["state"] == "held"
    held = answer(server)
    assert held[1:] == ([beyond], main_run)
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
