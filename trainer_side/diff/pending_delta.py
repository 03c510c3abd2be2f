"""What one version changes: found by diffing, taken back if the version cannot be made durable."""

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
class _Moved:
    """What changed in one tensor."""

    tensor: int
    found: ChangeLog


class PendingDelta:
    """The difference between a baseline and newer weights; the baseline is brought up to the latter.

    Whatever interrupts the work, the patch holds enough to put the baseline back: each step is noted down
    before the baseline is touched, in a form that undoes nothing if the step did not happen.

    Attributes:
        changed: elements whose bits changed.
        fingerprints: tensor id → fingerprint after minus before.
    """

    def __init__(self, baseline: Baseline, codec: Codec, compression: Compression, detector: Detector) -> None:
        self._baseline = baseline
        self._codec = codec
        self._compression = compression
        self._detector = detector
        self._moved: list[_Moved] = []
        self._lock = threading.Lock()
        self._settled = False
        self.changed = 0
        self.fingerprints: dict[int, Fingerprint] = {}

    @property
    def open(self) -> bool:
        """Whether the baseline may hold changes that are neither durable nor put back."""
        return not self._settled

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the model after the patch minus before."""
        return sum(self.fingerprints.values(), Fingerprint())

    def add_all(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Diff (live name, tensor) pairs, one after another.

        Raises:
            TensorMismatchError: tied tensors differ. Else as ``Baseline.current``; ``revert`` is up to the caller.
        """
        owners: dict[int, str] = {}
        for name, tensor, live in self._baseline.current(tensors):
            changed = self.add(tensor, live)
            if owners.setdefault(tensor, name) != name and changed:
                raise TensorMismatchError(
                    f"tensor {name!r} is tied to {owners[tensor]!r} but has other values; nothing was published: tie "
                    "them again, or start a new run under a new URL"
                )

    def add(self, tensor: int, live: torch.Tensor) -> int:
        """Diff one tensor and bring the baseline up to it.

        Args:
            tensor: id. live: of its shape, on any device; not kept.

        Returns:
            Number of changed elements.
        """
        spec = self._baseline.table[tensor]
        held = self._baseline.hold(tensor, live.device)
        moved = _Moved(tensor, ChangeLog(spec.element))
        self._moved.append(moved)
        change = self._detector.collect(spec, held, live, moved.found)
        changed = moved.found.size
        if not changed:
            self._moved.pop()
            return 0
        self.fingerprints[tensor] = change
        self.changed += changed
        return changed

    def settle(self) -> None:
        """The version is durable: the baseline stays as it is, and can no longer be put back."""
        with self._lock:
            if self._settled:
                return
            known = self._baseline.fingerprints
            # In one step, so that a failure in the middle leaves none of it.
            self._baseline.fingerprints = [
                value + self.fingerprints[i] if i in self.fingerprints else value for i, value in enumerate(known)
            ]
            self._settled = True
            self._moved.clear()

    def revert(self) -> None:
        """Put the baseline back, unless that is done or the patch is settled.

        Call it where no signal handler can interrupt it: not in the main thread.
        """
        with self._lock:
            if self._settled:
                return
            # An interrupted caller has left its helpers at work.
            self._detector.settle()
            for moved in reversed(self._moved):
                moved.found.revert(self._baseline.held(moved.tensor))
            self._settled = True
            self._moved.clear()

    def pieces(self, most: int) -> Iterator[tuple[int, Iterator[tuple[Bits, Bits]]]]:
        """Tensor id, and its bits (before, now) in pieces of up to ``most`` elements: those that changed."""
        for moved in self._moved:
            yield moved.tensor, ((before, now) for _, before, now in self._elements(moved, most))

    def elements(self, most: int) -> Iterator[tuple[int, Positions, Bits, Bits]]:
        """Pieces of up to ``most`` elements that changed: tensor id, their positions, their bits before and now."""
        for moved in self._moved:
            for positions, before, now in self._elements(moved, most):
                yield moved.tensor, positions, before, now

    def _elements(self, moved: _Moved, most: int) -> Iterator[tuple[Positions, Bits, Bits]]:
        held = self._baseline.held(moved.tensor)
        for positions, distances in moved.found.pieces():
            every = np.arange(min(most, positions.size), dtype=np.int64)
            for start in range(0, positions.size, most):
                here = positions[start : start + most]
                now = held.get(here)
                before = now.copy()
                revert_distances(moved.found.element, before, every[: now.size], distances[start : start + most])
                yield here, before, now

    def before(self, tensors: Iterable[int]) -> dict[int, Bits]:
        """Copies of the (numel,) bits that tensors which the patch changes had before it."""
        wanted = set(tensors)
        found: dict[int, Bits] = {}
        for moved in self._moved:
            if moved.tensor in wanted:
                bits = found[moved.tensor] = np.array(self._baseline.peek(moved.tensor))
                for positions, distances in moved.found.pieces():
                    revert_distances(moved.found.element, bits, positions, distances)
        return found

    def changes(self) -> Changes:
        """The patch in the wire's terms; valid until it is reverted or the next patch begins."""
        full: list[Full] = []
        sparse: list[_Moved] = []
        # Not found out where tensors are compared: the training waits there.
        for moved in self._moved:
            if self._is_smaller_in_full(moved):
                full.append(Full(moved.tensor, self._baseline.peek(moved.tensor)))
            else:
                sparse.append(moved)
        return Changes([self._group(batch) for batch in self._batches(sparse)], full, dict(self.fingerprints))

    def _is_smaller_in_full(self, moved: _Moved) -> bool:
        spec, baseline = self._baseline.table[moved.tensor], self._baseline
        return baseline.sent_in_full(moved.tensor) and full_is_smaller(
            spec, moved.found, self._codec, self._compression, lambda: baseline.peek(moved.tensor)
        )

    def _batches(self, sparse: list[_Moved]) -> Iterator[list[_Moved]]:
        """Tensors of one dtype, ascending by id, up to about a block together: bounds what joining copies."""
        table = self._baseline.table
        batch: list[_Moved] = []
        held = 0
        for moved in sorted(sparse, key=lambda moved: (table[moved.tensor].dtype, moved.tensor)):
            full = held + moved.found.size > BLOCK_ELEMENTS
            if batch and (full or table[moved.tensor].dtype != table[batch[0].tensor].dtype):
                yield batch
                batch, held = [], 0
            batch.append(moved)
            held += moved.found.size
        if batch:
            yield batch

    def _group(self, batch: list[_Moved]) -> Sparse:
        relative = self._codec in RELATIVE_CODECS
        counts = np.array([moved.found.size for moved in batch], np.int64)
        positions = np.empty(counts.sum(), np.int64)
        distances = np.empty(positions.size, batch[0].found.element.uint)
        start = 0
        for moved, count in zip(batch, counts.tolist(), strict=True):
            # The joined arrays replace the single ones, so that both are held for one batch only.
            moved.found.join_into(positions[start : start + count], distances[start : start + count])
            start += count
        data = distances
        if not relative:
            data = np.concatenate(
                [
                    self._baseline.held(moved.tensor).get(positions)
                    for moved in batch
                    for positions, _ in moved.found.pieces()
                ]
            )
        ids = np.array([moved.tensor for moved in batch], np.uint32)
        return Sparse(self._baseline.table[batch[0].tensor].dtype, ids, counts, positions, data, relative)
