"""``DeviceComparer``: find what changed in tensors on a device with one wait, and collect it while training goes on.

While training waits, kernels read live weights and baseline once, many tensors per launch, and leave positions, old and
new bits of what differs in memory of the device (``Found``), block by block in any order. The host waits once, for a
count per tensor; after that the weights may change. ``collect`` runs in the background, on a stream of its own: it
brings the blocks in order, copies them to the host, and updates the baseline.

With the baseline in host memory, its parts are copied to two buffers by turns, so that the bus is busy while a kernel
compares. Memory is made by ``prepare``, or at the first comparison, and used again by each later one.

Kernels are Triton's on CUDA (``compare_triton``), and torch operations elsewhere (``compare_torch``).
"""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from trainer_side.diff import compare_torch
from trainer_side.diff.buffers import BaselineBuffer, DeviceBuffer, HostBuffer
from trainer_side.diff.change_log import ChangeLog, PendingWrite
from trainer_side.diff.device_memory import (
    BLOCK,
    COLUMNS,
    WIDTHS,
    BatchMemory,
    Found,
    Kernels,
    Kind,
    Ordered,
    Piece,
    PieceBatch,
    PieceTables,
    Stretch,
)
from trainer_side.diff.device_queue import DeviceQueue, Event
from trainer_side.diff.memory_limits import MemoryUse
from trainer_side.diff.reader import boxes
from vllm_delta_sync.format.fingerprint import Fingerprint, tensor_seed
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import CHUNK_ELEMENTS
from vllm_delta_sync.tensors.segments import Segment, SegmentArrays
from vllm_delta_sync.tensors.torch_views import SIGNED, TORCH_DTYPES

BATCH_ELEMENTS = 16 * 1024**2
"""Elements compared in one launch, if room is reserved for all of them, or their baseline comes from host memory."""
LARGE_BATCH_ELEMENTS = 256 * 1024**2
"""The same otherwise: reading them takes longer than Python takes to launch a kernel."""
BATCH_PIECES = 512
"""Tensors, or parts of large ones, that are compared in one launch."""
STRETCH_ELEMENTS = 2 * 1024**2
"""Changed elements that are collected at a time …"""
STRETCH_BLOCKS = 8192
"""… and blocks that they are in."""
BATCHES_UNDER_WAY = 8
"""Launches that the host is ahead of the device."""
ROOM_SHARE = 64
"""There is room for one in so many elements to have changed …"""
LARGEST_ROOM_SHARE = 16
"""… and, after a version in which more did, for up to one in so many. What is more is collected in between."""

MOST_ROOM = (1 << 31) - (1 << 20)
"""Kernels count places there in 32 bits."""

BLOCK_ALIGNMENT = 4
"""The rows of a batch begin at a multiple of 16 bytes: Triton compiles other kernels for other addresses."""
ROOM_ALIGNMENT = 64
"""So do old and new bits: room is made in multiples of so many elements."""


@dataclass(eq=False)
class LaunchedBatch:
    """A batch whose comparison was launched.

    Attributes:
        event: it has read all, and ``used`` (WIDTHS,) of ``PieceTables.used`` has arrived.
    """

    batch: PieceBatch
    memory: BatchMemory
    used: torch.Tensor
    event: Event


def table_sizes(table: TensorTable) -> tuple[int, int]:
    """Return how many pieces and blocks ``PieceTables`` has room for: twice as many tensors as there are, since large
    ones are cut, and ties may be compared once more."""
    pieces = 2 * (len(table) + table.total // BATCH_ELEMENTS) + BATCH_PIECES
    return pieces, table.total // BLOCK + (1 + BLOCK_ALIGNMENT) * pieces + STRETCH_BLOCKS


def _elements_by_width(table: TensorTable) -> dict[int, int]:
    totals = dict.fromkeys(WIDTHS, 0)
    for spec in table:
        totals[spec.element.itemsize] += spec.numel
    return totals


def _rooms(total: int) -> tuple[int, int]:
    """Return the least and the most elements that ``Found`` has room for. Args: total: elements of a width."""
    least = max(min(total, 2 * BATCH_ELEMENTS), min(total // ROOM_SHARE, MOST_ROOM))
    return least, max(least, min(total // LARGEST_ROOM_SHARE, MOST_ROOM))


def comparer_memory(table: TensorTable, on_device: bool) -> MemoryUse:
    """Return the most that a ``DeviceComparer`` keeps. Args: on_device: the baseline is."""
    pieces, blocks = table_sizes(table)
    device = pieces * (8 + 8 * COLUMNS) + 12 * blocks
    pinned = pieces * (8 + 8 * COLUMNS) + 4 * blocks
    for width, total in _elements_by_width(table).items():
        if total:
            device += _rooms(total)[1] * (4 + 2 * width) + STRETCH_ELEMENTS * (6 + 3 * width)
            device += 4 * STRETCH_BLOCKS + 16 * BATCH_PIECES
            device += 0 if on_device else 2 * width * (BATCH_ELEMENTS + 16 * BATCH_PIECES)
            pinned += STRETCH_ELEMENTS * (2 + 2 * width) + 8 * STRETCH_BLOCKS + 16 * BATCH_PIECES
    # torch rounds each piece of pinned memory up to a power of two.
    return MemoryUse(pinned=2 * pinned, device=device)


class DeviceComparer:
    """Compares tensors on one device with their baselines: ``add`` and ``finish`` while training waits, then
    ``collect``, in any thread. One publish at a time; it keeps its memory for the next one.

    If tensors last and the baseline is on the device, it launches as if there were room for what has changed, and
    compares once more, batch by batch, where there was not. Otherwise each batch waits until there is room for it,
    which earlier ones that are still under way may leave.

    Args:
        table: what is published: bounds how many elements may change.
    """

    def __init__(self, queue: DeviceQueue, table: TensorTable, kernels: Kernels | None = None) -> None:
        self._queue = queue
        self._kernels = _kernels_for(queue.device) if kernels is None else kernels
        self._totals = _elements_by_width(table)
        self._most_pieces, self._most_blocks = table_sizes(table)
        self._needed = dict.fromkeys(WIDTHS, 0)
        self.release()

    def release(self) -> None:
        """Give up all memory, which the next comparison would make anew. The device must be idle."""
        self._tables: PieceTables | None = None
        self._uploaded_owners: dict[int, list[int]] = {}
        self._found: dict[int, Found] = {}
        self._ordered: dict[int, Ordered] = {}
        self._windows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.drop()

    def drop(self) -> None:
        """Forget what was found. The device must be idle; baselines keep what was collected of it."""
        self._open: dict[Kind, PieceBatch] = {}
        self._launched: list[LaunchedBatch] = []
        self._under_way: deque[LaunchedBatch] = deque()
        self._launches = 0
        self._used = dict.fromkeys(WIDTHS, 0)
        self._collected = dict.fromkeys(WIDTHS, 0)
        self._counts: dict[ChangeLog, int] = {}
        self._changes: dict[ChangeLog, Fingerprint] = {}
        self._numbered: list[Piece] = []
        self._counted = self._blocks = 0
        self._window_events: list[Event] = [None, None]
        self._window = 0
        self._begun = False

    def add(
        self, spec: TensorSpec, buffer: BaselineBuffer, live: torch.Tensor, log: ChangeLog, lasting: bool = True
    ) -> None:
        """Compare a tensor, now or with later ones.

        Args:
            buffer: its baseline, on this device or in host memory.
            live: of the spec's shape, on this device. lasting: it keeps its values until ``finish``; else until what
                the calling thread's stream does after this call.
            log: empty; ``finish`` counts what belongs in it, ``collect`` adds it.
        """
        served = TORCH_DTYPES[spec.dtype]
        rounds = live.dtype == torch.float32 and spec.dtype == "BF16"
        bits = buffer.bits if isinstance(buffer, HostBuffer) else None
        whole = live.is_contiguous()
        # One kind for all parts of a tensor, so that they are logged in their order.
        aligned = whole and live.data_ptr() % 16 == 0 and (bits is not None or buffer.flat.data_ptr() % 16 == 0)
        # A tensor that is copied to be compared would last as long as the whole batch.
        reserved = not lasting or bits is not None or not whole or not (rounds or live.dtype == served)
        kind = Kind(spec.element.itemsize, rounds, spec.element.is_float, bits is None, aligned, reserved)
        self._counts[log] = 0
        if whole and live.numel() <= BATCH_ELEMENTS:
            # Few calls into torch: this runs for every tensor while training waits.
            if live.numel():
                flat = live.view(-1) if rounds or live.dtype == served else live.view(-1).to(served)
                self._add_piece(kind, Piece(log, spec, 0, flat, buffer.flat, bits))
        else:
            for start, index in _parts(live.numel()) if whole else boxes(tuple(live.shape), BATCH_ELEMENTS):
                box = (live.view(-1) if whole else live)[index].contiguous().view(-1)
                box = box if rounds else box.to(served)
                self._add_piece(kind, Piece(log, spec, start, box, buffer.flat[start : start + box.numel()], bits))
        if not lasting:
            self._launch_open()

    def finish(self) -> dict[ChangeLog, int]:
        """Wait until all that was added is read: from here on the live tensors may change.

        Returns:
            The number of changed elements of each log since the last call, which the log has as ``counted``.
        """
        self._launch_open()
        self._read_counts()
        fresh = {log: count for log, count in self._counts.items() if log.counted is None}
        for log, count in fresh.items():
            log.counted = count
        return fresh

    def collect(self) -> dict[ChangeLog, Fingerprint]:
        """Fill the logs, and bring the baselines up to date. Runs beside whatever the device does meanwhile.

        Returns:
            The change of fingerprint of each log with changes.
        """
        self._collect_launched()
        for log in self._counts:
            log.counted = None
        # A quarter more than this version needed.
        self._needed = {width: count + count // 4 for width, count in self._collected.items()}
        changes = self._changes
        self.drop()
        return changes

    def prepare(self, served: str, live: torch.dtype, on_device: bool) -> None:
        """Make the memory and compile the kernels for tensors of a dtype now, not at the first publish.

        Args:
            served: safetensors name of the served dtype. on_device: the baseline is.
        """
        spec = TensorSpec("", served, (1,))
        bits = np.ones(1, spec.element.uint)
        signed = torch.from_numpy(bits.view(f"<i{bits.itemsize}"))
        buffer = DeviceBuffer(signed.to(self._queue.device, copy=True)) if on_device else HostBuffer(bits)
        # The second one is at no multiple of 16 bytes, for which there is a kernel of its own.
        for tensor in torch.zeros(2, 1, dtype=live, device=self._queue.device):
            self.add(spec, buffer, tensor, ChangeLog(spec.element))
        self.finish()
        self.collect()

    # While training waits

    def _add_piece(self, kind: Kind, piece: Piece) -> None:
        most = BATCH_ELEMENTS if kind.reserved else LARGE_BATCH_ELEMENTS
        batch = self._open.get(kind)
        if batch is None:
            batch = self._open[kind] = PieceBatch(kind, most)
        if not batch.takes(piece, BATCH_PIECES):
            self._launch(kind)
            batch = self._open[kind] = PieceBatch(kind, most)
        batch.append(piece)

    def _launch_open(self) -> None:
        for kind in list(self._open):
            self._launch(kind)

    def _launch(self, kind: Kind) -> None:
        batch = self._open.pop(kind)
        queue, pieces, width = self._queue, batch.pieces, kind.width
        tables = self._begin(width)
        if len(self._numbered) + len(pieces) > self._most_pieces or self._blocks + batch.blocks > self._most_blocks:
            self._make_room()
        while len(self._under_way) == BATCHES_UNDER_WAY:
            self._await_oldest()
        bases = [piece.base for piece in pieces] if kind.on_device else self._upload_bases(batch)
        while kind.reserved and not self._has_room(batch):
            if not self._under_way:
                self._make_room()
                break
            self._await_oldest()
        first, at = len(self._numbered), slice(self._blocks, self._blocks + batch.blocks)
        rows = slice(first, first + len(pieces))
        memory = BatchMemory(
            tables.table[rows], tables.owners[at], tables.firsts[at], tables.counts[at], tables.counters,
            WIDTHS.index(width), first + len(WIDTHS),
        )  # fmt: skip
        lives = [piece.live for piece in pieces if piece.live is not None]
        tables.pinned_table.numpy()[rows] = [
            (
                live.data_ptr(), base.data_ptr(), piece.size, piece.first_block,
                np.uint64(tensor_seed(piece.spec.name)).astype(np.int64), piece.start,
            )
            for piece, live, base in zip(pieces, lives, bases, strict=True)
        ]  # fmt: skip
        queue.copy("caller", memory.table, tables.pinned_table[rows])
        self._upload_owners(batch, at, tables)
        self._numbered += pieces
        self._blocks += BLOCK_ALIGNMENT * -(-batch.blocks // BLOCK_ALIGNMENT)
        queue.run("caller", partial(self._kernels.compare, batch, lives, bases, memory, self._found[width]))
        used = tables.used[self._launches % BATCHES_UNDER_WAY]
        self._launches += 1
        queue.copy("caller", used, tables.counters[: len(WIDTHS)])
        launched = LaunchedBatch(batch, memory, used, queue.record("caller"))
        if not kind.on_device:
            self._window_events[self._window] = launched.event
            self._window = 1 - self._window
        self._launched.append(launched)
        self._under_way.append(launched)
        if kind.reserved:
            for piece in pieces:
                piece.live = None  # its stream keeps what it reads

    def _begin(self, width: int) -> PieceTables:
        """Have room for changes of elements of this width, and counters that begin at 0."""
        queue = self._queue
        if self._tables is None:
            self._tables = PieceTables(queue, self._most_pieces, self._most_blocks, BATCHES_UNDER_WAY)
        if not self._begun:
            queue.run("caller", self._tables.counters.zero_)
            self._begun = True
        least, most = _rooms(self._totals[width])
        room = ROOM_ALIGNMENT * -(-max(least, min(self._needed[width], most)) // ROOM_ALIGNMENT)
        before = self._found[width].room if width in self._found else 0
        if not before:
            self._found[width] = Found(queue, width, room)
        elif before < room and not self._launched:
            # Nothing else refers to it, so that the larger one may take its memory; if even that is too little, one of
            # the same size does: not inside ``except``, since the error refers to what was allocated before it.
            del self._found[width]
            with suppress(torch.OutOfMemoryError):
                self._found[width] = Found(queue, width, room)
            if width not in self._found:
                self._needed[width] = 0
                self._found[width] = Found(queue, width, before)
        return self._tables

    def _upload_owners(self, batch: PieceBatch, at: slice, tables: PieceTables) -> None:
        """Upload the table of blocks, unless the device has it since an earlier publish: tensors rarely change."""
        sizes = [piece.blocks for piece in batch.pieces]
        if self._uploaded_owners.get(at.start) == sizes:
            return
        for start, other in list(self._uploaded_owners.items()):
            if start < at.stop and at.start < start + sum(other):
                del self._uploaded_owners[start]
        tables.pinned_owners.numpy()[at] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        self._queue.copy("caller", tables.owners[at], tables.pinned_owners[at])
        # Interrupted before this line, the next publish uploads them again.
        self._uploaded_owners[at.start] = sizes

    def _has_room(self, batch: PieceBatch) -> bool:
        """Return whether there is room for a batch even if all elements that are under way, and its own, changed."""
        width, expected = batch.kind.width, batch.elements
        expected += sum(each.batch.elements for each in self._under_way if each.batch.kind.width == width)
        return self._used[width] + expected <= self._found[width].room

    def _upload_bases(self, batch: PieceBatch) -> list[torch.Tensor]:
        """Enqueue the copy of the pieces' baselines to the device, while the batch before is compared."""
        queue, width, number = self._queue, batch.kind.width, self._window
        if width not in self._windows:
            size = BATCH_ELEMENTS + BATCH_PIECES * (16 // width)
            self._windows[width] = (
                queue.empty("copies", (size,), SIGNED[width]),
                queue.empty("copies", (size,), SIGNED[width]),
            )
        window, bases, at = self._windows[width][number], [], 0
        if self._window_events[number] is not None:
            queue.wait("copies", self._window_events[number])
        for piece in batch.pieces:
            base = window[at : at + piece.size]
            queue.copy("copies", base, piece.base)
            bases.append(base)
            at += 16 // width * -(-piece.size * width // 16)
        queue.wait("caller", queue.record("copies"))
        return bases

    def _await_oldest(self) -> None:
        """Learn how much room is used, once the oldest batch under way is compared."""
        self._queue.synchronize(self._under_way[0].event)
        self._take_oldest()

    def _take_oldest(self) -> None:
        self._used = dict(zip(WIDTHS, self._under_way.popleft().used.tolist(), strict=True))

    def _make_room(self) -> None:
        """Collect what was found so far, while training still waits."""
        self._read_counts()
        self._collect_launched()
        self._used = dict.fromkeys(WIDTHS, 0)
        self._numbered, self._counted, self._blocks = [], 0, 0
        if self._tables is not None:
            self._queue.run("caller", self._tables.counters.zero_)

    def _read_counts(self) -> None:
        """Wait for all that was launched, and add up what each log has; compare again what there was no room for."""
        tables, number = self._tables, len(WIDTHS) + len(self._numbered)
        if tables is None or self._counted == len(self._numbered):
            return
        self._queue.copy("caller", tables.pinned_counters[:number], tables.counters[:number])
        self._queue.finish("caller")
        while self._under_way:
            self._take_oldest()
        full = {width for width, found in self._found.items() if self._used[width] > found.room}
        again = [each for each in self._launched if each.batch.kind.width in full and not each.batch.kind.reserved]
        repeated = {id(piece) for each in again for piece in each.batch.pieces}
        counts = tables.pinned_counters[len(WIDTHS) + self._counted : number].tolist()
        for piece, count in zip(self._numbered[self._counted :], counts, strict=True):
            if id(piece) not in repeated:
                self._counts[piece.log] += count
        self._counted = len(self._numbered)
        for width in full:
            self._needed[width] = self._used[width] + self._used[width] // 4
        if again:
            self._compare_again(again)

    def _compare_again(self, again: list[LaunchedBatch]) -> None:
        """Compare batches that found no room once more, with room reserved for each."""
        self._launched = [each for each in self._launched if each not in again]
        self._make_room()
        for each in again:
            kind = replace(each.batch.kind, reserved=True)
            for piece in each.batch.pieces:
                self._add_piece(kind, piece)
        self._launch_open()
        self._read_counts()

    # While training goes on

    def _collect_launched(self) -> None:
        for launched in self._launched:
            self._collected[launched.batch.kind.width] += self._collect_batch(launched)
        self._launched = []

    def _collect_batch(self, launched: LaunchedBatch) -> int:
        """Return the number of its changed elements."""
        queue, batch, memory = self._queue, launched.batch, launched.memory
        width = batch.kind.width
        if width not in self._ordered:
            self._ordered[width] = Ordered(queue, width, STRETCH_ELEMENTS, STRETCH_BLOCKS, BATCH_PIECES)
        ordered, total = self._ordered[width], 0
        queue.wait("background", launched.event)
        for at in range(0, batch.blocks, STRETCH_BLOCKS):
            part = memory.counts[at : at + STRETCH_BLOCKS]
            queue.copy("background", ordered.pinned_counts[: part.numel()], part)
            queue.finish("background")
            counts = ordered.pinned_counts[: part.numel()].numpy().astype(np.int64)
            for first, last in _stretches(counts):
                starts = np.concatenate([[0], np.cumsum(counts[first:last])])
                if starts[-1]:
                    self._collect_stretch(Stretch(batch, memory, at + first, at + last, starts), ordered)
            total += int(counts.sum())
        return total

    def _collect_stretch(self, stretch: Stretch, ordered: Ordered) -> None:
        queue, batch, starts = self._queue, stretch.batch, stretch.starts
        total, found = int(starts[-1]), self._found[batch.kind.width]
        ordered.pinned_starts[: starts.size].numpy()[:] = starts
        queue.copy("background", ordered.starts[: starts.size], ordered.pinned_starts[: starts.size])
        queue.run("background", ordered.sums.zero_)
        queue.run("background", partial(self._kernels.order, stretch, found, ordered))
        results = [
            (ordered.pinned_relative[:total], ordered.relative[:total]),
            (ordered.pinned_distances[:total], ordered.distances[:total]),
            (ordered.pinned_sums, ordered.sums),
        ]
        if not batch.kind.on_device:
            results.append((ordered.pinned_new[:total], ordered.new[:total]))
        for target, source in results:
            queue.copy("background", target, source)
        queue.finish("background")
        # Pinned memory takes the next stretch; these stay until the version is durable, or move to a file.
        element = batch.pieces[0].spec.element.uint
        relative = ordered.pinned_relative[:total].numpy().view(np.uint16).copy()
        distances = ordered.pinned_distances[:total].numpy().view(element).copy()
        logged = list(_log_entries(stretch, relative, distances))
        if batch.kind.on_device:
            self._update_on_device(stretch, ordered, logged)
        else:
            new = ordered.pinned_new[:total].numpy().view(element)
            _update_on_host(logged, new)
        for number, lanes in enumerate(ordered.pinned_sums[: len(batch.pieces)].numpy().view(np.uint64).tolist()):
            log = batch.pieces[number].log
            if any(lanes):
                self._changes[log] = self._changes.get(log, Fingerprint()) + Fingerprint(*lanes)
        for entry in logged:
            if entry.piece.log.spool is not None:
                entry.piece.log.spool.keep(entry.arrays)

    def _update_on_device(self, stretch: Stretch, ordered: Ordered, logged: list["_Entry"]) -> None:
        """Write new bits to baselines on the device; interrupted at any line, the logs undo what was written."""

        def put(bits: torch.Tensor) -> None:
            self._queue.run("background", partial(self._kernels.put, stretch, ordered, bits))
            self._queue.finish("background")

        states = np.zeros((len(logged), 3), np.int64)
        complete = np.array([[entry.arrays.relative.size, entry.arrays.starts.size, 0] for entry in logged])
        # In the log of the first tensor, which is reverted last: segments of the others are taken back before.
        notes = logged[0].piece.log.parts[0]
        notes.append(PendingWrite(partial(put, ordered.old)))
        place = len(notes) - 1
        for entry, state in zip(logged, states, strict=True):
            # Empty until ``states`` says otherwise.
            entry.arrays.state = state
            entry.piece.log.parts[0].append(Segment.open(entry.arrays))
        put(ordered.new)
        states[:] = complete
        del notes[place]


def _parts(size: int) -> Iterator[tuple[int, slice]]:
    """Yield the beginning and the range of each part of a flat tensor; they begin at whole blocks."""
    for start in range(0, size, BATCH_ELEMENTS):
        yield start, slice(start, start + BATCH_ELEMENTS)


@dataclass(frozen=True)
class _Entry:
    """What a piece adds to its log: a range of a stretch."""

    piece: Piece
    start: int
    arrays: SegmentArrays


def _log_entries(
    stretch: Stretch, relative: npt.NDArray[np.uint16], distances: npt.NDArray[np.unsignedinteger]
) -> Iterator[_Entry]:
    """Yield what each piece has in a stretch, without those that have nothing."""
    chunk_blocks = CHUNK_ELEMENTS // BLOCK
    for number, start, stop in stretch.ranges():
        piece = stretch.batch.pieces[number]
        blocks = np.arange(max(stretch.first, piece.first_block), min(stretch.last, piece.first_block + piece.blocks))
        chunks = (blocks - piece.first_block) // chunk_blocks
        last_blocks = np.flatnonzero(np.diff(chunks, append=-1))
        ends = stretch.starts[blocks[last_blocks] + 1 - stretch.first] - start
        filled = np.diff(ends, prepend=0) > 0
        arrays = SegmentArrays(
            relative[start:stop],
            distances[start:stop],
            (piece.start + CHUNK_ELEMENTS * chunks[last_blocks])[filled],
            ends[filled],
            np.zeros(3, np.int64),
        )
        yield _Entry(piece, start, arrays)


def _update_on_host(logged: list[_Entry], new: npt.NDArray[np.unsignedinteger]) -> None:
    """Write (n,) new bits of a stretch to baselines in host memory."""
    from vllm_delta_sync.tensors import diff_kernels

    for entry in logged:
        arrays = entry.arrays
        # Empty until the loop has written all.
        entry.piece.log.parts[0].append(Segment.open(arrays))
        bits = new[entry.start : entry.start + arrays.relative.size]
        diff_kernels.put(entry.piece.bits, bits, *arrays.as_arguments())


def _stretches(counts: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ranges of blocks, with (blocks,) changed elements each, of at most ``STRETCH_ELEMENTS`` together."""
    ends, first = np.cumsum(counts), 0
    while first < counts.size:
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + STRETCH_ELEMENTS, side="right"))
        yield first, last
        first = last


def _kernels_for(device: torch.device) -> Kernels:
    if device.type == "cuda":
        # torch's CUDA builds include Triton; without it torch operations do the same in several passes.
        with suppress(ImportError):
            from trainer_side.diff import compare_triton

            return compare_triton
    return compare_torch
