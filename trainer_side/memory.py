"""``PublisherMemory``: how much memory a publisher takes in this process, known before it takes it."""

from dataclasses import dataclass

from trainer_side.diff.baseline import Baseline
from trainer_side.diff.change_log import SAMPLE_ELEMENTS
from trainer_side.diff.device import comparer_memory
from trainer_side.diff.memory_limits import MemoryUse
from trainer_side.diff.pending_delta import SAMPLE_PIECES
from trainer_side.options import PublisherOptions
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.segments import ROOM

THREAD_BYTES = 10 * 1024 * 1024
"""Scratch memory of a thread that compares: 1.5 MB, and 8 MB for tensors that are strided."""


@dataclass(frozen=True)
class PublisherMemory:
    """Bytes that a publisher takes in this process, beside the model and what the store's client buffers.

    Attributes:
        at_rest: between two versions: the baseline.
        largest: the most, while a version is compared and written in which every element changed. It includes
            ``at_rest``. If the temporary files cannot be written, their bytes are host memory too.
    """

    at_rest: MemoryUse
    largest: MemoryUse

    def __str__(self) -> str:
        return f"{self.at_rest} at rest; {self.largest} at most, for a version in which every element changed"


def publisher_memory(
    baseline: Baseline, options: PublisherOptions, threads: int, keeps_deltas: bool
) -> PublisherMemory:
    """Return what a publisher takes.

    Args:
        baseline: its bits. threads: that compare. keeps_deltas: whether it has ``RecentDeltas``.
    """
    own, limits, at_rest = baseline.table, baseline.limits, baseline.memory()
    host = _comparing(own, threads) + _encoding(baseline, options) + keeps_deltas * limits.loaded_bytes
    if options.gate is not None and options.gate.action == "quarantine":
        host += own.full_bytes  # the bits of the sound version
    if options.budget is not None:
        # Sizes of all changes, and what is kept of them, expanded; for one tensor masks, and what is held back.
        host += (4 + 8) * own.total + own.full_bytes + max((40 * spec.numel for spec in own), default=0)
    # The log, the pieces of an object with the planes of one tensor, and all objects.
    log = own.full_bytes + 2 * own.total
    disk = max(0, log - limits.log_bytes) + 2 * own.full_bytes + own.total
    return PublisherMemory(at_rest, at_rest + MemoryUse(host=host, disk=disk) + _on_devices(baseline))


def _width(table: TensorTable) -> int:
    return max((spec.element.itemsize for spec in table), default=0)


def _comparing(table: TensorTable, threads: int) -> int:
    """Return the host memory of a comparison, beside the log: of threads, and of samples of one tensor's changes."""
    width = _width(table)
    return threads * (THREAD_BYTES + ROOM * (2 + width)) + SAMPLE_PIECES * SAMPLE_ELEMENTS * (3 + 4 * width)


def _encoding(baseline: Baseline, options: PublisherOptions) -> int:
    """Return the host memory of log and encoding: of the largest version that is encoded in memory, or of one that is
    encoded in pieces."""
    own, limits = baseline.table, baseline.limits
    width, largest = _width(own), max((spec.nbytes for spec in own), default=0)
    # Positions and distances, what is made of them, and their log, which is half as large. Of tensors in full: planes,
    # the object, and the log.
    in_memory = 7 * limits.loaded_bytes // 2
    # Positions and distances of a block twice, since they are joined, its planes, and the mask of a large tensor.
    block = limits.block_elements * (2 * (8 + width) + 2 + 2 * width)
    in_pieces = limits.log_bytes + block + max((spec.numel // 8 for spec in own), default=0)
    # A copy of one tensor: its base bits or, if the baseline is on a device, its bits.
    copied = largest if options.delta_codec == "tiled" or baseline.location == "device" else 0
    return max(in_memory, in_pieces) + copied


def _on_devices(baseline: Baseline) -> MemoryUse:
    """Return what comparisons on devices take there, and in pinned memory: each as if all tensors were on it."""
    each = comparer_memory(baseline.table, baseline.location == "device")
    return sum([each] * len(baseline.cuda_devices), MemoryUse())
