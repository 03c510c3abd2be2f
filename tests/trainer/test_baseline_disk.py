"""A baseline on disk or on a device: the versions of one in memory, through failures, rebases and restarts."""

import mmap
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.support.publishers import (
    FailAt,
    Hooked,
    Trainer,
    as_if_on_a_device,
    assert_history,
    assert_holds,
    expect_failure,
    flip,
    publish,
)
from tests.support.written import save_base
from trainer_side import Gate, Publisher
from trainer_side.diff import baseline as baselines
from trainer_side.diff.buffers import DeviceBuffer
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import StoreError
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.torch_views import bits_of


def places(publisher: Publisher) -> set[str]:
    """Where the baseline's tensors are: mapped from a file, on a device, or else in memory."""
    baseline, found = publisher._committer.baseline, set[str]()
    for tensor in range(len(baseline.table)):
        held = baseline.buffer(tensor)
        memory: object = held.read()
        while isinstance(memory, np.ndarray):
            memory = memory.base
        on_disk = "disk" if isinstance(memory, mmap.mmap) else "host"
        found.add("device" if isinstance(held, DeviceBuffer) else on_disk)
    return found


@pytest.fixture(params=["disk", "device"])
def location(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "device":
        monkeypatch.setattr(baselines, "move_buffer", as_if_on_a_device)
    return request.param


@pytest.mark.parametrize("gate", [None, Gate(max_changed_share=1.0)])
def test_versions_are_those_of_the_trainer(location: Any, gate: Gate | None, bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, gate=gate, baseline=location) as publisher:
        history = publish(publisher, trainer, 3)
        assert places(publisher) == {location}
        bucket.before = FailAt("versions/")
        trainer.step()
        publisher.publish(step=4)
        expect_failure(publisher, "injected")
        publisher.rebase(1)
        trainer.step()
        publisher.publish(step=5)
        history.append(trainer.copy())
        assert publisher.rescan() == []
        flip(publisher, "b")
        assert publisher.rescan() == ["b"]
        assert publisher.anchor() == 4
        assert places(publisher) == {location}
    with Publisher(trainer.live, bucket, gate=gate, baseline=location) as publisher:
        assert publisher.publish(step=6, skip_unchanged=True).version is None
        assert places(publisher) == {location}
        history += publish(publisher, trainer, 2)[1:]
        publisher.rebase(2)
        publisher.rebase(publisher.version)
        history += publish(publisher, trainer)[1:]
        assert places(publisher) == {location}
    assert_history(bucket, history)


def test_bits_of_a_base_are_copied_to_disk_once_they_change(tmp_path: Path, bucket: Hooked, trainer: Trainer) -> None:
    table = TensorTable(TensorSpec(name, {"a": "BF16", "b": "F32", "c": "F16"}[name], tuple(tensor.shape))
                        for name, tensor in trainer.live.items())  # fmt: skip
    base = save_base(tmp_path / "base", [bits_of(tensor) for tensor in trainer.live.values()], table).parent
    with Publisher(trainer.live, bucket, base, baseline="disk", first_step=8) as publisher:
        assert (publisher.began, publisher.run) == (True, open_run(bucket.url).info.run)
        history = publish(publisher, trainer)
        assert places(publisher) == {"disk"}
    assert_history(bucket, history)
    first = open_run(bucket.url).manifest(0)
    assert (first.kind, first.step) == ("reference", 8)


def test_a_lost_version_is_replaced_from_disk(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, baseline="disk", anchor_every=1000) as publisher:
        publish(publisher, trainer)
    for key in [info.key for info in bucket.list("objects/")] + [info.key for info in bucket.list("anchors/")]:
        bucket.delete(key)
    trainer.step()
    with Publisher(trainer.live, bucket, baseline="disk") as publisher:
        assert (publisher.began, publisher.version) == (False, 2)
        assert places(publisher) == {"disk"}
        trainer.step()
        publisher.publish(step=3)
    assert_holds(bucket, 3, trainer.live)


def test_no_room_on_disk(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    with mock.patch("tempfile.gettempdir", return_value=str(tmp_path / "none")):
        with pytest.raises(StoreError, match=r"no room for .* set TMPDIR"):
            Publisher(trainer.live, bucket, baseline="disk")
        assert list(bucket.list()) == []


def test_unchanged_weights_are_skipped_if_asked(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        skipped = publisher.publish(step=1, skip_unchanged=True, sidecars={"a": b"b"})
        assert (skipped.version, skipped.kind, skipped.done) == (None, "skipped", True)
        assert publisher.publish(step=2, wait=True).version == 1
        trainer.live["b"][3, 3] += 1
        assert publisher.publish(step=3, wait=True, skip_unchanged=True).version == 2
    assert [manifest.step for manifest in open_run(bucket.url).log()] == [0, 2, 3]
    assert_holds(bucket, 2, trainer.live)


@pytest.mark.parametrize("location", ["device"], indirect=True)
def test_device_memory_that_runs_out_while_a_version_is_reverted(
    location: Any, bucket: Hooked, trainer: Trainer
) -> None:
    """A part of the baseline then has the version that failed: it is restored before anything is compared with it."""
    upload, uploads = DeviceBuffer._on_device, 3

    def until_it_is_full(held: DeviceBuffer, array: np.ndarray) -> torch.Tensor:
        nonlocal uploads
        uploads -= 1
        if uploads < 0:
            raise torch.OutOfMemoryError
        return upload(held, array)

    with Publisher(trainer.live, bucket, baseline=location) as publisher:
        history = publish(publisher, trainer, 2)
        bucket.before = FailAt("versions/")
        trainer.step()
        with mock.patch.object(DeviceBuffer, "_on_device", until_it_is_full):
            publisher.publish(step=3)
            expect_failure(publisher, "injected")
        assert uploads < 0
        trainer.step()
        publisher.publish(step=4, wait=True)
        history.append(trainer.copy())
    assert_history(bucket, history)
