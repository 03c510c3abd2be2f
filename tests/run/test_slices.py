"""Boxes of versions: those of a snapshot, proven as far as is said, without a whole model in memory."""

import logging
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.running import counted
from tests.support.samples import changes_between, flip, nudge
from tests.support.seeds import few_by_default
from tests.support.written import Written
from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.codec.delta_object import DeltaContext, required_features
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.errors import (
    BaseUnavailableError,
    DigestError,
    FingerprintError,
    NotFoundError,
    TensorMismatchError,
)
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.run import restore as chain_read
from vllm_delta_sync.run.partial import fingerprint_box, restore_boxes
from vllm_delta_sync.run.read_plan import MERGE_WIDTH
from vllm_delta_sync.tensors.boxes import Box, boxes_of_range

TABLE = TensorTable(
    [
        TensorSpec("a", "BF16", (40, 3)),
        TensorSpec("b", "F32", (6, 5, 4)),
        TensorSpec("c", "I8", ()),
        TensorSpec("d", "BF16", (0, 4)),
        TensorSpec("e", "F8_E4M3", (3, 2, 4, 5)),
        TensorSpec("f", "F64", (11,)),
    ]
)
Boxes = dict[str, list[Box]]


class Grove(Written):
    """A run of several kinds of versions, of which boxes are read."""

    def __init__(
        self,
        folder: Path,
        start: Literal["anchor", "checkpoint", "branch"] = "anchor",
        seed: int = 0,
        table: TensorTable = TABLE,
    ) -> None:
        super().__init__(folder / "run", 0, seed, table, start)

    def grow(self, *kinds: str) -> None:
        """Versions, and what lies beside the newest one."""
        for kind in kinds:
            if kind == "beside":
                self.beside(self.head)
            if kind == "shards":
                self.publish_by_ranks(3)
            elif kind in ("raw", "tiled"):
                self.publish(0.1, kind)  # type: ignore[arg-type]
            else:
                base = self.head // 2 if kind == "break" else None
                self.publish(0.1, full=(1, 4) if kind == "full" else (), base=base)

    def expect(self, version: int, boxes: Boxes, run: Run | None = None) -> None:
        """Boxes of a version are those of its snapshot."""
        reader = self.run if run is None else run
        whole = reader.snapshot(version)
        found = restore_boxes(reader, reader.manifest(version), boxes)
        assert list(found) == list(boxes)
        for name, wanted in boxes.items():
            right = whole.bits[TABLE.index(name)]
            assert len(found[name]) == len(wanted)
            for box, bits in zip(wanted, found[name], strict=True):
                assert bits.dtype == right.dtype
                assert bits.flags.writeable
                assert np.array_equal(bits, box.view(right).reshape(-1))


def some_box(shape: tuple[int, ...], random: np.random.Generator) -> Box:
    sides = [sorted(random.integers(0, size + 1, 2).tolist()) for size in shape]
    return Box(tuple(first for first, _ in sides), tuple(last - first for first, last in sides), shape)


def ranges(shape: tuple[int, ...], cuts: list[int]) -> list[Box]:
    """The whole tensor, cut at flat indices."""
    ends = [*sorted(cuts), int(np.prod(shape, dtype=np.int64))]
    return [
        box for first, last in zip([0, *sorted(cuts)], ends, strict=True) for box in boxes_of_range(first, last, shape)
    ]


def random_boxes(random: np.random.Generator) -> Boxes:
    """Of each tensor nothing, some boxes, all of it, or all of it in pieces."""
    boxes: Boxes = {}
    for spec in TABLE:
        match random.integers(4):
            case 1:
                boxes[spec.name] = [some_box(spec.shape, random) for _ in range(random.integers(1, 4))]
            case 2:
                boxes[spec.name] = [Box.all_of(spec.shape)]
            case 3:
                boxes[spec.name] = ranges(spec.shape, random.integers(0, spec.numel + 1, 2).tolist())
    return boxes


def row_boxes(table: TensorTable, rank: int, size: int) -> Boxes:
    """What a rank of so many holds of each tensor: rows, as FSDP2 cuts them; the first one has what has no rows."""
    boxes: Boxes = {}
    for spec in table:
        if not spec.shape:
            boxes[spec.name] = [Box.all_of(())] if rank == 0 else []
            continue
        height = -(-spec.shape[0] // size)
        first = min(rank * height, spec.shape[0])
        last = min(first + height, spec.shape[0])
        rest = spec.shape[1:]
        boxes[spec.name] = [Box((first, *(0 for _ in rest)), (last - first, *rest), spec.shape)]
    return boxes


@pytest.fixture
def grove(tmp_path: Path) -> Grove:
    made = Grove(tmp_path)
    made.grow(*["delta", "shards"] * 4, "delta")
    made.merged_deltas(MERGE_WIDTH)
    return made


@few_by_default(12)
@given(
    start=st.sampled_from(["anchor", "checkpoint", "branch"]),
    kinds=st.lists(st.sampled_from(["delta", "shards", "raw", "full", "break", "beside", "tiled"]), max_size=9),
    seed=st.integers(0, 2**16),
    pieces=st.booleans(),
)
def test_random_boxes_of_random_runs(
    start: Literal["anchor", "checkpoint", "branch"], kinds: list[str], seed: int, pieces: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if pieces:
            for bound in ("restore.DECODED_ELEMENTS", "objects.MAPPED_BYTES"):
                patch.setattr(f"vllm_delta_sync.run.{bound}", 0)
        made = Grove(Path(folder), start, seed)
        made.grow(*kinds)
        made.merged_deltas(MERGE_WIDTH)
        for version in {0, len(made.writer.manifests) - 1, int(made.random.integers(len(made.writer.manifests)))}:
            made.expect(version, random_boxes(made.random))


def test_all_ranks_together_hold_the_model_and_prove_it(grove: Grove) -> None:
    manifest = grove.run.manifest(9)
    for size in (1, 2, 3, 7):
        total = Fingerprint()
        for rank in range(size):
            boxes = row_boxes(TABLE, rank, size)
            for name, found in restore_boxes(grove.run, manifest, boxes).items():
                for box, bits in zip(boxes[name], found, strict=True):
                    total += fingerprint_box(name, box, bits)
        assert total.hex() == manifest.fingerprint


def test_a_cache_is_read_through(grove: Grove, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_delta_sync.run.objects.MAPPED_BYTES", 0)
    run = open_run(grove.run.bucket.url, cache=ObjectCache(tmp_path / "cache", 1 << 20))
    grove.expect(9, row_boxes(TABLE, 0, 2), run)
    grove.lose(grove.object_of(0))
    grove.expect(9, row_boxes(TABLE, 1, 2), run)


# What is damaged or does not fit


def test_damaged_documents_are_walked_around(grove: Grove) -> None:
    boxes = row_boxes(TABLE, 1, 2)
    grove.flip(grove.run.merged_delta(0, 4).objects[0].key)
    grove.expect(9, boxes)
    grove.beside(2)
    grove.flip(grove.object_of(1))
    grove.expect(9, boxes)
    grove.flip(grove.run.anchor(2).objects[0].key)
    with pytest.raises(DigestError):
        restore_boxes(grove.run, grove.run.manifest(9), boxes)


def wrong_version(made: Grove) -> None:
    """A version whose object is the one listed, and moves an element of tensor a to other bits than it declares."""
    old = made.writer.bits[-1]
    new = nudge(old, made.random, 0.1)
    changes = changes_between(TABLE, old, new)
    group = next(group for group in changes.sparse if group.dtype == "BF16")
    group.data[0] += 1
    version = len(made.writer.manifests)
    data = encode(changes, TABLE, "plain", "zstd", DeltaContext(made.writer.run, version, version - 1))
    made.writer._commit(
        new, [data], "delta", changes.changed, requires=required_features("plain", "zstd"),
        base_version=version - 1, codec="plain", compression="zstd", reversible=True,
    )  # fmt: skip


def test_a_change_that_is_not_what_it_declares_is_seen_where_a_tensor_is_held_whole(grove: Grove) -> None:
    wrong_version(grove)
    manifest = grove.run.manifest(10)
    for whole in ([Box.all_of((40, 3))], ranges((40, 3), [7, 50])):
        with pytest.raises(FingerprintError, match="'a'"):
            restore_boxes(grove.run, manifest, {"a": whole})
    total = Fingerprint()
    for rank in range(2):
        boxes = row_boxes(TABLE, rank, 2)
        found = restore_boxes(grove.run, manifest, boxes)
        total += sum(
            (fingerprint_box(name, *pair) for name in boxes for pair in zip(boxes[name], found[name], strict=True)),
            Fingerprint(),
        )
    assert total.hex() != manifest.fingerprint


def test_a_checkpoint_that_was_overwritten_is_refused(tmp_path: Path) -> None:
    made = Grove(tmp_path, "checkpoint")
    made.grow("delta")
    flip(tmp_path / "checkpoint" / "model.safetensors")
    manifest = made.run.manifest(1)
    # The last byte is one of tensor e.
    some = {"a": [Box((0, 0), (1, 3), (40, 3))]}
    restore_boxes(made.run, manifest, some)
    with pytest.raises(BaseUnavailableError, match=r"'e'.*not the one that the run started from"):
        restore_boxes(made.run, manifest, {"e": [Box((0, 0, 0, 0), (1, 1, 1, 1), (3, 2, 4, 5))]})
    (tmp_path / "checkpoint").rename(tmp_path / "moved")
    with pytest.raises(BaseUnavailableError, match="base="):
        restore_boxes(made.run, manifest, some)
    found = restore_boxes(made.run, manifest, {"b": [Box.all_of((6, 5, 4))]}, base=tmp_path / "moved")
    assert np.array_equal(found["b"][0], made.writer.bits[1][1])


def test_boxes_of_other_tensors_are_refused(grove: Grove) -> None:
    manifest = grove.run.manifest(9)
    with pytest.raises(TensorMismatchError, match="'z'"):
        restore_boxes(grove.run, manifest, {"z": [Box.all_of((3,))]})
    with pytest.raises(TensorMismatchError, match=r"'a' is for shape \[3, 40\], the tensor of the run has \[40, 3\]"):
        restore_boxes(grove.run, manifest, {"a": [Box.all_of((3, 40))]})
    with pytest.raises(NotFoundError, match="nowhere"):
        restore_boxes(grove.run, manifest, {}, base="nowhere")


# What it takes

WIDE = TensorTable(TensorSpec(f"layers.{layer}.weight", "BF16", (512, 2048)) for layer in range(16))
"""32 MiB."""


@pytest.mark.parametrize("start", ["anchor", "checkpoint"])
def test_takes_the_memory_of_the_boxes_and_little_more(
    start: Literal["anchor", "checkpoint"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_delta_sync.run.objects.MAPPED_BYTES", 1024 * 1024)
    monkeypatch.setattr("vllm_delta_sync.bucket.ranged.PIECE_BYTES", 256 * 1024)
    monkeypatch.setattr(chain_read, "DECODED_ELEMENTS", 0)
    monkeypatch.setattr("vllm_delta_sync.codec.delta_reader.LAZY_ELEMENTS", 64 * 1024)
    made = Grove(tmp_path, start, table=WIDE)
    for _ in range(3):
        made.publish(0.01)
    manifest, boxes = made.run.manifest(3), row_boxes(WIDE, 3, 8)
    held = WIDE.full_bytes // 8
    # Once before it is counted, for what is compiled and imported.
    restore_boxes(made.run, manifest, boxes)
    with counted() as most:
        found = restore_boxes(made.run, manifest, boxes)
    assert sum(bits.nbytes for pieces in found.values() for bits in pieces) == held
    assert held <= most[0] < held + 8 * 1024 * 1024
    with counted() as most:
        made.run.snapshot(3, in_memory=True)
    assert most[0] > WIDE.full_bytes


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the scratch files that are made; tiles are coded with classes, so that they need old bits."""
    monkeypatch.setattr("vllm_delta_sync.codec.tiles.coder.TABLE_BITS", -1000.0)
    made: list[int] = []
    real = chain_read.scratch_file

    def watched(size: int) -> np.ndarray:
        made.append(size)
        return real(size)

    monkeypatch.setattr(chain_read, "scratch_file", watched)
    return made


def test_tiles_cut_by_boxes_take_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture, files: list[int]) -> None:
    made = Grove(tmp_path)
    made.grow("delta", "tiled", "delta")
    with caplog.at_level(logging.INFO, logger="vllm_delta_sync"):
        found = restore_boxes(made.run, made.run.manifest(3), {"a": [Box.all_of((40, 3))], "d": []})
        assert np.array_equal(found["a"][0], made.writer.bits[3][0])
        assert not files
        assert "in a temporary file" not in caplog.text
        found = restore_boxes(made.run, made.run.manifest(3), {"a": [Box((16, 0), (2, 3), (40, 3))], "d": []})
    assert np.array_equal(found["a"][0], made.writer.bits[3][0][48:54])
    assert found["d"] == []
    assert len(files) == 1
    assert files[0] >= TABLE.full_bytes
    assert "rebuilding all of version 3 in a temporary file" in caplog.text
