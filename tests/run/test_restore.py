"""Reading weights without vLLM: any version, streamed or into a model, and by another path where one is damaged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.collecting import MemoryBucket
from tests.support.damage import TABLE, Whole
from tests.support.samples import state_of
from tests.support.written import Written, assert_bits, find_steps
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import (
    ChainError,
    DeltaSyncError,
    DigestError,
    FingerprintError,
    NotFoundError,
    StoreError,
    TensorMismatchError,
    UsageError,
)
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.run import restore as chain_read
from vllm_delta_sync.run.read_plan import Step
from vllm_delta_sync.run.restore import apply_step, scratch_file
from vllm_delta_sync.tensors.torch_views import bits_of, tensor_from_bits

State = dict[str, torch.Tensor]


@pytest.fixture
def tree() -> Whole:
    made = Whole()
    made.deltas(*["plain"] * 9)
    made.merged_deltas()
    return made


def expect(run: Run, tree: Whole, version: int | str | None, right: int) -> None:
    held = dict(run.tensors(version))
    assert list(held) == [spec.name for spec in TABLE]
    for tensor, spec in enumerate(TABLE):
        assert np.array_equal(bits_of(held[spec.name]), tree.writer.bits[right][tensor])


def test_any_version_by_number_tag_or_head(tree: Whole) -> None:
    for version in range(10):
        expect(tree.run, tree, version, version)
    tree.tag("best", 6)
    expect(tree.run, tree, "tag:best", 6)
    expect(tree.run, tree, None, 9)
    assert list(tree.run.tags()) == ["best"]
    kinds: dict[int | str, type[DeltaSyncError]]
    kinds = {10: NotFoundError, -1: NotFoundError, "tag:none": NotFoundError, "best": UsageError}
    for absent, kind in kinds.items():
        with pytest.raises(kind):
            tree.run.snapshot(absent)
    # The tag of a version that was rewritten is refused.
    tree.forge(side.tag_key("best"), tree.run.tag("best"), version=5)
    with pytest.raises(ChainError, match="best"):
        tree.run.snapshot("tag:best")


def test_only_some_tensors(tree: Whole) -> None:
    assert [name for name, _ in tree.run.tensors(3, names=["c", "a"])] == ["a", "c"]
    with pytest.raises(TensorMismatchError, match="'d'"):
        list(tree.run.tensors(3, names=["d"]))


def test_large_models_lie_in_a_nameless_file(tree: Whole, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for bound in ("restore.IN_MEMORY_BYTES", "restore.DECODED_ELEMENTS", "objects.MAPPED_BYTES"):
        monkeypatch.setattr(f"vllm_delta_sync.run.{bound}", 0)
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    made: list[int] = []

    def watched(size: int) -> np.ndarray:
        made.append(size)
        return scratch_file(size)

    monkeypatch.setattr(chain_read, "scratch_file", watched)
    tree.publish(0.1, full=(1,), base=2)
    expect(tree.run, tree, 10, 10)
    assert len(made) == 1
    assert made[0] >= TABLE.full_bytes
    with pytest.raises(StoreError, match=r"no room for .*TMPDIR"):
        scratch_file(1 << 60)
    assert list(folder.iterdir()) == []


def test_damaged_merged_delta_or_delta_is_avoided(tree: Whole) -> None:
    tree.flip(tree.run.merged_delta(0, 4).objects[0].key)
    expect(tree.run, tree, 9, 9)
    tree.flip(tree.object_of(2))
    with pytest.raises(DigestError):
        tree.run.snapshot(9)
    tree.beside(2)
    for version in (9, 2, 1):
        expect(tree.run, tree, version, version)
    # An anchor is taken for its own version only.
    tree.forge(side.anchor_key(6), tree.run.anchor(2), version=6)
    expect(tree.run, tree, 6, 6)
    tree.lose(side.anchor_key(6))
    tree.flip(tree.run.anchor(2).objects[0].key)
    with pytest.raises(DigestError):
        tree.run.snapshot(9)


def test_what_a_step_declares_is_checked_before_it_is_applied(tree: Whole) -> None:
    run = tree.run
    for held, target, field in ((8, 9, "fingerprint"), (0, 4, "first_fingerprint"), (0, 4, "last_fingerprint")):
        [step] = find_steps(run, held, target)
        liar = Step(run, step.document.model_copy(update={field: "0" * 32}))
        for in_pieces in (False, True):
            state = state_of(TABLE, tree.writer.bits[held])
            with pytest.raises(FingerprintError):
                apply_step(liar, state, in_pieces=in_pieces)
            assert_bits(state, tree.writer.bits[held])


def empty_state(tree: Whole, change: Callable[[State], object] = lambda state: None) -> State:
    blank = [np.zeros_like(bits) for bits in tree.writer.bits[0]]
    state = {spec.name: tensor_from_bits(bits, spec) for spec, bits in zip(TABLE, blank, strict=True)}
    change(state)
    return state


def test_state_dict_is_filled_in_place(tree: Whole) -> None:
    state = empty_state(tree)
    places = {name: tensor.data_ptr() for name, tensor in state.items()}
    tree.run.load_into(state, 5)
    for tensor, spec in enumerate(TABLE):
        assert np.array_equal(bits_of(state[spec.name]), tree.writer.bits[5][tensor])
        assert state[spec.name].data_ptr() == places[spec.name]


def test_model_with_masters_and_a_tied_name_is_filled(tree: Whole) -> None:
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


@pytest.mark.parametrize("sharded", [False, True])
def test_target_that_ties_what_the_run_has_untied_is_left_alone(sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [TensorSpec(name, "F32", (4, 3)) for name in ("embed", "head", "other")]
    written = Written(MemoryBucket(), table=TensorTable(specs))
    monkeypatch.setattr("vllm_delta_sync.run.partial.any_sharded", lambda targets: sharded)
    state = {spec.name: torch.zeros(4, 3) for spec in specs}
    state["head"] = state["embed"]
    run = Run(written.bucket)
    with pytest.raises(TensorMismatchError, match="'embed' and 'head' are one tensor"):
        run.load_into(state, 0)
    assert not any(tensor.any() for tensor in state.values())
    # Of one that ties them too, both are equal.
    bits = [written.writer.bits[0][0].copy() for _ in specs]
    written.anchor(bits)
    run.load_into(state, 1)
    assert np.array_equal(bits_of(state["head"]), bits[0])


def test_target_that_does_not_fit_is_left_alone(tree: Whole) -> None:
    changes: dict[str, Callable[[State], object]] = {
        "'b'": lambda state: state.pop("b"),
        "'extra'": lambda state: state.update(extra=torch.zeros(3)),
        r"\[3, 40\]": lambda state: state.update(a=torch.zeros(3, 40)),
        "torch.float32 in the run; give": lambda state: state.update(b=torch.zeros(7, dtype=torch.bfloat16)),
        # Elements of a quantized weight are no values without its scales.
        "torch.int8 in the run; give": lambda state: state.update(c=torch.zeros(())),
        # All parameters of some trainers are in one storage.
        "'beside'": lambda state: state.update(zip(("b", "beside"), torch.zeros(2, 7), strict=True)),
    }
    for named, change in changes.items():
        state = empty_state(tree, change)
        before = {name: tensor.clone() for name, tensor in state.items()}
        with pytest.raises(TensorMismatchError, match=named):
            tree.run.load_into(state, 5)
        assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    # Beside tensors there may be the state of a module, such as Transformer Engine's.
    tree.run.load_into(empty_state(tree, lambda state: state.update(_extra_state=None)), 5)  # type: ignore[call-overload]
    # One that holds a part is filled if asked.
    state = empty_state(tree, lambda state: state.pop("b"))
    state["extra"] = torch.zeros(3)
    tree.run.load_into(state, 5, strict=False)
    assert np.array_equal(bits_of(state["a"]), tree.writer.bits[5][0])
    # What would stay as it is must not count as filled.
    arrays: Any = {name: tensor.float().numpy() for name, tensor in state.items()}
    for strict in (False, True):
        with pytest.raises(TensorMismatchError, match="'a' of the target is a ndarray; give a"):
            tree.run.load_into(arrays, 5, strict=strict)
