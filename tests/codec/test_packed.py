"""Codec packed against a second one in plain numpy, which only knows docs/FORMAT.md; and the loops it runs."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import reference_packed as reference
from tests.support.samples import CONTEXT, changes_between, patterns
from vllm_delta_sync.codec import packed, packed_kernels
from vllm_delta_sync.codec.delta_object import Arrays, BlockEntries, open_blocks, parse_blocks
from vllm_delta_sync.codec.delta_reader import decode
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.codec.packed import FullReader, LazyFullTensors, encode_full
from vllm_delta_sync.format.dtypes import DTYPES
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.safetensors_file import Container, write_container
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import Changes, Full, Sparse

U64 = np.uint64


def group_of(dtype: str, tensors: list[reference.Tensor]) -> tuple[Sparse, TensorTable]:
    table = TensorTable([TensorSpec(f"w{i:03d}", dtype, (numel,)) for i, (_, _, numel) in enumerate(tensors)])
    counts = np.array([positions.size for positions, _, _ in tensors], np.int64)
    positions, distances = (np.concatenate([tensor[part] for tensor in tensors]) for part in (0, 1))
    ids = np.arange(len(tensors), dtype=np.uint32)
    return Sparse(dtype, ids, counts, positions.astype(np.int64), distances, relative=True), table


def encoded(group: Sparse, table: TensorTable, compression: str) -> tuple[Arrays, list[dict[str, Any]]]:
    blocks = BlockEntries()
    packed.encode(blocks, [group], table, compression)  # type: ignore[arg-type]
    return blocks.arrays, blocks.rows


@st.composite
def tensors_of(draw: st.DrawFn, dtype: str) -> list[reference.Tensor]:
    """Some tensors, few and many elements changed, near each other and far apart."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        numel = draw(st.sampled_from([1, 7, 8, 9, 64, 300, 5000]))
        many = draw(st.booleans())
        limit = numel if many else max(1, numel // 50)
        positions = sorted(draw(st.sets(st.integers(0, numel - 1), min_size=1, max_size=min(limit, 40))))
        steps = st.one_of(st.integers(0, 300), patterns(dtype))
        values = draw(st.lists(steps, min_size=len(positions), max_size=len(positions)))
        width = 8 * DTYPES[dtype].itemsize
        kept = np.array([value % (1 << width) for value in values], DTYPES[dtype].uint)
        found.append((np.array(positions, np.int64), kept, numel))
    return found


@given(st.data(), st.sampled_from(sorted(DTYPES)))
def test_planes_are_those_of_the_reference_and_come_back(data: st.DataObject, dtype: str) -> None:
    tensors = data.draw(tensors_of(dtype))
    group, table = group_of(dtype, tensors)
    width = 8 * DTYPES[dtype].itemsize
    arrays, rows = encoded(group, table, "none")
    blocks = parse_blocks(rows, "object")
    kinds = {False: "sparse", True: "dense"}
    of_kind = {dense: [t for t in tensors if (4 * t[0].size > t[2]) is dense] for dense in kinds}
    assert [block.kind for block in blocks] == [kinds[dense] for dense, chosen in of_kind.items() if chosen]
    for block in blocks:
        chosen = of_kind[block.kind == "dense"]
        planes = reference.encode(chosen, width, block.kind == "dense")
        assert set(arrays) >= {f"{block.name}.{part}" for part in planes}
        found = {part: arrays[f"{block.name}.{part}"][1] for part in planes}
        assert {part: plane.tolist() for part, plane in planes.items()} == {k: v.tolist() for k, v in found.items()}
        counts, numels = [t[0].size for t in chosen], [t[2] for t in chosen]
        back = reference.decode(found, counts, numels, width, block.kind == "dense")
        assert [(p.tolist(), d.tolist()) for p, d, _ in back] == [(p.tolist(), d.tolist()) for p, d, _ in chosen]
    assert {name.split(".")[0] for name in arrays} == {block.name for block in blocks}
    assert set(arrays) == packed.entry_names(blocks)


@pytest.mark.parametrize(("changed", "kind"), [(15, "sparse"), (16, "sparse"), (17, "dense")])
def test_a_mask_is_written_when_more_than_a_quarter_changed(changed: int, kind: str) -> None:
    group, table = group_of("BF16", [(np.arange(changed), np.ones(changed, np.uint16), 64)])
    _, rows = encoded(group, table, "none")
    assert [block.kind for block in parse_blocks(rows, "object")] == [kind]


@given(st.data(), st.sampled_from(sorted(DTYPES)), st.sampled_from(["zstd", "none"]))
def test_decoding_gives_what_was_encoded(data: st.DataObject, dtype: str, compression: str) -> None:
    group, table = group_of(dtype, data.draw(tensors_of(dtype)))
    arrays, rows = encoded(group, table, compression)
    container = Container(write_container(arrays, {}))
    opened = open_blocks(container, table, parse_blocks(rows, "object"), None, "object")
    assert sum(int(item.directory.counts.sum()) for item in opened) == group.positions.size
    found: dict[int, tuple[list[int], list[int]]] = {}
    for item in opened:
        reader = packed.BlockReader(container, table, item, compression)  # type: ignore[arg-type]
        cut = data.draw(st.integers(1, item.directory.ids.size))
        for last in sorted({cut, item.directory.ids.size}):
            found |= {tensor: (p.tolist(), d.tolist()) for tensor, p, d in reader.take(last).tensors()}
    assert found == {tensor: (p.tolist(), d.tolist()) for tensor, p, d in group.tensors()}


@given(st.lists(st.lists(st.integers(0, 2**47), min_size=1, max_size=30, unique=True).map(sorted), max_size=4))
def test_gaps_come_back_however_far(groups: list[list[int]]) -> None:
    positions = np.array([position for group in groups for position in group], np.int64)
    counts = np.array([len(group) for group in groups], np.int64)
    numels = np.array([group[-1] + 1 for group in groups], np.int64)
    shifts = np.array([reference.shift_of(len(group), group[-1] + 1) for group in groups], np.int64)
    gaps, escapes = np.empty(positions.size, np.uint8), np.empty(positions.size, U64)
    low = np.zeros(int(((counts * shifts + 7) // 8).sum()), np.uint8)
    used = packed_kernels.encode_gaps(positions, counts, shifts, gaps, low, escapes)
    found = np.empty(positions.size, np.int64)
    arguments = gaps, low, escapes[:used].copy(), counts, shifts
    assert packed_kernels.decode_gaps(*arguments, numels, found) == -1
    assert found.tolist() == positions.tolist()
    for row in range(counts.size):
        shorter = numels.copy()
        shorter[row] -= 1
        assert packed_kernels.decode_gaps(*arguments, shorter, found) == row


@pytest.mark.parametrize(
    ("gaps", "low", "escapes", "shift", "counts", "numels", "bad"),
    [
        ([255], [], [], 0, [1], [1000], 1),  # an escape is missing
        ([3], [], [9], 0, [1], [1000], 1),  # one too many
        ([255], [], [2**64 - 256], 0, [1], [1000], 0),  # would wrap around
        ([255, 255], [], [2**63, 2**63], 0, [2], [2**48], 0),
        ([0, 0, 0], [], [], 0, [1, 2], [1, 1], 1),  # second tensor's second position
        ([4], [], [], 0, [1], [4], 0),
        ([255], [0] * 6, [2**48 - 1], 42, [1], [2**48], 0),  # shifted, it would wrap around to inside
        ([1], [0], [], 3, [1], [8], 0),
        ([0], [7], [], 3, [1], [8], -1),
        ([0], [8], [], 3, [1], [8], 0),  # a low bit behind the last element
        ([0, 0], [0x40], [], 3, [2], [999], 0),
    ],
)
def test_gaps_that_lead_nowhere(
    gaps: list[int], low: list[int], escapes: list[int], shift: int, counts: list[int], numels: list[int], bad: int
) -> None:
    found = np.zeros(len(gaps), np.int64)
    planes = np.array(gaps, np.uint8), np.array(low, np.uint8), np.array(escapes, U64)
    sizes = np.array(counts, np.int64), np.full(len(counts), shift), np.array(numels, np.int64)
    assert packed_kernels.decode_gaps(*planes, *sizes, found) == bad


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2**40 - 1)), min_size=1, max_size=4))
def test_a_mask_comes_back_and_nothing_else_passes(rows: list[tuple[int, int]]) -> None:
    groups = [[i for i in range(numel) if bits >> i & 1] or [0] for numel, bits in rows]
    counts = np.array([len(group) for group in groups], np.int64)
    numels = np.array([numel for numel, _ in rows], np.int64)
    mask = np.zeros(int(((numels + 7) // 8).sum()), np.uint8)
    packed_kernels.encode_mask(np.concatenate(groups).astype(np.int64), counts, numels, mask)
    found = np.empty(counts.sum(), np.int64)
    assert packed_kernels.decode_mask(mask, counts, numels, found) == -1
    assert found.tolist() == np.concatenate(groups).tolist()
    # Whichever bit is turned, one count is wrong, or a bit stands behind the end of a tensor.
    for bit in range(8 * mask.size):
        turned = mask.copy()
        turned[bit // 8] ^= 1 << (bit % 8)
        assert packed_kernels.decode_mask(turned, counts, numels, found) >= 0


def test_codes_behind_the_last_element_are_told() -> None:
    counts = np.array([5, 1], np.int64)
    codes = np.array([0b11100100, 0b10, 0b01], np.uint8)
    assert packed_kernels.count_codes(codes, counts) == (2, 1, -1)
    assert packed_kernels.count_codes(codes | np.array([0, 0b100, 0], np.uint8), counts)[2] == 0
    assert packed_kernels.count_codes(codes | np.array([0, 0, 0b10000000], np.uint8), counts)[2] == 1


def test_the_writer_takes_whichever_is_smaller() -> None:
    """Gaps up to a quarter changed, a mask from there on: each beats the other there."""
    random = np.random.default_rng(0)
    sizes = {}
    for share in (0.1, 0.6):
        positions = np.flatnonzero(random.random(200_000) < share)
        group, table = group_of("BF16", [(positions, np.full(positions.size, 2, np.uint16), 200_000)])
        for ratio in (1, 10**9):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(packed, "DENSE_RATIO", ratio)
                arrays, rows = encoded(group, table, "zstd")
            sizes[share, rows[0]["kind"]] = sum(array.nbytes for _, array in arrays.values())
    assert sizes[0.1, "sparse"] < 0.98 * sizes[0.1, "dense"]
    assert sizes[0.6, "dense"] < 0.9 * sizes[0.6, "sparse"]


@pytest.mark.parametrize(
    ("share", "most"), [(0.001, 1.04), (0.005, 1.04), (0.02, 1.04), (0.1, 1.04), (0.5, 1.04), (0.95, 1.1)]
)
def test_size_is_near_the_entropy_of_positions_and_values(share: float, most: float) -> None:
    random = np.random.default_rng(1)
    numel = int(min(4e7, 60_000 / share))
    gaps = random.geometric(share, int(numel * share * 1.01))
    positions = np.cumsum(gaps) - 1
    positions = positions[positions < numel]
    steps = random.choice(
        np.array([-1, 1, -2, 2, 3, -9], np.int16), positions.size, p=[0.45, 0.44, 0.04, 0.04, 0.02, 0.01]
    )
    group, table = group_of("BF16", [(positions, steps.view(np.uint16), numel)])
    arrays, _ = encoded(group, table, "zstd")
    p = positions.size / numel
    bits = -p * np.log2(p) - (1 - p) * np.log2(1 - p)
    weights = np.unique(steps, return_counts=True)[1] / steps.size
    bound = numel * bits / 8 - positions.size * float((weights * np.log2(weights)).sum()) / 8
    assert sum(array.nbytes for _, array in arrays.values()) < most * bound


@given(st.data(), st.sampled_from(sorted(DTYPES)), st.lists(st.integers(1, 20), max_size=5))
def test_planes_in_pieces_are_those_of_the_whole(data: st.DataObject, dtype: str, sizes: list[int]) -> None:
    """Wherever the pieces end, whatever their dtype, few and many elements changed."""
    positions, distances, numel = data.draw(tensors_of(dtype))[0]
    group, table = group_of(dtype, [(positions, distances, numel)])
    whole, rows = encoded(group, table, "none")
    cuts = np.cumsum(sizes)
    pieces = zip(np.split(positions, cuts), np.split(distances, cuts), strict=True)
    found: dict[str, list[np.ndarray]] = {}
    kind = packed.write_planes(
        table[0], positions.size, pieces, lambda part, plane: found.setdefault(part, []).append(plane.copy())
    )
    assert kind == rows[0]["kind"]
    expected = {name.removeprefix("@0."): array for name, (_, array) in whole.items()}
    assert found.keys() == expected.keys() - {"ids", "counts"}
    for part, plane in found.items():
        assert np.array_equal(np.concatenate(plane), expected[part]), part


@given(st.data(), st.sampled_from(sorted(DTYPES)), st.sampled_from(["zstd", "none"]), st.sampled_from([1, 20, 10**6]))
def test_tensors_in_full_come_back(data: st.DataObject, dtype: str, compression: str, most: int) -> None:
    numels = data.draw(st.lists(st.sampled_from([0, 1, 9, 33]), min_size=1, max_size=4))
    table = TensorTable([TensorSpec(f"w{i}", dtype, (numel,)) for i, numel in enumerate(numels)])
    tensors = []
    for tensor, numel in enumerate(numels):
        bits = data.draw(st.lists(patterns(dtype), min_size=numel, max_size=numel))
        tensors.append(Full(tensor, np.array(bits, DTYPES[dtype].uint)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_delta_sync.codec.packed.BLOCK_ELEMENTS", most)
        written = BlockEntries(3)
        encode_full(written, tensors[::-1], table, compression)  # type: ignore[arg-type]
    arrays, rows = written.arrays, written.rows
    assert all(name.startswith(tuple(f"@{3 + row}." for row in range(len(rows)))) for name in arrays)
    blocks = parse_blocks([{"dtype": dtype, "kind": "full"}] * 3 + rows, "object")[3:]
    container = Container(write_container(arrays, {}))
    opened = open_blocks(container, table, blocks, sum(numels), "object")
    lazy = LazyFullTensors([], [FullReader(container, item, compression) for item in opened])  # type: ignore[arg-type]
    assert sorted(lazy) == list(range(len(numels)))
    assert len(lazy) == len(numels)
    for full in tensors + tensors[::-1]:
        assert lazy[full.id].bits.tobytes() == full.bits.tobytes()
        assert lazy[full.id].bits.dtype == full.bits.dtype


def test_a_tensor_in_full_is_compressed() -> None:
    table = TensorTable([TensorSpec("w", "BF16", (300, 300))])
    weights = np.random.default_rng(2).standard_normal(90_000).astype(np.float32)
    bits = (weights.view(np.uint32) >> 16).astype(np.uint16)
    changes = Changes(full=[Full(0, bits)], fingerprints={0: Fingerprint(1, 2)})
    sizes = {}
    for compression in ("zstd", "none"):
        data = encode(changes, table, "packed", compression, CONTEXT)  # type: ignore[arg-type]
        found = decode(data, table, CONTEXT)
        assert [full.bits.tobytes() for full in found.full] == [bits.tobytes()]
        assert found.fingerprints == changes.fingerprints
        sizes[compression] = len(data)
    assert sizes["zstd"] < 0.75 * bits.nbytes < bits.nbytes < sizes["none"]


def test_one_object_holds_every_kind() -> None:
    table = TensorTable([TensorSpec(name, "BF16", (4000,)) for name in "abcd"])
    old = [np.arange(4000, dtype=np.uint16) for _ in table]
    new = [bits.copy() for bits in old]
    new[0][5] += 1
    new[1][::2] += 3
    new[3][:] = 7
    data = encode(changes_between(table, old, new, full=[3]), table, "packed", "zstd", CONTEXT)
    assert '{\\"dtype\\":\\"BF16\\",\\"kind\\":\\"dense\\"}' in data[:2000].decode("latin-1")
    found = decode(data, table, CONTEXT)
    assert [group.ids.tolist() for group in found.sparse] == [[0], [1]]
    assert [full.id for full in found.full] == [3]
    assert set(found.fingerprints) == {0, 1, 3}
