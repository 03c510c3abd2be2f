"""What one version changes: found by diffing, taken back if the version cannot be made durable."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from trainer_side.baseline import Baseline
from vllm_delta_sync.errors import PublishError
from vllm_delta_sync.wire.bits import Bits, Positions, order_masks, revert_distances
from vllm_delta_sync.wire.changes import Changes, Full, Sparse
from vllm_delta_sync.wire.compression import Compression
from vllm_delta_sync.wire.delta import Codec
from vllm_delta_sync.wire.fingerprint import Fingerprint, fingerprint_tensor, tensor_seed
from vllm_delta_sync.wire.packed import BLOCK_ELEMENTS
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

SAMPLE_WINDOWS = 16
SAMPLE_WINDOW_ELEMENTS = 16_384
# Entropy is what an ideal coder reaches; a real one needs a little more.
ENTROPY_MARGIN = 1.05


@dataclass
class _Moved:
    """Changed elements of one tensor: positions (n,) ascending and ULP distances new − old (n,)."""

    tensor: int
    positions: Positions
    distances: Bits


@dataclass
class _Replaced:
    """A tensor that is sent in full; ``saved`` are its bits of before."""

    tensor: int
    saved: Bits


class Patch:
    """The difference between a baseline and newer weights; the baseline is brought up to the latter.

    Whatever interrupts the work, the patch holds enough to put the baseline back: each step is noted down
    before the baseline is touched, in a form that undoes nothing if the step did not happen.

    Attributes:
        changed: elements whose bits changed.
        fingerprints: tensor id → fingerprint after minus before.
    """

    def __init__(self, baseline: Baseline, codec: Codec, compression: Compression) -> None:
        self._baseline = baseline
        self._codec = codec
        self._compression = compression
        self._moved: list[_Moved] = []
        self._replaced: list[_Replaced] = []
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

    def add(self, tensor: int, new: Bits) -> int:
        """Diff one tensor and bring the baseline up to ``new``.

        Args:
            tensor: id. new: (numel,) bits in the served dtype, which nobody else changes; not kept.

        Returns:
            Number of changed elements.

        Raises:
            PublishError: ``new`` changed meanwhile; ``revert`` puts the baseline back all the same.
        """
        from vllm_delta_sync.wire import kernels

        spec, old = self._baseline.table[tensor], self._baseline.bits(tensor)
        changed = int(kernels.count_different(old, new))
        if not changed:
            return 0
        if self._full_is_smaller(spec, changed, old, new):
            saved = old.copy()
            self._replaced.append(_Replaced(tensor, saved))
            np.copyto(old, new)
            change = fingerprint_tensor(spec.name, old) - fingerprint_tensor(spec.name, saved)
        else:
            # Zeros stand for "element 0 moved by nothing" until the kernel has filled them.
            moved = _Moved(tensor, np.zeros(changed, np.int64), np.zeros(changed, spec.element.uint))
            self._moved.append(moved)
            seed = np.uint64(tensor_seed(spec.name))
            masks = order_masks(spec.element)
            low, high, found = kernels.diff_into(old, new, *masks, seed, moved.positions, moved.distances)
            if found != changed:
                # Not the zeros behind what was found: element 0 may be among that, and is put back only once.
                moved.positions, moved.distances = moved.positions[:found], moved.distances[:found]
                raise PublishError(
                    f"tensor {spec.name!r} changed while it was compared ({changed} differences, then {found}); "
                    "nothing is published: hold the weights still and publish again"
                )
            change = Fingerprint(int(low), int(high))
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
            self._replaced.clear()

    def revert(self) -> None:
        """Put the baseline back, unless that is done or the patch is settled.

        Call it where no signal handler can interrupt it: not in the main thread.
        """
        with self._lock:
            if self._settled:
                return
            for moved in self._moved:
                element = self._baseline.table[moved.tensor].element
                revert_distances(element, self._baseline.bits(moved.tensor), moved.positions, moved.distances)
            for replaced in self._replaced:
                np.copyto(self._baseline.bits(replaced.tensor), replaced.saved)
            self._settled = True
            self._moved.clear()
            self._replaced.clear()

    def pieces(self, most: int) -> Iterator[tuple[int, Iterator[tuple[Bits, Bits]]]]:
        """Tensor id, and its bits (before, now) in pieces of up to ``most`` elements: at least all that changed."""
        for moved in self._moved:
            yield moved.tensor, self._pieces_of(moved, most)
        for replaced in self._replaced:
            now = self._baseline.bits(replaced.tensor)
            starts = range(0, now.size, most)
            yield replaced.tensor, ((replaced.saved[i : i + most], now[i : i + most]) for i in starts)

    def _pieces_of(self, moved: _Moved, most: int) -> Iterator[tuple[Bits, Bits]]:
        element, bits = self._baseline.table[moved.tensor].element, self._baseline.bits(moved.tensor)
        every = np.arange(min(most, moved.positions.size), dtype=np.int64)
        for start in range(0, moved.positions.size, most):
            now = bits[moved.positions[start : start + most]]
            before = now.copy()
            revert_distances(element, before, every[: now.size], moved.distances[start : start + most])
            yield before, now

    def before(self, tensors: Iterable[int]) -> dict[int, Bits]:
        """Copies of the (numel,) bits that tensors which the patch changes had before it."""
        wanted = set(tensors)
        found = {replaced.tensor: replaced.saved.copy() for replaced in self._replaced if replaced.tensor in wanted}
        for moved in self._moved:
            if moved.tensor in wanted:
                bits = found[moved.tensor] = self._baseline.bits(moved.tensor).copy()
                revert_distances(self._baseline.table[moved.tensor].element, bits, moved.positions, moved.distances)
        return found

    def changes(self) -> Changes:
        """The patch in the wire's terms; valid until it is reverted or the next patch begins."""
        full = [Full(replaced.tensor, self._baseline.bits(replaced.tensor)) for replaced in self._replaced]
        return Changes([self._group(batch) for batch in self._batches()], full, dict(self.fingerprints))

    def _batches(self) -> Iterator[list[_Moved]]:
        """Tensors of one dtype, ascending by id, up to about a block together: bounds what joining copies."""
        table = self._baseline.table
        batch: list[_Moved] = []
        held = 0
        for moved in sorted(self._moved, key=lambda moved: (table[moved.tensor].dtype, moved.tensor)):
            full = held + moved.positions.size > BLOCK_ELEMENTS
            if batch and (full or table[moved.tensor].dtype != table[batch[0].tensor].dtype):
                yield batch
                batch, held = [], 0
            batch.append(moved)
            held += moved.positions.size
        if batch:
            yield batch

    def _group(self, batch: list[_Moved]) -> Sparse:
        relative = self._codec == "packed"
        if len(batch) == 1:
            positions, distances = batch[0].positions, batch[0].distances
        else:
            positions = np.concatenate([moved.positions for moved in batch])
            distances = np.concatenate([moved.distances for moved in batch])
        counts = np.array([moved.positions.size for moved in batch], np.int64)
        data = distances
        if not relative:
            data = np.concatenate([self._baseline.bits(moved.tensor)[moved.positions] for moved in batch])
        start = 0
        for moved, count in zip(batch, counts.tolist(), strict=True):
            # The joined arrays replace the single ones, so that both are held for one batch only.
            moved.positions, moved.distances = (
                positions[start : start + count],
                distances[start : start + count],
            )
            start += count
        ids = np.array([moved.tensor for moved in batch], np.uint32)
        return Sparse(self._baseline.table[batch[0].tensor].dtype, ids, counts, positions, data, relative)

    def _full_is_smaller(self, spec: TensorSpec, changed: int, old: Bits, new: Bits) -> bool:
        width = spec.element.itemsize
        if self._codec == "raw":
            index = 4 if spec.numel <= np.iinfo(np.int32).max else 8
            return changed * (index + width) >= spec.nbytes
        # A gap byte, the planes of the distance, and eight bytes for each of the few gaps beyond 254.
        most = changed * (1 + width) + 8 * (spec.numel // 255)
        if self._compression == "none" or most < spec.nbytes:
            return most >= spec.nbytes
        return ENTROPY_MARGIN * changed * _entropy_per_change(spec, old, new) >= spec.nbytes


def compile_kernels(table: TensorTable) -> None:
    """Compile (or load from the cache) what diffing this table runs.

    The first ``publish`` is then as fast as the others. Call it outside the main thread, where no interrupt
    can hit the compiler.
    """
    from vllm_delta_sync.wire import kernels

    positions = np.zeros(1, np.int64)
    for element in {spec.element.uint: spec.element for spec in table}.values():
        old, new, distances = (np.full(1, value, element.uint) for value in (0, 1, 0))
        kernels.count_different(old, new)
        kernels.diff_into(old, new, *order_masks(element), np.uint64(0), positions, distances)


def _entropy_per_change(spec: TensorSpec, old: Bits, new: Bits) -> float:
    """Estimated bytes per changed element in codec ``packed``, from samples of a densely changed tensor."""
    from vllm_delta_sync.wire import kernels

    starts = np.linspace(0, max(0, spec.numel - SAMPLE_WINDOW_ELEMENTS), SAMPLE_WINDOWS).astype(np.int64).tolist()
    before = np.concatenate([old[start : start + SAMPLE_WINDOW_ELEMENTS] for start in starts])
    after = np.concatenate([new[start : start + SAMPLE_WINDOW_ELEMENTS] for start in starts])
    changed = int(kernels.count_different(before, after))
    positions, distances = np.empty(changed, np.int64), np.empty(changed, spec.element.uint)
    kernels.diff_into(before, after, *order_masks(spec.element), np.uint64(0), positions, distances)
    signed = distances.view(f"<i{distances.itemsize}")
    zigzag = ((signed << 1) ^ (signed >> (8 * distances.itemsize - 1))).view(np.uint8).reshape(-1, distances.itemsize)
    gaps = np.minimum(np.diff(positions, prepend=-1) - 1, 255).astype(np.uint8)
    return sum(_entropy(plane) for plane in (gaps, *zigzag.T))


def _entropy(plane: np.ndarray) -> float:
    """Bytes per symbol of a memoryless source with these byte frequencies."""
    if not plane.size:
        return 0.0
    share = np.bincount(plane, minlength=256)[np.bincount(plane, minlength=256) > 0] / plane.size
    return float(-(share * np.log2(share)).sum() / 8)
