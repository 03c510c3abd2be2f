"""Real ``vllm serve``: back beyond the undo log, from branch to branch, and a hold that outlives kill -9."""

import os
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import Server, delta_sync_serve, end_group, serving
from tests.support.tiny import make_model, save_checkpoint, train_steps
from trainer_side import Publisher
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.upkeep.branching import branch

VERSIONS = 4
pytestmark = pytest.mark.e2e


class World:
    """A run of some versions, and a branch from one in the middle."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = save_checkpoint(make_model("qwen3"), root / "base")
        self.main, self.other = f"file://{root}/run", f"file://{root}/other"
        self._publish(self.main, VERSIONS, seed=1, base=self.base)
        branch(open_run(self.main), 2, self.other)
        self._publish(self.other, 2, seed=2)

    def _publish(self, url: str, versions: int, seed: int, base: Path | None = None) -> None:
        model = make_model("qwen3")
        steps = train_steps(model, lr=1e-4, seed=seed)
        with Publisher(model, bucket=url, base=base) as publisher:
            for step in range(1, versions + 1):
                next(steps)
                publisher.publish(step=step, wait=True)

    def serve(self, log: str) -> AbstractContextManager[Server]:
        environment = {
            "DELTA_SYNC_POLL_SECONDS": "0.1",
            "DELTA_SYNC_UNDO_BYTES": "0",
            "DELTA_SYNC_STATE_DIR": str(self.root / "state"),
        }
        return serving(self.base, self.root / log, delta_sync_serve(self.base, "--bucket", self.main), environment)


def answer(server: Server) -> tuple[Any, list[int | None], str]:
    """Greedy tokens with log probabilities, the versions that they are said to come from, and the run."""
    body = {
        "model": "tiny",
        "prompt": [5, 6, 7, 8],
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = server.post("/v1/completions", body)
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


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("targets"))


def test_back_beyond_the_log_to_a_branch_and_held_across_a_kill(world: World) -> None:
    runs = {url: open_run(url).info.run for url in (world.main, world.other)}
    with world.serve("one.log") as server:
        server.wait_served(VERSIONS)
        assert server.status()["undo"] == []
        newest = answer(server)
        assert newest[1:] == ([VERSIONS], runs[world.main])

        assert told(server, "target", target="2")["state"] == "idle"
        second = answer(server)
        assert (second[0] != newest[0], second[1]) == (True, [2])
        status = told(server, "target", target="head", bucket=world.other)
        assert (status["run"], status["served"]["version"], status["target"]) == (runs[world.other], 2, "head")
        branched = answer(server)
        assert (branched[0] not in (second[0], newest[0]), branched[1:]) == (True, ([2], runs[world.other]))
        refused = server.post("/delta_sync/target", {"target": "head", "bucket": f"file://{world.root}/base/run"})
        assert refused.status_code == 400
        # Version 0 of the branch is version 2 of the run that it comes from.
        told(server, "rollback", version=0)
        assert answer(server) == (second[0], [0], runs[world.other])
        told(server, "target", target="head")
        assert answer(server) == branched
        told(server, "target", target="head", bucket=world.main)
        assert answer(server) == newest

        assert told(server, "rollback", version=1)["state"] == "held"
        held = answer(server)
        assert held[1:] == ([1], runs[world.main])
        missing = server.post("/delta_sync/rollback", {"version": 9})
        assert (missing.status_code, missing.json()["error"]["kind"]) == (404, "not_found")
        os.killpg(server.process.pid, signal.SIGKILL)
        end_group(server.process)
    with world.serve("two.log") as server:
        status = server.wait_served(1)
        assert answer(server) == held
        status = told(server, "hold")
        assert (status["served"]["version"], status["holding"], status["state"]) == (1, True, "held")
        assert (status["commits"], status["head"]["version"]) == (1, VERSIONS)
        server.post("/delta_sync/release")
        server.wait_served(VERSIONS)
        assert answer(server) == newest
