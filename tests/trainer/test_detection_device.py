"""Change detection on a device with plain torch operations, which run on the CPU as well; and a baseline there."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.detection import NAME, Difference, compared, disturbed, expected, served
from tests.support.publishers import FailAt, Hooked, Trainer, assert_holds
from trainer_side import Gate, Publisher, baseline, detection_device
from trainer_side.detection import Detector
from trainer_side.detection_held import DeviceHeld, Held, HostHeld, Place, placed
from trainer_side.detection_notes import Extracted
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import PublishError, UsageError
from vllm_delta_sync.torch_bits import SIGNED, TORCH_DTYPES
from vllm_delta_sync.wire.dtypes import DTYPES
from vllm_delta_sync.wire.table import TensorSpec


def device_held(bits: np.ndarray) -> DeviceHeld:
    return DeviceHeld(torch.from_numpy(bits.view(f"<i{bits.itemsize}").copy()))


@pytest.mark.parametrize("hold", [device_held, lambda bits: HostHeld(bits.copy())])
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (torch.float32, "BF16"), (torch.bfloat16, "BF16"), (torch.float32, "F32"), (torch.float16, "F16"),
        (torch.float8_e5m2, "F8_E5M2"), (torch.float64, "F64"), (torch.bool, "BOOL"),
    ],
)  # fmt: skip
def test_device_finds_what_the_host_finds(
    given: torch.dtype, dtype: str, share: float, hold: Callable[[np.ndarray], Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection_device, "WINDOW_ELEMENTS", 1000)
    for live in (torch.randn(70, 90).to(given), torch.randn(70, 90).to(given).t(), torch.randn(()).to(given)):
        new = served(live, dtype)
        old = disturbed(new, share)
        held, found = hold(old), Extracted(DTYPES[dtype])
        spec = TensorSpec(NAME, dtype, tuple(live.shape))
        difference = Difference.of(found, detection_device.collect(spec, held, live, found))
        difference = Difference.of(found, difference.fingerprint)
        assert difference == expected(dtype, old, new)
        assert np.array_equal(held.read(), new)
        found.revert(held)
        assert np.array_equal(held.read(), old)


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_every_pattern_on_a_device(name: str) -> None:
    old = np.arange(1 << 16, dtype=np.uint16)
    new = np.random.default_rng(1).permutation(old)
    live = torch.from_numpy(new.view(np.int16)).view(TORCH_DTYPES[name])
    held = device_held(old)
    found, difference = compared(name, held, live, Detector())
    assert difference == expected(name, old, new)
    found.revert(held)
    assert np.array_equal(held.read(), old)


@pytest.mark.parametrize("hold", [device_held, HostHeld])
def test_held_bits_are_read_and_written(hold: Callable[[np.ndarray], Held]) -> None:
    start = np.arange(100, dtype=np.uint16)
    held = hold(start.copy())
    positions = np.array([3, 50, 99])
    assert held.get(positions).tolist() == [3, 50, 99]
    held.revert(DTYPES["U16"], positions, np.array([1, 2, 65_535], np.uint16))
    assert held.get(positions).tolist() == [2, 48, 100]
    assert held.window(2, 5, torch.device("cpu")).tolist() == [2, 2, 4]
    read = held.read().copy()
    held.write(start)
    assert held.read().tolist() == start.tolist()
    assert read[3] == 2


def test_bits_are_placed_where_they_are_compared() -> None:
    """The meta device stands for one with memory of its own."""
    far, here = torch.device("meta"), torch.device("cpu")
    host = HostHeld(np.arange(9, dtype=np.uint16))
    assert placed(host, "w", here, "host") is host
    assert placed(host, "w", here, "device") is host
    assert placed(host, "w", far, "host") is host
    moved = placed(host, "w", far, "device")
    assert isinstance(moved, DeviceHeld)
    assert (moved.flat.device, moved.flat.dtype, moved.flat.numel()) == (far, SIGNED[2], 9)
    assert placed(moved, "w", far, "device") is moved
    back = placed(device_held(host.bits), "w", here, "device")
    assert isinstance(back, HostHeld)
    assert np.array_equal(back.bits, host.bits)


def as_if_on_a_device(held: Held, name: str, device: torch.device, place: Place) -> Held:
    return held if isinstance(held, DeviceHeld) else device_held(held.read())


@pytest.mark.parametrize("gate", [None, Gate(max_changed_share=0.9)])
def test_a_publisher_with_its_baseline_on_a_device(
    gate: Gate | None, bucket: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baseline, "placed", as_if_on_a_device)
    trainer, steps = Trainer(), []
    with Publisher(trainer.live, bucket, gate=gate, baseline="device") as publisher:
        for step in range(1, 4):
            trainer.step()
            publisher.publish(step=step, wait=True)
            steps.append(trainer.copy())
        publisher.flush()
        held = publisher._committer.baseline
        assert all(isinstance(held.held(tensor), DeviceHeld) for tensor in range(len(held.table)))
        bucket.before = FailAt("versions/")
        trainer.step()
        publisher.publish(step=4)
        with pytest.raises(PublishError, match="injected"):
            publisher.flush()
        publisher.publish(step=5)
        steps.append(trainer.copy())
        assert publisher.rescan() == []
        damaged = held.held(0)
        assert isinstance(damaged, DeviceHeld)
        damaged.flat[7] ^= 1
        assert publisher.rescan() == [held.table[0].name]
        assert publisher.anchor() == 4
        publisher.rebase(2)
        assert publisher.publish(step=6).changed > 0
        steps.append(trainer.copy())
    assert open_run(bucket.url).verify().replayed
    for version, weights in enumerate(steps, 1):
        assert_holds(bucket, version, weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "gpu"}, "baseline is 'gpu'; give 'host' or 'device'"),
        ({"diff_threads": 0}, "diff_threads is 0; give a number of threads, or None, at least 1"),
        ({"diff_threads": True}, "diff_threads is True"),
    ],
)
def test_settings_that_make_no_sense(options: dict, message: str, bucket: Hooked) -> None:
    with pytest.raises(UsageError, match=message):
        Publisher({"w": torch.ones(2)}, bucket, **options)
