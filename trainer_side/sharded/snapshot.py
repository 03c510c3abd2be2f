"""An anchor of what no single rank holds: file by file, each written by another rank, tensor by tensor."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from trainer_side.sharded.baseline import PartsBaseline
from trainer_side.sharded.ranks import Bytes, Circle, LostRankError, error_document, told_error
from trainer_side.versions import Put, Shards
from vllm_delta_sync.errors import DeltaSyncError, FormatError, TensorMismatchError
from vllm_delta_sync.wire.anchor import shard_tables
from vllm_delta_sync.wire.bits import Bits
from vllm_delta_sync.wire.boxes import Box
from vllm_delta_sync.wire.manifest import ObjectRef
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

_HEADER = 8


def put_shards(circle: Circle, baseline: PartsBaseline, shard_bytes: int, put: Put) -> list[ObjectRef] | None:
    """Store all tensors as an anchor's objects; every rank calls it. A rank holds one whole tensor at a time.

    Args:
        put: as in ``versions.Shards``.

    Returns:
        on rank 0 the objects, in the order of their tensors; None elsewhere.

    Raises:
        DeltaSyncError: on every rank, what one of them has met.
    """
    own: list[tuple[int, ObjectRef]] = []

    def work() -> list[tuple[int, dict[str, Any]]]:
        with Shards(put) as files:
            failure: Exception | None = None
            for number, table in enumerate(shard_tables(baseline.whole, shard_bytes)):
                writer = number % circle.size
                if writer != circle.rank:
                    _send_all(circle, writer, baseline, table)
                    continue
                # The others send on whatever becomes of the file: what they send has to be taken.
                tensors = _Incoming(circle, baseline, table)
                try:
                    if failure is None:
                        own.append((number, files.add(table, iter(tensors))))
                except LostRankError:
                    raise
                except Exception as error:  # noqa: BLE001 - raised below, once nobody waits for this rank
                    failure = error
                tensors.drain()
            if failure is not None:
                raise failure
        return [(number, ref.model_dump()) for number, ref in own]

    told = circle.together("anchor", work)
    if told is None:
        return None
    rows = sorted((number, rank, ref) for rank, theirs in enumerate(told) for number, ref in theirs)
    return [ObjectRef(**{**ref, "rank": rank}) for _, rank, ref in rows]


class _Incoming:
    """(name, (numel,) bits) of the tensors of one file, put together from what all ranks hold."""

    def __init__(self, circle: Circle, baseline: PartsBaseline, table: TensorTable) -> None:
        self._circle, self._baseline = circle, baseline
        self._rest = iter(table)

    def __iter__(self) -> Iterator[tuple[str, Bits]]:
        for spec in self._rest:
            yield spec.name, self._assembled(spec)

    def drain(self) -> None:
        """Take what is left, and throw it away."""
        for _ in self._rest:
            for rank in range(self._circle.size):
                if rank != self._circle.rank:
                    self._circle.receive(rank)

    def _assembled(self, spec: TensorSpec) -> Bits:
        bits = np.empty(spec.numel, spec.element.uint)
        filled, failure = 0, None
        for rank in range(self._circle.size):
            try:
                own = rank == self._circle.rank
                data = None if own else self._circle.receive(rank)
                for box, here in _own_pieces(self._baseline, spec) if data is None else _unpacked(data, spec, rank):
                    box.view(bits)[...] = here.reshape(box.shape)
                    filled += box.numel
            except LostRankError:
                raise
            except DeltaSyncError as error:
                # First hear the other ranks out.
                failure = failure or error
        if failure is not None:
            raise failure
        if filled != spec.numel:
            raise TensorMismatchError(
                f"the ranks hold {filled} of the {spec.numel} elements of tensor {spec.name!r}: no snapshot is written"
            )
        return bits


def _own_pieces(baseline: PartsBaseline, spec: TensorSpec) -> list[tuple[Box, Bits]]:
    return [(box, baseline.peek(part)) for part, box in baseline.parts_of(spec.name)]


def _send_all(circle: Circle, writer: int, baseline: PartsBaseline, table: TensorTable) -> None:
    """Send this rank's parts of a file's tensors to the rank that writes it."""
    for spec in table:
        try:
            data = _packed(_own_pieces(baseline, spec))
        except DeltaSyncError as error:
            data = _message({"error": error_document(error)}, [])
        circle.send(writer, data)


def _packed(pieces: list[tuple[Box, Bits]]) -> Bytes:
    if not pieces:
        return np.empty(0, np.uint8)
    boxes = [(box.offsets, box.shape) for box, _ in pieces]
    return _message({"boxes": boxes}, [np.ascontiguousarray(bits) for _, bits in pieces])


def _message(header: dict[str, Any], arrays: list[np.ndarray]) -> Bytes:
    text = json.dumps(header).encode()
    parts = [np.frombuffer(len(text).to_bytes(_HEADER, "little") + text, np.uint8), *(a.view(np.uint8) for a in arrays)]
    return np.concatenate(parts)


def _unpacked(data: Bytes, spec: TensorSpec, rank: int) -> Iterator[tuple[Box, Bits]]:
    if not data.size:
        return
    start = _HEADER + int.from_bytes(data[:_HEADER].tobytes(), "little")
    header = json.loads(data[_HEADER:start].tobytes())
    if "error" in header:
        raise told_error(header["error"], rank)
    for offsets, shape in header["boxes"]:
        box = Box(tuple(offsets), tuple(shape), spec.shape)
        stop = start + box.numel * spec.element.itemsize
        if stop > data.size:
            raise FormatError(f"rank {rank} sent less of tensor {spec.name!r} than it announced")
        # Where a header ends is anywhere: elements are aligned by the copy.
        yield box, data[start:stop].copy().view(spec.element.uint)
        start = stop
