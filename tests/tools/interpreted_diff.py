"""The Triton kernel of change detection against plain torch, under Triton's interpreter: run with TRITON_INTERPRET=1.

A program of its own, as Triton decides when it is imported whether it interprets.
"""

import torch

from tests.support.detection import NAME, Difference, disturbed, expected, served
from trainer_side.diff import device, triton
from trainer_side.diff.buffers import DeviceBuffer
from trainer_side.diff.change_log import ChangeLog
from vllm_delta_sync.format.dtypes import DTYPES
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.torch_views import SIGNED, bits_of

SIZES = (1, 63, triton.BLOCK - 1, triton.BLOCK, 3 * triton.BLOCK + 5, 20_000)
CASES = (
    (torch.float32, "BF16"), (torch.bfloat16, "BF16"), (torch.float32, "F32"), (torch.float16, "F16"),
    (torch.float32, "F16"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64"), (torch.bool, "BOOL"),
)  # fmt: skip


def check(live: torch.Tensor, dtype: str, share: float) -> int:
    """Compare with a baseline of which a share differs → number of changed elements."""
    new = served(live, dtype)
    old = disturbed(new, share)
    held, found = DeviceBuffer(torch.from_numpy(old.view(f"<i{old.itemsize}").copy())), ChangeLog(DTYPES[dtype])
    spec = TensorSpec(NAME, dtype, tuple(live.shape))
    fingerprint = device.collect(spec, held, live, found)
    difference = Difference.of(found, fingerprint)
    assert difference == expected(dtype, old, new), (live.dtype, dtype, live.numel(), share)
    assert (held.read() == new).all()
    found.revert(held)
    assert (held.read() == old).all()
    return len(difference.positions)


def check_rounding() -> None:
    """Every upper half of a float32, with lower halves around the tie."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        patterns = upper | lower
        live = torch.where(patterns < 1 << 31, patterns, patterns - (1 << 32)).to(torch.int32).view(torch.float32)
        window = torch.zeros(live.numel(), dtype=SIGNED[2])
        spec = TensorSpec(NAME, "BF16", tuple(live.shape))
        rounded = torch.zeros_like(window)
        for found in triton.extract_triton(spec, 0, live, window):
            rounded[found.start + found.where.long()] = found.new
        assert (bits_of(rounded) == served(live, "BF16")).all(), hex(lower)


def main() -> None:
    device._extract_for = lambda live: triton.extract_triton
    device.WINDOW_ELEMENTS = 15_000
    generator = torch.Generator().manual_seed(0)
    for given, dtype in CASES:
        for size in SIZES:
            live = torch.randn(size, generator=generator).to(given)
            for share in (0.0, 0.02, 1.0):
                changed = check(live, dtype, share)
                assert (changed > 0) == (share > 0) or size < triton.BLOCK - 1
    assert check(torch.randn(70, 90, generator=generator).t(), "BF16", 0.1) > 0
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert check(patterns, "BF16", 1.0) == 1 << 16
    check_rounding()
    print("equal")


if __name__ == "__main__":
    main()
