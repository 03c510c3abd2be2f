"""``PendingDelta``: the changes of one version, reverted if the version cannot be made durable.

``VersionChanges`` are these changes as they are encoded, read from the log and the baseline in pieces."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import torch

from trainer_side.diff.baseline import Baseline
from trainer_side.diff.buffers import HostBuffer
from trainer_side.diff.change_log import ChangeLog, ChangeSpool
from trainer_side.diff.device import DeviceComparer, comparer_memory
from trainer_side.diff.engine import Detector, SmallTensor, SmallTensors
from trainer_side.model.live_tensors import LiveTensors
from vllm_delta_sync.codec.delta_object import BLOCK_ELEMENTS
from vllm_delta_sync.codec.tiles.coder import zigzag
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.errors import ModelError, TensorMismatchError
from vllm_delta_sync.format.codecs import RELATIVE_CODECS, Codec
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_change
from vllm_delta_sync.format.limits import split_by_bytes
from vllm_delta_sync.format.table import DType, TensorSpec, TensorTable
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.tensors.changes import Bits, Changes, Full, Positions, Sparse, revert_distances

logger = guarded_logger(__name__)

Pieces = Callable[[], Iterator[tuple[Positions, Bits]]]
"""Yields the changed elements of a tensor, ascending, in pieces: positions (n,) int64, data (n,) as in ``Sparse``."""


@dataclass(frozen=True)
class SparseTensor:
    """Changed elements of a tensor: its id, their number, and what reads them."""

    id: int
    count: int
    pieces: Pieces


@dataclass(frozen=True)
class FullTensor:
    """A tensor that is sent in full: its id, and what reads its (numel,) bits."""

    id: int
    read: Callable[[], Bits]


@dataclass
class VersionChanges:
    """Changes in terms of a table; valid until the pending delta is reverted or the next one begins.

    Attributes:
        relative: the data of sparse tensors are ULP distances, else new bits.
        fingerprints: per tensor id, fingerprint after minus before.
    """

    table: TensorTable
    relative: bool = True
    sparse: list[SparseTensor] = field(default_factory=list)
    full: list[FullTensor] = field(default_factory=list)
    fingerprints: dict[int, Fingerprint] = field(default_factory=dict)

    @property
    def changed(self) -> int:
        """Elements carried; tensors in full count with all elements."""
        return sum(self.counts.values()) + sum(self.table[tensor.id].numel for tensor in self.full)

    @property
    def counts(self) -> dict[int, int]:
        """Changed elements by id of sparse tensors."""
        return {tensor.id: tensor.count for tensor in self.sparse}

    @property
    def reversible(self) -> bool:
        """As ``Changes.reversible``."""
        return not self.full and (self.relative or not self.sparse)

    @property
    def decoded_bytes(self) -> int:
        """What ``load`` takes, with copies of the full tensors."""
        return sum(self._sizes().values())

    def load(self) -> Changes:
        """Return all changes in memory."""
        by_id = {tensor.id: tensor for tensor in self.sparse}
        groups = [self.group([by_id[id] for id in batch]) for batch in batches(self.counts, self.table)]
        return Changes(groups, [Full(tensor.id, tensor.read()) for tensor in self.full], self.fingerprints)

    def parts(self, most_bytes: int, most_parts: int) -> "list[VersionChanges]":
        """Split the changes as ``Changes.parts`` does."""
        found = split_by_bytes(self._sizes(), most_bytes, most_parts)
        return [self._only(tensors) for tensors in found]

    def _sizes(self) -> dict[int, int]:
        sizes = {tensor.id: self.table[tensor.id].nbytes for tensor in self.full}
        for tensor in self.sparse:
            sizes[tensor.id] = tensor.count * (8 + self.table[tensor.id].element.itemsize)
        return sizes

    def _only(self, tensors: set[int]) -> "VersionChanges":
        return VersionChanges(
            self.table,
            self.relative,
            [tensor for tensor in self.sparse if tensor.id in tensors],
            [tensor for tensor in self.full if tensor.id in tensors],
            {id: change for id, change in self.fingerprints.items() if id in tensors},
        )

    def group(self, tensors: list[SparseTensor]) -> Sparse:
        """Return the changes of some of the tensors, of one dtype, in memory."""
        spec = self.table[tensors[0].id]
        counts = np.array([tensor.count for tensor in tensors], np.int64)
        positions = np.empty(counts.sum(), np.int64)
        data = np.empty(positions.size, spec.element.uint)
        start = 0
        for tensor in tensors:
            for where, values in tensor.pieces():
                positions[start : start + where.size], data[start : start + where.size] = where, values
                start += where.size
        ids = np.array([tensor.id for tensor in tensors], np.uint32)
        return Sparse(spec.dtype, ids, counts, positions, data, self.relative)


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


class PendingDelta:
    """The difference between a baseline and newer weights; the baseline is updated to the newer weights.

    After any interruption it holds enough to restore the baseline: each step is logged before the baseline is touched,
    in a form that undoes nothing if the step did not happen.

    The caller's thread compares; all else, ``keep`` and ``revert`` too, is done in the publisher's background thread.

    Attributes:
        changed: number of elements whose bits changed, without those held back.
        compared: ids of the tensors that were compared.
        sparse: no tensor is sent in full, which would carry elements that a budget holds back, here or on another rank.
        fingerprints: tensor id → fingerprint after minus before; of tensors on a device once they are collected.
    """

    def __init__(self, baseline: Baseline, codec: Codec, compression: Compression, detector: Detector) -> None:
        self._baseline = baseline
        self._codec = codec
        self._compression = compression
        self._detector = detector
        self._on_devices: list[DeviceComparer] = []
        self._spool = ChangeSpool(baseline.limits.log_bytes)
        self._touched: dict[ChangeLog, int] = {}  # in order of comparison
        self._closed = False
        self.changed = 0
        self.sparse = False
        self.compared: set[int] = set()
        self.fingerprints: dict[int, Fingerprint] = {}

    @property
    def open(self) -> bool:
        """Whether the baseline may hold changes that are neither durable nor reverted."""
        return not self._closed

    def add_all(
        self, tensors: Iterable[tuple[str, torch.Tensor]], lasts: Callable[[torch.Tensor], bool] = lambda tensor: False
    ) -> None:
        """Compare (live name, tensor) pairs, one after another; after an error the caller must ``revert``.

        Args:
            lasts: whether a tensor stays valid after the next one is requested, and takes no memory meanwhile: many
                are then compared at a time.
        """
        owners: dict[int, str] = {}
        batch = SmallTensors()
        for name, tensor, live in self._baseline.match(tensors):
            tied = owners.setdefault(tensor, name) != name
            small, lasting = None, lasts(live)
            if lasting and not tied:
                buffer = self._baseline.buffer_on(tensor, live.device)
                small = SmallTensor.of(self._baseline.table[tensor], buffer, live)
            if tied or (small is not None and not batch.takes(small)):
                self._add_each(batch)
                batch = SmallTensors()
            if small is not None:
                batch.append(tensor, small)
                continue
            if tied:
                # The baseline must have the values of the first of them.
                self._finish_devices()
                self.collect_from_devices()
            before = self.changed
            self.add(tensor, live, lasting)
            if tied:
                self._finish_devices()
                if self.changed > before:
                    raise TensorMismatchError(
                        f"tensor {name!r} is tied to {owners[tensor]!r} but has other values; nothing was published: "
                        "tie them again, or start a new run under a new URL; if one buffer is refilled for both, yield "
                        "copies there"
                    )
        self._add_each(batch)
        self._finish_devices()

    def _add_each(self, batch: SmallTensors) -> None:
        """Do ``add`` for a batch."""
        if not batch.ids:
            return
        self.compared.update(batch.ids)
        logs = [ChangeLog(tensor.spec.element, self._spool) for tensor in batch.tensors]
        self._touched.update(zip(logs, batch.ids, strict=True))
        changes = self._detector.collect_each(batch.tensors, logs)
        for log, change in zip(logs, changes, strict=True):
            self._count(log, change)

    def add(self, tensor: int, live: torch.Tensor, lasting: bool = False) -> None:
        """Compare one tensor and update the baseline to it. On a device this only begins it; see ``add_all``.

        Args:
            tensor: id. live: of its shape, on any device. lasting: as ``lasts`` of ``add_all``.
        """
        self.compared.add(tensor)
        spec = self._baseline.table[tensor]
        buffer = self._baseline.buffer_on(tensor, live.device)
        log = ChangeLog(spec.element, self._spool)
        self._touched[log] = tensor
        if not live.is_cpu or not isinstance(buffer, HostBuffer):
            comparer = self._detector.on_device(live.device, self._baseline.table)
            if comparer not in self._on_devices:
                comparer.drop()
                self._on_devices.append(comparer)
            comparer.add(spec, buffer, live, log, lasting)
            return
        self._count(log, self._detector.collect(spec, buffer, live, log))

    def _count(self, log: ChangeLog, change: Fingerprint) -> None:
        """Count what a complete log has; forget it if that is nothing."""
        changed = log.size
        if changed:
            self.fingerprints[self._touched[log]] = change
            self.changed += changed
        else:
            del self._touched[log]

    def _finish_devices(self) -> None:
        """Wait until devices have read all that is compared there; count what changed."""
        counts: dict[ChangeLog, int] = {}
        for comparer in self._on_devices:
            counts.update(comparer.finish())
        self.changed += sum(counts.values())
        self._touched = {log: tensor for log, tensor in self._touched.items() if counts.get(log) != 0}

    def collect_from_devices(self) -> None:
        """Collect what was found on devices, and update the baselines there. Training need not wait for it.

        Only then ``fingerprints`` and the changes themselves are complete.
        """
        changes: dict[ChangeLog, Fingerprint] = {}
        for comparer in self._on_devices:
            changes.update(comparer.collect())
        self.fingerprints.update({tensor: changes[log] for log, tensor in self._touched.items() if log in changes})

    def keep(self) -> None:
        """Keep the changes, since the version is durable: the baseline can no longer be reverted."""
        if self._closed:
            return
        known = self._baseline.fingerprints
        # In one assignment, so that a failure in the middle changes nothing.
        self._baseline.fingerprints = [
            value + self.fingerprints[i] if i in self.fingerprints else value for i, value in enumerate(known)
        ]
        self._close()

    def _close(self) -> None:
        self._closed = True
        self._touched.clear()
        self._spool.close()

    def revert(self) -> None:
        """Restore the baseline, unless that was done or the changes were kept; else it is ``suspect``.

        Call it where no signal handler can interrupt it: not in the main thread.
        """
        if self._closed:
            return
        # An interrupted caller may have left the detector's threads running.
        self._detector.wait_idle()
        for comparer in self._on_devices:
            comparer.drop()
        try:
            for log, tensor in reversed(self._touched.items()):
                log.revert(self._baseline.buffer(tensor))
        except Exception as error:  # noqa: BLE001  a file that cannot be read, or memory of a device that runs out
            # It is half reverted, and cannot be reverted again. The next publish restores it from the bucket.
            self._baseline.suspect = True
            logger.error("a version's changes could not be reverted (%s: %s)", type(error).__name__, error)
        self._close()

    def hold_back(self, tensor: int, keep: npt.NDArray[np.bool_]) -> tuple[Bits, Bits]:
        """Revert changed elements of a tensor and drop them: the next comparison finds them again.

        Args:
            keep: (n,) which of the tensor's changed elements stay, in ascending order.

        Returns:
            Bits before and after, of the elements that are held back.
        """
        log = self._logs[tensor]
        positions, before, after = log.hold_back(self._baseline.buffer(tensor), keep)
        self.fingerprints[tensor] -= fingerprint_change(self._baseline.table[tensor].name, positions, before, after)
        self.changed -= positions.size
        if not log.size:
            del self._touched[log], self._logs[tensor], self.fingerprints[tensor]
        return before, after

    @property
    def touched(self) -> list[int]:
        """The ids of the tensors that changed."""
        return [*self._touched.values()]

    def positions(self, tensor: int) -> Positions:
        """Return the (n,) positions of the changed elements of a tensor, ascending."""
        return np.concatenate([positions for positions, _ in self._logs[tensor].pieces()])

    @cached_property
    def _logs(self) -> dict[int, ChangeLog]:
        """The log of each changed tensor, once all are compared."""
        return {tensor: log for log, tensor in self._touched.items()}

    def elements(self, most: int) -> Iterator[tuple[int, Iterator[tuple[Positions, Bits, Bits]]]]:
        """Yield tensor id, and its changed elements in pieces of up to ``most``: positions, bits before and now."""
        for log, tensor in self._touched.items():
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
        for log, tensor in self._touched.items():
            if tensor in tensors:
                bits = found[tensor] = np.array(self._baseline.read(tensor))
                for positions, distances in log.pieces():
                    revert_distances(log.element, bits, positions, distances)
        return found

    def changes(self) -> VersionChanges:
        """Return the delta as it is encoded; valid until it is reverted or the next delta begins."""
        changes = VersionChanges(
            self._baseline.table, self._codec in RELATIVE_CODECS, fingerprints=dict(self.fingerprints)
        )
        # Decided here and not during the comparison, since training waits for that.
        for log, tensor in self._touched.items():
            new_bits = partial(self._baseline.read, tensor)
            may_be_full = not self.sparse and tensor not in self._baseline.partial
            if may_be_full and full_is_smaller(changes.table[tensor], log, self._codec, self._compression, new_bits):
                changes.full.append(FullTensor(tensor, new_bits))
            else:
                read = log.pieces if changes.relative else partial(self._new_bits, tensor, log)
                changes.sparse.append(SparseTensor(tensor, log.size, read))
        return changes

    def _new_bits(self, tensor: int, log: ChangeLog) -> Iterator[tuple[Positions, Bits]]:
        for positions, _ in log.pieces():
            yield positions, self._baseline.buffer(tensor).get(positions)


def prepare_devices(detector: Detector, live: LiveTensors, baseline: Baseline) -> None:
    """Make the memory and compile the kernels for comparing tensors on devices now, not at the first publish.

    Raises:
        ModelError: a device has no memory for it.
    """
    kinds = {
        (tensor.device, baseline.table[target].dtype, tensor.dtype)
        for name, tensor in live.tensors.items()
        if tensor.device.type not in ("cpu", "meta")
        for target in baseline.targets_of.get(name, ())
    }
    for device, served, dtype in kinds:
        try:
            detector.on_device(device, baseline.table).prepare(served, dtype, baseline.location == "device")
        except torch.OutOfMemoryError as error:
            needed = comparer_memory(baseline.table, baseline.location == "device")
            raise ModelError(f"{device} has no memory left to compare weights there, which takes {needed}") from error


SAMPLE_PIECES = 16
SAMPLE_ELEMENTS = 16_384
COUNTED_ELEMENTS = 64 * 1024
SPARSE_RATIO = 32
"""If fewer than one in this many elements changed, the changes are smaller, and nothing is estimated."""

BLOCK_BYTES = 512
"""Bytes of a block besides its streams. A full tensor must save as much, because changes can be reverted."""


def full_is_smaller(
    spec: TensorSpec, log: ChangeLog, codec: Codec, compression: Compression, bits: Callable[[], Bits]
) -> bool:
    """Return whether all bits of a tensor take fewer bytes than its changes, as estimated from samples.

    Args:
        log: the changed elements, at least one. bits: returns the tensor's new (numel,) bits, if they are needed.
    """
    changed, width = log.size, spec.element.itemsize
    if codec == "raw":
        index = 4 if spec.numel <= np.iinfo(np.int32).max else 8
        return changed * (index + width) >= spec.nbytes
    if changed * SPARSE_RATIO < spec.numel:
        return False
    values = _value_bytes(log, spec.element)
    share = changed / spec.numel
    where = -share * np.log2(share) - (1 - share) * np.log2(1 - share) if changed < spec.numel else 0.0
    each = width if compression == "none" else _bytes_per_element(bits())
    return spec.numel * where / 8 + changed * values > spec.numel * each + BLOCK_BYTES


def _value_bytes(log: ChangeLog, element: DType) -> float:
    """Return the estimated bytes of a distance, from samples: its token, which is entropy-coded, and raw bits."""
    counts = np.zeros(66, np.int64)
    for _, distances in log.samples(SAMPLE_PIECES):
        lengths = np.frexp(zigzag(distances, element).astype(np.float64))[1]
        counts += np.bincount(lengths, minlength=counts.size)
    share = counts / counts.sum()
    # Numbers of a length have up to four tokens, and their lowest bits but three are raw.
    length = np.arange(counts.size)
    raw = float((share * (np.minimum(length, 2) + np.maximum(length - 3, 0))).sum())
    used = share[share > 0]
    return float(raw - (used * np.log2(used)).sum()) / 8


def _bytes_per_element(bits: Bits) -> float:
    """Return the estimated size of an element of a full tensor: its byte planes, each coded separately."""
    starts = np.linspace(0, max(0, bits.size - SAMPLE_ELEMENTS), SAMPLE_PIECES).astype(np.int64).tolist()
    sample = np.concatenate([bits[start : start + SAMPLE_ELEMENTS] for start in starts])
    return sum(_entropy(plane) for plane in sample.view(np.uint8).reshape(sample.size, -1).T)


def _entropy(plane: npt.NDArray[np.uint8]) -> float:
    """Return the bytes per symbol of a memoryless source with these byte frequencies."""
    if not plane.size:
        return 0.0
    # In pieces, because bincount makes 64-bit integers of its argument.
    starts = range(0, plane.size, COUNTED_ELEMENTS)
    counts = np.sum([np.bincount(plane[start : start + COUNTED_ELEMENTS], minlength=256) for start in starts], axis=0)
    share = counts[counts > 0] / plane.size
    return float(-(share * np.log2(share)).sum() / 8)
