"""``Detector``: find what changed in a tensor, and update its baseline.

Live tensor → served dtype → compare with the baseline → extract → update the baseline: one pass per tensor, in chunks
that stay in a core's cache. Each element of the live tensor is read once, so that the value compared, collected and
stored is the same even while another thread trains.
"""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from trainer_side.background_thread import BackgroundJob, BackgroundThread
from trainer_side.diff.buffers import BaselineBuffer, HostBuffer
from trainer_side.diff.reader import Box, Reader, split_boxes
from trainer_side.diff.undo_log import ChangeLog, LogEntry
from vllm_delta_sync.format.fingerprint import Fingerprint, tensor_seed
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.bits import CHUNK_ELEMENTS, Bits, order_masks
from vllm_delta_sync.tensors.segments import Scratch

PARALLEL_ELEMENTS = 8 * 1024**2
"""Tensors below this size take two milliseconds at most. Splitting them made two threads slower than one for a model
(``benchmarks.publish``), since the threads are woken and awaited at each tensor."""


@dataclass
class _ThreadBuffers:
    """Scratch memory of one thread."""

    reader: Reader = field(default_factory=Reader)
    scratch: Scratch = field(default_factory=Scratch)
    block: np.ndarray = field(default_factory=lambda: np.empty(CHUNK_ELEMENTS, np.uint16))


class Detector:
    """Compares live tensors with their baseline, large ones in several threads; one tensor at a time.

    Args:
        threads: number of threads, including the caller's; the result does not depend on it.
    """

    def __init__(self, threads: int = 1) -> None:
        self._workers = [BackgroundThread(f"delta-sync-diff-{number}") for number in range(1, threads)]
        self._thread_buffers = [_ThreadBuffers() for _ in range(threads)]

    def collect(self, spec: TensorSpec, buffer: BaselineBuffer, live: torch.Tensor, log: ChangeLog) -> Fingerprint:
        """Update the baseline of one tensor to the live values, and log the changes.

        After any interruption, ``wait_idle`` and then ``log.revert`` restore the baseline.

        Args:
            buffer: the baseline, where ``buffers.move_buffer`` puts it for this tensor.
            live: of the spec's shape; any strides, and any dtype that rounds to the served one.
            log: empty; receives the changes.

        Returns:
            Fingerprint after minus before.
        """
        if live.device.type != "cpu" or not isinstance(buffer, HostBuffer):
            from trainer_side.diff.device import collect

            return collect(spec, buffer, live, log)
        parts = len(self._thread_buffers) if spec.numel >= PARALLEL_ELEMENTS else 1
        flat, boxes = split_boxes(live, parts)
        log.parts = [[] for _ in boxes]
        if len(boxes) == 1:
            return _ThreadComparison(spec, buffer.bits, flat, self._thread_buffers[0], log.parts[0]).collect(boxes[0])
        changes = [Fingerprint() for _ in boxes]

        def work(number: int) -> None:
            share = _ThreadComparison(spec, buffer.bits, flat, self._thread_buffers[number], log.parts[number])
            changes[number] = share.collect(boxes[number])

        jobs = [(BackgroundJob(), number) for number in range(1, len(boxes))]
        for job, number in jobs:
            self._workers[number - 1].submit(job, partial(work, number))
        if boxes:
            work(0)
        for job, _ in jobs:
            job.join()
            if job.error is not None:
                raise job.error
        return sum(changes, Fingerprint())

    def wait_idle(self) -> None:
        """Wait until none of its threads is comparing; call it after an interrupted ``collect``."""
        for worker in self._workers:
            worker.call(lambda: None)

    def close(self) -> None:
        """End the threads."""
        for worker in self._workers:
            worker.close()


class _ThreadComparison:
    """One thread's part of comparing one tensor."""

    def __init__(
        self, spec: TensorSpec, bits: Bits, live: torch.Tensor, room: _ThreadBuffers, entries: list[LogEntry]
    ) -> None:
        self._spec, self._bits, self._live, self._room, self._entries = spec, bits, live, room, entries
        self._known = (*order_masks(spec.element), np.uint64(tensor_seed(spec.name)))
        self._low = self._high = 0

    def collect(self, boxes: list[Box]) -> Fingerprint:
        """Compare consecutive boxes; return what they add to the fingerprint."""
        self._open(0)
        for start, index in boxes:
            # An empty index means the whole tensor, without a view.
            box = self._live[index] if index else self._live
            for offset, fresh, nan in self._room.reader.read(box, self._spec.dtype):
                here = start + offset
                self._compare(self._bits[here : here + fresh.size], fresh, nan, here)
        self._entries[-1:] = [self._segment.closed()] if self._segment.size else []
        mask = (1 << 64) - 1
        return Fingerprint(self._low & mask, self._high & mask)

    def _compare(self, old: Bits, fresh: Bits, nan: np.uint16 | None, start: int) -> None:
        from vllm_delta_sync.tensors import diff_kernels

        self._segment.state[2] = 0
        while True:
            segment = self._segment
            room = (
                start,
                *self._known,
                segment.relative,
                segment.distances,
                segment.starts,
                segment.ends,
                segment.state,
            )
            if nan is None:
                low, high = diff_kernels.collect(old, fresh, *room)
            else:
                block = self._room.block
                low, high = diff_kernels.collect_rounded(old, fresh, nan, block, *room)
            self._low += int(low)
            self._high += int(high)
            compared = int(segment.state[2])
            if compared == old.size:
                return
            self._entries[-1] = segment.closed()
            self._open(compared)

    def _open(self, compared: int) -> None:
        # Logged before the loop that fills it; empty until then.
        self._segment = self._room.scratch.segment(self._spec.element, compared)
        self._entries.append(self._segment)


def compile_kernels(table: TensorTable) -> None:
    """Compile (or load from the cache) the kernels that compare the tensors of this table.

    The first ``publish`` is then as fast as the others. Call it outside the main thread, where no interrupt can hit
    the compiler.
    """
    from vllm_delta_sync.tensors import diff_kernels

    scratch, block = Scratch(), np.empty(1, np.uint16)
    for element in {spec.element.uint: spec.element for spec in table}.values():
        old, fresh = (np.full(1, value, element.uint) for value in (0, 1))
        segment = scratch.segment(element)
        known = 0, *order_masks(element), np.uint64(0)
        room = segment.relative, segment.distances, segment.starts, segment.ends, segment.state
        diff_kernels.collect(old, fresh, *known, *room)
        segment.closed().expand(np.empty(1, np.int64))
        diff_kernels.gather(fresh, 1, 1, 1, old)
        if element.itemsize == block.itemsize:
            singles = np.zeros(1, np.uint32)
            diff_kernels.gather(singles, 1, 1, 1, singles)
            diff_kernels.collect_rounded(old, singles, np.uint16(0), block, *known, *room)
