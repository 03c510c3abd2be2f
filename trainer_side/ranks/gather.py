"""An anchor of what no single rank holds: file by file, each written by another rank, tensor by tensor."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from trainer_side.manifests import Put, Shards
from trainer_side.ranks.group import LostRankError, ProcessGroup, encoded, error_document, told_error
from trainer_side.ranks.shard_baseline import ShardBaseline
from vllm_delta_sync.errors import LimitError, TensorMismatchError
from vllm_delta_sync.format.manifest import ObjectRef
from vllm_delta_sync.format.safetensors_file import shard_tables
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.bits import Bits
from vllm_delta_sync.tensors.boxes import Box


def put_shards(circle: ProcessGroup, baseline: ShardBaseline, shard_bytes: int, put: Put) -> list[ObjectRef] | None:
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
        with ExitStack() as stack:
            failure: Exception | None = None
            try:
                files = stack.enter_context(Shards(put))
            except Exception as error:  # noqa: BLE001 - raised below: the others wait for what this rank sends
                failure = error
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

    def __init__(self, circle: ProcessGroup, baseline: ShardBaseline, table: TensorTable) -> None:
        self._circle, self._baseline = circle, baseline
        self._rest = iter(table)

    def __iter__(self) -> Iterator[tuple[str, Bits]]:
        for spec in self._rest:
            yield spec.name, self._assembled(spec)

    def drain(self) -> None:
        """Take what is left, and throw it away."""
        for _ in self._rest:
            self._skip()

    def _assembled(self, spec: TensorSpec) -> Bits:
        """The (numel,) bits of a tensor. Whatever is raised, all that the other ranks send of it has been taken."""
        try:
            bits = np.empty(spec.numel, spec.element.uint)
        except MemoryError as error:
            self._skip()
            raise self._explained(spec, error) from error
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
            except Exception as error:  # noqa: BLE001 - raised below, once the other ranks have been heard out
                failure = failure or self._explained(spec, error)
        if failure is not None:
            raise failure
        if filled != spec.numel:
            raise TensorMismatchError(
                f"the ranks hold {filled} of the {spec.numel} elements of tensor {spec.name!r}: no snapshot is written"
            )
        return bits

    def _take(self, rank: int, spec: TensorSpec, bits: Bits) -> int:
        """Take what another rank holds of a tensor, into the (numel,) bits of the whole.

        Returns:
            the number of elements.

        Raises:
            DeltaSyncError: that rank cannot give them, and says why. Else as ``np.empty``; all has been taken then.
        """
        header = self._header(rank)
        if "error" in header:
            raise told_error(header["error"], rank)
        filled, failure = 0, None
        for offsets, shape in header["boxes"]:
            room: Bits | None = None
            if failure is None:
                try:
                    box = Box(tuple(offsets), tuple(shape), spec.shape)
                    # What lies in the whole without gaps comes to its place at once: tensors may be large.
                    room = bits[box.start : box.stop] if box.is_range else np.empty(box.numel, bits.dtype)
                except Exception as error:  # noqa: BLE001 - raised below, once the other boxes have come
                    failure = error
            if room is None:
                self._circle.skip(rank)
                continue
            self._circle.receive(rank, room.view(np.uint8))
            if not box.is_range:
                box.view(bits)[...] = room.reshape(box.shape)
            filled += box.numel
        if failure is not None:
            raise failure
        return filled

    def _skip(self) -> None:
        """Take what the other ranks send of a tensor, and throw it away."""
        for rank in range(self._circle.size):
            if rank != self._circle.rank:
                for _ in self._header(rank).get("boxes", ()):
                    self._circle.skip(rank)

    def _header(self, rank: int) -> dict[str, Any]:
        header: dict[str, Any] = json.loads(self._circle.receive(rank).tobytes())
        return header

    def _explained(self, spec: TensorSpec, error: Exception) -> Exception:
        """What to raise for an error."""
        if not isinstance(error, MemoryError):
            return error
        return LimitError(
            f"tensor {spec.name!r} has {spec.nbytes} bytes, for which rank {self._circle.rank} has no memory: no "
            "snapshot is written; a rank holds one whole tensor at a time for it"
        )


def _own_pieces(baseline: ShardBaseline, spec: TensorSpec) -> list[tuple[Box, Bits]]:
    return [(box, baseline.peek(part)) for part, box in baseline.parts_of(spec.name)]


def _send_all(circle: ProcessGroup, writer: int, baseline: ShardBaseline, table: TensorTable) -> None:
    """Send this rank's parts of a file's tensors to the rank that writes it: of each its boxes, and then their bits."""
    for spec in table:
        try:
            # A tensor of torch wants memory that may be written; what a base has mapped may not.
            pieces = [
                (box, np.require(bits, requirements=["C", "W"]).view(np.uint8))
                for box, bits in _own_pieces(baseline, spec)
            ]
        except Exception as error:  # noqa: BLE001 - the writer waits for an answer, and raises it
            circle.send(writer, encoded({"error": error_document(error)}))
            continue
        circle.send(writer, encoded({"boxes": [(box.offsets, box.shape) for box, _ in pieces]}))
        for _, data in pieces:
            circle.send(writer, data)
