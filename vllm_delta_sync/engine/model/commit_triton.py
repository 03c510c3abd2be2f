"""``commit_triton`` applies a batch of changed elements on a device in one launch; imported only where Triton is.

Each block of the grid handles up to ``BLOCK`` elements of one segment, a stretch of one patch, so that one launch
serves any number of destinations. ``device_patch.commit_torch`` is the same in torch operations.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from vllm_delta_sync.engine.model.device_batch import BLOCK, FIXED_COLUMNS, Batch, PackedBatch
from vllm_delta_sync.format.triton_hash import high_lane, low_lane, premix

# Triton reads globals only as constexpr.
_FIXED_COLUMNS = tl.constexpr(FIXED_COLUMNS)

WIDTHS = {
    torch.int8: (tl.int8, tl.uint8),
    torch.int16: (tl.int16, tl.uint16),
    torch.int32: (tl.int32, tl.uint32),
    torch.int64: (tl.int64, tl.uint64),
}


@triton.jit
def commit_kernel(
    table, firsts, segments, positions, data, sums, REVERSE: tl.constexpr, RELATIVE: tl.constexpr, FLOAT: tl.constexpr,
    SIGNED: tl.constexpr, UNSIGNED: tl.constexpr, DIMS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write a batch and add the change of fingerprint to ``sums``; see ``PackedBatch`` for the arguments.

    The order of floats is that of ``device_patch``: a negative pattern x stands at x ^ largest.
    """
    block = tl.program_id(0)
    segment = table + tl.load(segments + block).to(tl.int64) * (_FIXED_COLUMNS + 2 * DIMS)
    # No hint of what ``at`` is divisible by: an exchange loads and stores ``data`` with the same layout of threads, so
    # that no thread overwrites what another one has yet to load.
    at = tl.load(firsts + block) + tl.arange(0, SIZE)
    inside = at < tl.load(segment + 1)
    rest = tl.load(positions + at, mask=inside, other=0)
    words = premix(tl.load(segment + 3).to(tl.uint64, bitcast=True), tl.load(segment + 4) + rest)
    steps = segment + _FIXED_COLUMNS
    index = tl.zeros([SIZE], tl.int64)
    for dim in tl.static_range(DIMS - 1):
        stride = tl.load(steps + 2 * dim).to(rest.dtype)
        coordinate = rest // stride
        rest -= coordinate * stride
        index += coordinate * tl.load(steps + 2 * dim + 1)
    index += rest * tl.load(steps + 2 * DIMS - 1)
    live = tl.load(segment).to(tl.pointer_type(SIGNED)) + index
    before = tl.load(live, mask=inside, other=0)
    change = tl.load(data + at, mask=inside, other=0)
    if RELATIVE:
        step = -change if REVERSE else change
        if FLOAT:
            largest = tl.full([SIZE], (1 << (SIGNED.primitive_bitwidth - 1)) - 1, SIGNED)
            key = tl.where(before < 0, before ^ largest, before) + step
            after = tl.where(key < 0, key ^ largest, key)
        else:
            after = before + step
    else:
        # An exchange is its own inverse.
        after = change
        tl.store(data + at, before, mask=inside)
    tl.store(live, after, mask=inside)
    low_before = low_lane(words, before.to(UNSIGNED, bitcast=True).to(tl.uint64))
    low_after = low_lane(words, after.to(UNSIGNED, bitcast=True).to(tl.uint64))
    # Elements beyond the segment are 0 before and after, and so add nothing.
    low = tl.sum(low_after - low_before, 0)
    high = tl.sum(high_lane(low_after) - high_lane(low_before), 0)
    row = sums + 2 * tl.load(segment + 2)
    tl.atomic_add(row, low.to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(row + 1, high.to(tl.int64, bitcast=True), sem="relaxed")


def commit_triton(packed: PackedBatch, batch: Batch, sums: torch.Tensor, reverse: bool) -> None:
    """Do ``device_patch.commit_torch`` in one launch on the thread's current stream."""
    signed, unsigned = WIDTHS[packed.data.dtype]
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.cuda.device_of(packed.data):
        commit_kernel[(batch.blocks,)](
            packed.table, packed.firsts, packed.segments, packed.positions, packed.data, sums, REVERSE=reverse,
            RELATIVE=packed.relative, FLOAT=packed.is_float, SIGNED=signed, UNSIGNED=unsigned, DIMS=batch.dims,
            SIZE=BLOCK,
        )  # fmt: skip
