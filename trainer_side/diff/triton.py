"""``extract_triton``: the element loop of change detection as one Triton kernel; imported only for CUDA tensors."""

from functools import cache

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES

BLOCK = 2048
ROOM_SHARE = 4
"""There is output for a quarter of a window's elements; if more changed, the window is compared again in quarters."""


@triton.jit
def _extract(live, base, size, where, old, new, count, nan, room, ROUND: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
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
    if found > 0:
        # Blocks finish in any order; the caller sorts.
        slot = tl.atomic_add(count, found) + rank - 1
        fits = changed & (slot < room)
        tl.store(where + slot, offsets.to(tl.int32), mask=fits)
        tl.store(old + slot, before, mask=fits)
        tl.store(new + slot, fresh, mask=fits)


@cache
def nan_pattern(device: torch.device) -> int:
    """Return the bits, as a signed integer, to which torch rounds float32 NaNs in bfloat16 on a device."""
    return int(torch.full((64,), float("nan"), device=device).to(torch.bfloat16).view(torch.int16)[0])


def extract_triton(
    box: torch.Tensor, window: torch.Tensor, dtype: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do ``device.extract_torch`` in one pass."""
    box = box.contiguous().view(-1)
    rounds = box.dtype == torch.float32 and dtype == "BF16"
    if box.dtype != TORCH_DTYPES[dtype] and not rounds:
        box = box.to(TORCH_DTYPES[dtype])
    bits = box.view(torch.int32 if rounds else window.dtype)
    room = max(BLOCK, -(-window.numel() // ROOM_SHARE))
    return _compared(bits, window, nan_pattern(box.device) if rounds else 0, rounds, room)


def _compared(
    bits: torch.Tensor, window: torch.Tensor, nan: int, rounds: bool, room: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = window.numel()
    where = torch.empty(room, dtype=torch.int32, device=window.device)
    old, new = torch.empty_like(where, dtype=window.dtype), torch.empty_like(where, dtype=window.dtype)
    count = torch.zeros(1, dtype=torch.int32, device=window.device)
    blocks = (triton.cdiv(size, BLOCK),)
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.cuda.device_of(window):
        _extract[blocks](bits, window, size, where, old, new, count, nan, room, ROUND=rounds, SIZE=BLOCK)
    found = int(count)
    if found > room:
        # Only scratch was written, so the comparison can be repeated.
        parts = [
            (start, _compared(bits[start : start + room], window[start : start + room], nan, rounds, room))
            for start in range(0, size, room)
        ]
        wheres, olds, news = zip(*((part[0] + start, *part[1:]) for start, part in parts), strict=True)
        return torch.cat(wheres), torch.cat(olds), torch.cat(news)
    positions, order = torch.sort(where[:found])
    return positions.long(), old[:found][order], new[:found][order]
