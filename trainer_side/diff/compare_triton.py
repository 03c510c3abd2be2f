"""The kernels of ``DeviceComparer`` in Triton; imported only for CUDA tensors.

``compare_kernel`` reads live weights and baseline of many tensors and collects what differs, each block at once and
blocks in any order. ``order_kernel`` brings blocks in order, which is cheaper than sorting, and computes distances and
hashes; ``put_kernel`` writes to baselines.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Sequence
from functools import cache

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from trainer_side.diff.device_memory import BLOCK, COLUMNS, BatchMemory, Found, Ordered, PieceBatch, Stretch
from vllm_delta_sync.format.triton_hash import high_lane, low_lane, premix
from vllm_delta_sync.tensors.changes import CHUNK_ELEMENTS

ORDER_BLOCK = 128
"""Elements brought in order at a time: few of a block have changed."""
ORDER_BLOCKS = 8
"""Blocks per program: it adds to the sums once per tensor, so that few programs at a time wait for the same words."""

COMPARE_WARPS = 8
"""Each thread loads 16 bytes of bfloat16 weights at once; with four warps it would take twice the registers."""

SIGNED = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit(do_not_specialize=["slot", "first", "room", "nan"])
def compare_kernel(
    table, owners, firsts, counts, counters, slot, first, where, old, new, room, nan: tl.int32,
    ROUND: tl.constexpr, ALIGNED: tl.constexpr, LIVE: tl.constexpr, BASE: tl.constexpr, COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Collect what differs in a block of ``SIZE`` elements; ``firsts`` and ``counts`` say where it stands."""
    block = tl.program_id(0)
    piece = tl.load(owners + block)
    row = table + piece * COLUMNS
    live = tl.load(row).to(tl.pointer_type(LIVE))
    base = tl.load(row + 1).to(tl.pointer_type(BASE))
    if ALIGNED:
        live = tl.multiple_of(live, 16)
        base = tl.multiple_of(base, 16)
    start = (block - tl.load(row + 3).to(tl.int32)) * SIZE
    left = tl.load(row + 2).to(tl.int32) - start
    lanes = tl.arange(0, SIZE)
    if left >= SIZE:
        # Without a mask, so that 16 bytes are loaded at a time. Each element is loaded once, so that the value compared
        # and collected is the same.
        fresh = tl.load(live + start + lanes)
        before = tl.load(base + start + lanes)
    else:
        fresh = tl.load(live + start + lanes, mask=lanes < left, other=0)
        before = tl.load(base + start + lanes, mask=lanes < left, other=0)
    if ROUND:
        # float32 → bfloat16, to nearest even; a carry out of the mantissa runs into the exponent, as it should.
        magnitude = fresh & 0x7FFFFFFF
        rounded = (fresh + 0x7FFF + ((fresh >> 16) & 1)) >> 16
        bits = tl.where(magnitude > 0x7F800000, nan, rounded).to(BASE)
    else:
        bits = fresh
    changed = (bits != before) & (lanes < left)
    rank = tl.cumsum(changed.to(tl.int32), 0)
    count = tl.max(rank, 0)
    tl.store(counts + block, count)
    if count > 0:
        at = tl.atomic_add(counters + slot, count.to(tl.int64), sem="relaxed")
        tl.atomic_add(counters + first + piece, count.to(tl.int64), sem="relaxed")
        if at + count <= room:
            tl.store(firsts + block, at.to(tl.int32))
            to = at.to(tl.int32) + rank - 1
            tl.store(where + to, start + lanes, mask=changed)
            tl.store(old + to, before, mask=changed)
            tl.store(new + to, bits, mask=changed)


@triton.jit(do_not_specialize=["first", "blocks"])
def order_kernel(
    table, owners, firsts, starts, first, blocks, where, old, new, to_where, to_old, to_new, relative, distances, sums,
    FLOAT: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Copy the elements of some blocks to their places in the order of blocks; ``Ordered`` has the outputs."""
    width: tl.constexpr = old.dtype.element_ty.primitive_bitwidth
    mask: tl.constexpr = (1 << width) - 1
    largest: tl.constexpr = (1 << (width - 1)) - 1
    low_sum = tl.zeros((SIZE,), tl.uint64)
    high_sum = tl.zeros((SIZE,), tl.uint64)
    begin = tl.program_id(0) * BLOCKS
    end = tl.minimum(begin + BLOCKS, blocks)
    summed = tl.load(owners + first + begin)
    for block in range(begin, end):
        piece = tl.load(owners + first + block)
        if piece != summed:
            tl.atomic_add(sums + 2 * summed, tl.sum(low_sum).to(tl.int64, bitcast=True), sem="relaxed")
            tl.atomic_add(sums + 2 * summed + 1, tl.sum(high_sum).to(tl.int64, bitcast=True), sem="relaxed")
            low_sum = tl.zeros((SIZE,), tl.uint64)
            high_sum = tl.zeros((SIZE,), tl.uint64)
            summed = piece
        target = tl.load(starts + block)
        count = tl.load(starts + block + 1) - target
        if count > 0:
            source = tl.load(firsts + first + block)
            seed = tl.load(table + piece * COLUMNS + 4).to(tl.uint64, bitcast=True)
            start = tl.load(table + piece * COLUMNS + 5)
            for at in range(0, count, SIZE):
                lanes = at + tl.arange(0, SIZE)
                inside = lanes < count
                index = tl.load(where + source + lanes, mask=inside, other=0)
                before = tl.load(old + source + lanes, mask=inside, other=0)
                after = tl.load(new + source + lanes, mask=inside, other=0)
                if FLOAT:
                    # A negative pattern x stands at x ^ largest.
                    key_before = tl.where(before < 0, before ^ largest, before)
                    key_after = tl.where(after < 0, after ^ largest, after)
                else:
                    key_before = before
                    key_after = after
                tl.store(to_where + target + lanes, index, mask=inside)
                tl.store(to_old + target + lanes, before, mask=inside)
                tl.store(to_new + target + lanes, after, mask=inside)
                tl.store(relative + target + lanes, (index % CHUNK).to(tl.int16), mask=inside)
                distance = (key_after - key_before).to(distances.dtype.element_ty)
                tl.store(distances + target + lanes, distance, mask=inside)
                words = premix(seed, start + index)
                # A signed integer is extended by its sign, which the mask takes away.
                low_before = low_lane(words, before.to(tl.uint64) & mask)
                low_after = low_lane(words, after.to(tl.uint64) & mask)
                low_sum += tl.where(inside, low_after - low_before, 0)
                high_sum += tl.where(inside, high_lane(low_after) - high_lane(low_before), 0)
    tl.atomic_add(sums + 2 * summed, tl.sum(low_sum).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(sums + 2 * summed + 1, tl.sum(high_sum).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=["first"])
def put_kernel(
    table, owners, starts, first, where, bits, BASE: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Write the elements of a block, which ``order_kernel`` has brought in order, to their baseline."""
    block = tl.program_id(0)
    start = tl.load(starts + block)
    count = tl.load(starts + block + 1) - start
    if count > 0:
        piece = tl.load(owners + first + block)
        base = tl.load(table + piece * COLUMNS + 1).to(tl.pointer_type(BASE))
        for at in range(0, count, SIZE):
            lanes = at + tl.arange(0, SIZE)
            inside = lanes < count
            index = tl.load(where + start + lanes, mask=inside, other=0)
            tl.store(base + index, tl.load(bits + start + lanes, mask=inside, other=0), mask=inside)


@cache
def nan_pattern(device: torch.device) -> int:
    """Return the bits, as a signed integer, to which torch rounds float32 NaNs in bfloat16 on a device."""
    return int(
        torch.full((64,), float("nan"), dtype=torch.float32, device=device).to(torch.bfloat16).view(torch.int16)[0]
    )


def compare(
    batch: PieceBatch, lives: Sequence[torch.Tensor], bases: Sequence[torch.Tensor], memory: BatchMemory, found: Found
) -> None:
    """Do ``Kernels.compare`` in one launch and one pass."""
    kind = batch.kind
    nan = nan_pattern(found.where.device) if kind.rounds else 0
    read = tl.int32 if kind.rounds else SIGNED[kind.width]
    compare_kernel[(batch.blocks,)](
        memory.table, memory.owners, memory.firsts, memory.counts, memory.counters, memory.slot, memory.first,
        found.where, found.old, found.new, found.room, nan, ROUND=kind.rounds, ALIGNED=kind.aligned, LIVE=read,
        BASE=SIGNED[kind.width], COLUMNS=COLUMNS, SIZE=BLOCK, num_warps=COMPARE_WARPS,
    )  # fmt: skip


def order(stretch: Stretch, found: Found, ordered: Ordered) -> None:
    """Do ``Kernels.order`` in one launch."""
    memory, blocks = stretch.memory, stretch.last - stretch.first
    order_kernel[(triton.cdiv(blocks, ORDER_BLOCKS),)](
        memory.table, memory.owners, memory.firsts, ordered.starts, stretch.first, blocks, found.where, found.old,
        found.new, ordered.where, ordered.old, ordered.new, ordered.relative, ordered.distances, ordered.sums,
        FLOAT=stretch.batch.kind.is_float, CHUNK=CHUNK_ELEMENTS, COLUMNS=COLUMNS, SIZE=ORDER_BLOCK,
        BLOCKS=ORDER_BLOCKS, num_warps=1,
    )  # fmt: skip


def put(stretch: Stretch, ordered: Ordered, bits: torch.Tensor) -> None:
    """Do ``Kernels.put`` in one launch."""
    memory = stretch.memory
    put_kernel[(stretch.last - stretch.first,)](
        memory.table, memory.owners, ordered.starts, stretch.first, ordered.where, bits,
        BASE=SIGNED[stretch.batch.kind.width], COLUMNS=COLUMNS, SIZE=ORDER_BLOCK, num_warps=1,
    )  # fmt: skip
