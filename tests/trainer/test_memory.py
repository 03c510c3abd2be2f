"""What a publisher takes is known before, is at most what it says, and a large version takes little."""

import json
import logging
import os
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from tests.support.adapters import adapted, randomize
from tests.support.publishers import FailAt, Hooked, Trainer, as_if_on_a_device, assert_history, expect_failure, publish
from tests.support.running import run_python
from tests.support.simulated_queue import SimulatedQueue
from tests.support.tiny import make_model
from trainer_side import Budget, Gate, Publisher
from trainer_side.diff import baseline as baselines
from trainer_side.diff import compare_torch, memory_limits
from trainer_side.diff.baseline import Baseline
from trainer_side.diff.buffers import BaselineLocation
from trainer_side.diff.change_log import ChangeSpool
from trainer_side.diff.device import DeviceComparer
from trainer_side.diff.memory_limits import MemoryUse
from trainer_side.memory import publisher_memory
from trainer_side.model import lora
from trainer_side.model.live_tensors import CheckpointTensor
from trainer_side.model.module import live_tensors
from trainer_side.options import PublisherOptions
from trainer_side.writer import RunWriter
from vllm_delta_sync import open_run
from vllm_delta_sync.format.manifest import Stored
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.state import slab_layout

QWEN2_5_7B = Qwen2Config(
    vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4, tie_word_embeddings=False,
)  # fmt: skip
QWEN3_8B = Qwen3Config(
    vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
)  # fmt: skip
ALLOCATOR_BYTES = 8 * 1024 * 1024
"""What malloc may keep of what was freed: it gives memory back from the top of a heap only, and a heap has holes."""


def table_of(config: Any) -> TensorTable:
    """In bfloat16, which takes no memory here."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return TensorTable(TensorSpec(name, "BF16", tuple(tensor.shape)) for name, tensor in model.named_parameters())


def options(**given: Any) -> PublisherOptions:
    return PublisherOptions("memory://none", **{"rescan_bytes": 0, **given})


@pytest.mark.parametrize(("config", "gigabytes"), [(QWEN2_5_7B, 15.23), (QWEN3_8B, 16.38)])
def test_pinned_memory_is_that_of_the_weights_and_a_version_takes_at_most_half_of_it(
    config: Any, gigabytes: float
) -> None:
    """A slab allocates and pins what ``slab_layout`` plans."""
    table = table_of(config)
    assert table.full_bytes / 1e9 == pytest.approx(gigabytes, abs=0.01)
    assert table.full_bytes <= slab_layout(table)[1] <= 1.03 * table.full_bytes
    baseline = Baseline(table, {spec.name: [spec.name] for spec in table}, None)
    for codec in ("tiled", "plain", "raw"):
        memory = publisher_memory(baseline, options(codec=codec), 8, codec == "tiled")
        assert 0.1 * table.full_bytes < memory.largest.host - memory.at_rest.host < 0.5 * table.full_bytes
        guarded = options(codec=codec, gate=Gate(action="quarantine"))
        with_gate = publisher_memory(baseline, guarded, 8, codec == "tiled")
        assert with_gate.largest.host == memory.largest.host + table.full_bytes


@pytest.mark.parametrize("location", ["host", "disk"])
def test_at_rest_is_one_slab(location: BaselineLocation, bucket: Hooked, caplog: pytest.LogCaptureFixture) -> None:
    """For a new run and after a takeover, and all bits are in it."""
    trainer = Trainer()
    caplog.set_level(logging.INFO)
    for _ in range(2):
        with Publisher(trainer.live, bucket, baseline=location) as publisher:
            publish(publisher, trainer)
            baseline = publisher._committer.baseline
            slab = baseline._slab
            assert slab is not None
            assert all(np.shares_memory(baseline.read(tensor), slab._memory) for tensor in range(3))
            assert slab._memory.nbytes == slab_layout(baseline.table)[1]
            assert publisher.memory.at_rest == MemoryUse(**{location: slab._memory.nbytes})
            assert f"memory of the publisher of {publisher.run}: {publisher.memory}" in caplog.text


def test_a_baseline_on_a_device_is_none_on_the_host() -> None:
    """Where it will be is known before the first comparison moves it; the meta device stands for one."""
    live = live_tensors({"there": torch.zeros(50, dtype=torch.bfloat16), "here": torch.zeros(9)})
    live.tensors["there"] = live.tensors["there"].__class__("there", (50,), torch.bfloat16, device=torch.device("meta"))
    baseline = Baseline.captured(live, location="device")
    assert baseline.memory() == MemoryUse(host=36, device=100)
    baseline.buffer_on(baseline.table.index("there"), torch.device("meta"))
    assert baseline.memory() == MemoryUse(host=36, device=100)
    baseline.close()
    assert baseline.memory() == MemoryUse(host=36)


@pytest.mark.parametrize("devices", [1, 2])
def test_each_device_that_compares_is_counted(devices: int) -> None:
    """Of a model over several, as ``device_map`` makes them: each has tables and room of its own."""
    live = live_tensors({f"t{number}": torch.zeros(3000, dtype=torch.bfloat16) for number in range(6)})
    for number, name in enumerate(live.tensors):
        there = torch.device("cuda", number % devices)
        live.tensors[name] = CheckpointTensor(name, (3000,), torch.bfloat16, device=there)
    baseline = Baseline.captured(live)
    said, taken = publisher_memory(baseline, options(), 1, False), 0
    for _ in range(devices):
        queue = SimulatedQueue()
        comparer = DeviceComparer(queue, baseline.table, compare_torch)
        comparer.prepare("BF16", torch.bfloat16, on_device=False)
        taken += queue.used
    assert taken <= said.largest.device - said.at_rest.device


def test_a_device_keeps_no_merged_copy_of_a_model(bucket: Hooked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights with adapters are merged one at a time, and each is free once it was compared."""
    monkeypatch.setattr(baselines, "move_buffer", as_if_on_a_device)
    made: list[weakref.ref[torch.UntypedStorage]] = []
    merge, finish, alive = lora._merge, DeviceComparer.finish, []

    def merged(*arguments: Any) -> torch.Tensor:
        found = merge(*arguments)
        made.append(weakref.ref(found.untyped_storage()))
        return found

    def finished(comparer: DeviceComparer) -> Any:
        alive.append(sum(storage() is not None for storage in made))
        return finish(comparer)

    model = adapted(make_model("qwen3"))
    with Publisher(model, bucket, baseline="device") as publisher:
        monkeypatch.setattr(lora, "_merge", merged)
        monkeypatch.setattr(DeviceComparer, "finish", finished)
        randomize(model, 1)
        publisher.publish(step=1, wait=True)
    assert len(made) > 4
    assert max(alive) <= 1


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits at which versions of the small trainer are large."""
    monkeypatch.setattr(memory_limits, "LEAST_BYTES", 300)
    monkeypatch.setattr(memory_limits, "SHARE", 1 << 30)
    monkeypatch.setattr(memory_limits, "LEAST_BLOCK_ELEMENTS", 64)
    # So that the first few entries of a log are moved.
    monkeypatch.setattr("vllm_delta_sync.tensors.segments.CHUNKS", 1)


@pytest.fixture
def spilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that each log had in a file when its version ended."""
    found: list[int] = []
    close = ChangeSpool.close

    def noted(self: ChangeSpool) -> None:
        found.append(sum(file.end for file in self._files.values()))
        close(self)

    monkeypatch.setattr(ChangeSpool, "close", noted)
    return found


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Objects that were stored from files."""
    found: list[Path] = []
    put = RunWriter.put

    def noted(self: RunWriter, ref: Stored, content: bytes | Path) -> None:
        if isinstance(content, Path):
            found.append(content)
        put(self, ref, content)

    monkeypatch.setattr(RunWriter, "put", noted)
    return found


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("given", [{}, {"gate": Gate(max_norm_jump=1e9)}, {"budget": Budget(max_share=0.9)}])
@pytest.mark.parametrize("codec", ["plain", "tiled", "raw"])
def test_large_versions_are_those_of_the_trainer(
    codec: str, given: dict[str, object], bucket: Hooked, spilled: list[int], files: list[Path]
) -> None:
    """Through a failure, which takes the baseline back from the file, several objects a version, and a takeover."""
    trainer = Trainer()
    trainer.live["wide"] = torch.randn(200, 1000).bfloat16()
    history = [trainer.copy()]

    def step(publisher: Publisher, number: int) -> None:
        trainer.step()
        trainer.live["wide"].view(torch.int16)[:: 1 + number % 2] += number
        publisher.publish(number, wait=True, exact=True)

    for first in (1, 4):
        with Publisher(trainer.live, bucket, codec=codec, shard_bytes=100_000, **given) as publisher:  # type: ignore[arg-type]
            for number in (first, first + 1):
                step(publisher, number)
                history.append(trainer.copy())
                publisher.flush()
            bucket.before = FailAt("versions/")
            trainer.live["wide"].view(torch.int16)[:] ^= 3
            publisher.publish(9)
            expect_failure(publisher, "injected")
            assert publisher.rescan() == []
            step(publisher, first + 2)
            history.append(trainer.copy())
    assert max(spilled) > 100_000
    assert len(files) > 12
    assert not any(path.exists() for path in files)
    assert any(len(manifest.objects) > 1 for manifest in open_run(bucket.url).log())
    assert_history(bucket, history)


@pytest.mark.usefixtures("small_limits")
def test_a_baseline_that_cannot_be_reverted_is_restored_from_the_bucket(bucket: Hooked, trainer: Trainer) -> None:
    """The temporary file of the log cannot be read any more when the version fails."""
    trainer.live["wide"] = torch.randn(200, 1000).bfloat16()
    history = [trainer.copy()]
    with Publisher(trainer.live, bucket) as publisher:

        def lose_the_file(key: str) -> None:
            if not key.startswith("versions/"):
                return
            bucket.before = FailAt("versions/")
            pending = publisher._session._pending
            assert pending is not None
            for file in pending._spool._files.values():
                os.ftruncate(file.file.fileno(), 100)
            bucket.before(key)

        bucket.before = lose_the_file
        trainer.live["wide"] += 1
        publisher.publish(1, wait=True)
        expect_failure(publisher, "injected")
        assert publisher.publish(2, wait=True).changed > 100_000
        publisher.flush()
        history.append(trainer.copy())
    assert_history(bucket, history)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("folder", ["none", None], ids=["it is gone", "there is none"])
def test_without_a_disk_versions_are_encoded_in_memory(
    bucket: Hooked,
    trainer: Trainer,
    files: list[Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    folder: str | None,
) -> None:
    nowhere = str(tmp_path / "none")
    trainer.live["wide"] = torch.randn(200, 1000).bfloat16()
    history = [trainer.copy()]
    with Publisher(trainer.live, bucket) as publisher:
        with (
            mock.patch("tempfile.tempdir", folder and nowhere),
            mock.patch("tempfile._candidate_tempdir_list", return_value=[nowhere]),
        ):
            trainer.live["wide"] += 1
            publisher.publish(1, wait=True)
            publisher.flush()
    history.append(trainer.copy())
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "the changes of a version stay in memory" in warnings[0]
    assert "version 1 is encoded in memory" in warnings[1]
    assert files == []
    assert_history(bucket, history)


@pytest.mark.parametrize(
    ("codec", "change", "megabytes"),
    [
        ("plain", "small", 96),
        *(
            pytest.param(codec, change, 192, marks=pytest.mark.slow)
            for codec in ("plain", "tiled", "raw")
            for change in ("small", "random")
        ),
    ],
)
def test_a_dense_version_takes_what_was_said(codec: str, change: str, megabytes: int) -> None:
    """Every element changes, a quarter of them in one tensor: at most half the model beside the baseline."""
    arguments = ("--verify", "--model-mb", str(megabytes), "--codec", codec, "--change", change)
    found: dict[str, Any] = json.loads(run_python("-m", "tests.tools.publisher_memory", *arguments).stdout)
    memory = found["memory"]
    said = memory["largest"]["host"] - memory["at_rest"]["host"]
    assert found["changed"] == 1.0
    assert 0.05 * found["model_bytes"] < found["peak_bytes"] < said + ALLOCATOR_BYTES
    assert found["peak_bytes"] < 0.5 * found["model_bytes"] + ALLOCATOR_BYTES
