"""``DeviceSums`` hashes weights on their device by a Triton kernel; imported only for weights on CUDA devices."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import numpy as np
import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from vllm_delta_sync.engine.model.route import Region
from vllm_delta_sync.format.fingerprint import Fingerprint, tensor_seed
from vllm_delta_sync.format.triton_hash import high_lane, low_lane, premix

BLOCK = 1024
BLOCKS_PER_PROGRAM = 8
"""A program adds to the sums once, so that few programs at a time wait for the same two words."""


# Without ``do_not_specialize``, and without types, Triton would compile another kernel for each kind of number.
@triton.jit(
    do_not_specialize=[
        "seed", "count", "at", "start", "size0", "size1", "size2",
        "step0", "step1", "step2", "step3", "stride0", "stride1", "stride2", "stride3",
    ]
)  # fmt: skip
def add_hashes(
    flat, sums, seed: tl.uint64, count: tl.uint32, at: tl.int64, start: tl.int64,
    size0: tl.uint32, size1: tl.uint32, size2: tl.uint32,
    step0: tl.int64, step1: tl.int64, step2: tl.int64, step3: tl.int64,
    stride0: tl.int64, stride1: tl.int64, stride2: tl.int64, stride3: tl.int64,
    DIMS: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Add the hashes of a box of ``count`` elements to two sums.

    The element with coordinates c is flat[at + Σ cᵢ·stepᵢ] and has flat index start + Σ cᵢ·strideᵢ in its tensor.
    Dimension 0 turns fastest; the size of the last is what is left.
    """
    mask: tl.constexpr = (1 << flat.dtype.element_ty.primitive_bitwidth) - 1
    sizes = (size0, size1, size2)
    steps = (step0, step1, step2, step3)
    strides = (stride0, stride1, stride2, stride3)
    low_sum = tl.zeros((SIZE,), tl.uint64)
    high_sum = tl.zeros((SIZE,), tl.uint64)
    for block in range(BLOCKS):
        rest = ((tl.program_id(0) * BLOCKS + block) * SIZE + tl.arange(0, SIZE)).to(tl.uint32)
        inside = rest < count
        address = at.to(tl.int64)
        index = start.to(tl.int64)
        for dim in tl.static_range(DIMS - 1):
            size = sizes[dim].to(tl.uint32)
            coordinate = (rest % size).to(tl.int64)
            address += coordinate * steps[dim]
            index += coordinate * strides[dim]
            rest = rest // size
        address += rest.to(tl.int64) * steps[DIMS - 1]
        index += rest.to(tl.int64) * strides[DIMS - 1]
        # A signed integer is extended by its sign, which the mask takes away.
        bits = tl.load(flat + address, mask=inside, other=0).to(tl.uint64) & mask
        low = low_lane(premix(seed.to(tl.uint64), index), bits)
        low_sum += tl.where(inside, low, 0)
        high_sum += tl.where(inside, high_lane(low), 0)
    tl.atomic_add(sums, tl.sum(low_sum).to(tl.int64), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(high_sum).to(tl.int64), sem="relaxed")


class DeviceSums:
    """Fingerprints that kernels add up on a device, and that are read all at once.

    Args:
        slots: number of fingerprints; all begin at zero.

    Attributes:
        MAX_ELEMENTS: of one launch. It needs no memory, but ``/sleep`` waits for it: counted in instructions, less than
            a millisecond on a large GPU and a few on a small one.
        MAX_DIMS: of a region. No model is known whose routes have more.
    """

    MAX_ELEMENTS = 1 << 26
    MAX_DIMS = 4

    def __init__(self, slots: int, device: torch.device) -> None:
        self.device = device
        self._sums = torch.zeros((slots, 2), dtype=torch.int64, device=device)

    def add(self, slot: int, name: str, flat: torch.Tensor, source: Region, target: Region) -> None:
        """Launch a kernel that hashes a tensor's ``source`` elements, at ``target`` of (numel,) signed integers.

        Args:
            source, target: of at most MAX_DIMS dimensions and MAX_ELEMENTS elements.
        """
        if not source.numel:
            return
        # Neighbouring lanes read neighbouring memory: the smallest step turns fastest.
        order = sorted(zip(target.strides, source.strides, source.sizes, strict=True)) or [(1, 1, 1)]
        padded = [*order, *[(0, 0, 1)] * (self.MAX_DIMS - len(order))]
        steps, strides, sizes = zip(*padded, strict=True)
        programs = triton.cdiv(source.numel, BLOCK * BLOCKS_PER_PROGRAM)
        # Triton launches on the current device, whatever device the tensors are on.
        with torch.cuda.device_of(flat):
            add_hashes[(programs,)](
                flat, self._sums[slot], tensor_seed(name), source.numel, target.offset, source.offset,
                *sizes[:-1], *steps, *strides, DIMS=len(order), SIZE=BLOCK, BLOCKS=BLOCKS_PER_PROGRAM,
            )  # fmt: skip

    def read(self) -> list[Fingerprint]:
        """Wait for the kernels, and return the fingerprint of each slot."""
        words = self._sums.cpu().numpy().view(np.uint64).tolist()
        return [Fingerprint(low, high) for low, high in words]
