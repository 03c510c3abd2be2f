"""``Detector``: find what changed in a tensor, and update its baseline.

Live tensor → served dtype → compare with the baseline → extract → update the baseline: one pass per tensor, in chunks
that stay in a core's cache. Each element of the live tensor is read once, so that the value compared, collected and
stored is the same even while another thread trains.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
import torch

from trainer_side.background_thread import BackgroundJob, BackgroundThread
from trainer_side.diff.buffers import BaselineBuffer, HostBuffer
from trainer_side.diff.change_log import ChangeLog, ChangeSpool, LogEntry
from trainer_side.diff.device import DeviceComparer
from trainer_side.diff.device_queue import open_queue
from trainer_side.diff.reader import Box, Reader, split_boxes
from vllm_delta_sync.format.fingerprint import Fingerprint, tensor_seed
from vllm_delta_sync.format.table import DType, TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import CHUNK_ELEMENTS, Bits, order_masks
from vllm_delta_sync.tensors.segments import Segment, SegmentArrays
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES

SMALL_ELEMENTS = 1024**2
"""Tensors up to this size are compared many at a time: calling a loop takes as long as comparing 100,000 elements."""
BATCH_ELEMENTS = 4 * 1024**2
"""Elements that are compared in one call: bounds what sources hold that make each tensor when it is read."""
PARALLEL_ELEMENTS = 8 * 1024**2
"""Tensors below this size take two milliseconds at most. Splitting them made two threads slower than one for a model
(``benchmarks.publish``), since the threads are woken and awaited at each tensor."""


@dataclass(slots=True)
class SmallTensor:
    """A tensor that can be compared with others in one call: small, contiguous, and in the served dtype."""

    spec: TensorSpec
    buffer: HostBuffer
    live: torch.Tensor

    @classmethod
    def of(cls, spec: TensorSpec, buffer: BaselineBuffer, live: torch.Tensor) -> Self | None:
        """Return the tensor, with the arguments of ``Detector.collect``; None if it is not such a tensor."""
        if not isinstance(buffer, HostBuffer) or not 0 < spec.numel <= SMALL_ELEMENTS:
            return None
        if not live.is_cpu or not live.is_contiguous() or live.dtype != TORCH_DTYPES[spec.dtype]:
            return None
        return cls(spec, buffer, live)


class SmallTensors:
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


class Detector:
    """Compares live tensors with their baseline, large ones in several threads; one tensor at a time.

    Args:
        threads: number of threads, including the caller's; the result does not depend on it.
    """

    def __init__(self, threads: int = 1) -> None:
        self._workers = [BackgroundThread(f"delta-sync-diff-{number}") for number in range(1, threads)]
        self._comparers = [_Comparer() for _ in range(threads)]
        self._devices: dict[torch.device, DeviceComparer] = {}

    def collect(self, spec: TensorSpec, buffer: HostBuffer, live: torch.Tensor, log: ChangeLog) -> Fingerprint:
        """Update the baseline of one tensor to the live values, and log the changes.

        After any interruption, ``wait_idle`` and then ``log.revert`` restore the baseline.

        Args:
            live: in host memory, of the spec's shape; any strides, and any dtype that rounds to the served one.
            log: empty; receives the changes.

        Returns:
            Fingerprint after minus before.
        """
        if not spec.numel:
            return Fingerprint()
        parts = len(self._comparers) if spec.numel >= PARALLEL_ELEMENTS else 1
        flat, boxes = split_boxes(live, parts)
        if len(boxes) == 1:
            return self._comparers[0].collect(spec, buffer.bits, flat, boxes[0], log.parts[0], log.spool)
        log.parts = [[] for _ in boxes]
        changes = [Fingerprint() for _ in boxes]

        def work(number: int) -> None:
            comparer = self._comparers[number]
            changes[number] = comparer.collect(spec, buffer.bits, flat, boxes[number], log.parts[number], log.spool)

        jobs = [(BackgroundJob(), number) for number in range(1, len(boxes))]
        for job, number in jobs:
            self._workers[number - 1].submit(job, partial(work, number))
        work(0)
        for job, _ in jobs:
            job.join()
            if job.error is not None:
                raise job.error
        return sum(changes, Fingerprint())

    def collect_each(self, tensors: Sequence[SmallTensor], logs: Sequence[ChangeLog]) -> list[Fingerprint]:
        """Do ``collect`` for tensors of one dtype, in one call of a loop. Args: logs: as ``log``, of each tensor."""
        from vllm_delta_sync.tensors.diff_kernels import collect_each

        element = tensors[0].spec.element
        masks = order_masks(element)
        olds = np.array([tensor.buffer.address for tensor in tensors])
        news = np.array([tensor.live.data_ptr() for tensor in tensors])
        sizes = np.array([tensor.spec.numel for tensor in tensors])
        seeds = np.array([tensor_seed(tensor.spec.name) for tensor in tensors], np.uint64)
        sums = np.zeros((len(tensors), 2), np.uint64)
        arrays, done = self._comparers[0].arrays(element), 0
        arrays.state[2] = 0
        while True:
            bounds = np.empty((len(tensors) + 1, 2), np.int64)
            bounds[:] = arrays.state[:2]
            rows = list(bounds)
            # Logged before the loop that fills them; empty until then.
            for number in range(done, len(tensors)):
                logs[number].parts[0].append(Segment(arrays, rows[number], rows[number + 1]))
            done = collect_each(done, olds, news, sizes, seeds, *masks, *arrays.as_arguments(), bounds, sums)
            if done == len(tensors):
                return [Fingerprint(low, high) for low, high in sums.tolist()]
            compared = arrays.state[2]
            arrays = self._comparers[0].renew(element, logs[0].spool)
            arrays.state[2] = compared

    def on_device(self, device: torch.device, table: TensorTable) -> DeviceComparer:
        """Return what compares tensors on a device. Args: table: of all that is published."""
        if device not in self._devices:
            self._devices[device] = DeviceComparer(open_queue(device), table)
        return self._devices[device]

    def wait_idle(self) -> None:
        """Wait until none of its threads or devices is comparing; call it after an interrupted ``collect``."""
        for worker in self._workers:
            worker.call(lambda: None)
        for device in self._devices:
            if device.type != "cpu":
                # On all streams: which one the interrupted thread used is not known here.
                torch.accelerator.synchronize(device)

    def close(self) -> None:
        """End the threads, and give up the memory of devices, which must be idle."""
        for worker in self._workers:
            worker.close()
        for comparer in self._devices.values():
            comparer.release()


class _Comparer:
    """Compares in one thread, with memory of its own."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._block = np.empty(CHUNK_ELEMENTS, np.uint16)
        self._arrays: dict[str, SegmentArrays] = {}

    def collect(
        self,
        spec: TensorSpec,
        bits: Bits,
        live: torch.Tensor,
        boxes: list[Box],
        entries: list[LogEntry],
        spool: ChangeSpool | None = None,
    ) -> Fingerprint:
        """Compare consecutive boxes of one tensor, log its changes in ``entries``; return what they add to its
        fingerprint."""
        from vllm_delta_sync.tensors import diff_kernels

        element = spec.element
        known = (*order_masks(element), np.uint64(tensor_seed(spec.name)))
        arrays = self.arrays(element)
        segment = _open(arrays, entries)
        low = high = 0
        for start, index in boxes:
            # An empty index means the whole tensor, without a view.
            for offset, fresh, nan in self._reader.read(live[index] if index else live, spec.dtype):
                here = start + offset
                old = bits[here : here + fresh.size]
                arrays.state[2] = compared = 0
                while True:
                    room = here, *known, *arrays.as_arguments()
                    if nan is None:
                        added = diff_kernels.collect(old, fresh, *room)
                    else:
                        added = diff_kernels.collect_rounded(old, fresh, nan, self._block, *room)
                    low, high = low + int(added[0]), high + int(added[1])
                    compared = int(arrays.state[2])
                    if compared == old.size:
                        break
                    _close(segment, entries)
                    arrays = self.renew(element, spool)
                    arrays.state[2] = compared
                    segment = _open(arrays, entries)
        _close(segment, entries)
        mask = (1 << 64) - 1
        return Fingerprint(low & mask, high & mask)

    def arrays(self, element: DType) -> SegmentArrays:
        """Return room for changes, which may be used up."""
        return self._arrays.get(element.name) or self.renew(element)

    def renew(self, element: DType, spool: ChangeSpool | None = None) -> SegmentArrays:
        """Return new room for changes. The room before lives as long as the segments in it, which ``spool`` keeps."""
        full = self._arrays.get(element.name)
        arrays = self._arrays[element.name] = SegmentArrays.empty(element)
        if full is not None and spool is not None:
            spool.keep(full)
        return arrays


def _open(arrays: SegmentArrays, entries: list[LogEntry]) -> Segment:
    """Log a segment before the loop that fills it; it is empty until then."""
    segment = Segment.open(arrays)
    entries.append(segment)
    return segment


def _close(segment: Segment, entries: list[LogEntry]) -> None:
    segment.close()
    if not segment.size:
        entries.pop()


def compile_kernels(table: TensorTable) -> None:
    """Compile (or load from the cache) the kernels that compare the tensors of this table.

    The first ``publish`` is then as fast as the others. Call it outside the main thread, where no interrupt can hit
    the compiler.
    """
    from vllm_delta_sync.tensors import diff_kernels

    block = np.empty(1, np.uint16)
    for element in {spec.element.uint: spec.element for spec in table}.values():
        old, fresh = (np.full(1, value, element.uint) for value in (0, 1))
        arrays = SegmentArrays.empty(element)
        segment = Segment.open(arrays)
        room = 0, *order_masks(element), np.uint64(0), *arrays.as_arguments()
        diff_kernels.collect(old, fresh, *room)
        segment.expand(np.empty(1, np.int64))
        diff_kernels.put(old, fresh, *arrays.as_arguments()[:2], *np.zeros((2, 0), np.int64), arrays.state)
        diff_kernels.gather(fresh, 1, 1, 1, old)
        one = np.empty(0, np.int64)
        bounds, sums, none = np.empty((1, 2), np.int64), np.empty((0, 2), np.uint64), np.empty(0, np.uint64)
        masks = order_masks(element)
        diff_kernels.collect_each(0, one, one, one, none, *masks, *arrays.as_arguments(), bounds, sums)
        if element.itemsize == block.itemsize:
            singles = np.zeros(1, np.uint32)
            diff_kernels.gather(singles, 1, 1, 1, singles)
            diff_kernels.collect_rounded(old, singles, np.uint16(0), block, *room)
