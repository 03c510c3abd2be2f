"""Tensors of more than 2^31 elements: index arithmetic from the trainer's memory to the reader's, in files of holes."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.codec.tiling import classes_at
from tests.support.differences import joined
from tests.support.merging import merged
from trainer_side.diff.engine import _Comparer
from trainer_side.diff.reader import split_boxes
from trainer_side.model.conversion_trace import View, trace
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_reader import decode
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.codec.tiles import coder
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.fingerprint import fingerprint_change
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import BaseTensor, Changes, Sparse, apply_distances, revert_distances
from vllm_delta_sync.tensors.segments import Segment

NUMEL = 2**33 + 4096
EDGES = [2**31 - 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**33 - 1, 2**33, NUMEL - 1]
SPEC = TensorSpec("w", "I8", (2**20 + 1, 2**13))
CONTEXT = DeltaContext("a" * 32, 1, 0)


def holes(path: Path) -> np.ndarray:
    """(NUMEL,) bytes, all 0, that take no memory and no disk until they are written."""
    with path.open("wb") as file:
        file.truncate(NUMEL)
    return np.memmap(path, np.uint8, mode="r+", shape=(NUMEL,))


@pytest.mark.parametrize("codec", ["tiled", "plain", "raw"])
def test_changes_are_found_where_they_are_and_arrive_there(
    codec: Codec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It takes milliseconds to read a hole.
    monkeypatch.setattr(coder, "SAMPLED_ELEMENTS", 1024)
    spec = TensorSpec("w", "I8", (NUMEL,))
    table = TensorTable([spec])
    holes(tmp_path / "live")
    live = torch.from_file(str(tmp_path / "live"), shared=True, size=NUMEL, dtype=torch.int8)
    baseline, served = holes(tmp_path / "baseline"), holes(tmp_path / "served")
    for number, position in enumerate(EDGES, 1):
        live[position] = number
    notes: list[Segment] = []
    # What a thread is given: pieces of the tensor, only those here that something is in.
    around = [(end - 64, end) for end in (2**31 + 1, 2**32 + 6, 2**33 + 1, NUMEL)]
    boxes = [(start, (slice(start, stop),)) for start, stop in around]
    change = _Comparer().collect(spec, baseline, live, boxes, notes)  # type: ignore[arg-type]
    positions, distances = joined(notes, spec.element)
    assert positions.tolist() == EDGES
    assert distances.tolist() == list(range(1, len(EDGES) + 1))
    assert [int(baseline[position]) for position in EDGES] == distances.tolist()
    zeros = np.zeros(len(EDGES), np.uint8)
    assert change == fingerprint_change("w", positions, zeros, distances)
    one, many = np.zeros(1, np.uint32), np.array([positions.size])
    # From 0 the distance to a number is the number.
    sparse = Sparse("I8", one, many, positions, distances, codec != "raw")
    # All elements are of the first class.
    with classes_at([1, 1, 1, 1]):
        written = Changes([sparse], fingerprints={0: change})
        data = encode(written, table, codec, "zstd", CONTEXT, lambda _: BaseTensor(served))
    found = decode(data, table, CONTEXT, lambda _: BaseTensor(served))
    for group in found.sparse:
        apply_distances(spec.element, served, group.positions, group.data)
    assert [int(served[position]) for position in EDGES] == distances.tolist()
    revert_distances(spec.element, served, positions, distances)
    assert not any(int(served[position]) for position in EDGES)


@pytest.mark.parametrize("codec", ["plain", "raw"])
def test_merging_keeps_positions_beyond_32_bits(codec: str) -> None:
    table = TensorTable([SPEC])
    total = math.prod(SPEC.shape)
    even = np.array([p for p in EDGES if p < total][::2])
    everything = np.array([p for p in EDGES if p < total])
    parts = [of(positions, codec == "plain") for positions in (even, everything)]
    assert total > 2**33
    found = merged(parts, table)
    assert [group.positions.tolist() for group in found.sparse] == [everything.tolist()]
    wanted = [1 + (codec == "plain" and position in even.tolist()) for position in everything.tolist()]
    assert found.sparse[0].data.tolist() == wanted


def of(positions: np.ndarray, relative: bool) -> Changes:
    ones = np.ones(positions.size, np.uint8)
    return Changes([Sparse("I8", np.array([0], np.uint32), np.array([positions.size]), positions, ones, relative)])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(2**33,), (2**17, 2**17), (3, 2**16, 2**16), (2**31 + 1, 2)])
def test_shares_of_threads_make_up_a_huge_tensor(shape: tuple[int, ...], turned: bool) -> None:
    live = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    if turned and len(shape) > 1:
        live = live.transpose(-1, -2)
    seen, every = split_boxes(live, 3)
    flat = [box for part in every for box in part]
    starts = [start for start, _ in flat]
    sizes = [measured(index, tuple(seen.shape)) for _, index in flat]
    assert starts[0] == 0
    assert all(
        start + size == after for start, size, after in zip(starts, sizes, [*starts[1:], live.numel()], strict=True)
    )
    assert len(every) <= 3


def measured(index: tuple[int | slice, ...], shape: tuple[int, ...]) -> int:
    ranges = [1 if isinstance(at, int) else at.stop - at.start for at in index]
    return math.prod(ranges) * math.prod(shape[len(index) :])


def test_experts_far_inside_a_stacked_weight_are_windows_of_it() -> None:
    """What a model's conversion back to its checkpoint form is followed to: offsets beyond 2^32 elements."""
    stacked = torch.empty(512, 4096, 8192, device="meta")
    routes = trace({"experts": stacked}, lambda state: dict(enumerate_rows(state["experts"])))
    last = routes["experts.511.up"]
    assert isinstance(last, View)
    assert last.offset == 511 * 4096 * 8192 + 2048 * 8192 > 2**33
    seen = last.read({"experts": stacked})
    assert (seen.storage_offset(), tuple(seen.shape)) == (last.offset, (2048, 8192))


def enumerate_rows(stacked: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    halves = [(number, expert.chunk(2)) for number, expert in enumerate(stacked.unbind(0))]
    return [
        (f"experts.{number}.{name}", half)
        for number, pair in halves
        for name, half in zip(("gate", "up"), pair, strict=True)
    ]
