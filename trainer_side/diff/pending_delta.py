"""``PendingDelta``: the changes of one version, reverted if the version cannot be made durable."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from trainer_side.diff.baseline import Baseline
from trainer_side.diff.dense_or_sparse import full_is_smaller
from trainer_side.diff.engine import Detector
from trainer_side.diff.undo_log import ChangeLog
from vllm_delta_sync.codec.delta_object import BLOCK_ELEMENTS
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.errors import TensorMismatchError
from vllm_delta_sync.format.codecs import RELATIVE_CODECS, Codec
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.tensors.bits import Bits, Positions, revert_distances
from vllm_delta_sync.tensors.changes import Changes, Full, Sparse


@dataclass
class _TensorChanges:
    """The changes of one tensor."""

    tensor: int
    log: ChangeLog


class PendingDelta:
    """The difference between a baseline and newer weights; the baseline is updated to the newer weights.

    After any interruption it holds enough to restore the baseline: each step is logged before the baseline is touched,
    in a form that undoes nothing if the step did not happen.

    Attributes:
        changed: number of elements whose bits changed.
        fingerprints: tensor id → fingerprint after minus before.
    """

    def __init__(self, baseline: Baseline, codec: Codec, compression: Compression, detector: Detector) -> None:
        self._baseline = baseline
        self._codec = codec
        self._compression = compression
        self._detector = detector
        self._touched: list[_TensorChanges] = []
        self._lock = threading.Lock()
        self._closed = False
        self.changed = 0
        self.fingerprints: dict[int, Fingerprint] = {}

    @property
    def open(self) -> bool:
        """Whether the baseline may hold changes that are neither durable nor reverted."""
        return not self._closed

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the model with the delta minus without."""
        return sum(self.fingerprints.values(), Fingerprint())

    def add_all(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Compare (live name, tensor) pairs, one after another.

        Raises:
            TensorMismatchError: tied tensors differ. Other errors as ``Baseline.match``; the caller must ``revert``.
        """
        owners: dict[int, str] = {}
        for name, tensor, live in self._baseline.match(tensors):
            changed = self.add(tensor, live)
            if owners.setdefault(tensor, name) != name and changed:
                raise TensorMismatchError(
                    f"tensor {name!r} is tied to {owners[tensor]!r} but has other values; nothing was published: tie "
                    "them again, or start a new run under a new URL"
                )

    def add(self, tensor: int, live: torch.Tensor) -> int:
        """Compare one tensor and update the baseline to it.

        Args:
            tensor: id. live: of its shape, on any device; not kept.

        Returns:
            Number of changed elements.
        """
        spec = self._baseline.table[tensor]
        buffer = self._baseline.buffer_on(tensor, live.device)
        touched = _TensorChanges(tensor, ChangeLog(spec.element))
        self._touched.append(touched)
        change = self._detector.collect(spec, buffer, live, touched.log)
        changed = touched.log.size
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
            for touched in reversed(self._touched):
                touched.log.revert(self._baseline.buffer(touched.tensor))
            self._closed = True
            self._touched.clear()

    def pieces(self, most: int) -> Iterator[tuple[int, Iterator[tuple[Bits, Bits]]]]:
        """Yield tensor id, and the bits (before, now) of its changed elements in pieces of up to ``most`` elements."""
        for touched in self._touched:
            yield touched.tensor, ((before, now) for _, before, now in self._elements(touched, most))

    def elements(self, most: int) -> Iterator[tuple[int, Positions, Bits, Bits]]:
        """Yield changed elements in pieces of up to ``most``: tensor id, positions, bits before and now."""
        for touched in self._touched:
            for positions, before, now in self._elements(touched, most):
                yield touched.tensor, positions, before, now

    def _elements(self, touched: _TensorChanges, most: int) -> Iterator[tuple[Positions, Bits, Bits]]:
        buffer = self._baseline.buffer(touched.tensor)
        for positions, distances in touched.log.pieces():
            every = np.arange(min(most, positions.size), dtype=np.int64)
            for start in range(0, positions.size, most):
                here = positions[start : start + most]
                now = buffer.get(here)
                before = now.copy()
                revert_distances(touched.log.element, before, every[: now.size], distances[start : start + most])
                yield here, before, now

    def before(self, tensors: Iterable[int]) -> dict[int, Bits]:
        """Return copies of the (numel,) bits that changed tensors had before this delta."""
        wanted = set(tensors)
        found: dict[int, Bits] = {}
        for touched in self._touched:
            if touched.tensor in wanted:
                bits = found[touched.tensor] = np.array(self._baseline.read(touched.tensor))
                for positions, distances in touched.log.pieces():
                    revert_distances(touched.log.element, bits, positions, distances)
        return found

    def changes(self) -> Changes:
        """Return the delta as the codecs take it; valid until it is reverted or the next delta begins."""
        full: list[Full] = []
        sparse: list[_TensorChanges] = []
        # Decided here and not during the comparison, since training waits for that.
        for touched in self._touched:
            if self._is_smaller_in_full(touched):
                full.append(Full(touched.tensor, self._baseline.read(touched.tensor)))
            else:
                sparse.append(touched)
        return Changes([self._group(batch) for batch in self._batches(sparse)], full, dict(self.fingerprints))

    def _is_smaller_in_full(self, touched: _TensorChanges) -> bool:
        spec, baseline = self._baseline.table[touched.tensor], self._baseline
        return baseline.may_send_in_full(touched.tensor) and full_is_smaller(
            spec, touched.log, self._codec, self._compression, lambda: baseline.read(touched.tensor)
        )

    def _batches(self, sparse: list[_TensorChanges]) -> Iterator[list[_TensorChanges]]:
        """Yield tensors of one dtype, ascending by id, in batches of about a block: bounds what joining copies."""
        table = self._baseline.table
        batch: list[_TensorChanges] = []
        size = 0
        for touched in sorted(sparse, key=lambda touched: (table[touched.tensor].dtype, touched.tensor)):
            full = size + touched.log.size > BLOCK_ELEMENTS
            if batch and (full or table[touched.tensor].dtype != table[batch[0].tensor].dtype):
                yield batch
                batch, size = [], 0
            batch.append(touched)
            size += touched.log.size
        if batch:
            yield batch

    def _group(self, batch: list[_TensorChanges]) -> Sparse:
        relative = self._codec in RELATIVE_CODECS
        counts = np.array([touched.log.size for touched in batch], np.int64)
        positions = np.empty(counts.sum(), np.int64)
        distances = np.empty(positions.size, batch[0].log.element.uint)
        start = 0
        for touched, count in zip(batch, counts.tolist(), strict=True):
            # The joined arrays replace the single ones, so that both exist for one batch only.
            touched.log.join_into(positions[start : start + count], distances[start : start + count])
            start += count
        data = distances
        if not relative:
            data = np.concatenate(
                [
                    self._baseline.buffer(touched.tensor).get(positions)
                    for touched in batch
                    for positions, _ in touched.log.pieces()
                ]
            )
        ids = np.array([touched.tensor for touched in batch], np.uint32)
        return Sparse(self._baseline.table[batch[0].tensor].dtype, ids, counts, positions, data, relative)
