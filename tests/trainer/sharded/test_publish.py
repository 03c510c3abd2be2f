"""A run that ranks publish together is the run that one process would publish of the gathered model."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed

from tests.support.publishing import damage
from tests.trainer.sharded.nursery import Nursery
from tests.trainer.sharded.training import make, sharded, train, whole_tensors
from trainer_side import Publisher
from vllm_delta_sync import open_run

STEPS = 3


def publish_both(rank: int, size: int, url: str, kind: str, how: str, codec: Literal["auto", "raw"]) -> Any:
    """Publish from all ranks, and on rank 0 the gathered model too → what each rank said of its versions."""
    model = sharded(make(kind), how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    single = make(kind)
    single.load_state_dict(whole_tensors(model))
    alone = Publisher(single, f"{url}-alone", codec=codec) if rank == 0 else None
    said: list[Any] = []
    with Publisher(model, url, codec=codec) as publisher:
        for step in range(1, STEPS + 1):
            train(model, optimizer, kind, step)
            gathered = whole_tensors(model)
            result = publisher.publish(step, wait=True, sidecars={"state": f"{rank} {step}".encode()})
            percent = result.metrics()["delta_sync/changed_percent"]
            said.append([result.version, result.total, result.changed, percent])
            if alone is not None:
                single.load_state_dict(gathered)
                alone.publish(step, wait=True)
        publisher.flush()
        said.append(publisher.version)
    if alone is not None:
        alone.close()
    return said


CASES = [
    ("mixed", "fsdp", 2, "auto"),
    pytest.param("mixed", "fsdp", 4, "raw", marks=pytest.mark.slow),
    pytest.param("qwen3", "fsdp", 4, "auto", marks=pytest.mark.slow),
    ("llama", "ddp", 2, "auto"),
    ("qwen3_moe", "hsdp", 4, "auto"),
    ("qwen3_moe", "fsdp", 2, "raw"),
]


@pytest.mark.parametrize(("kind", "how", "size", "codec"), CASES)
def test_ranks_publish_what_one_process_would(
    kind: str, how: str, size: int, codec: str, nursery: Nursery, tmp_path: Path
) -> None:
    url = str(tmp_path / "run")
    said = nursery.run(size, publish_both, url=url, kind=kind, how=how, codec=codec)
    together, alone = open_run(url), open_run(f"{url}-alone")
    assert together.table.to_bytes() == alone.table.to_bytes()
    assert [rows[-1] for rows in said] == [STEPS] * size
    for version in range(STEPS + 1):
        ours, theirs = together.manifest(version), alone.manifest(version)
        assert ours.fingerprint == theirs.fingerprint
        assert (ours.kind, ours.step, ours.total) == (theirs.kind, theirs.step, theirs.total)
        mine, reference = together.snapshot(version), alone.snapshot(version)
        assert all((a == b).all() for a, b in zip(mine.bits, reference.bits, strict=True))
        if version:
            writers = {ref.rank for ref in ours.objects}
            assert writers == ({0} if how == "ddp" else set(range(2 if how == "hsdp" else size)))
            found = sum(rows[version - 1][2] for rows in said)
            assert 0 < found <= ours.changed
            # On every rank that of all.
            assert {rows[version - 1][3] for rows in said} == {100 * found / ours.total}
    assert together.sidecar(STEPS, "state") == f"0 {STEPS}".encode()
    assert together.verify().head == STEPS


def go_on(rank: int, size: int, url: str, base: str | None) -> list[Any]:
    """Take the run over from what it holds, or begin it, and publish two versions."""
    model: Any = make("mixed")
    there = Path(url, "run.json").exists()
    distributed.barrier()
    if there:
        held = dict(open_run(url).tensors(base=base))
        model.load_state_dict({name: held[name] for name in model.state_dict()})
    model = sharded(model, "fsdp") if size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # No anchor beside the chain, from which a lost version could be rebuilt.
    with Publisher(model, url, base=base, shard_bytes=100, anchor_every=100, fold=False) as publisher:
        begun = publisher.version
        for step in range(begun + 1, begun + 3):
            train(model, optimizer, "mixed", step)
            publisher.publish(step, wait=True)
        publisher.flush()
        gathered = whole_tensors(model)
        if rank == 0:
            held = dict(open_run(url).tensors(base=base))
            assert [name for name in gathered if not torch.equal(held[name], gathered[name])] == []
    return [begun, publisher.version]


@pytest.mark.parametrize("kind", ["anchor", pytest.param("reference", marks=pytest.mark.slow)])
def test_a_run_goes_on_with_another_number_of_ranks(kind: str, nursery: Nursery, tmp_path: Path) -> None:
    url, base = str(tmp_path / "run"), tmp_path / "base"
    base.mkdir()
    tensors = make("mixed").state_dict()
    if kind == "anchor":
        tensors["last.weight"] = tensors["last.weight"] + 1
    tensors["vision.weight"] = torch.arange(6.0)
    save_file(tensors, base / "model.safetensors")
    for number, size in enumerate([4, 2, 1, 4]):
        said = nursery.run(size, go_on, url=url, base=str(base))
        assert said == [[2 * number, 2 * number + 2]] * size
    run = open_run(url)
    assert run.manifest(0).kind == kind
    assert {ref.rank for ref in run.manifest(0).objects} == (set(range(4)) if kind == "anchor" else set())
    assert run.manifest(3).epoch == 1
    # What the model does not hold keeps the base's bits through all of it.
    assert torch.equal(dict(run.tensors(base=base))["vision.weight"], tensors["vision.weight"])
    assert run.verify(base).head == 8


def begin_anew(rank: int, size: int, url: str) -> int:
    with Publisher(sharded(make("mixed"), "fsdp"), url) as publisher:
        return publisher.version


def test_a_newest_version_that_is_lost_is_begun_anew_behind(nursery: Nursery, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    nursery.run(2, go_on, url=url, base=None)
    damage(url, open_run(url).manifest(2).objects[1].key)
    assert nursery.run(2, begin_anew, url=url) == [3, 3]
    run = open_run(url)
    assert run.manifest(3).kind == "anchor"
    expected = make("mixed").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in run.tensors(3))
