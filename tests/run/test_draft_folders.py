"""The tensors of a draft are a checkpoint of their own in a subfolder: written there, and read from there."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.exporting import held, names
from tests.support.modules import checkpoint_tensors, save_base
from trainer_side import Publisher
from trainer_side.checkpoint_folders import CheckpointPublisher
from vllm_delta_sync import follow, open_run
from vllm_delta_sync.errors import FormatError
from vllm_delta_sync.maintenance.export import export
from vllm_delta_sync.tensors.checkpoint import EXPORT_NAME, Checkpoint

DRAFT = {"draft.fc.weight": (16, 32), "draft.norm.weight": (32,)}
FILE = "draft/model.safetensors"


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    own = {name: torch.randn(shape, generator=generator) for name, shape in DRAFT.items()}
    return {name: tensor.bfloat16() for name, tensor in (checkpoint_tensors() | own).items()}


def expect_folder(folder: Path, trained: dict[str, torch.Tensor], shards: int) -> None:
    """What vLLM loads as the model, and as its draft: each has its own tensors, and no other."""
    served = {name: tensor for name, tensor in trained.items() if name not in DRAFT}
    assert held(folder) == {name: t.reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in served.items()}
    draft = load_file(folder / FILE)
    assert draft.keys() == {name.removeprefix("draft.") for name in DRAFT}
    assert all(torch.equal(tensor, trained[f"draft.{name}"]) for name, tensor in draft.items())
    assert len([name for name in names(folder) if name.endswith(".safetensors")]) == shards + 1
    assert Checkpoint(folder).specs.keys() == trained.keys()


@pytest.mark.parametrize("with_base", [True, False])
def test_a_run_begins_with_such_a_folder_and_is_exported_to_one(tmp_path: Path, with_base: bool) -> None:
    trained = tensors()
    base = save_base(tmp_path / "base", trained)
    url, out = str(tmp_path / "run"), tmp_path / "out"
    with Publisher(trained, url, base if with_base else None) as publisher:
        for step, shard_bytes, shards in ((1, 10**9, 1), (2, 2000, 6), (3, 10**9, 1)):
            trained["draft.fc.weight"][step] += 1
            trained["model.norm.weight"][step] += 1
            publisher.publish(step, wait=True)
            publisher.flush()
            report = export(open_run(url), out, shard_bytes=shard_bytes)
            assert {FILE, EXPORT_NAME} < set(report.files)
            expect_folder(out, trained, shards)
            assert export(open_run(url), out, shard_bytes=shard_bytes).present
    manifest = open_run(url).manifest(0)
    assert manifest.kind == ("reference" if with_base else "anchor")
    assert Checkpoint(out).bits("draft.norm.weight").tobytes() == Checkpoint(base).bits("draft.norm.weight").tobytes()


def test_a_followed_folder_has_it_and_shares_it_while_it_does_not_change(tmp_path: Path) -> None:
    trained = tensors()
    url, out = str(tmp_path / "run"), tmp_path / "out"
    inodes = []
    with Publisher(trained, url) as publisher:
        for step, name in enumerate(("draft.norm.weight", "model.norm.weight", "draft.fc.weight"), 1):
            trained[name][0] += 1
            publisher.publish(step, wait=True)
            publisher.flush()
            list(follow(url, out, once=True))
            expect_folder(out / "current", trained, 1)
            inodes.append((out / "current" / FILE).stat().st_ino)
    assert inodes[0] == inodes[1] != inodes[2]


def test_a_checkpoint_folder_is_published_with_its_draft(tmp_path: Path) -> None:
    """Also where both have a tensor of one name."""
    trained = tensors() | {"draft.model.norm.weight": torch.full((128,), 3.0, dtype=torch.bfloat16)}
    with CheckpointPublisher(str(tmp_path / "run")) as publisher:
        for step in (1, 2):
            trained["draft.fc.weight"][step] += 1
            publisher.publish(save_base(tmp_path / f"checkpoint-{step}", trained))
            found = dict(open_run(str(tmp_path / "run")).tensors())
            assert found.keys() == trained.keys()
            assert all(torch.equal(tensor, found[name]) for name, tensor in trained.items())


def test_a_name_that_both_checkpoints_give_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    base = save_base(tmp_path / "base", {"draft.norm.weight": torch.ones(4), "norm.weight": torch.ones(4)})
    save_file({"norm.weight": torch.ones(4), "draft.norm.weight": torch.zeros(4)}, base / "model.safetensors")
    with pytest.raises(FormatError, match=r"'draft\.norm\.weight' is in two files"):
        Checkpoint(base)
