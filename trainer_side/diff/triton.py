"""``extract_triton``: the element loops of change detection as Triton kernels; imported only for CUDA tensors.

One kernel reads the live tensor and the baseline and collects what differs, each block at once and blocks in any order.
Another one brings the blocks in order, which is cheaper than sorting, and computes distances and hashes.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Iterator
from functools import cache

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from trainer_side.diff.differences import Differences
from vllm_delta_sync.format.fingerprint import tensor_seed
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.format.triton_hash import high_lane, low_lane, premix
from vllm_delta_sync.tensors.bits import CHUNK_ELEMENTS
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES

BLOCK = 2048
CHUNK_BLOCKS = CHUNK_ELEMENTS // BLOCK
ORDER_BLOCK = 128
"""Elements brought in order at a time: few of a block have changed."""
ORDER_BLOCKS = 8
"""Blocks per program: it adds to the sums once, so that few programs at a time wait for the same two words."""
ROOM_SHARE = 4
"""There is output for a quarter of a window's elements; if more changed, the window is compared again in quarters."""


@triton.jit
def extract_kernel(
    live, base, size, where, old, new, firsts, counts, count, nan, room, ROUND: tl.constexpr, SIZE: tl.constexpr
):
    """Collect what differs in a block of ``size`` elements; ``firsts`` and ``counts`` say where it stands."""
    block = tl.program_id(0)
    offsets = block.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = offsets < size
    # Each element is loaded once, so that the value compared and collected is the same.
    fresh = tl.load(live + offsets, mask=inside, other=0)
    if ROUND:
        # float32 → bfloat16, to nearest even; a carry out of the mantissa runs into the exponent, as it should.
        magnitude = fresh & 0x7FFFFFFF
        rounded = (fresh + 0x7FFF + ((fresh >> 16) & 1)) >> 16
        fresh = tl.where(magnitude > 0x7F800000, nan, rounded).to(tl.int16)
    before = tl.load(base + offsets, mask=inside, other=0)
    changed = inside & (fresh != before)
    rank = tl.cumsum(changed.to(tl.int32), 0)
    found = tl.max(rank, 0)
    tl.store(counts + block, found)
    if found > 0:
        first = tl.atomic_add(count, found, sem="relaxed")
        tl.store(firsts + block, first)
        slot = first + rank - 1
        fits = changed & (slot < room)
        tl.store(where + slot, offsets.to(tl.int32), mask=fits)
        tl.store(old + slot, before, mask=fits)
        tl.store(new + slot, fresh, mask=fits)


@triton.jit(do_not_specialize=["blocks", "seed", "start"])
def order_kernel(
    where,
    old,
    new,
    firsts,
    counts,
    ends,
    blocks,
    seed: tl.uint64,
    start: tl.int64,
    to_where,
    to_old,
    to_new,
    relative,
    distances,
    sums,
    FLOAT: tl.constexpr,
    CHUNK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Copy the elements of some blocks to their places in the order of blocks; ``Differences`` has the outputs."""
    width: tl.constexpr = old.dtype.element_ty.primitive_bitwidth
    mask: tl.constexpr = (1 << width) - 1
    largest: tl.constexpr = (1 << (width - 1)) - 1
    low_sum = tl.zeros((SIZE,), tl.uint64)
    high_sum = tl.zeros((SIZE,), tl.uint64)
    for number in range(BLOCKS):
        block = tl.program_id(0) * BLOCKS + number
        count = tl.load(counts + block, mask=block < blocks, other=0)
        if count > 0:
            first = tl.load(firsts + block)
            target = tl.load(ends + block) - count
            for at in range(0, count, SIZE):
                lanes = at + tl.arange(0, SIZE)
                inside = lanes < count
                index = tl.load(where + first + lanes, mask=inside, other=0)
                before = tl.load(old + first + lanes, mask=inside, other=0)
                after = tl.load(new + first + lanes, mask=inside, other=0)
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
                words = premix(seed.to(tl.uint64), start.to(tl.int64) + index)
                # A signed integer is extended by its sign, which the mask takes away.
                low_before = low_lane(words, before.to(tl.uint64) & mask)
                low_after = low_lane(words, after.to(tl.uint64) & mask)
                low_sum += tl.where(inside, low_after - low_before, 0)
                high_sum += tl.where(inside, high_lane(low_after) - high_lane(low_before), 0)
    tl.atomic_add(sums, tl.sum(low_sum).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(high_sum).to(tl.int64, bitcast=True), sem="relaxed")


@cache
def nan_pattern(device: torch.device) -> int:
    """Return the bits, as a signed integer, to which torch rounds float32 NaNs in bfloat16 on a device."""
    return int(torch.full((64,), float("nan"), device=device).to(torch.bfloat16).view(torch.int16)[0])


def extract_triton(spec: TensorSpec, start: int, box: torch.Tensor, window: torch.Tensor) -> Iterator[Differences]:
    """Do ``differences.extract_torch``, in one pass over box and window; where much changed, in several stretches."""
    box = box.contiguous().view(-1)
    rounds = box.dtype == torch.float32 and spec.dtype == "BF16"
    if box.dtype != TORCH_DTYPES[spec.dtype] and not rounds:
        box = box.to(TORCH_DTYPES[spec.dtype])
    bits = box.view(torch.int32 if rounds else window.dtype)
    # In whole blocks: Triton would compile other kernels for a stretch that begins at an odd address.
    room = BLOCK * -(-window.numel() // (ROOM_SHARE * BLOCK))
    yield from _compared(spec, start, bits, window, room)


def _compared(
    spec: TensorSpec, start: int, bits: torch.Tensor, window: torch.Tensor, room: int
) -> Iterator[Differences]:
    device, size, rounds = window.device, window.numel(), bits.dtype != window.dtype
    where = torch.empty(min(room, size), dtype=torch.int32, device=device)
    old, new = torch.empty_like(where, dtype=window.dtype), torch.empty_like(where, dtype=window.dtype)
    blocks = triton.cdiv(size, BLOCK)
    firsts, counts = torch.empty((2, blocks), dtype=torch.int32, device=device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    nan = nan_pattern(device) if rounds else 0
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.cuda.device_of(window):
        extract_kernel[(blocks,)](
            bits, window, size, where, old, new, firsts, counts, count, nan, room, ROUND=rounds, SIZE=BLOCK
        )
    ends = torch.cumsum(counts, 0)
    found = ends.cpu().numpy()
    total = int(found[-1])
    if total > room:
        # Only scratch was written, so the comparison can be repeated.
        for first in range(0, size, room):
            stretch = slice(first, first + room)
            yield from _compared(spec, start + first, bits[stretch], window[stretch], room)
        return
    to_where = torch.empty(total, dtype=torch.int32, device=device)
    relative = torch.empty_like(to_where, dtype=torch.int16)
    to_old, to_new, distances = torch.empty((3, total), dtype=window.dtype, device=device)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    if total:
        with torch.cuda.device_of(window):
            order_kernel[(triton.cdiv(blocks, ORDER_BLOCKS),)](
                where, old, new, firsts, counts, ends, blocks, tensor_seed(spec.name), start, to_where, to_old, to_new,
                relative, distances, sums, FLOAT=spec.element.is_float, CHUNK=CHUNK_ELEMENTS, SIZE=ORDER_BLOCK,
                BLOCKS=ORDER_BLOCKS, num_warps=1,
            )  # fmt: skip
    # The last chunk may have fewer blocks.
    chunks = found[[*range(CHUNK_BLOCKS - 1, blocks - 1, CHUNK_BLOCKS), blocks - 1]]
    yield Differences(start, to_where, to_old, to_new, relative, distances, sums, chunks)
