"""Reading weights without vLLM: any version, streamed or into a model, and other ways where one is damaged."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.run.test_chain_plan import TABLE, Tree
from tests.support.samples import RUN, nudge, random_bits
from vllm_delta_sync.chain import Run, open_run
from vllm_delta_sync.chain import read as chain_read
from vllm_delta_sync.chain.read import scratch_file
from vllm_delta_sync.errors import (
    ChainError,
    DeltaSyncError,
    DigestError,
    NotFoundError,
    StoreError,
    TensorMismatchError,
    UsageError,
)
from vllm_delta_sync.torch_bits import bits_of, tensor_from_bits
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire.documents import Tag
from vllm_delta_sync.wire.manifest import Base


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path)
    made.deltas(9)
    made.fold_all()
    return made


def expect(run: Run, tree: Tree, version: int | str | None, right: int) -> None:
    held = dict(run.tensors(version))
    assert list(held) == [spec.name for spec in TABLE]
    for tensor, spec in enumerate(TABLE):
        assert np.array_equal(bits_of(held[spec.name]), tree.writer.bits[right][tensor])


def tag(tree: Tree, name: str, version: int) -> None:
    digest = tree.writer.manifests[version].digest
    document = Tag(run=RUN, name=name, version=version, manifest=digest, created_at="2026-01-02T03:04:05Z")
    tree.writer.bucket.put(side.tag_key(name), document.to_bytes())


def test_any_version_by_number_tag_or_head(tree: Tree) -> None:
    for version in range(10):
        expect(tree.run, tree, version, version)
    tag(tree, "best", 6)
    expect(tree.run, tree, "tag:best", 6)
    expect(tree.run, tree, None, 9)
    assert list(tree.run.tags()) == ["best"]


@pytest.mark.parametrize(
    ("version", "kind"), [(10, NotFoundError), (-1, NotFoundError), ("tag:none", NotFoundError), ("best", UsageError)]
)
def test_version_that_is_not_there(tree: Tree, version: int | str, kind: type[DeltaSyncError]) -> None:
    with pytest.raises(kind):
        tree.run.snapshot(version)


def test_tag_of_a_rewritten_version_is_refused(tree: Tree) -> None:
    tag(tree, "best", 6)
    other = tree.run.tag("best").model_copy(update={"version": 5})
    other._raw = None
    tree.writer.bucket.put(side.tag_key("best"), other.to_bytes())
    with pytest.raises(ChainError, match="best"):
        tree.run.snapshot("tag:best")


def test_only_some_tensors(tree: Tree) -> None:
    assert [name for name, _ in tree.run.tensors(3, names=["c", "a"])] == ["a", "c"]
    with pytest.raises(TensorMismatchError, match="'d'"):
        list(tree.run.tensors(3, names=["d"]))


def test_large_models_lie_in_a_file_without_a_name(tree: Tree, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for bound in ("IN_MEMORY_BYTES", "DECODED_ELEMENTS", "MAPPED_BYTES"):
        monkeypatch.setattr(chain_read, bound, 0)
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    made: list[int] = []

    def watched(size: int) -> np.ndarray:
        made.append(size)
        return scratch_file(size)

    monkeypatch.setattr(chain_read, "scratch_file", watched)
    tree.delta(base=2, full=(1,))
    expect(tree.run, tree, 10, 10)
    assert len(made) == 1
    assert made[0] >= TABLE.full_bytes
    assert list(folder.iterdir()) == []


def test_no_room_for_the_weights_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(StoreError, match="no room for"):
        scratch_file(1 << 60)
    assert list(tmp_path.iterdir()) == []


def damage(tree: Tree, key: str) -> None:
    data = bytearray(tree.writer.bucket.get(key))
    data[-1] ^= 1
    tree.writer.bucket.put(key, bytes(data))


def test_damaged_folded_range_or_delta_is_walked_around(tree: Tree, tmp_path: Path) -> None:
    damage(tree, tree.run.folded(0, 4).objects[0].key)
    expect(tree.run, tree, 9, 9)
    damage(tree, tree.writer.manifests[2].objects[0].key)
    with pytest.raises(DigestError):
        tree.run.snapshot(9)
    tree.writer.beside(2, tmp_path)
    expect(tree.run, tree, 9, 9)
    expect(tree.run, tree, 2, 2)
    expect(tree.run, tree, 1, 1)
    damage(tree, tree.run.anchor(2).objects[0].key)
    with pytest.raises(DigestError):
        tree.run.snapshot(9)


def test_anchor_of_another_version_is_not_taken(tree: Tree, tmp_path: Path) -> None:
    anchor = tree.writer.beside(5, tmp_path)
    forged = anchor.model_copy(update={"version": 6})
    forged._raw = None
    tree.writer.bucket.put(side.anchor_key(6), forged.to_bytes())
    expect(tree.run, tree, 6, 6)


def test_branch_begins_where_it_left(tree: Tree, tmp_path: Path) -> None:
    other = Tree(tmp_path / "other")
    at = tree.writer.manifests[4]
    bucket = other.writer.bucket
    for item in list(bucket.list("versions/")):
        bucket.delete(item.key)
    other.writer.manifests.clear()
    other.writer.bits.clear()
    location = {"location": tree.writer.bucket.url, "run": at.run, "version": 4, "manifest": at.digest}
    bits = tree.writer.bits[4]
    other.writer._commit(bits, [], "reference", 0, requires=[], base=Base.model_validate(location))
    other.writer.delta(nudge(bits, other.random, 0.2))
    run = open_run(bucket.url)
    for version in (0, 1):
        expect(run, other, version, version)
    moved = tmp_path / "moved"
    (tmp_path / "run").rename(moved)
    with pytest.raises(NotFoundError, match="branches from a run"):
        run.snapshot(1)
    state = run.snapshot(1, base=str(moved))
    assert np.array_equal(state.bits[0], other.writer.bits[1][0])


def empty_state(change: Callable[[dict[str, torch.Tensor]], object] = lambda state: None) -> dict[str, torch.Tensor]:
    state = {spec.name: tensor_from_bits(bits, spec) for spec, bits in zip(TABLE, blank(), strict=True)}
    change(state)
    return state


def blank() -> list[np.ndarray]:
    return [np.zeros_like(bits) for bits in random_bits(TABLE, np.random.default_rng(0))]


def test_state_dict_is_filled_in_place(tree: Tree) -> None:
    state = empty_state()
    places = {name: tensor.data_ptr() for name, tensor in state.items()}
    tree.run.load_into(state, 5)
    for tensor, spec in enumerate(TABLE):
        assert np.array_equal(bits_of(state[spec.name]), tree.writer.bits[5][tensor])
        assert state[spec.name].data_ptr() == places[spec.name]


def test_model_with_masters_and_a_tied_name_is_filled(tree: Tree) -> None:
    model = torch.nn.Module()
    tied = torch.nn.Parameter(torch.zeros(40, 3))
    model.a = tied
    model.b = torch.nn.Parameter(torch.zeros(7))
    model.register_buffer("c", torch.zeros((), dtype=torch.int8))
    model.tied = tied
    tree.run.load_into(model, 5)
    held = dict(tree.run.tensors(5))
    assert torch.equal(tied.detach().nan_to_num(), held["a"].float().nan_to_num())
    assert torch.equal(model.get_buffer("c"), held["c"])
    assert model.a is model.tied is tied


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda state: state.pop("b"), "'b' of the run is not in the target"),
        (lambda state: state.update(extra=torch.zeros(3)), "'extra' of the target is not in the run"),
        (lambda state: state.update(a=torch.zeros(3, 40)), r"\[3, 40\] in the target"),
        (lambda state: state.update(b=torch.zeros(7, dtype=torch.bfloat16)), "cannot hold every"),
    ],
)
def test_target_that_does_not_fit_is_left_alone(
    tree: Tree, change: Callable[[dict[str, torch.Tensor]], object], match: str
) -> None:
    state = empty_state(change)
    before = {name: tensor.clone() for name, tensor in state.items()}
    with pytest.raises(TensorMismatchError, match=match):
        tree.run.load_into(state, 5)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())


def test_target_that_holds_a_part_is_filled_if_asked(tree: Tree) -> None:
    state = empty_state(lambda state: state.pop("b"))
    state["extra"] = torch.zeros(3)
    tree.run.load_into(state, 5, strict=False)
    assert np.array_equal(bits_of(state["a"]), tree.writer.bits[5][0])
