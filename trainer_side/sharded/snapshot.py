"""An anchor of what no single rank holds: file by file, each written by another rank, tensor by tensor."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from trainer_side.sharded.baseline import PartsBaseline
from trainer_side.sharded.ranks import Circle, LostRankError, encoded, error_document, told_error
from trainer_side.versions import Put, Shards
from vllm_delta_sync.errors import DeltaSyncError, TensorMismatchError
from vllm_delta_sync.wire.anchor import shard_tables
from vllm_delta_sync.wire.bits import Bits
from vllm_delta_sync.wire.boxes import Box
from vllm_delta_sync.wire.manifest import ObjectRef
from vllm_delta_sync.wire.table import TensorSpec, TensorTable


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
        for spec in self._rest:
            for rank in range(self._circle.size):
                if rank != self._circle.rank:
                    self._take(rank, spec, None)

    def _assembled(self, spec: TensorSpec) -> Bits:
        bits = np.empty(spec.numel, spec.element.uint)
        filled, failure = 0, None
        for rank in range(self._circle.size):
            try:
                if rank == self._circle.rank:
                    for box, here in _own_pieces(self._baseline, spec):
                        box.view(bits)[...] = here.reshape(box.shape)
                        filled += box.numel
                else:
                    filled += self._take(rank, spec, bits)
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

    def _take(self, rank: int, spec: TensorSpec, bits: Bits | None) -> int:
        """Take what another rank holds of a tensor, into the (numel,) bits of the whole unless that is None.

        Returns:
            the number of elements.

        Raises:
            DeltaSyncError: that rank cannot give them, and says why.
        """
        header = json.loads(self._circle.receive(rank).tobytes())
        if bits is None:
            for _ in header.get("boxes", ()):
                self._circle.receive(rank)
            return 0
        if "error" in header:
            raise told_error(header["error"], rank)
        filled = 0
        for offsets, shape in header["boxes"]:
            box = Box(tuple(offsets), tuple(shape), spec.shape)
            # What lies in the whole without gaps comes to its place at once: tensors may be large.
            room = bits[box.start : box.stop] if box.is_range else np.empty(box.numel, bits.dtype)
            self._circle.receive(rank, room.view(np.uint8))
            if not box.is_range:
                box.view(bits)[...] = room.reshape(box.shape)
            filled += box.numel
        return filled


def _own_pieces(baseline: PartsBaseline, spec: TensorSpec) -> list[tuple[Box, Bits]]:
    return [(box, baseline.peek(part)) for part, box in baseline.parts_of(spec.name)]


def _send_all(circle: Circle, writer: int, baseline: PartsBaseline, table: TensorTable) -> None:
    """Send this rank's parts of a file's tensors to the rank that writes it: of each its boxes, and then their bits."""
    for spec in table:
        try:
            pieces = _own_pieces(baseline, spec)
        except DeltaSyncError as error:
            circle.send(writer, encoded({"error": error_document(error)}))
            continue
        circle.send(writer, encoded({"boxes": [(box.offsets, box.shape) for box, _ in pieces]}))
        for _, bits in pieces:
            # A tensor of torch wants memory that may be written; what a base has mapped may not.
            circle.send(writer, np.require(bits, requirements=["C", "W"]).view(np.uint8))
