"""LoRA on a real vLLM: adapters from runs of their own say what the trainer's adapters say, loaded anew.

That a run of a merged model has the bits that ``merge_and_unload`` saves is in tests/trainer/test_lora.py.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from tests.e2e.lora import VERSIONS
from tests.e2e.servers import Server, delta_sync_serve, eventually, serving
from tests.e2e.warm import see
from tests.e2e.world import World, ranks_bound
from tests.support.adapters import TARGETS, adapted, randomize, save_adapter
from tests.support.tiny import make_model, save_checkpoint
from trainer_side.integrations.peft import adapter_publisher
from vllm_delta_sync import open_run

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("lora")]

FLAGS = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--max-cpu-loras", "4", "--poll-seconds", "0.2")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_are_those_of_the_trainer_after_every_version(tmp_path: Path, ranks: int) -> None:
    environment = {"DELTA_SYNC_STATE_DIR": str(tmp_path / "state"), **ranks_bound(ranks)}
    seen = see("tests.e2e.lora", tmp_path, str(ranks), environment=environment)
    assert seen["wrong"] == []
    assert seen["different"], "the versions do not differ enough to tell"
    assert [each["math"] for each in seen["served"]] == list(range(VERSIONS + 1))
    assert [each["code"] for each in seen["served"]] == [0, 0, 1, 1, 2, 2]
    assert seen["verdicts"] == [True, True]
    assert seen["labels"] == "default;math=5;code=2"
    assert (seen["rolled back to"], seen["rolled back"], seen["other stayed"]) == (3, True, True)
    assert seen["failed"].startswith("engine: ")
    assert "vLLM did not load adapter 'math': RuntimeError: out of slots" in seen["failed"]
    assert (seen["after failure"], seen["put back"], seen["tried again"]) == (VERSIONS, True, True)
    words = {
        "other shape": "'shape' is of another base: tensor",
        "other depth": "'depth' is of another base: it changes 'model.layers.2.",
        "other rank": "'rank' has rank 16, and --max-lora-rank is 8; set it to 16 or more",
        "no adapter": "has no adapter_config.json, so it is not that of an adapter",
    }
    for case, said in words.items():
        assert seen["refused"][case].startswith("model: "), case
        assert said in seen["refused"][case]
    assert seen["nothing applied"]
    assert seen["others stay"]


class Adapter:
    """One adapter in training, its run, and what a server says of it."""

    def __init__(self, root: Path, name: str, base: Any, seed: int) -> None:
        self.root, self.name, self.version = root, name, 0
        self.model = adapted(base, seed)
        self.url = str(root / f"run-{name}")
        self.publisher = adapter_publisher(self.model, self.url)

    def publish(self) -> None:
        self.version += 1
        randomize(self.model, 100 + self.version)
        self.publisher.publish(step=self.version, wait=True)
        self.publisher.flush()

    def wait_served(self, server: Server) -> None:
        def served() -> bool:
            status = self.status(server)
            return status["served"] is not None and bool(status["served"]["version"] == self.version)

        eventually(served, f"{self.name} serves version {self.version}", 120)

    def status(self, server: Server) -> dict[str, Any]:
        status: dict[str, Any] = server.get("/delta_sync/status", params={"adapter": self.name}).json()
        return status

    def order(self, server: Server, action: str, body: Any = None) -> dict[str, Any]:
        answer = server.post(f"/delta_sync/{action}", body, params={"adapter": self.name})
        assert answer.status_code == 200, answer.text
        done: dict[str, Any] = answer.json()
        return done

    def fresh(self, server: Server) -> list[Any]:
        """What vLLM says with the trainer's adapter, loaded by vLLM's own route under a new name."""
        name = f"fresh-{self.name}-{self.version}-{len(list(self.root.glob('fresh-*')))}"
        folder = save_adapter(self.model, self.root / name)
        answer = server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        assert answer.status_code == 200, answer.text
        said = server.outputs(name)
        assert server.post("/v1/unload_lora_adapter", {"lora_name": name}).status_code == 200
        return said


@pytest.mark.slow
def test_a_server_follows_two_adapters_beside_its_base(tmp_path: Path) -> None:
    world = World(tmp_path, rate=1e-3)
    math, code = (
        Adapter(tmp_path, name, make_model("qwen3", seed=5), seed) for seed, name in enumerate(["math", "code"])
    )
    runs = f"math={math.url},code={code.url}"
    with world.serve(*FLAGS, "--lora-adapters", runs, environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}) as server:
        server.wait_served(0)
        for adapter in (math, code):
            adapter.wait_served(server)
            assert server.outputs(adapter.name) == adapter.fresh(server)
            assert server.traced(adapter.name)["run"] == open_run(adapter.url).info.run
            assert server.versions(adapter.name) == [0]
        assert {model["id"] for model in server.get("/v1/models").json()["data"]} == {"tiny", "math", "code"}
        before = server.outputs("code")

        # Each moves by itself, and all act on the base of the moment.
        math.publish()
        math.wait_served(server)
        assert server.outputs("math") == math.fresh(server)
        assert server.outputs("code") == before
        for model, version in (("math", 1), ("code", 0), ("tiny", 0)):
            asked = {"model": model, "prompt": "fox", "max_tokens": 5, "ignore_eos": True}
            exactly = server.post("/v1/completions", asked, headers={"X-Delta-Sync-Version": str(version)})
            assert [span["version"] for span in exactly.json()["delta_sync"]["spans"]] == [version], exactly.text
            elsewhere = server.post("/v1/completions", asked, headers={"X-Delta-Sync-Version": str(1 - version)})
            assert (elsewhere.status_code, elsewhere.json()["error"]["kind"]) == (409, "version")
        server.wait_served(world.publish())
        assert server.outputs("code") == code.fresh(server) != before
        assert (server.versions("code"), server.versions("tiny")) == ([0], [1])

        # One is held and rolled back while the others go on.
        at_1 = server.outputs("math")
        math.publish()
        math.wait_served(server)
        assert math.order(server, "rollback", {"version": 1})["served"]["version"] == 1
        code.publish()
        code.wait_served(server)
        assert server.outputs("math") == at_1
        assert server.versions("math") == [1]
        assert math.status(server)["state"] == "held"
        assert math.order(server, "verify")["verdict"]
        math.order(server, "release")
        math.wait_served(server)
        assert server.outputs("math") == math.fresh(server)

        # vLLM's own routes do not touch it.
        other = str(save_adapter(code.model, tmp_path / "other"))
        for path, body in (
            ("/v1/load_lora_adapter", {"lora_name": "math", "lora_path": other, "load_inplace": True}),
            ("/v1/unload_lora_adapter", {"lora_name": "math"}),
        ):
            answer = server.post(path, body)
            assert (answer.status_code, "adapter 'math' follows a run" in answer.text) == (409, True)
        assert server.outputs("math") == math.fresh(server)

        answer = server.get("/delta_sync/status", params={"adapter": "none"})
        assert (answer.status_code, "which has math, code" in answer.text) == (404, True)
    for adapter in (math, code):
        adapter.publisher.close()
    world.close()


@pytest.mark.slow
def test_an_adapter_that_trl_trains_is_said_after_every_sync(tmp_path: Path) -> None:
    """Under the name that TRL asks for, which the base leaves to it."""
    name, url, syncs = "org/policy", str(tmp_path / "run"), 6
    base = save_checkpoint(make_model("qwen3", seed=5), tmp_path / "base")
    command = delta_sync_serve(base, "--bucket", url, "--lora-name", name, *FLAGS)
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with serving(tmp_path / "log", command, environment) as server:
        # Only now: it sets variables that a server would inherit.
        from tests.support.async_trainers import async_trainer
        from trainer_side.integrations.trl import DeltaWeightTransfer

        said: list[list[Any]] = [server.outputs()]

        class Asked(DeltaWeightTransfer):
            def resume(self) -> None:
                super().resume()
                assert self.publisher is not None
                self.publisher.flush()
                server.wait_served(self.publisher.version)
                said.append(server.outputs(name))
                folder = save_adapter(trainer.model, tmp_path / f"fresh-{len(said)}")
                fresh = {"lora_name": folder.name, "lora_path": str(folder)}
                assert server.post("/v1/load_lora_adapter", fresh).status_code == 200
                assert server.outputs(folder.name) == said[-1]
                assert server.post("/v1/unload_lora_adapter", {"lora_name": folder.name}).status_code == 200

        config = LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, task_type="CAUSAL_LM")
        # The first sync is that of the adapter as it was made, which changes nothing.
        trainer = async_trainer(
            base, tmp_path, Asked(url, adapter=True), peft=config, learning_rate=3e-2, max_steps=syncs - 1
        )
        trainer.train()
    assert open_run(url).head().version == syncs
    assert said[0] == said[1], "a new adapter changes nothing"
    assert all(before != after for before, after in itertools.pairwise(said[1:])), "the versions do not differ enough"
