"""``PendingDelta``: the changes of one version, reverted if the version cannot be made durable."""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from trainer_side.diff.baseline import Baseline
from trainer_side.diff.dense_or_sparse import full_is_smaller
from trainer_side.diff.engine import BATCH_ELEMENTS, Detector, SmallTensor
from trainer_side.diff.undo_log import ChangeLog
from vllm_delta_sync.codec.delta_object import BLOCK_ELEMENTS
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.errors import TensorMismatchError
from vllm_delta_sync.format.codecs import RELATIVE_CODECS, Codec
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_change
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.bits import Bits, Positions, revert_distances
from vllm_delta_sync.tensors.changes import Changes, Full, Sparse


class PendingDelta:
    """The difference between a baseline and newer weights; the baseline is updated to the newer weights.

    After any interruption it holds enough to restore the baseline: each step is logged before the baseline is touched,
    in a form that undoes nothing if the step did not happen.

    Attributes:
        changed: number of elements whose bits changed, without those held back.
        compared: ids of the tensors that were compared.
        fingerprints: tensor id → fingerprint after minus before.
    """

    def __init__(self, baseline: Baseline, codec: Codec, compression: Compression, detector: Detector) -> None:
        self._baseline = baseline
        self._codec = codec
        self._compression = compression
        self._detector = detector
        self._touched: list[tuple[int, ChangeLog]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._sparse = False
        self.changed = 0
        self.compared: set[int] = set()
        self.fingerprints: dict[int, Fingerprint] = {}

    @property
    def open(self) -> bool:
        """Whether the baseline may hold changes that are neither durable nor reverted."""
        return not self._closed

    def add_all(self, tensors: Iterable[tuple[str, torch.Tensor]], lasting: bool = False) -> None:
        """Compare (live name, tensor) pairs, one after another; after an error the caller must ``revert``.

        Args:
            lasting: tensors stay valid after the next one is requested: small ones are compared many at a time.
        """
        owners: dict[int, str] = {}
        batch = _Batch()
        for name, tensor, live in self._baseline.match(tensors):
            tied = owners.setdefault(tensor, name) != name
            small = self._as_small(tensor, live) if lasting and not tied else None
            if tied or (small is not None and not batch.takes(small)):
                self._add_each(batch)
                batch = _Batch()
            if small is not None:
                batch.append(tensor, small)
            elif self.add(tensor, live) and tied:
                raise TensorMismatchError(
                    f"tensor {name!r} is tied to {owners[tensor]!r} but has other values; nothing was published: tie "
                    "them again, or start a new run under a new URL"
                )
        self._add_each(batch)

    def _as_small(self, tensor: int, live: torch.Tensor) -> SmallTensor | None:
        """Return the tensor as ``Detector.collect_each`` takes it; None if it does not."""
        spec, buffer = self._baseline.table[tensor], self._baseline.buffer_on(tensor, live.device)
        return SmallTensor.of(spec, buffer, live)

    def _add_each(self, batch: "_Batch") -> None:
        """Do ``add`` for a batch."""
        if not batch.ids:
            return
        self.compared.update(batch.ids)
        logs = [ChangeLog(tensor.spec.element) for tensor in batch.tensors]
        before = len(self._touched)
        self._touched += zip(batch.ids, logs, strict=True)
        changes = self._detector.collect_each(batch.tensors, logs)
        touched = []
        for tensor, log, change in zip(batch.ids, logs, changes, strict=True):
            changed = log.size
            if changed:
                touched.append((tensor, log))
                self.fingerprints[tensor] = change
                self.changed += changed
        self._touched[before:] = touched

    def add(self, tensor: int, live: torch.Tensor) -> int:
        """Compare one tensor and update the baseline to it.

        Args:
            tensor: id. live: of its shape, on any device; not kept.

        Returns:
            Number of changed elements.
        """
        self.compared.add(tensor)
        spec = self._baseline.table[tensor]
        buffer = self._baseline.buffer_on(tensor, live.device)
        log = ChangeLog(spec.element)
        self._touched.append((tensor, log))
        change = self._detector.collect(spec, buffer, live, log)
        changed = log.size
        if not changed:
            self._touched.pop()
            return 0
        self.fingerprints[tensor] = change
        self.changed += changed
        return changed

    def keep(self) -> None:
        """Keep the changes, since the version is durable: the baseline can no longer be reverted."""
        with self._lock:
            if self._closed:
                return
            known = self._baseline.fingerprints
            # In one assignment, so that a failure in the middle changes nothing.
            self._baseline.fingerprints = [
                value + self.fingerprints[i] if i in self.fingerprints else value for i, value in enumerate(known)
            ]
            self._closed = True
            self._touched.clear()

    def revert(self) -> None:
        """Restore the baseline, unless that was done or the changes were kept.

        Call it where no signal handler can interrupt it: not in the main thread.
        """
        with self._lock:
            if self._closed:
                return
            # An interrupted caller may have left the detector's threads running.
            self._detector.wait_idle()
            for tensor, log in reversed(self._touched):
                log.revert(self._baseline.buffer(tensor))
            self._closed = True
            self._touched.clear()

    def hold_back(self, tensor: int, keep: npt.NDArray[np.bool_]) -> tuple[Bits, Bits]:
        """Revert changed elements of a tensor and drop them: the next comparison finds them again.

        From then on no tensor is sent in full, which would carry more elements than were kept.

        Args:
            keep: (n,) which of the tensor's changed elements stay, in ascending order.

        Returns:
            Bits before and after, of the elements that are held back.
        """
        log = next(log for touched, log in self._touched if touched == tensor)
        positions, before, after = log.hold_back(self._baseline.buffer(tensor), keep)
        self.fingerprints[tensor] -= fingerprint_change(self._baseline.table[tensor].name, positions, before, after)
        self.changed -= positions.size
        self._sparse = True
        if not log.size:
            self._touched.remove((tensor, log))
            del self.fingerprints[tensor]
        return before, after

    def elements(self, most: int) -> Iterator[tuple[int, Iterator[tuple[Positions, Bits, Bits]]]]:
        """Yield tensor id, and its changed elements in pieces of up to ``most``: positions, bits before and now."""
        for tensor, log in self._touched:
            yield tensor, self._elements(tensor, log, most)

    def _elements(self, tensor: int, log: ChangeLog, most: int) -> Iterator[tuple[Positions, Bits, Bits]]:
        buffer = self._baseline.buffer(tensor)
        for positions, distances in log.pieces():
            every = np.arange(min(most, positions.size), dtype=np.int64)
            for start in range(0, positions.size, most):
                here = positions[start : start + most]
                now = buffer.get(here)
                before = now.copy()
                revert_distances(log.element, before, every[: now.size], distances[start : start + most])
                yield here, before, now

    def before(self, tensors: Collection[int]) -> dict[int, Bits]:
        """Return copies of the (numel,) bits that changed tensors had before this delta."""
        found: dict[int, Bits] = {}
        for tensor, log in self._touched:
            if tensor in tensors:
                bits = found[tensor] = np.array(self._baseline.read(tensor))
                for positions, distances in log.pieces():
                    revert_distances(log.element, bits, positions, distances)
        return found

    def changes(self) -> Changes:
        """Return the delta as the codecs take it; valid until it is reverted or the next delta begins."""
        full: list[Full] = []
        sparse: dict[int, ChangeLog] = {}
        # Decided here and not during the comparison, since training waits for that.
        for tensor, log in self._touched:
            if self._is_smaller_in_full(tensor, log):
                full.append(Full(tensor, self._baseline.read(tensor)))
            else:
                sparse[tensor] = log
        sizes = {tensor: log.size for tensor, log in sparse.items()}
        groups = [
            self._group(batch, [sparse[tensor] for tensor in batch]) for batch in batches(sizes, self._baseline.table)
        ]
        return Changes(groups, full, dict(self.fingerprints))

    def _is_smaller_in_full(self, tensor: int, log: ChangeLog) -> bool:
        baseline = self._baseline
        return (
            not self._sparse
            and baseline.may_send_in_full(tensor)
            and full_is_smaller(
                baseline.table[tensor], log, self._codec, self._compression, lambda: baseline.read(tensor)
            )
        )

    def _group(self, batch: list[int], logs: list[ChangeLog]) -> Sparse:
        group = join_logs(self._baseline.table[batch[0]].dtype, batch, logs)
        if self._codec in RELATIVE_CODECS:
            return group
        pieces = [
            self._baseline.buffer(tensor).get(positions)
            for tensor, log in zip(batch, logs, strict=True)
            for positions, _ in log.pieces()
        ]
        return replace(group, data=np.concatenate(pieces), relative=False)


def join_logs(dtype: str, batch: list[int], logs: list[ChangeLog]) -> Sparse:
    """Return the changes of some tensors as one relative group.

    Args:
        batch: ids of tensors of this dtype, ascending. logs: their changes; each then holds views of the group's arrays
            instead of arrays of its own, so that both exist for one batch only.
    """
    counts = np.array([log.size for log in logs], np.int64)
    positions = np.empty(counts.sum(), np.int64)
    distances = np.empty(positions.size, logs[0].element.uint)
    start = 0
    for log, count in zip(logs, counts.tolist(), strict=True):
        log.join_into(positions[start : start + count], distances[start : start + count])
        start += count
    return Sparse(dtype, np.array(batch, np.uint32), counts, positions, distances, relative=True)


class _Batch:
    """Small tensors of one dtype that are compared in one call.

    Attributes:
        ids, tensors: the tensors.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.tensors: list[SmallTensor] = []
        self._elements = 0

    def takes(self, tensor: SmallTensor) -> bool:
        """Return whether the tensor fits in."""
        same = not self.tensors or self.tensors[0].spec.dtype == tensor.spec.dtype
        return same and self._elements + tensor.spec.numel <= BATCH_ELEMENTS

    def append(self, tensor: int, small: SmallTensor) -> None:
        self.ids.append(tensor)
        self.tensors.append(small)
        self._elements += small.spec.numel


def batches(sizes: Mapping[int, int], table: TensorTable) -> Iterator[list[int]]:
    """Yield tensor ids of one dtype, ascending, in batches of about a block: bounds what joining a batch copies.

    Args:
        sizes: tensor id → number of changed elements.
    """
    batch: list[int] = []
    size = 0
    for tensor in sorted(sizes, key=lambda tensor: (table[tensor].dtype, tensor)):
        if batch and (size + sizes[tensor] > BLOCK_ELEMENTS or table[tensor].dtype != table[batch[0]].dtype):
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += sizes[tensor]
    if batch:
        yield batch
