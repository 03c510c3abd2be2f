"""What ``delta-sync export`` writes is what the trainer would have saved: stock vLLM and transformers say the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.e2e.stock import said_by_stock
from tests.support.tiny import make_model, make_model_like, make_tokenizer, save_checkpoint, train_steps
from trainer_side import Publisher
from vllm_delta_sync import cli, open_run
from vllm_delta_sync.maintenance.branch import branch
from vllm_delta_sync.trust import Keyring, keys

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("export")]

SHARD_BYTES = "100000"
"""Some tensors of the model are larger, and most are far smaller."""


class World:
    """A signed run and a branch of it.

    Attributes:
        run, branch: their URLs. public: file of the trusted key.
        held: what the trainer held, bfloat16: 0 to 3 of the run's versions, "branch 0" and "branch 1" of the branch's.
            Version 3 is built on version 0.
    """

    def __init__(self, root: Path) -> None:
        self.run, self.branch, self.public = str(root / "run"), str(root / "branch"), root / "signer.pub"
        keys.generate(root / "signer")
        make_tokenizer().save_pretrained(root / "tokenizer")
        signed: dict[str, Any] = {"signing_key": root / "signer", "trusted_keys": [self.public]}
        model = make_model("llama", seed=5)
        model.config.dtype = torch.bfloat16
        self.held: dict[str, PreTrainedModel] = {"0": make_model_like(model)}
        steps = train_steps(model, lr=3e-4)
        with Publisher(model, self.run, files=root / "tokenizer", **signed) as publisher:
            for step in (1, 2, 3):
                next(steps)
                if step == 3:
                    publisher.rebase(0)
                assert publisher.publish(step, wait=True).version == step
                self.held[str(step)] = make_model_like(model)
        with open_run(self.run, Keyring.load([self.public], root / "signer")) as run:
            branch(run, 1, self.branch).close()
        self.held["branch 0"] = self.held["1"]
        model.load_state_dict(self.held["1"].state_dict())
        with Publisher(model, self.branch, **signed) as publisher:
            next(steps)
            assert publisher.publish(9, wait=True).version == 1
        self.held["branch 1"] = make_model_like(model)

    def export(self, name: str, folder: Path) -> Path:
        """Export with the command, over several files."""
        of_branch, version = name.startswith("branch"), name.rpartition(" ")[2]
        url = self.branch if of_branch else self.run
        arguments = ["--bucket", url, "--version", version, "--to", str(folder), "--shard-bytes", SHARD_BYTES]
        assert cli.run(["export", *arguments, "--trusted-keys", str(self.public)]) == 0
        return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["0", "1", "3", "branch 0", "branch 1"])
def test_stock_vllm_says_the_same_of_an_export_and_of_what_the_trainer_saves(
    world: World, tmp_path: Path, name: str
) -> None:
    folders = world.export(name, tmp_path / "out"), save_checkpoint(world.held[name], tmp_path / "saved")
    exported, saved = said_by_stock(tmp_path, *folders)
    assert exported == saved
    assert len({tuple(tokens) for tokens in exported}) > 1
