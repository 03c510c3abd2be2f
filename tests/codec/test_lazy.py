"""Delta objects read and written piece by piece: the same as whole, in memory of a few tensors."""

import tempfile
from collections.abc import Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codec.test_delta import ways
from tests.codec.test_merge import histories
from tests.codec.tiling import classes_at
from tests.support.merging import merged
from tests.support.samples import CONTEXT, changes_between, every_dtype_table, nudge, random_bits, state_of
from tests.support.written import TABLE
from vllm_delta_sync.codec import delta_reader as reading
from vllm_delta_sync.codec import merge_spool as spooling
from vllm_delta_sync.codec.delta_reader import DeltaReader, decode, pieces_of
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.codec.merge import merge
from vllm_delta_sync.codec.merge_spool import DeltaSpool
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.errors import ChainError, UnsupportedError
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import Bits, Changes, Full, Positions, Sparse


def spooled(parts: list[Changes], table: TensorTable, folder: Path) -> Changes:
    lazy = [DeltaReader(encode(part, table, "plain", "zstd", CONTEXT), table, CONTEXT) for part in parts]
    sums: dict[int, Fingerprint] = {}
    for part in lazy:
        for tensor, change in part.fingerprints.items():
            sums[tensor] = sums.get(tensor, Fingerprint()) + change
    spool = DeltaSpool(folder, table, CONTEXT, "zstd")
    for piece in merge([[part] for part in lazy], table):
        spool.add(piece)
    ref = spool.finish(folder / "object", sums)
    spool.close()
    data = (folder / "object").read_bytes()
    assert len(data) == ref.bytes
    assert [file.name for file in folder.iterdir()] == ["object"]
    return decode(data, table, CONTEXT)


@given(history=histories(), batch=st.sampled_from([1, 3, 1 << 20]), block=st.sampled_from([1, 4, 1 << 20]))
def test_merging_piece_by_piece_does_what_the_versions_do(
    history: tuple[TensorTable, list[list[Bits]], list[Changes]], batch: int, block: int
) -> None:
    table, versions, parts = history
    # What is no distance is sent in full instead, so that every history can be carried by codec plain.
    relative = []
    for number, part in enumerate(parts):
        absolute = [int(tensor) for group in part.sparse if not group.relative for tensor in group.ids]
        whole = {*absolute, *(full.id for full in part.full)}
        relative.append(changes_between(table, versions[number], versions[number + 1], full=whole))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "LAZY_ELEMENTS", batch)
        patch.setattr(spooling, "SPOOL_ELEMENTS", block)
        found = spooled(relative, table, Path(folder))
    one_by_one, leap = state_of(table, versions[0]), state_of(table, versions[0])
    for part in relative:
        one_by_one.apply(part)
    leap.apply(found)
    for got, followed, expected in zip(leap.bits, one_by_one.bits, versions[-1], strict=True):
        assert got.tobytes() == followed.tobytes() == expected.tobytes()
    assert leap.fingerprints == one_by_one.fingerprints
    # The same elements in batches of any size.
    assert found.changed == merged(relative, table).changed


@pytest.mark.parametrize("codec", ["plain", "tiled", "raw"])
@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_large_tensors_are_written_with_a_piece_in_memory(
    codec: Codec, compression: Compression, tmp_path: Path
) -> None:
    """Blocks of 50 elements: most tensors are blocks of their own, whose changes come 7 at a time; one is in full."""
    random = np.random.default_rng(5)
    old = random_bits(TABLE, random)
    new = nudge(old, random, 0.3)
    changes = changes_between(TABLE, old, new, full=[2])
    spool = DeltaSpool(tmp_path, TABLE, CONTEXT, compression, codec, state_of(TABLE, old).base_tensor, 50)
    for group in sorted(changes.sparse, key=lambda group: group.dtype):
        for tensor, positions, distances in group.tensors():
            data = distances if codec != "raw" else new[tensor][positions]

            def pieces(positions: Positions = positions, data: Bits = data) -> Iterator[tuple[Positions, Bits]]:
                return ((positions[at : at + 7], data[at : at + 7]) for at in range(0, positions.size, 7))

            spool.add_large(tensor, positions.size, pieces)
    spool.add(changes.full[0])
    ref = spool.finish(tmp_path / "object", changes.fingerprints)
    spool.close()
    assert [file.name for file in tmp_path.iterdir()] == ["object"]
    read = (tmp_path / "object").read_bytes()
    assert sha256(read).hexdigest() == ref.sha256
    state = state_of(TABLE, old)
    state.apply(decode(read, TABLE, CONTEXT, state.base_tensor))
    assert [bits.tobytes() for bits in state.bits] == [bits.tobytes() for bits in new]


@ways
def test_pieces_of_an_object_are_the_object(
    codec: Codec, compression: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All dtypes, a scalar, an empty tensor in full. A piece may be applied before the next one is read."""
    monkeypatch.setattr(reading, "LAZY_ELEMENTS", 50)
    table = every_dtype_table(70_000)
    random = np.random.default_rng(4)
    old = random_bits(table, random)
    new = nudge(old, random, 0.001)
    changes = changes_between(table, old, new, codec, full=[table.index("empty"), 1])
    state = state_of(table, old)
    data = encode(changes, table, codec, compression, CONTEXT, state.base_tensor)
    lazy = DeltaReader(np.frombuffer(data, np.uint8), table, CONTEXT, state.base_tensor if codec == "tiled" else None)
    assert (lazy.changed, lazy.fingerprints) == (changes.changed, changes.fingerprints)
    pieces = list(pieces_of([lazy]))
    assert len(pieces) > 10
    for piece in pieces:
        state.apply(piece)
    assert [bits.tobytes() for bits in state.bits] == [bits.tobytes() for bits in new]


def test_backwards_the_changes_lead_back_or_are_refused() -> None:
    random = np.random.default_rng(7)
    old = random_bits(TABLE, random)
    new = nudge(old, random, 0.1)
    state = state_of(TABLE, new)
    distances = changes_between(TABLE, old, new)
    state.apply(DeltaReader(encode(distances, TABLE, "plain", "zstd", CONTEXT), TABLE, CONTEXT, None, True).rest())
    assert [bits.tobytes() for bits in state.bits] == [bits.tobytes() for bits in old]
    others: list[tuple[Changes, Codec]] = [
        (changes_between(TABLE, old, new, "raw"), "raw"),
        (changes_between(TABLE, old, new, full=[1]), "plain"),
    ]
    for changes, codec in others:
        with pytest.raises(ChainError, match="does not contain the old bits"):
            DeltaReader(encode(changes, TABLE, codec, "none", CONTEXT), TABLE, CONTEXT, None, True)
    base = state_of(TABLE, old).base_tensor
    with classes_at([1, 1, 1, 1]):
        data = encode(distances, TABLE, "tiled", "zstd", CONTEXT, base)
    reader = DeltaReader(data, TABLE, CONTEXT, base, True)
    with pytest.raises(UnsupportedError, match="only with the weights of its base version"):
        reader.rest()


def test_a_tensor_is_looked_at_no_more_often_if_its_block_has_many(tmp_path: Path) -> None:
    looks = 0

    class SparseLookedAt(Sparse):
        def __getattribute__(self, name: str) -> Any:
            nonlocal looks
            looks += name == "positions"
            return super().__getattribute__(name)

    class FullLookedAt(Full):
        def __getattribute__(self, name: str) -> Any:
            nonlocal looks
            looks += name == "bits"
            return super().__getattribute__(name)

    table = TensorTable([TensorSpec(f"{number:04d}", "U8", (4,)) for number in range(1000)])
    one = np.ones(1, np.int64)
    with closing(DeltaSpool(tmp_path, table, CONTEXT, "zstd")) as spool:
        for number in range(0, 1000, 2):
            spool.add(SparseLookedAt("U8", np.array([number], np.uint32), one, one, one.astype(np.uint8), True))
            spool.add(FullLookedAt(number + 1, np.ones(4, np.uint8)))
        spool.finish(tmp_path / "object", {number: Fingerprint() for number in range(1000)})
    assert looks < 10_000
