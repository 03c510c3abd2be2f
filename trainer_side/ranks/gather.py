"""``put_shards``: write an anchor of a sharded model; ranks take turns at writing files, one tensor at a time."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from trainer_side.manifests import Put, Shards
from trainer_side.ranks.group import LostRankError, ProcessGroup, encode_document, error_document, error_from_rank
from trainer_side.ranks.shard_baseline import ShardBaseline
from vllm_delta_sync.errors import LimitError, TensorMismatchError
from vllm_delta_sync.format.manifest import ObjectRef
from vllm_delta_sync.format.safetensors_file import shard_tables
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.bits import Bits
from vllm_delta_sync.tensors.boxes import Box


def put_shards(group: ProcessGroup, baseline: ShardBaseline, shard_bytes: int, put: Put) -> list[ObjectRef]:
    """Store all tensors as an anchor's objects; every rank calls it. A rank holds one whole tensor at a time.

    Args:
        put: as in ``manifests.Shards``.

    Returns:
        On rank 0 the objects, in the order of their tensors; none elsewhere.
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
                writer = number % group.size
                if writer != group.rank:
                    _send_all(group, writer, baseline, table)
                    continue
                # The others keep sending even if the file fails, so everything must be received.
                tensors = _Incoming(group, baseline, table)
                try:
                    if failure is None:
                        own.append((number, files.add(table, iter(tensors))))
                except LostRankError:
                    raise
                except Exception as error:  # noqa: BLE001 - raised below, once no rank waits for this one
                    failure = error
                tensors.drain()
            if failure is not None:
                raise failure
        return [(number, ref.model_dump()) for number, ref in own]

    reports = group.all_or_raise("anchor", work)
    rows = sorted((number, rank, ref) for rank, theirs in enumerate(reports) for number, ref in theirs)
    return [ObjectRef(**{**ref, "rank": rank}) for _, rank, ref in rows]


class _Incoming:
    """(name, (numel,) bits) of the tensors of one file, assembled from the parts of all ranks."""

    def __init__(self, group: ProcessGroup, baseline: ShardBaseline, table: TensorTable) -> None:
        self._group, self._baseline = group, baseline
        self._rest = iter(table)

    def __iter__(self) -> Iterator[tuple[str, Bits]]:
        for spec in self._rest:
            yield spec.name, self._assemble(spec)

    def drain(self) -> None:
        """Receive and discard the remaining tensors."""
        for _ in self._rest:
            self._skip()

    def _assemble(self, spec: TensorSpec) -> Bits:
        """Return a tensor's (numel,) bits. Even if this raises, all that other ranks send of it is received."""
        try:
            bits = np.empty(spec.numel, spec.element.uint)
        except MemoryError as error:
            self._skip()
            raise self._explain(spec, error) from error
        filled, failure = 0, None
        for rank in range(self._group.size):
            try:
                if rank == self._group.rank:
                    for box, here in _own_pieces(self._baseline, spec):
                        box.view(bits)[...] = here.reshape(box.shape)
                        filled += box.numel
                else:
                    filled += self._receive_parts(rank, spec, bits)
            except LostRankError:
                raise
            except Exception as error:  # noqa: BLE001 - raised below, once the other ranks have sent their parts
                failure = failure or self._explain(spec, error)
        if failure is not None:
            raise failure
        if filled != spec.numel:
            raise TensorMismatchError(
                f"the ranks hold {filled} of the {spec.numel} elements of tensor {spec.name!r}: no snapshot is written"
            )
        return bits

    def _receive_parts(self, rank: int, spec: TensorSpec, bits: Bits) -> int:
        """Receive another rank's parts of a tensor into the (numel,) bits of the whole.

        Returns:
            The number of elements.

        Raises:
            DeltaSyncError: that rank reports an error. Other errors as ``np.empty``, after everything was received.
        """
        header = self._header(rank)
        if "error" in header:
            raise error_from_rank(header["error"], rank)
        filled, failure = 0, None
        for offsets, shape in header["boxes"]:
            into: Bits | None = None
            if failure is None:
                try:
                    box = Box(tuple(offsets), tuple(shape), spec.shape)
                    # A box that is contiguous in the whole is received in place: tensors may be large.
                    into = bits[box.start : box.stop] if box.is_range else np.empty(box.numel, bits.dtype)
                except Exception as error:  # noqa: BLE001 - raised below, once the other boxes are received
                    failure = error
            if into is None:
                self._group.skip(rank)
                continue
            self._group.receive(rank, into.view(np.uint8))
            if not box.is_range:
                box.view(bits)[...] = into.reshape(box.shape)
            filled += box.numel
        if failure is not None:
            raise failure
        return filled

    def _skip(self) -> None:
        """Receive and discard what the other ranks send of a tensor."""
        for rank in range(self._group.size):
            if rank != self._group.rank:
                for _ in self._header(rank).get("boxes", ()):
                    self._group.skip(rank)

    def _header(self, rank: int) -> dict[str, Any]:
        header: dict[str, Any] = json.loads(self._group.receive(rank).tobytes())
        return header

    def _explain(self, spec: TensorSpec, error: Exception) -> Exception:
        """Return the error to raise for ``error``."""
        if not isinstance(error, MemoryError):
            return error
        return LimitError(
            f"tensor {spec.name!r} has {spec.nbytes} bytes, for which rank {self._group.rank} has no memory: no "
            "snapshot is written; a rank holds one whole tensor at a time for it"
        )


def _own_pieces(baseline: ShardBaseline, spec: TensorSpec) -> list[tuple[Box, Bits]]:
    return [(box, baseline.parts.read(part)) for part, box in baseline.parts_of(spec.name)]


def _send_all(group: ProcessGroup, writer: int, baseline: ShardBaseline, table: TensorTable) -> None:
    """Send this rank's parts of a file's tensors to the writing rank: for each tensor its boxes, then their bits."""
    for spec in table:
        try:
            # torch needs writable memory, and bits mapped from a base are read only.
            pieces = [
                (box, np.require(bits, requirements=["C", "W"]).view(np.uint8))
                for box, bits in _own_pieces(baseline, spec)
            ]
        except Exception as error:  # noqa: BLE001 - the writing rank waits for an answer, and raises it
            group.send(writer, encode_document({"error": error_document(error)}))
            continue
        group.send(writer, encode_document({"boxes": [(box.offsets, box.shape) for box, _ in pieces]}))
        for _, data in pieces:
            group.send(writer, data)
