"""An interrupt at any line of a comparison: what is noted by then puts the baseline back."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.detection import NAME, compared, disturbed, expected, served
from trainer_side import detection, detection_device
from trainer_side.detection import Detector
from trainer_side.detection_held import DeviceHeld, Held, HostHeld
from trainer_side.detection_notes import Extracted
from vllm_delta_sync.wire import segments
from vllm_delta_sync.wire.bits import CHUNK_ELEMENTS
from vllm_delta_sync.wire.table import TensorSpec

WATCHED = {
    "detection.py",
    "detection_device.py",
    "detection_held.py",
    "detection_live.py",
    "detection_notes.py",
    "segments.py",
}


class AtLine:
    """Raises KeyboardInterrupt before the n-th line that this thread runs in the watched files."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if Path(frame.f_code.co_filename).name not in WATCHED:
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


@pytest.fixture
def detector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Detector]:
    monkeypatch.setattr(detection, "PARALLEL_ELEMENTS", 1)
    detector = Detector(2)
    yield detector
    detector.close()


def on_device(bits: np.ndarray) -> Held:
    return DeviceHeld(torch.from_numpy(bits.view("<i2").copy()))


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("hold", "size"), [(HostHeld, 2 * CHUNK_ELEMENTS + 300), (on_device, 500)], ids=["host", "device"]
)
def test_interrupt_at_any_line(
    hold: Callable[[np.ndarray], Held],
    size: int,
    given: torch.dtype,
    detector: Detector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Element 0 changed too: where a note counts it twice, or its room is taken for entries, it comes out wrong."""
    monkeypatch.setattr(segments, "ROOM", CHUNK_ELEMENTS)
    monkeypatch.setattr(segments, "CHUNKS", 2)
    monkeypatch.setattr(detection_device, "WINDOW_ELEMENTS", 200)
    detector._rooms = [detection._Room() for _ in detector._rooms]
    live = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(given)
    new = served(live, "BF16")
    start = disturbed(new, 0.6)
    start[0] = ~new[0]
    spec = TensorSpec(NAME, "BF16", (size,))
    held, lines = hold(start.copy()), 0
    while True:
        found = Extracted(spec.element)
        if not interrupted(lines, partial(detector.collect, spec, held, live, found)):
            break
        detector.settle()
        found.revert(held)
        assert np.array_equal(held.read(), start), f"interrupted before line {lines}"
        lines += 1
    assert lines > 30
    assert np.array_equal(held.read(), new)
    found.revert(held)
    assert np.array_equal(held.read(), start)
    # And nothing is left over from all that.
    assert compared("BF16", held, live, detector)[1] == expected("BF16", start, new)
