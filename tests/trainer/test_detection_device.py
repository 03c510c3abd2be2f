"""A baseline on the host or on a device finds the same, and an interrupt at any line of a comparison loses nothing."""

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.detection import NAME, check, collect_on_device, compared, disturbed, expected, served, tensor_of
from trainer_side.diff import compare_torch, engine
from trainer_side.diff import device as detection_device
from trainer_side.diff.baseline import Baseline
from trainer_side.diff.buffers import BaselineBuffer, DeviceBuffer, HostBuffer, move_buffer
from trainer_side.diff.change_log import ChangeLog, ChangeSpool
from trainer_side.diff.device_memory import BLOCK
from trainer_side.diff.engine import Detector
from trainer_side.diff.pending_delta import PendingDelta
from trainer_side.model.module import live_tensors
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors import segments
from vllm_delta_sync.tensors.changes import CHUNK_ELEMENTS
from vllm_delta_sync.tensors.torch_views import SIGNED, bits_of


def device_held(bits: np.ndarray) -> DeviceBuffer:
    return DeviceBuffer(torch.from_numpy(bits.view(f"<i{bits.itemsize}").copy()))


@pytest.mark.parametrize("hold", [device_held, HostBuffer])
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (torch.float32, "BF16"), (torch.bfloat16, "BF16"), (torch.float32, "F32"), (torch.float16, "F16"),
        (torch.float8_e5m2, "F8_E5M2"), (torch.float64, "F64"), (torch.bool, "BOOL"),
    ],
)  # fmt: skip
def test_device_finds_what_the_host_finds(
    given: torch.dtype,
    dtype: str,
    share: float,
    hold: Callable[[np.ndarray], BaselineBuffer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detection_device, "BATCH_ELEMENTS", 4800)
    monkeypatch.setattr(detection_device, "STRETCH_ELEMENTS", BLOCK)
    monkeypatch.setattr(compare_torch, "TORCH_ELEMENTS", 2 * BLOCK)
    for live in (torch.randn(70, 190).to(given), torch.randn(70, 190).to(given).t(), torch.randn(()).to(given)):
        check(dtype, disturbed(served(live, dtype), share), live, hold=hold, on_device=True)


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_every_pattern_on_a_device(name: str) -> None:
    old = np.arange(1 << 16, dtype=np.uint16)
    check(name, old, tensor_of(name, np.random.default_rng(1).permutation(old)), hold=device_held)


def test_bits_are_placed_where_they_are_compared() -> None:
    """The meta device stands for one with memory of its own."""
    far, here = torch.device("meta"), torch.device("cpu")
    host = HostBuffer(np.arange(9, dtype=np.uint16))
    assert move_buffer(host, "w", here, "host") is host
    assert move_buffer(host, "w", here, "device") is host
    assert move_buffer(host, "w", far, "host") is host
    moved = move_buffer(host, "w", far, "device")
    assert isinstance(moved, DeviceBuffer)
    assert (moved.flat.device, moved.flat.dtype, moved.flat.numel()) == (far, SIGNED[2], 9)
    assert move_buffer(moved, "w", far, "device") is moved
    back = move_buffer(device_held(host.bits), "w", here, "device")
    assert isinstance(back, HostBuffer)
    assert np.array_equal(back.bits, host.bits)


WATCHED = (
    "/diff/engine.py", "/diff/device.py", "/diff/compare_torch.py", "/diff/buffers.py", "/diff/reader.py",
    "/diff/change_log.py", "/tensors/segments.py",
)  # fmt: skip


class AtLine:
    """Raises KeyboardInterrupt before the n-th line that this thread runs in the watched files."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(WATCHED):
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def interrupted(number: int, work: Callable[[], object]) -> bool:
    """Whether ``work`` ran as many lines, and was interrupted there."""
    trace = sys.gettrace()
    sys.settrace(AtLine(number))
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(trace)
    return False


TO_FILE, IN_MEMORY = 0, 1 << 30
SLOW = [(torch.bfloat16, IN_MEMORY), (torch.float32, TO_FILE), (torch.float16, IN_MEMORY)]


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        (torch.bfloat16, TO_FILE), (torch.float32, IN_MEMORY), (torch.float16, TO_FILE),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("hold", "size", "on_device"),
    [(HostBuffer, 2 * CHUNK_ELEMENTS + 300, False), (HostBuffer, 500, True), (device_held, 500, True)],
    ids=["host", "device, baseline on the host", "device"],
)
def test_interrupt_at_any_line(
    hold: Callable[[np.ndarray], BaselineBuffer],
    size: int,
    on_device: bool,
    given: torch.dtype,
    limit: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Element 0 changed too: where a note counts it twice, or its room is taken for entries, it comes out wrong."""
    monkeypatch.setattr(segments, "ROOM", CHUNK_ELEMENTS)
    monkeypatch.setattr(segments, "CHUNKS", 2)
    monkeypatch.setattr(detection_device, "BATCH_ELEMENTS", 200)
    monkeypatch.setattr(engine, "PARALLEL_ELEMENTS", 1)
    # Its rooms are made after what says how large they are.
    detector = Detector(2)
    live = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(given)
    new = served(live, "BF16")
    start = disturbed(new, 0.6)
    start[0] = ~new[0]
    spec = TensorSpec(NAME, "BF16", (size,))
    held, lines = hold(start.copy()), 0
    collect: Callable[..., object] = collect_on_device if on_device else detector.collect
    while True:
        found = ChangeLog(spec.element, ChangeSpool(limit))
        if not interrupted(lines, partial(collect, spec, held, live, found)):
            break
        detector.wait_idle()
        found.revert(held)
        assert np.array_equal(held.read(), start), f"interrupted before line {lines}"
        lines += 1
    assert lines > 30
    assert found.spool is not None
    assert bool(found.spool._files) == (limit == TO_FILE)
    assert np.array_equal(held.read(), new)
    found.revert(held)
    assert np.array_equal(held.read(), start)
    # And nothing is left over from all that.
    assert compared("BF16", held, live, detector)[1] == expected("BF16", start, new)
    detector.close()


def test_interrupt_at_any_line_between_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one chunk at a time, so that one call of the loop does not get through all of them."""
    monkeypatch.setattr(segments, "ROOM", CHUNK_ELEMENTS)
    monkeypatch.setattr(sys.modules[__name__], "WATCHED", (*WATCHED, "/diff/pending_delta.py"))
    sizes = {"a": 3, "b": 70, "c": CHUNK_ELEMENTS + 5, "d": 1, "e": 500}
    old = {name: torch.randn(size, generator=torch.Generator().manual_seed(size)) for name, size in sizes.items()}
    new = {name: torch.where(torch.arange(sizes[name]) % 3 == 0, -tensor, tensor) for name, tensor in old.items()}
    baseline, detector = Baseline.captured(live_tensors(old)), Detector()
    engine.compile_kernels(baseline.table)
    start = [baseline.read(tensor).copy() for tensor in range(len(sizes))]
    lines = 0
    while True:
        pending = PendingDelta(baseline, "plain", "zstd", detector)
        if not interrupted(lines, partial(pending.add_all, new.items(), lambda tensor: True)):
            break
        pending.revert()
        for tensor, bits in enumerate(start):
            assert np.array_equal(baseline.read(tensor), bits), f"interrupted before line {lines}"
        lines += 1
    assert lines > 100
    assert pending.changed == sum(-(-size // 3) for size in sizes.values())
    assert [baseline.read(tensor).tolist() for tensor in range(5)] == [bits_of(new[name]).tolist() for name in "abcde"]
