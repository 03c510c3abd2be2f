"""What a publish asks of a device: one wait for all tensors, nothing made anew, and right in any order events allow."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.detection import Difference, disturbed, expected, served, tensor_of
from tests.support.simulated_queue import Record, SimulatedQueue
from trainer_side.diff import compare_torch, device, engine
from trainer_side.diff.buffers import BaselineBuffer, DeviceBuffer, HostBuffer
from trainer_side.diff.change_log import ChangeLog
from trainer_side.diff.device import DeviceComparer
from trainer_side.diff.device_memory import BLOCK, Kernels
from trainer_side.diff.engine import Detector
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import Bits

BATCH = 4 * BLOCK
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "BATCH_ELEMENTS", BATCH)
    monkeypatch.setattr(device, "LARGE_BATCH_ELEMENTS", 6 * BATCH)
    monkeypatch.setattr(device, "STRETCH_ELEMENTS", 3 * BLOCK)
    monkeypatch.setattr(device, "BATCHES_UNDER_WAY", 8)


class Weights:
    """Tensors on a simulated device, and their baselines: of one publish after another."""

    def __init__(
        self,
        dtypes: list[str],
        sizes: list[int],
        on_device: bool,
        queue: SimulatedQueue,
        rounds: bool = False,
        kernels: Kernels = compare_torch,
    ) -> None:
        self.random = np.random.default_rng(sum(sizes))
        self.queue = queue
        self.specs = [
            TensorSpec(f"t{i}", dtype, (size,)) for i, (dtype, size) in enumerate(zip(dtypes, sizes, strict=True))
        ]
        self.bits: list[Bits] = [
            self.random.integers(0, 1 << 7, spec.numel).astype(spec.element.uint) for spec in self.specs
        ]
        self.live = [
            tensor_of(spec.dtype, bits.copy()).to(
                torch.float32 if rounds and spec.dtype == "BF16" else DTYPES[spec.dtype]
            )
            for spec, bits in zip(self.specs, self.bits, strict=True)
        ]
        self.held: list[BaselineBuffer] = [
            DeviceBuffer(torch.from_numpy(bits.view(f"<i{bits.itemsize}").copy()))
            if on_device
            else HostBuffer(bits.copy())
            for bits in self.bits
        ]
        self.comparer = DeviceComparer(queue, TensorTable(self.specs), kernels)

    def step(self, share: float) -> None:
        for spec, live in zip(self.specs, self.live, strict=True):
            live.copy_(tensor_of(spec.dtype, disturbed(served(live, spec.dtype), share)))

    def publish(self, lasting: bool = True, side: bool = False) -> Record:
        """Compare, train on at once, collect; return what the device was asked for while training waited.

        Args:
            side: every second tensor comes while another stream is current, as if a generator had entered it.
        """
        self.queue.record_of = Record()
        new = [served(live, spec.dtype) for spec, live in zip(self.specs, self.live, strict=True)]
        logs = [ChangeLog(spec.element) for spec in self.specs]
        for number, (spec, held, live, log) in enumerate(zip(self.specs, self.held, self.live, logs, strict=True)):
            self.queue.current = "side" if side and number % 2 == 0 else "default"
            self.comparer.add(spec, held, live, log, lasting)
            if not lasting:
                # What its stream does next changes the tensor.
                self.queue.run("caller", partial(live.view(torch.uint8).fill_, 0x22))
        self.queue.current = "default"
        counted, waited = self.comparer.finish(), self.queue.record_of
        for live in self.live:
            live.view(torch.uint8).fill_(0x11)
        self.queue.record_of = Record()
        changes = self.comparer.collect()
        for spec, log, old, bits, held, live in zip(
            self.specs, logs, self.bits, new, self.held, self.live, strict=True
        ):
            wanted = expected(spec.dtype, old, bits)
            change = fingerprint_tensor(spec.name, bits) - fingerprint_tensor(spec.name, old)
            assert Difference.of(log, changes.get(log, Fingerprint())) == Difference(
                wanted.positions, wanted.distances, change
            )
            assert counted[log] == log.size == len(wanted.positions)
            assert np.array_equal(held.read(), bits)
            live.copy_(tensor_of(spec.dtype, bits))
        self.bits = new
        return waited


@given(
    sizes=st.lists(st.integers(1, 3 * BATCH), min_size=1, max_size=8),
    dtypes=st.lists(st.sampled_from(sorted(DTYPES)), min_size=8, max_size=8),
    shares=st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), min_size=2, max_size=3),
    on_device=st.booleans(),
    lasting=st.booleans(),
    rounds=st.booleans(),
    side=st.booleans(),
    seed=st.none() | st.integers(0, 1 << 16),
)
def test_right_in_any_order_that_events_allow(
    sizes: list[int],
    dtypes: list[str],
    shares: list[float],
    on_device: bool,
    lasting: bool,
    rounds: bool,
    side: bool,
    seed: int | None,
) -> None:
    weights = Weights(dtypes[: len(sizes)], sizes, on_device, SimulatedQueue(seed), rounds)
    for share in shares:
        weights.step(share)
        weights.publish(lasting, side)


@pytest.mark.parametrize("on_device", [True, False])
def test_one_wait_and_nothing_made_anew(on_device: bool) -> None:
    sizes = [100, 5000, BATCH // 2, 7, 3 * BATCH // 4]
    weights = Weights(["BF16"] * len(sizes), sizes, on_device, SimulatedQueue())
    weights.step(0.05)
    first = weights.publish()
    weights.step(0.05)
    later = weights.publish()
    assert first.waits == later.waits == [0]
    assert first.allocated
    assert (later.allocated, later.pinned) == ([], [])
    # One launch for each batch, however many tensors are in it, and one that clears the counters.
    assert later.launches <= 1 + -(-sum(sizes) // (BATCH // 2))


@pytest.mark.parametrize("on_device", [True, False])
def test_bytes_that_are_moved_while_training_waits(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides are read once; over the bus goes the baseline, if it is on the host, and little else."""
    monkeypatch.setattr(device, "BATCH_ELEMENTS", 256 * BLOCK)
    monkeypatch.setattr(device, "LARGE_BATCH_ELEMENTS", 512 * BLOCK)
    sizes = [200 * BLOCK, 300 * BLOCK + 5, 50 * BLOCK]
    read: list[int] = []
    compare = compare_torch.compare

    def counted(batch: Any, lives: Any, bases: Any, *rest: Any) -> None:
        read.extend(side.nbytes for side in (*lives, *bases))
        compare(batch, lives, bases, *rest)

    monkeypatch.setattr(compare_torch, "compare", counted)
    weights = Weights(["BF16"] * len(sizes), sizes, on_device, SimulatedQueue())
    weights.step(0.01)
    moved, total = weights.publish(), 2 * sum(sizes)
    assert sum(read) == 2 * total
    assert moved.to_device <= (0 if on_device else total) + total // 100
    assert moved.to_host <= 200


def test_many_elements_and_little_room() -> None:
    """With tensors that last there is one wait; with others, for batches that later ones follow."""
    sizes = [BATCH] * 40
    weights = Weights(["BF16"] * len(sizes), sizes, True, SimulatedQueue())
    for _ in range(2):
        weights.step(0.01)
        assert weights.publish().waits == [0]
    weights.step(0.01)
    waits = weights.publish(lasting=False).waits
    assert waits[-1] == 0
    assert waits.count(0) < len(waits) <= 40


def test_more_changes_than_there_is_room_for() -> None:
    """They are compared again batch by batch, and collected in between; the next version finds more room."""
    sizes = [BATCH] * 40
    weights = Weights(["BF16"] * len(sizes), sizes, True, SimulatedQueue())
    rooms = []
    for share in (0.01, 0.06, 0.06, 0.9, 0.9):
        weights.step(share)
        waits = weights.publish().waits
        rooms.append((len(waits) == 1, weights.comparer._found[2].room))
    most = 40 * BATCH // device.LARGEST_ROOM_SHARE
    assert rooms[0] == (True, 2 * BATCH)
    assert not rooms[1][0]
    assert rooms[1][1] > 2 * BATCH
    assert rooms[2] == (True, rooms[1][1])
    assert rooms[3] == rooms[4] == (False, most)


def test_without_memory_for_more_room() -> None:
    sizes, queue = [BATCH] * 40, SimulatedQueue()
    weights = Weights(["BF16"] * len(sizes), sizes, True, queue)
    weights.step(0.01)
    weights.publish()
    queue.memory = queue.used
    for _ in range(2):
        weights.step(0.08)
        weights.publish()
    assert weights.comparer._found[2].room == 2 * BATCH


@pytest.mark.parametrize("on_device", [True, False])
def test_all_memory_can_be_made_before_the_first_version(on_device: bool) -> None:
    weights = Weights(["BF16", "F32"], [BATCH, 3000], on_device, SimulatedQueue(), rounds=True)
    weights.comparer.prepare("BF16", torch.float32, on_device)
    weights.comparer.prepare("F32", torch.float32, on_device)
    weights.step(0.01)
    waited = weights.publish()
    assert (waited.allocated, waited.pinned) == ([], [])


@pytest.mark.parametrize("on_device", [True, False])
def test_memory_is_given_back_at_the_end(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts keep a publisher that they have closed."""
    queue, detector = SimulatedQueue(), Detector()
    monkeypatch.setattr(engine, "open_queue", lambda device: queue)
    weights = Weights(["BF16", "F32"], [BATCH, 3000], on_device, queue)
    weights.comparer = detector.on_device(queue.device, TensorTable(weights.specs))
    weights.step(0.1)
    weights.publish()
    queue.run_all()
    assert queue.used > 0
    detector.close()
    assert queue.used == 0
