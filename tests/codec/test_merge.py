"""Merging versions: one apply that does what many do, bit for bit."""

from copy import deepcopy
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.merging import merged
from tests.support.samples import CONTEXT, changes_between, every_dtype_table, nudge, patterns, random_bits, state_of
from tests.support.seeds import few_by_default
from vllm_delta_sync.codec import delta_reader as reading
from vllm_delta_sync.codec import merge_kernels
from vllm_delta_sync.codec.delta_reader import DeltaReader
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.codec.merge import RollingBase, apply_row, merge
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, Changes, Sparse

DTYPE_NAMES = ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "I64", "I32", "I8", "U16", "BOOL"]
KINDS = ["plain", "raw", "mixed", "full", "same"]


def part_between(table: TensorTable, old: list[Bits], new: list[Bits], kinds: list[list[int]]) -> Changes:
    """What leads from ``old`` to ``new``, as two ranks send it: first distances, then new bits and tensors in full.

    ``kinds`` has per tensor and element 1 where it is sent as a distance, 0 where as new bits; [] for all in full.
    """
    middle = [bits.copy() for bits in old]
    for tensor, kind in enumerate(kinds):
        by_distance = np.array(kind, bool) if kind else np.zeros(old[tensor].size, bool)
        middle[tensor][by_distance] = new[tensor][by_distance]
    full = [tensor for tensor, kind in enumerate(kinds) if not kind]
    one, two = changes_between(table, old, middle), changes_between(table, middle, new, "raw", full)
    sums = dict(one.fingerprints)
    for tensor, change in two.fingerprints.items():
        sums[tensor] = sums.get(tensor, Fingerprint()) + change
    return Changes(one.sparse + two.sparse, two.full, sums)


@st.composite
def histories(draw: st.DrawFn) -> tuple[TensorTable, list[list[Bits]], list[Changes]]:
    """A table, the bits at each of 1 to 7 versions, and what lies between them.

    Each tensor has few patterns to choose from, so elements go back and forth.
    """
    dtypes = draw(st.lists(st.sampled_from(DTYPE_NAMES), min_size=1, max_size=4))
    shapes = st.sampled_from([(), (0,), (1,), (5,), (2, 4)])
    table = TensorTable([TensorSpec(f"t{i}", dtype, draw(shapes)) for i, dtype in enumerate(dtypes)])
    palettes = [draw(st.lists(patterns(dtype), min_size=2, max_size=4)) for dtype in dtypes]

    def chosen(tensor: int) -> Bits:
        numel, element = table[tensor].numel, table[tensor].element
        values = draw(st.lists(st.sampled_from(palettes[tensor]), min_size=numel, max_size=numel))
        return np.array(values, element.uint)

    versions = [[chosen(tensor) for tensor in range(len(table))]]
    parts = []
    for _ in range(draw(st.integers(0, 6))):
        new, kinds = [], []
        for tensor, old in enumerate(versions[-1]):
            kind = draw(st.sampled_from(KINDS))
            new.append(old if kind == "same" else chosen(tensor))
            by_distance = {"raw": [0] * old.size, "full": []}.get(kind, [1] * old.size)
            if kind == "mixed":
                by_distance = draw(st.lists(st.integers(0, 1), min_size=old.size, max_size=old.size))
            kinds.append(by_distance)
        parts.append(part_between(table, versions[-1], new, kinds))
        versions.append(new)
    return table, versions, parts


def check_form(found: Changes) -> None:
    """What the docstring of ``merge`` says of the result, and Sparse of its arrays."""
    kinds = [(tensor, group.relative) for group in found.sparse for tensor in group.ids.tolist()]
    assert len(set(kinds)) == len(kinds)
    carried: dict[int, np.ndarray] = {}
    for group in found.sparse:
        assert [str(array.dtype) for array in (group.ids, group.positions)] == ["uint32", "int64"]
        assert group.data.dtype == group.element.uint
        assert np.all(np.diff(group.ids.astype(np.int64)) > 0)
        assert group.counts.min() >= 1
        assert group.counts.sum() == group.positions.size == group.data.size
        for tensor, positions, _ in group.tensors():
            assert np.all(np.diff(positions) > 0)
            assert not np.intersect1d(positions, carried.get(tensor, [])).size
            carried[tensor] = np.concatenate([carried.get(tensor, positions[:0]), positions])
        assert not group.relative or np.all(group.data)
    full = [tensor.id for tensor in found.full]
    assert full == sorted(set(full))
    assert not set(full) & set(carried)
    assert list(found.fingerprints) == sorted([*full, *carried])


def check_merge(table: TensorTable, versions: list[list[Bits]], parts: list[Changes]) -> Changes:
    """Merge, and hold it against applying the parts one by one; → the merged changes."""
    before = deepcopy(parts)
    found = merged(parts, table)
    assert_same(parts, before)
    step, leap = state_of(table, versions[0]), state_of(table, versions[0])
    for part in parts:
        step.apply(part)
    leap.apply(found)
    for got, followed, expected in zip(leap.bits, step.bits, versions[-1], strict=True):
        assert got.tobytes() == followed.tobytes() == expected.tobytes()
    assert leap.fingerprints == step.fingerprints == state_of(table, versions[-1]).fingerprints
    check_form(found)
    return found


def assert_same(parts: list[Changes], others: list[Changes]) -> None:
    for part, other in zip(parts, others, strict=True):
        assert part.fingerprints == other.fingerprints
        for group, copied in zip(part.sparse, other.sparse, strict=True):
            assert (group.dtype, group.relative) == (copied.dtype, copied.relative)
            for name in ("ids", "counts", "positions", "data"):
                assert np.array_equal(getattr(group, name), getattr(copied, name))
        for full, copy in zip(part.full, other.full, strict=True):
            assert full.id == copy.id
            assert np.array_equal(full.bits, copy.bits)


@given(histories())
# What lies between two versions is of five kinds, for each of four tensors.
@few_by_default(75)
def test_one_apply_does_what_many_do(history: tuple[TensorTable, list[list[Bits]], list[Changes]]) -> None:
    check_merge(*history)


@given(histories())
def test_distances_there_and_back_fold_to_nothing(history: tuple[TensorTable, list[list[Bits]], list[Changes]]) -> None:
    table, versions, _ = history
    walk = [*versions, *versions[-2::-1]]
    found = merged([changes_between(table, old, new) for old, new in pairwise(walk)], table)
    assert (found.sparse, found.full, found.fingerprints) == ([], [], {})


def test_batches_and_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors larger than a tile, in several batches, dense and thin, from steps in every codec."""
    monkeypatch.setattr(reading, "LAZY_ELEMENTS", 9_000)
    tile = int(merge_kernels.TILE)
    sizes = [1, tile - 1, tile, tile + 1, 3 * tile + 5, 40 * tile]
    specs = [TensorSpec(f"{dtype}.{n}", dtype, (n,)) for dtype in ("BF16", "F32", "F8_E4M3", "F64") for n in sizes]
    table = TensorTable(specs)
    for seed, share in enumerate((0.5, 0.01, 0.0001)):
        random = np.random.default_rng(seed)
        versions = [random_bits(table, random)]
        parts = []
        codecs: list[Codec] = ["plain", "raw", "plain", "plain"]
        for codec in codecs:
            new = nudge(versions[-1], random, share)
            # The ends of a tile, in each version.
            for bits in new:
                bits[[0, -1, bits.size // 2, min(tile, bits.size - 1)]] ^= bits.dtype.type(1)
            parts.append(changes_between(table, versions[-1], new, codec, full=[seed] if codec == "raw" else []))
            versions.append(new)
        check_merge(table, versions, parts)
        check_merge(table, versions[2:], parts[2:])


def test_nothing_and_one_part() -> None:
    table = every_dtype_table(20)
    assert merged([], table) == Changes()
    assert merged([Changes(), Changes()], table) == Changes()
    random = np.random.default_rng(3)
    old = random_bits(table, random)
    new = nudge(old, random, 0.5)
    for codec in ("plain", "raw"):
        part = changes_between(table, old, new, codec, full=[3])
        part.sparse.sort(key=lambda group: group.dtype)
        part.fingerprints = dict(sorted(part.fingerprints.items()))
        assert_same([merged([part], table)], [part])
        assert_same([merged([Changes(), part, Changes()], table)], [part])


def test_old_bits_after_hundreds_of_steps_that_did_not_need_them() -> None:
    table = TensorTable([TensorSpec("t", "BF16", (256, 256))])
    versions = [np.random.default_rng(1).normal(size=65_536).astype("<f4").view("<u2")[1::2].copy()]
    for step in range(600):
        versions.append(versions[-1].copy())
        versions[-1][step] = 0x3F80  # 1.0: from another class than before, which the last step must see
    small = (versions[-1] & 0x7FFF) < 0x3E00
    versions.append(np.where(small, versions[-1] + np.uint16(1), versions[-1]))
    base = RollingBase(lambda tensor: BaseTensor(versions[0]))
    steps = []
    for old, new in pairwise(versions):
        part = changes_between(table, [old], [new])
        data = encode(part, table, "tiled", "zstd", CONTEXT, lambda tensor: BaseTensor(old))  # noqa: B023
        steps.append([DeltaReader(data, table, CONTEXT, base)])
    bits = versions[0].copy()
    for piece in merge(steps, table, base):
        assert isinstance(piece, Sparse)
        apply_row(bits, piece, 0)
    assert np.array_equal(bits, versions[-1])
