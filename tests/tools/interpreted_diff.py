"""The Triton kernels of change detection against plain numpy, under Triton's interpreter: run with TRITON_INTERPRET=1.

A program of its own, as Triton decides when it is imported whether it interprets.
"""

import numpy as np
import pytest
import torch

from tests.support.detection import NAME, Difference, collect_on_device, disturbed, expected, served
from tests.support.simulated_queue import SimulatedQueue
from tests.trainer.test_device_pipeline import Weights
from trainer_side.diff import compare_triton, device
from trainer_side.diff.buffers import BaselineBuffer, DeviceBuffer, HostBuffer
from trainer_side.diff.change_log import ChangeLog
from trainer_side.diff.device import DeviceComparer
from trainer_side.diff.device_memory import BLOCK
from trainer_side.diff.device_queue import Stream, open_queue
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import DTYPES, TensorSpec, TensorTable

SIZES = (1, 63, BLOCK - 1, BLOCK, 3 * BLOCK + 5, 20_000)
CASES = (
    (torch.float32, "BF16"), (torch.bfloat16, "BF16"), (torch.float32, "F32"), (torch.float16, "F16"),
    (torch.float32, "F16"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64"), (torch.bool, "BOOL"),
)  # fmt: skip


def check(live: torch.Tensor, dtype: str, share: float, on_device: bool = True) -> int:
    """Compare with a baseline of which a share differs → number of changed elements."""
    new = served(live, dtype)
    old = disturbed(new, share)
    held: BaselineBuffer = HostBuffer(old.copy())
    if on_device:
        held = DeviceBuffer(torch.from_numpy(old.view(f"<i{old.itemsize}").copy()))
    found, spec = ChangeLog(DTYPES[dtype]), TensorSpec(NAME, dtype, tuple(live.shape))
    fingerprint = collect_on_device(spec, held, live, found, kernels=compare_triton)
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
        new = served(live, "BF16")
        held = DeviceBuffer(torch.from_numpy((~new).view(np.int16)))
        spec = TensorSpec(NAME, "BF16", tuple(live.shape))
        collect_on_device(spec, held, live, ChangeLog(DTYPES["BF16"]), kernels=compare_triton)
        assert (held.read() == new).all(), hex(lower)


def check_batches(on_device: bool) -> None:
    """Tensors of several sizes and dtypes in few launches, some of them at odd addresses."""
    generator = torch.Generator().manual_seed(1)
    cases = []
    for number, size in enumerate((5, 3000, 3 * BLOCK, 1, 9000, 40, 2 * BLOCK + 1)):
        given, dtype = CASES[number % 3]
        live = torch.randn(size + 1, generator=generator).to(given)[number % 2 :][:size]
        new = served(live, dtype)
        old = disturbed(new, (0.0, 0.05, 1.0)[number % 3])
        spec = TensorSpec(f"t{number}", dtype, (size,))
        signed = torch.from_numpy(old.view(f"<i{old.itemsize}").copy())
        held: BaselineBuffer = DeviceBuffer(signed) if on_device else HostBuffer(old.copy())
        cases.append((spec, held, live, ChangeLog(spec.element), old, new))
    comparer = DeviceComparer(open_queue(live.device), TensorTable([case[0] for case in cases]), compare_triton)
    for _ in range(2):
        for spec, held, live, log, _old, _new in cases:
            comparer.add(spec, held, live, log)
        counted = comparer.finish()
        changes = comparer.collect()
        for spec, held, _live, log, old, new in cases:
            wanted = expected(spec.dtype, old, new)
            assert log.size == counted[log] == len(wanted.positions), spec
            assert Difference.of(log, Fingerprint()).positions == wanted.positions, spec
            assert (held.read() == new).all(), spec
            log.revert(held)
            assert (held.read() == old).all(), spec
            assert (log in changes) == bool(counted[log])
        cases = [(spec, held, live, ChangeLog(spec.element), old, new) for spec, held, live, _log, old, new in cases]


def check_pipeline() -> None:
    """These kernels on a device that does its work as late as events allow, or in any order; interrupted, too."""
    sizes = [5 * BLOCK + 1, 100, 7000, 4 * BLOCK]
    for on_device, seed in ((True, None), (False, None), (True, 1), (False, 2)):
        weights = Weights(["BF16", "F32", "BF16", "BF16"], sizes, on_device, SimulatedQueue(seed), True, compare_triton)
        for share, lasting in ((0.05, True), (1.0, True), (0.3, False)):
            weights.step(share)
            weights.publish(lasting, side=True)
    weights = Weights(["BF16"] * 3, [5000, 100, 7000], True, SimulatedQueue(), kernels=compare_triton)
    weights.step(0.05)
    copy = weights.queue.copy

    def interrupted(stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        tables = weights.comparer._tables
        if tables is not None and target.data_ptr() == tables.owners.data_ptr():
            raise KeyboardInterrupt
        copy(stream, target, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights.queue, "copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            weights.publish()
    weights.queue.run_all()
    weights.comparer.drop()
    # The table of blocks was not uploaded, and without it the kernels read anywhere.
    weights.publish()


def main() -> None:
    device.BATCH_ELEMENTS = 4 * BLOCK
    device.STRETCH_ELEMENTS = 3 * BLOCK
    generator = torch.Generator().manual_seed(0)
    for given, dtype in CASES:
        for size in SIZES:
            live = torch.randn(size, generator=generator).to(given)
            for share in (0.0, 0.02, 1.0):
                changed = check(live, dtype, share, on_device=size != 63)
                assert (changed > 0) == (share > 0) or size < BLOCK - 1
    assert check(torch.randn(70, 90, generator=generator).t(), "BF16", 0.1) > 0
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert check(patterns, "BF16", 1.0) == 1 << 16
    check_rounding()
    for on_device in (True, False):
        check_batches(on_device)
    check_pipeline()
    print("equal")


if __name__ == "__main__":
    main()
