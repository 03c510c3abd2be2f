"""``Reader``: read live tensors on the host in pieces, as bits of the served dtype."""

import math
from collections.abc import Iterator
from functools import cache
from itertools import chain, product

import numpy as np
import torch

from vllm_delta_sync.tensors.changes import CHUNK_ELEMENTS, Bits
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES, bits_of

GATHER_ELEMENTS = 1024**2
"""Elements of a strided tensor gathered at once: enough rows of a transposed matrix to use whole cache lines."""
PLANE_ELEMENTS = 4096
"""If the last two dimensions have fewer elements, gathered boxes include more of the dimensions before them."""

Index = tuple[int | slice, ...]
Box = tuple[int, Index]
"""Flat index of its first element, and its index in the tensor; ``()`` for the whole tensor."""


@cache
def nan_pattern() -> np.uint16 | None:
    """Return the bits to which torch rounds float32 NaNs in bfloat16 here; None if that depends on the NaN.

    They differ between processors, and even between a contiguous and a strided tensor.
    """
    samples = torch.tensor(
        [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -0x7FFFFF, -0x400000], dtype=torch.int32, device="cpu"
    )
    rounded = bits_of(samples.view(torch.float32).repeat(16).to(torch.bfloat16))
    return np.uint16(rounded[0]) if (rounded == rounded[0]).all() else None


def boxes(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Yield boxes of at most ``most`` elements, in row-major order, that together make up the shape.

    A box is a range of one dimension, with all of the dimensions after it. Each is consecutive in flat indices.
    """
    if not math.prod(shape):
        return
    if not shape:
        yield 0, ()
        return
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= most)
    inner = math.prod(shape[axis + 1 :])
    rows = -(-shape[axis] // -(-shape[axis] // (most // inner)))
    start = 0
    for outer in product(*map(range, shape[:axis])):
        for row in range(0, shape[axis], rows):
            stop = min(row + rows, shape[axis])
            yield start, (*outer, slice(row, stop))
            start += (stop - row) * inner


def split_boxes(live: torch.Tensor, parts: int) -> tuple[torch.Tensor, list[list[Box]]]:
    """Return the tensor, flat if it is cut and contiguous, and for each of up to ``parts`` threads its boxes."""
    if parts == 1 and live.is_contiguous():
        return live, [[(0, ())]] if live.numel() else []
    shape = tuple(live.shape)
    if live.is_contiguous():
        live = live.view(-1)
        found = list(boxes((live.numel(),), -(-live.numel() // parts) or 1))
    elif len(shape) > 2 and math.prod(shape[-2:]) < PLANE_ELEMENTS:
        found = list(boxes(shape, CHUNK_ELEMENTS))
    else:
        planes = enumerate(product(*map(range, shape[:-2])))
        inside = list(boxes(shape[-2:], GATHER_ELEMENTS))
        size = math.prod(shape[-2:])
        found = [(size * number + start, (*outer, *index)) for number, outer in planes for start, index in inside]
    per_part = -(-len(found) // parts) or 1
    return live, [found[start : start + per_part] for start in range(0, len(found), per_part)]


class Reader:
    """Reads boxes of CPU tensors, for one thread; strided or converted elements go through scratch memory."""

    def __init__(self) -> None:
        self._gathered = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._converted = torch.empty(0, dtype=torch.uint8, device="cpu")

    def read(self, box: torch.Tensor, dtype: str) -> Iterator[tuple[int, Bits, np.uint16 | None]]:
        """Yield the bits of the elements in row-major order, rounded as torch rounds a contiguous tensor.

        Yields:
            consecutive pieces: index of the first element, (n,) bits in the served dtype, None; or bits of float32,
            and the bits that ``round_to_bf16`` gives to NaNs. The arrays share memory with the tensor or scratch:
            never write them, and do not use them after the next piece is requested.
        """
        if not box.is_contiguous():
            box = self._gather(box)
        if box.dtype == TORCH_DTYPES[dtype]:
            yield 0, bits_of(box), None
        elif box.dtype == torch.float32 and dtype == "BF16" and nan_pattern() is not None:
            yield 0, bits_of(box), nan_pattern()
        else:
            if not self._converted.numel():
                self._converted = torch.empty(8 * CHUNK_ELEMENTS, dtype=torch.uint8, device="cpu")
            # torch converts so few elements in this thread alone.
            for number, piece in enumerate(box.view(-1).split(CHUNK_ELEMENTS)):
                scratch = self._converted.view(TORCH_DTYPES[dtype])[: piece.numel()]
                yield number * CHUNK_ELEMENTS, bits_of(scratch.copy_(piece)), None

    def _gather(self, box: torch.Tensor) -> torch.Tensor:
        if self._gathered.numel() < 8 * box.numel():
            self._gathered = torch.empty(8 * box.numel(), dtype=torch.uint8, device="cpu")
        scratch = self._gathered.view(box.dtype)[: box.numel()]
        if box.dim() > 2:
            return scratch.view(box.shape).copy_(box)
        from vllm_delta_sync.tensors import diff_kernels

        rows, columns = (1, *box.shape)[-2:]
        strides = (0, *box.stride())[-2:]
        reach = box.as_strided((1 + (rows - 1) * strides[0] + (columns - 1) * strides[1],), (1,))
        diff_kernels.gather(bits_of(reach), *strides, columns, bits_of(scratch))
        return scratch


def host_bits(tensor: torch.Tensor, dtype: str, out: Bits | None = None) -> Bits:
    """Copy of the bit patterns of a tensor rounded to ``dtype``, to nearest even.

    Args:
        tensor: of any shape, layout of strides, and device.
        dtype: safetensors name of the served dtype.
        out: (numel,) to copy them to; None makes an array.

    Returns:
        (numel,) in row-major order.
    """
    bits = np.empty(tensor.numel(), f"<u{TORCH_DTYPES[dtype].itemsize}") if out is None else out
    if tensor.device.type != "cpu":
        np.copyto(bits, bits_of(tensor.detach().contiguous().to(TORCH_DTYPES[dtype]).cpu()))
        return bits
    live, found = split_boxes(tensor.detach(), 1)
    from vllm_delta_sync.tensors import diff_kernels

    reader = Reader()
    for start, index in chain.from_iterable(found):
        for offset, fresh, nan in reader.read(live[index], dtype):
            target = bits[start + offset : start + offset + fresh.size]
            if nan is None:
                np.copyto(target, fresh)
            else:
                diff_kernels.round_to_bf16(fresh, nan, target)
    return bits
