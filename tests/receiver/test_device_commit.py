"""A commit on a (simulated) device: in batches, uploaded as far as memory goes, and nothing is allocated in a pause."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.device import SimulatedDevice, for_host, identity, staged_on_device
from tests.support.world import World
from tests.tools.guarded_weights import stage_request
from vllm_delta_sync.engine import protocol
from vllm_delta_sync.engine.commit import apply as commits
from vllm_delta_sync.engine.compat import write_hooks
from vllm_delta_sync.engine.model import accelerator, device_patch
from vllm_delta_sync.engine.model.patch import StagedPatch
from vllm_delta_sync.engine.model.route import Destination, RoutePatch
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.engine.worker.rank_worker import RankWorker
from vllm_delta_sync.errors import BusyError, DeltaSyncError, MemoryLimitError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import DTYPES, TensorTable


def destinations(count: int, size: int, random: np.random.Generator) -> list[Destination]:
    bits = random.integers(-(1 << 15), 1 << 15, (count, size), dtype=np.int16)
    return [Destination(f"weight {i}", torch.bfloat16, torch.from_numpy(row.copy())) for i, row in enumerate(bits)]


def random_patches(count: int, size: int, random: np.random.Generator) -> list[RoutePatch]:
    """Distances for each destination, then bits to exchange; every third patch has wide positions."""
    found = []
    for relative in (True, False):
        for number in range(count):
            chosen = np.sort(random.choice(size, random.integers(1, size), replace=False))
            positions = chosen.astype(np.int64) if number % 3 == 2 else chosen.astype(np.int32)
            data = random.integers(0, 1 << 16, positions.size, dtype=np.uint16)
            seed = int(random.integers(0, 1 << 64, dtype=np.uint64))
            route = identity(number, size)
            found.append(RoutePatch(route, seed, number % 2, DTYPES["BF16"], relative, positions, data))
    return found


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0], ids=["all uploaded", "some uploaded", "none uploaded"])
@pytest.mark.parametrize("workspace", [4_096, 1 << 20], ids=["many batches", "few batches"])
def test_any_batches_are_the_commit_in_host_memory(
    share: float, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "WORKSPACE_BYTES", workspace)
    monkeypatch.setattr(device_patch, "TORCH_ELEMENTS", 100)
    random = np.random.default_rng(workspace)
    weights, patches = destinations(5, 3_000, random), random_patches(5, 3_000, random)
    before = [weight.flat.clone() for weight in weights]
    there = [Destination(weight.name, weight.dtype, weight.flat.clone()) for weight in weights]
    on_host = StagedPatch(1, [for_host(patch) for patch in patches], Fingerprint(), [], [])
    host_routes = RouteMap(TensorTable([]), weights, [])
    device = SimulatedDevice()
    staged, routes = staged_on_device(patches, there, uploaded=False, device=device)
    assert staged.on_device is not None
    batches = staged.on_device.batches
    device.workspace.free_idle_slabs()
    device.free = int(2 * share * len(batches)) * device.workspace.nbytes
    staged.on_device.upload()
    assert sum(batch.uploaded is not None for batch in batches) == int(share * len(batches))
    assert max(batch.nbytes for batch in staged.on_device.batches) <= workspace
    for reverse in (False, True, False):
        assert commits.apply_patch(on_host, host_routes, reverse) == commits.apply_patch(staged, routes, reverse)
        for one, other in zip(weights, there, strict=True):
            assert torch.equal(one.flat, other.flat)
        for patch, other_patch in zip(on_host.sparse, staged.routed, strict=True):
            assert np.array_equal(patch.data, other_patch.data)
        staged.on_device.release()
    assert not torch.equal(weights[0].flat, before[0])
    routes.memory.asleep = True
    with pytest.raises(BusyError):
        staged.on_device.upload()


class NoNewMemory(TorchDispatchMode):
    """Fails at an operation whose result is in memory that none of its arguments had."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            tensor.untyped_storage()._cdata
            for tensor in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        }
        found = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                assert tensor.untyped_storage()._cdata in given, f"{func} allocates in a pause"
        return found


def on_device(root: Path, free: int = 1 << 34) -> tuple[World, SimulatedDevice]:
    """A world whose one rank is on a device."""
    world, device = World(root), SimulatedDevice(free)
    world.port.ranks = [RankWorker(world.model, 0, memory=WeightMemory(device))]
    world.use(world.port)
    return world, device


def test_nothing_is_allocated_in_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a commit, nor by rollbacks of a confirmed one; sparse changes, and tensors in full."""
    world, device = on_device(tmp_path)
    original, calls = commits.apply_patch, []

    def watched(patch: StagedPatch, routes: RouteMap, reverse: bool = False) -> Any:
        free = device.free
        with NoNewMemory():
            found = original(patch, routes, reverse)
        assert device.free == free
        calls.append((len(patch.routed), len(patch.dense)))
        return found

    monkeypatch.setattr(commits, "apply_patch", watched)
    world.receiver.advance()
    world.train_and_follow(1, 2)
    for tensor in world.tensors.values():
        tensor += 1.0
    world.publisher.publish(step=3, wait=True)
    world.publisher.flush()
    world.receiver.advance()
    world.expect_exact()
    world.receiver.rollback(1)
    assert world.port.ranks[0].version == 1
    assert any(routed for routed, _ in calls)
    assert any(dense for _, dense in calls)


def test_a_commit_that_fails_in_any_piece_leaves_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails after the piece has been written: whatever was written is taken back."""
    monkeypatch.setattr(accelerator, "WORKSPACE_BYTES", 4_096)
    random = np.random.default_rng(1)
    there, patches = destinations(3, 1_000, random), random_patches(3, 1_000, random)
    before, data = [weight.flat.clone() for weight in there], [patch.data.copy() for patch in patches]
    staged, routes = staged_on_device(patches, there)
    assert staged.on_device is not None
    add = torch.Tensor.add_
    for failing in range(sum(len(batch.parts) for batch in staged.on_device.batches)):
        left = [failing]

        def sometimes(tensor: torch.Tensor, *arguments: Any, left: list[int] = left, **named: Any) -> torch.Tensor:
            # The last operation of a piece adds its two sums; nothing else adds to a tensor of two elements.
            left[0] -= tensor.numel() == 2
            if left[0] == -1:
                left[0] -= 1
                raise torch.OutOfMemoryError("no memory")
            return add(tensor, *arguments, **named)

        monkeypatch.setattr(torch.Tensor, "add_", sometimes)
        with pytest.raises(torch.OutOfMemoryError):
            commits.apply_patch(staged, routes)
        assert not staged.applied
        for weight, bits in zip(there, before, strict=True):
            assert torch.equal(weight.flat, bits)
        for patch, known in zip(patches, data, strict=True):
            assert np.array_equal(patch.data, known)


@pytest.mark.parametrize("ceiling", [0, 1, 3])
def test_versions_take_no_more_than_the_setting(ceiling: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is above it passes through the workspace in the pause, and the weights are the same."""
    monkeypatch.setattr(accelerator, "WORKSPACE_BYTES", 1_024)
    world, device = on_device(tmp_path)
    world.follow(device_staging_bytes=ceiling * 1_024 + 1_023)
    world.receiver.advance()
    uploaded: list[tuple[int, int]] = []
    original = device_patch.DevicePatch.upload

    def upload(patch: device_patch.DevicePatch) -> None:
        original(patch)
        uploaded.append((sum(batch.uploaded is not None for batch in patch.batches), len(patch.batches)))

    monkeypatch.setattr(device_patch.DevicePatch, "upload", upload)
    for step in range(1, 4):
        world.train_and_follow(step)
    assert [found for found, _ in uploaded] == [ceiling] * 3
    assert min(wanted for _, wanted in uploaded) > 3
    assert device.workspace.slabs == ceiling


def test_a_large_version_gives_its_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What versions of the usual size need is kept, so that they allocate nothing."""
    monkeypatch.setattr(accelerator, "WORKSPACE_BYTES", 1_024)
    world, device = on_device(tmp_path)
    world.receiver.advance()
    for step in range(1, 4):
        world.train_and_follow(step)
    space = device.workspace
    usual, free = space.slabs, device.free
    assert usual > 3
    for tensor in world.tensors.values():
        tensor += torch.where(torch.rand(tensor.shape) < 0.6, 1e-3, 0.0)
    held: list[int] = []
    original = commits.apply_patch

    def watched(patch: StagedPatch, routes: RouteMap, reverse: bool = False) -> Any:
        held.append(space.slabs)
        return original(patch, routes, reverse)

    monkeypatch.setattr(commits, "apply_patch", watched)
    world.train_and_follow(4)
    assert held.pop() > 5 * usual
    assert space.slabs == usual
    # Each version allocates its sums.
    assert 0 <= free - device.free < space.nbytes
    # Versions of nearly the same size use that memory, which stays.
    for step in range(5, 9):
        world.train_and_follow(step)
        assert space.slabs == held[-1]
    assert usual <= min(held) <= max(held) <= usual + 2


@pytest.mark.parametrize("at", ["first batch", "end"])
def test_an_engine_that_falls_asleep_while_a_version_is_staged_keeps_no_memory_for_it(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sleep comes as soon as it may, between two batches; or after the last one."""
    monkeypatch.setattr(accelerator, "WORKSPACE_BYTES", 1_024)
    world, device = on_device(tmp_path)
    (rank,) = world.port.ranks
    world.receiver.advance()
    worker = SimpleNamespace(sleep=lambda level: None, wake_up=lambda tags: None)
    write_hooks.watch_writes(worker, world.model, rank.memory)
    world.train(1)
    request = stage_request(world)
    rank.leave_device()
    upload, upload_all = accelerator.Workspace.upload, device_patch.DevicePatch.upload
    sleeping = threading.Thread(target=lambda: worker.sleep(1))

    def fall_asleep(workspace: accelerator.Workspace, *arguments: Any) -> None:
        upload(workspace, *arguments)
        if at == "first batch" and not sleeping.ident:
            sleeping.start()
            while rank.memory._gate.acquire(blocking=False):
                rank.memory._gate.release()

    def uploaded(patch: device_patch.DevicePatch) -> None:
        upload_all(patch)
        assert device.workspace.slabs > 3
        sleeping.start()
        sleeping.join()

    monkeypatch.setattr(accelerator.Workspace, "upload", fall_asleep)
    if at == "end":
        monkeypatch.setattr(device_patch.DevicePatch, "upload", uploaded)
    rank.answer(request)
    while rank.answer(protocol.Poll()) == protocol.Progress(True):
        time.sleep(1e-3)
    sleeping.join()
    assert rank.memory.asleep
    assert device.workspace.slabs == 0


def test_the_workspace_takes_what_memory_is_left() -> None:
    device = SimulatedDevice(free=(3 << 20) + 5)
    assert device.workspace.nbytes == 2 << 20
    with pytest.raises(torch.OutOfMemoryError):
        assert SimulatedDevice(free=1_000).workspace


def test_a_device_without_memory_keeps_serving_and_follows_once_there_is_some(tmp_path: Path) -> None:
    world, device = on_device(tmp_path, free=10)
    world.receiver.advance()
    world.train(1)
    with pytest.raises(DeltaSyncError) as failed:
        world.receiver.advance()
    assert failed.value.kind == MemoryLimitError.kind
    assert world.receiver.served_version == 0
    device.free = 1 << 30
    world.receiver.advance()
    world.expect_exact()


def test_an_exchange_that_fails_leaves_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice()
    live, staged = torch.zeros(9, dtype=torch.int16), torch.ones(9, dtype=torch.int16)
    calls: list[None] = []

    def failing() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError("the device reports an error")

    monkeypatch.setattr(device, "synchronize_stream", failing)
    with pytest.raises(RuntimeError):
        device.workspace.exchange(live, staged)
    assert not live.any()
    assert staged.all()
