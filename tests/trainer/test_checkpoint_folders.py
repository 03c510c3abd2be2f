"""Checkpoint folders become versions, bit for bit: only complete ones, each once, and in bounded memory."""

import errno
import io
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from tests.support.architectures import same_bits
from tests.support.checkpoints import index_of, shards_of, weights, write_checkpoint, write_slowly
from tests.support.publishing import Tensors, assert_holds, assert_versions, snapshot
from tests.support.running import run_python
from tests.support.tiny import make_model, save_checkpoint
from tests.support.trainers import trainer_of
from trainer_side import Gate, checkpoint_folders
from trainer_side.checkpoint_folders import (
    SIDECAR,
    CheckpointFolder,
    CheckpointPublisher,
    CheckpointWatcher,
    IncompleteCheckpointError,
    PublishedCheckpoint,
)
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket.ranged import CONNECTIONS, PIECE_BYTES
from vllm_delta_sync.errors import (
    ConflictError,
    DeltaSyncError,
    FormatError,
    NotFoundError,
    StoreError,
    TensorMismatchError,
    UsageError,
)
from vllm_delta_sync.format.manifest import HEAD_KEY, version_key
from vllm_delta_sync.tensors.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint

POLL = 0.05


@pytest.fixture
def watcher(out: Path, url: str) -> Iterator[CheckpointWatcher]:
    with CheckpointPublisher(url) as publisher:
        yield CheckpointWatcher(out, publisher, POLL)


def watch_once(out: Path, url: str) -> list[tuple[str, str, int]]:
    """Name, outcome and version of each checkpoint, of a process that starts anew."""
    with CheckpointPublisher(url) as publisher:
        results = list(CheckpointWatcher(out, publisher, POLL).watch(once=True))
    return [(result.folder.name, result.outcome, result.manifest.version) for result in results]


def steps_of(url: str) -> list[int]:
    return [manifest.step for manifest in open_run(url).log()]


ODD = {
    "none": torch.empty(0, 3),
    "f8": torch.arange(35.0).reshape(7, 5).to(torch.float8_e4m3fn),
    "f64": torch.arange(3.0, dtype=torch.float64),
    "bool": torch.arange(11) > 5,
    "nan": torch.tensor([float("nan"), -0.0, float("inf")]).half(),
}


# One after another


def test_folders_become_versions(out: Path, url: str) -> None:
    history = []
    with CheckpointPublisher(url) as publisher:
        for number, step in enumerate((3, 4, 9)):
            tensors = {**weights(step), **ODD, "scalar": torch.tensor(float(step))}
            folder = write_checkpoint(out / f"checkpoint-{step}", tensors, sharded=step == 4)
            history.append(tensors)
            result = publisher.publish(folder)
            assert (result.outcome, result.step, result.manifest.version) == ("published", step, number)
        again = publisher.publish(folder, step=12)
        assert (again.outcome, again.manifest.version) == ("unchanged", 2)
    run = assert_versions(url, history)
    assert [(manifest.step, manifest.kind) for manifest in run.log()] == [(3, "anchor"), (4, "delta"), (9, "delta")]
    assert run.file("config.json") == b'{"model_type": "tiny"}'
    assert run.file("tokenizer.json") == b"{}"


def test_a_step_is_never_guessed(out: Path, url: str) -> None:
    with CheckpointPublisher(url) as publisher:
        assert publisher.publish(write_checkpoint(out / "Qwen3-0.6B-v2025", weights(0))).step == 0
        other = write_checkpoint(out / "Qwen3-0.6B-v2026", weights(1))
        with pytest.raises(UsageError, match=r"is unknown: .* give it with --step"):
            publisher.publish(other)
        assert publisher.publish(other, step=50).step == 50
        assert publisher.publish(write_checkpoint(out / "checkpoint-100", weights(2))).step == 100
    assert steps_of(url) == [0, 50, 100]


# With a base


def test_with_a_base_version_0_is_a_reference(tmp_path: Path, out: Path, url: str) -> None:
    base = write_checkpoint(tmp_path / "base", weights(0))
    with CheckpointPublisher(url, base) as publisher:
        result = publisher.publish(write_checkpoint(out / "checkpoint-5", weights(5)))
        assert (result.outcome, result.manifest.version, result.manifest.kind) == ("published", 1, "delta")
    assert [manifest.kind for manifest in open_run(url).log()] == ["reference", "delta"]
    assert_versions(url, [weights(0), weights(5)])
    with CheckpointPublisher(f"{url}-2", base) as publisher:
        result = publisher.publish(base)
        assert (result.outcome, result.manifest.version, result.manifest.kind) == ("unchanged", 0, "reference")


def test_with_a_base_the_configuration_is_its_own(tmp_path: Path, out: Path, url: str) -> None:
    """Its dtypes are the run's: a float32 trainer's configuration made others load an export in float32."""
    base = write_checkpoint(tmp_path / "base", weights(0))
    folder = write_checkpoint(out / "checkpoint-5", weights(5))
    for path, text in ((base, '{"dtype": "bfloat16"}'), (folder, '{"dtype": "float32"}')):
        (path / "config.json").write_text(text)
    (folder / "tokenizer.json").write_text('{"of": "the trainer"}')
    with CheckpointPublisher(url, base) as publisher:
        publisher.publish(folder)
    run = open_run(url)
    assert run.file("config.json") == (base / "config.json").read_bytes()
    assert run.file("tokenizer.json") == (folder / "tokenizer.json").read_bytes()


def test_what_a_run_cannot_keep_of_a_folder_is_left_out(out: Path, url: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint(out / "checkpoint-5", weights(5))
    (folder / "eval results.json").write_text("{}")
    assert watch_once(out, url) == [("checkpoint-5", "published", 0)]
    assert [file.name for file in open_run(url).info.files] == ["config.json", "tokenizer.json"]
    assert "does not keep the model's file 'eval results.json'" in caplog.text


def test_with_a_base_weights_are_rounded_to_its_dtypes(tmp_path: Path, out: Path, url: str) -> None:
    base = write_checkpoint(tmp_path / "base", weights(0))
    wide = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights(5).items()}
    for name in ("model.embed.weight", "model.layers.0.proj.weight"):
        wide[name] += 1e-5
    lacking = wide.pop("model.layers.0.scale")
    rounded = {name: tensor.to(weights(0)[name].dtype) for name, tensor in wide.items()}
    for step in (5, 6):  # begins the run, and takes it over
        wide["model.steps"] = rounded["model.steps"] = torch.tensor([step])
        with CheckpointPublisher(url, base) as publisher:
            publisher.publish(write_checkpoint(out / f"checkpoint-{step}", wide))
        assert_holds(open_run(url), None, {**rounded, "model.layers.0.scale": weights(0)["model.layers.0.scale"]})
    # A trainer may save in another dtype than before: the run keeps the base's.
    narrow = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in wide.items()}
    with CheckpointPublisher(url, base) as publisher:
        publisher.publish(write_checkpoint(out / "checkpoint-7", wide))
        publisher.publish(write_checkpoint(out / "checkpoint-8", narrow))
        with pytest.raises(TensorMismatchError, match=r"lacks tensor 'model.steps'.* a new URL$"):
            publisher.publish(
                write_checkpoint(out / "checkpoint-9", {n: t for n, t in wide.items() if n != "model.steps"})
            )
    rounded = {name: tensor.to(weights(0)[name].dtype) for name, tensor in narrow.items()}
    assert_holds(open_run(url), None, {**rounded, "model.layers.0.scale": weights(0)["model.layers.0.scale"]})
    assert not same_bits(lacking, weights(0)["model.steps"])
    with pytest.raises(TensorMismatchError, match="with a base, dtypes are rounded"), CheckpointPublisher(url) as other:
        other.publish(out / "checkpoint-6")


# What is not complete, or does not fit


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, size)


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


HALF_WRITTEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: (folder / SECOND).unlink(), f"{SECOND} is missing"),
    "empty": (cut(SECOND, 0), f"checkpoint file '{SECOND}' is empty"),
    "no header": (cut(SECOND, 5), f"{SECOND}: 5 bytes are too few"),
    "half a header": (cut(SECOND, 20), "in a file of 20: truncated"),
    "half the data": (cut(FIRST, 9000), "data bytes"),
    "too long": (rewrite(FIRST, lambda data: data + b"more"), f"{FIRST}: 4 bytes after the last entry"),
    # As writers do that first make the file as long as it will be.
    "reserved": (rewrite(SECOND, lambda data: bytes(len(data))), f"{SECOND}: header does not begin"),
    "half an index": (cut(INDEX_NAME, 30), INDEX_NAME),
}


@pytest.mark.parametrize("case", HALF_WRITTEN)
def test_half_a_checkpoint_is_refused(case: str, out: Path, url: str) -> None:
    damage, message = HALF_WRITTEN[case]
    first = write_checkpoint(out / "checkpoint-1", weights(1), sharded=True)
    damage(first)
    with CheckpointPublisher(url) as publisher:
        with pytest.raises(FormatError) as found:
            publisher.publish(first)
        assert message in found.value.message
        assert not Path(url).exists()
        publisher.publish(write_checkpoint(out / "checkpoint-2", weights(2)))
        with pytest.raises(FormatError):
            publisher.publish(first, step=3)
        publisher.publish(write_checkpoint(first, weights(1), sharded=True), step=4)
    assert_versions(url, [weights(2), weights(1)])


def test_what_is_no_checkpoint(tmp_path: Path, out: Path, url: str) -> None:
    (tmp_path / "nothing").mkdir()
    save_file({}, tmp_path / "nothing" / SINGLE_NAME)
    for folder, message in (
        (out, f"has neither {SINGLE_NAME} nor {INDEX_NAME}"),
        (tmp_path / "none", "does not exist"),
        (tmp_path / "nothing", "has no tensor"),
    ):
        with pytest.raises(NotFoundError, match=message), CheckpointPublisher(url) as publisher:
            publisher.publish(folder)
    with CheckpointPublisher(url) as publisher:
        with pytest.raises(NotFoundError, match="create it"):
            CheckpointWatcher(tmp_path / "none", publisher)
        watcher = CheckpointWatcher(out, publisher, POLL)
        out.rmdir()
        with pytest.raises(StoreError, match="cannot be read"):
            list(watcher.watch(once=True))


SCALE = "model.layers.0.scale"
OTHER: dict[str, tuple[Tensors, str]] = {
    "shape": (weights(2) | {SCALE: torch.zeros(65)}, rf"'{SCALE}' is F32 \[65\], but F32 \[64\] in the "),
    "dtype": (weights(2) | {SCALE: weights(2)[SCALE].half()}, rf"'{SCALE}' is F16 \[64\], but F32 \[64\] in the "),
    "added": (weights(2) | {"lm_head.weight": torch.zeros(3)}, "has tensor 'lm_head.weight', which the "),
    "missing": ({n: t for n, t in weights(2).items() if n != SCALE}, f"lacks tensor '{SCALE}', which the "),
}


@pytest.mark.parametrize("change", OTHER)
def test_other_tensors_are_refused(change: str, out: Path, url: str) -> None:
    tensors, message = OTHER[change]
    other = write_checkpoint(out / "other", tensors)
    with CheckpointPublisher(url) as publisher:
        publisher.publish(write_checkpoint(out / "checkpoint-1", weights(1)))
        with pytest.raises(TensorMismatchError, match=message):
            publisher.publish(other, step=2)
        publisher.publish(write_checkpoint(out / "checkpoint-2", weights(2)))
    with CheckpointPublisher(url) as publisher:
        with pytest.raises(TensorMismatchError, match=message):
            publisher.publish(other, step=3)
        publisher.publish(write_checkpoint(out / "checkpoint-3", weights(3)))
    assert_versions(url, [weights(step) for step in (1, 2, 3)])
    assert open_run(url).newest_epoch() == 1  # what does not fit takes no run over


# Deleted or written while it is read


HARMS: dict[str, Callable[[Path], object]] = {
    "delete": shutil.rmtree,
    "truncate": lambda folder: [cut(path.name, 100)(folder) for path in folder.glob("*.safetensors")],
    "overwrite": lambda folder: write_checkpoint(folder, weights(50), sharded=True),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("begins", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("when", [1, 3, 4])
def test_nothing_is_published_of_a_checkpoint_that_is_harmed_while_it_is_read(
    harm: str, begins: bool, when: int, out: Path, url: str
) -> None:
    history = []
    folder = write_checkpoint(out / "checkpoint-7", weights(7), sharded=True)
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        assert done <= total
        if calls == when:
            HARMS[harm](folder)

    with CheckpointPublisher(url) as publisher:
        if not begins:
            publisher.publish(write_checkpoint(out / "checkpoint-1", weights(1)))
            history.append(weights(1))
        with pytest.raises(IncompleteCheckpointError, match="checkpoint-7' is not complete"):
            publisher.publish(folder, progress=progress)
        assert Path(url).exists() is not begins
        publisher.publish(write_checkpoint(out / "checkpoint-8", weights(8)))
    assert_versions(url, [*history, weights(8)])


def test_an_index_that_appears_while_a_checkpoint_is_opened(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(out / "checkpoint-7", weights(7))

    def late(path: Path) -> Checkpoint:
        write_checkpoint(folder, weights(7), sharded=True)
        return Checkpoint(path)

    monkeypatch.setattr(checkpoint_folders, "Checkpoint", late)
    with pytest.raises(IncompleteCheckpointError, match="its index was changed while it was read"):
        CheckpointFolder(folder)


def test_a_checkpoint_that_vanishes_is_one_log_line(
    out: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        write_checkpoint(out / f"checkpoint-{step}", weights(step), sharded=True)
    real = CheckpointFolder.tensors

    def tensors(self: CheckpointFolder, progress: object = None) -> Iterator[tuple[str, torch.Tensor]]:
        """A trainer deletes the second while it is read."""
        for number, pair in enumerate(real(self)):
            if number == 1 and self.step == 2:
                shutil.rmtree(self.path)
            yield pair

    monkeypatch.setattr(CheckpointFolder, "tensors", tensors)
    with caplog.at_level(logging.WARNING):
        assert watch_once(out, url) == [("checkpoint-1", "published", 0), ("checkpoint-3", "published", 1)]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("checkpoint-2 is not published: checkpoint ")
    assert line.endswith(f"{SECOND} was deleted while it was read")
    assert_versions(url, [weights(1), weights(3)])


# Watching


def test_what_a_slow_trainer_writes_is_published_bit_for_bit(out: Path, url: str) -> None:
    steps = (5, 10)

    def train() -> None:
        for step in steps:
            write_slowly(out / f"checkpoint-{step}", step, seconds=0.5)

    trainer, results = threading.Thread(target=train), list[PublishedCheckpoint]()
    with CheckpointPublisher(url) as publisher:
        trainer.start()
        for result in CheckpointWatcher(out, publisher, POLL).watch():
            results.append(result)
            if result.step == steps[-1]:
                break
    trainer.join()
    assert [result.outcome for result in results] == ["published"] * 2
    assert steps_of(url) == [*steps]
    assert_versions(url, [weights(step) for step in steps])


def test_checkpoints_of_a_transformers_trainer(tmp_path: Path, out: Path, url: str) -> None:
    """In float32, while servers have bfloat16; its best model is the last one under another name."""
    model = make_model("qwen3")
    base = save_checkpoint(model, tmp_path / "base")
    trainer = trainer_of(model, tmp_path, [], save_strategy="steps", save_steps=2, save_total_limit=2, max_steps=6)
    trainer.train()
    trainer.save_model(str(out / "final"))
    saved = [load_file(out / name / SINGLE_NAME) for name in ("checkpoint-4", "checkpoint-6")]
    for bucket, with_base, dtype in ((url, None, torch.float32), (f"{url}-served", base, torch.bfloat16)):
        with CheckpointPublisher(bucket, with_base) as publisher:
            watcher = CheckpointWatcher(out, publisher, POLL)
            results = list(watcher.watch(once=True))
            assert list(watcher.left_out) == ["final"]
            assert publisher.publish(out / "final", step=6).outcome == "unchanged"
        found = [(result.folder.name, result.step, result.outcome) for result in results]
        assert found == [(f"checkpoint-{step}", step, "published") for step in (4, 6)]
        run = open_run(bucket)
        assert [manifest.step for manifest in run.log()] == ([0] if with_base else []) + [4, 6]
        for result, tensors in zip(results, saved, strict=False):
            assert_holds(run, result.manifest.version, snapshot(tensors, dtype))


def test_a_folder_that_still_changes_is_not_published(out: Path, url: str, watcher: CheckpointWatcher) -> None:
    """Its files are as long as they must be, but a writer that reserves space has not filled them yet."""
    folder = write_checkpoint(out / "checkpoint-1", weights(1))
    data = save(weights(2))
    for cursor in (100, 5000, len(data)):
        assert list(watcher._poll()) == []
        (folder / SINGLE_NAME).write_bytes(data[:cursor].ljust(len(data), b"\0"))
    assert list(watcher._poll()) == []
    assert [result.outcome for result in watcher._poll()] == ["published"]
    assert list(watcher._poll()) == []
    assert_versions(url, [weights(2)])


def test_a_restart_publishes_nothing_again(out: Path, url: str) -> None:
    for step in (100, 20):
        write_checkpoint(out / f"checkpoint-{step}", weights(step))
    write_checkpoint(out / ".hidden-7", weights(7))
    write_checkpoint(out / "tmp-checkpoint-8", weights(8))
    (out / "logs").mkdir()
    (out / "newest").symlink_to(out / "checkpoint-100")
    assert watch_once(out, url) == [("checkpoint-20", "published", 0), ("checkpoint-100", "published", 1)]
    older = [("checkpoint-20", "older", 1), ("checkpoint-100", "older", 1)]
    assert watch_once(out, url) == older
    write_checkpoint(out / "checkpoint-200", weights(200))
    shutil.rmtree(out / "checkpoint-20")
    assert watch_once(out, url) == [("checkpoint-100", "older", 1), ("checkpoint-200", "published", 2)]
    assert_versions(url, [weights(step) for step in (20, 100, 200)])


def test_version_that_no_watcher_published_hides_no_record(out: Path, url: str) -> None:
    """A checkpoint that is published again, to go back to it, is not followed by those that came after it."""
    for step in (20, 40, 60):
        write_checkpoint(out / f"checkpoint-{step}", weights(step))
    assert len(watch_once(out, url)) == 3
    with CheckpointPublisher(url) as publisher:
        assert publisher.publish(out / "checkpoint-20").manifest.version == 3
    assert {outcome for _, outcome, _ in watch_once(out, url)} == {"older"}
    write_checkpoint(out / "checkpoint-80", weights(80))
    assert watch_once(out, url)[-1] == ("checkpoint-80", "published", 4)
    assert_versions(url, [weights(step) for step in (20, 40, 60, 20, 80)])


def test_a_version_of_a_time_that_does_not_exist_is_no_reason_to_end(out: Path, url: str) -> None:
    with CheckpointPublisher(url) as publisher:
        publisher.publish(write_checkpoint(out / "checkpoint-40", weights(40)))
    manifest = Path(url) / version_key(0)
    created = open_run(url).head().created_at
    manifest.write_text(manifest.read_text().replace(created, "2026-02-30T00:00:00Z"))
    (Path(url) / HEAD_KEY).unlink()
    write_checkpoint(out / "checkpoint-20", weights(20))
    assert ("checkpoint-20", "published", 1) in watch_once(out, url)


def written_after(folder: Path, seconds: float) -> Path:
    """Give the files of a folder a time after (or before) now."""
    for file in folder.iterdir():
        now = file.stat().st_mtime + seconds
        os.utime(file, (now, now))
    return folder


@pytest.mark.parametrize("restarts", [False, True], ids=["watched", "restarted"])
def test_a_trainer_that_starts_again_from_an_earlier_step_is_followed(restarts: bool, out: Path, url: str) -> None:
    """It rewrites one folder and writes one for an earlier step; what it left of its former life is not published.

    Where no watcher ran meanwhile, the order is that of the times.
    """
    for step in (20, 40, 60):
        write_checkpoint(out / f"checkpoint-{step}", weights(step))
    with CheckpointPublisher(url) as publisher:
        watcher = CheckpointWatcher(out, publisher, POLL)
        assert [result.step for result in watcher.watch(once=True)] == [20, 40, 60]
        rewrite = [(80, 80), (30, 130), (40, 140)]
        for number, (step, content) in enumerate(rewrite, 1):
            written_after(write_checkpoint(out / f"checkpoint-{step}", weights(content)), number)
        if not restarts:
            found = [(result.step, result.outcome) for result in watcher.watch(once=True)]
            assert found == [(step, "published") for step in (80, 30, 40)]
    if restarts:
        results = [(20, "older", 2), (60, "older", 2), (80, "published", 3), (30, "published", 4), (40, "published", 5)]
        assert watch_once(out, url) == [(f"checkpoint-{step}", *rest) for step, *rest in results]
    assert {outcome for _, outcome, _ in watch_once(out, url)} == {"older"}
    assert steps_of(url) == [20, 40, 60, 80, 30, 40]
    assert_versions(url, [weights(step) for step in (20, 40, 60, 80, 130, 140)])


def test_equal_weights_are_not_published_twice(out: Path, url: str) -> None:
    """Whatever wrote their files again, and wherever they lie."""
    for step in (20, 40, 60):
        write_checkpoint(out / f"checkpoint-{step}", weights(step))
    with CheckpointPublisher(url) as publisher:
        watcher = CheckpointWatcher(out, publisher, POLL)
        assert len(list(watcher.watch(once=True))) == 3
        for step in (20, 60):
            written_after(write_checkpoint(out / f"checkpoint-{step}", weights(step), sharded=step == 20), 5)
        (out / "checkpoint-20" / SINGLE_NAME).unlink()
        results = [(result.step, result.outcome) for result in watcher.watch(once=True)]
        assert results == [(60, "unchanged")]  # the other was named before
    assert_versions(url, [weights(step) for step in (20, 40, 60)])
    written_after(write_checkpoint(out / "again" / "step_10", weights(40)), 10)
    names = dict.fromkeys(["again/step_10", "checkpoint-20", "checkpoint-40", "checkpoint-60"])
    with CheckpointPublisher(url) as publisher:
        for result in CheckpointWatcher(out, publisher, POLL).watch(once=True):
            names[str(result.folder.relative_to(out))] = f"{result.outcome}: {result.reason}"
    assert all(text is not None and "published" not in text.partition(":")[0] for text in names.values())
    assert names["again/step_10"] == "older: its weights were published before version 2 (step 60)"
    assert steps_of(url) == [20, 40, 60]


def test_a_checkpoint_that_was_begun_before_the_newest_one_is_older(
    out: Path, url: str, watcher: CheckpointWatcher
) -> None:
    """Trainers write in the background: the checkpoint of an earlier step may be complete after a later one."""
    slow = write_checkpoint(out / "checkpoint-10", weights(10), sharded=True)
    last = slow / "model-00002-of-00002.safetensors"
    data = last.read_bytes()
    last.unlink()
    write_checkpoint(out / "checkpoint-20", weights(20))
    assert [result.step for result in watcher.watch(once=True)] == [20]
    last.write_bytes(data)
    written_after(slow, 0)
    os.utime(last, (2**32, 2**32))
    assert [(result.step, result.outcome) for result in watcher.watch(once=True)] == []
    assert watcher.left_out == {}
    assert_versions(url, [weights(20)])


def test_folders_that_are_gone_for_long_are_forgotten(out: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is part of each version, and a trainer that keeps only its last checkpoints has had thousands."""
    monkeypatch.setattr(checkpoint_folders, "MAX_PUBLISHED", 2)
    for step in range(1, 9):
        write_checkpoint(out / f"checkpoint-{step}", weights(step))
        assert watch_once(out, url)[-1] == (f"checkpoint-{step}", "published", step - 1)
        if step > 2:
            shutil.move(out / f"checkpoint-{step - 2}", out.parent / f"{step - 2}")
    record = json.loads(open_run(url).sidecar(7, SIDECAR))
    assert [*record["folders"]] == [f"checkpoint-{step}" for step in (4, 5, 6, 7, 8)]
    # One that comes back is not published again.
    shutil.move(out.parent / "5", out / "checkpoint-5")
    assert "published" not in {outcome for _, outcome, _ in watch_once(out, url)}


@pytest.mark.parametrize("content", [b"", b"[]", b'{"written": 1, "folders": {"a": 3}, "published": []}'])
def test_a_damaged_record_is_no_reason_to_end(content: bytes, out: Path, url: str) -> None:
    with CheckpointPublisher(url) as publisher:
        publisher.publish(write_checkpoint(out / "checkpoint-1", weights(1)))
        publisher.publish(write_checkpoint(out / "checkpoint-2", weights(2)), sidecars={SIDECAR: content})
    write_checkpoint(out / "checkpoint-3", weights(3))
    outcomes = {name: outcome for name, outcome, _ in watch_once(out, url)}
    assert outcomes["checkpoint-3"] == "published"
    assert steps_of(url) == [1, 2, 3]


def test_one_that_does_not_fit_stops_no_other(
    out: Path, url: str, watcher: CheckpointWatcher, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 3):
        write_checkpoint(out / f"checkpoint-{step}", weights(step))
    write_checkpoint(out / "checkpoint-2", OTHER["shape"][0])
    shards = shards_of(weights(4))
    (out / "checkpoint-4").mkdir()
    save_file(shards[SECOND], out / "checkpoint-4" / SECOND)
    (out / "checkpoint-4" / INDEX_NAME).write_text(index_of(shards))
    assert [result.step for result in watcher.watch(once=True)] == [1, 3]
    assert list(watcher.refused) == ["checkpoint-2"]
    lines = [record.getMessage() for record in caplog.records]
    assert sorted(line.split(" is not published: ")[0] for line in lines) == ["checkpoint-2", "checkpoint-4"]
    assert list(watcher.left_out) == ["checkpoint-4"]
    assert list(watcher._poll()) == []
    assert len(caplog.records) == 2
    write_checkpoint(out / "checkpoint-4", weights(4), sharded=True)
    assert [result.step for result in watcher.watch(once=True)] == [4]
    assert watcher.left_out == {}
    # One that was refused is tried again after a restart, and forgotten when it is gone.
    with CheckpointPublisher(url) as publisher:
        later = CheckpointWatcher(out, publisher, POLL)
        assert {result.outcome for result in later.watch(once=True)} == {"older"}
        write_checkpoint(out / "checkpoint-9", OTHER["shape"][0])
        assert list(later.watch(once=True)) == []
        assert list(later.refused) == ["checkpoint-9"]
        (out / "checkpoint-9").rename(out.parent / "aside")
        assert list(later.watch(once=True)) == []
        assert later.refused == {}
    assert_versions(url, [weights(step) for step in (1, 3, 4)])


@pytest.mark.parametrize("call", ["stat", "seek"])
def test_one_that_cannot_be_read_is_tried_again_and_stops_no_other(
    call: str,
    out: Path,
    url: str,
    watcher: CheckpointWatcher,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A network file system may fail for a while, and its files have not changed afterwards."""
    damaged = write_checkpoint(out / "checkpoint-1", weights(1)) / SINGLE_NAME
    write_checkpoint(out / "checkpoint-2", weights(2))
    written_after(out / "checkpoint-1", 2)
    number, stat, open_file = damaged.stat().st_ino, os.stat, CheckpointFolder._open

    def failing(file: Any, *_: Any, **__: Any) -> Any:
        if file == damaged:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return stat(file, *_, **__)

    class Stale(io.FileIO):
        def seek(self, *_: Any) -> int:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def stale(folder: CheckpointFolder, name: str) -> Any:
        file = open_file(folder, name)
        return Stale(file.name) if os.fstat(file.fileno()).st_ino == number else file

    with monkeypatch.context() as broken:
        broken.setattr(*((os, "stat", failing) if call == "stat" else (CheckpointFolder, "_open", stale)))
        assert [result.step for result in watcher.watch(once=True)] == [2]
        assert list(watcher._poll()) == []
        assert watcher.unfinished() == []
        assert list(watcher.left_out) == ["checkpoint-1"]
        assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["Stale file handle"]
    assert [(result.step, result.outcome) for result in watcher._poll()] == [(1, "published")]
    assert watcher.left_out == {}
    assert_versions(url, [weights(2), weights(1)])


def test_a_folder_that_is_left_out_is_named_once(
    tmp_path: Path, out: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(out / "Qwen3-0.6B-v2025", weights(0))
    (write_checkpoint(out / "checkpoint-1", weights(1)) / "config.json").unlink()
    (out / "checkpoint-2").mkdir()
    (out / "checkpoint-2" / "pytorch_model.bin").write_bytes(b"pickled")
    for base, expected in ((None, []), (write_checkpoint(tmp_path / "base", weights(0)), [1])):
        caplog.clear()
        with CheckpointPublisher(f"{url}-{len(expected)}", base) as publisher:
            watcher = CheckpointWatcher(out, publisher, POLL)
            assert [result.step for result in watcher.watch(once=True)] == expected
            for _ in range(3):
                assert list(watcher._poll()) == []
            left_out = ["Qwen3-0.6B-v2025", *([] if base else ["checkpoint-1"]), "checkpoint-2"]
            assert sorted(watcher.left_out) == left_out
            # Threads that other tests have left behind may log too.
            logged = [record.getMessage() for record in caplog.records if record.name.startswith("trainer_side")]
            assert sorted(message.partition(" ")[0] for message in logged) == left_out
    assert "no step is in its name" in watcher.left_out["Qwen3-0.6B-v2025"]
    assert "pytorch_model.bin is not of the form that can be read" in watcher.left_out["checkpoint-2"]


def test_a_store_that_fails_is_tried_again(out: Path, url: str) -> None:
    objects, aside, lines = Path(url) / "objects", Path(url) / "aside", []

    class Repair(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            if record.getMessage().startswith("trying again every 0.05 s"):
                objects.unlink()
                aside.rename(objects)

    with CheckpointPublisher(url) as publisher:
        publisher.publish(write_checkpoint(out / "checkpoint-1", weights(1)))
        objects.rename(aside)
        objects.write_bytes(b"a file in the place of the folder")
        write_checkpoint(out / "checkpoint-2", weights(2))
        watcher = CheckpointWatcher(out, publisher, POLL)
        with pytest.raises(DeltaSyncError):
            list(watcher.watch(once=True))
        logger, handler = logging.getLogger("trainer_side.checkpoint_folders"), Repair()
        logger.addHandler(handler)
        try:
            found = next(result for result in watcher.watch() if result.outcome == "published")
        finally:
            logger.removeHandler(handler)
        assert (found.step, found.manifest.version) == (2, 1)
    assert len(lines) == 1
    assert_versions(url, [weights(1), weights(2)])


def test_a_publisher_that_was_fenced_ends(out: Path, url: str) -> None:
    with CheckpointPublisher(url) as publisher:
        watcher = CheckpointWatcher(out, publisher, POLL)
        write_checkpoint(out / "checkpoint-1", weights(1))
        assert [result.step for result in watcher.watch(once=True)] == [1]
        with CheckpointPublisher(url) as other:
            other.publish(write_checkpoint(out / "checkpoint-2", weights(2)))
        write_checkpoint(out / "checkpoint-3", weights(3))
        with pytest.raises(ConflictError):
            list(watcher.watch())
        with pytest.raises(ConflictError):
            publisher.close()
    assert_versions(url, [weights(1), weights(2)])


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_that_was_removed_before_the_first_checkpoint_is_not_begun_again(
    replaced: bool, out: Path, url: str
) -> None:
    """What was read of it does not fit another: a new run would have no files of the model."""
    write_checkpoint(out / "checkpoint-1", weights(1))
    watch_once(out, url)
    with CheckpointPublisher(url) as publisher:
        watcher = CheckpointWatcher(out, publisher, POLL)
        assert [result.outcome for result in watcher.watch(once=True)] == ["older"]
        shutil.rmtree(url)
        if replaced:
            with CheckpointPublisher(url) as other:
                other.publish(write_checkpoint(out.parent / "other" / "checkpoint-1", weights(5)))
        write_checkpoint(out / "checkpoint-2", weights(2))
        with pytest.raises(ConflictError, match=r"was removed or replaced; start again"):
            list(watcher.watch(once=True))
    assert steps_of(url) == [1] if replaced else not Path(url).exists()
    assert watch_once(out, url)[-1] == ("checkpoint-2", "published", 1)


def test_a_checkpoint_that_the_gate_refuses_holds_up_no_other(out: Path, url: str) -> None:
    with CheckpointPublisher(url, gate=Gate()) as publisher:
        watcher = CheckpointWatcher(out, publisher, POLL)
        write_checkpoint(out / "checkpoint-1", weights(1))
        assert [result.step for result in watcher.watch(once=True)] == [1]
        bad = weights(2)
        for tensor in filter(torch.is_floating_point, bad.values()):
            tensor.fill_(torch.nan)
        write_checkpoint(out / "checkpoint-2", bad)
        write_checkpoint(out / "checkpoint-3", weights(3))
        assert [result.step for result in watcher.watch(once=True)] == [3]
        write_checkpoint(out / "checkpoint-4", bad)
        assert list(watcher.watch(once=True)) == []
        assert sorted(watcher.refused) == ["checkpoint-2", "checkpoint-4"]
        assert watcher.unfinished() == []
    assert_versions(url, [weights(step) for step in (1, 3)])


@pytest.mark.parametrize("name", ["every", "budget", "include", "exclude", "rename", "parts"])
def test_options_that_make_no_sense_for_folders(url: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}= is given, but"):
        CheckpointPublisher(url, None, **{name: 2})  # type: ignore[arg-type]


# Memory


@pytest.mark.slow
def test_memory_is_that_of_the_largest_tensor(tmp_path: Path, url: str) -> None:
    """For beginning a run, and for taking it over with changes; the model has 320 MB, its largest tensor 16 MB. Taking
    over downloads the anchor, which takes memory for the pieces under way."""
    torch.manual_seed(0)
    tensors = {f"layers.{number}": torch.randn(4000, 2000).bfloat16() for number in range(20)}
    folders = []
    for step in range(2):
        for tensor in tensors.values():
            tensor.view(-1)[step::1009] += 1
        folders.append(str(write_checkpoint(tmp_path / f"checkpoint-{step}", tensors)))
    for version, folder in enumerate(folders):
        limit = 70e6 + version * CONNECTIONS * PIECE_BYTES
        report = json.loads(run_python("-m", "tests.support.folder_memory", url, folder).stdout)
        assert report["versions"] == [version]
        assert report["anonymous"] < limit, report
    assert_holds(open_run(url), None, tensors)
