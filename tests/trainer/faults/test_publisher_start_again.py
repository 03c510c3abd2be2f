"""A publisher that is gone before the first version of its run, and the one that comes after it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer.faults.hooks import Hooked, Trainer, nothing
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import ConflictError, StoreError
from vllm_delta_sync.wire.manifest import RUN_KEY, TABLE_KEY, version_key

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.trainer.faults.hooks import Hooked, Trainer
from trainer_side import Publisher

def die(key):
    if key.startswith(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

bucket = Hooked(Path(sys.argv[1]))
setattr(bucket, sys.argv[3], die)
Publisher(Trainer().live, bucket)
"""


def expect_run(bucket: Hooked, trainer: Trainer) -> None:
    """A publisher begins there, and what it publishes is whole."""
    with Publisher(trainer.live, bucket) as publisher:
        assert publisher.version == 0
        trainer.step()
        publisher.publish(step=1)
    assert open_run(bucket.url).verify().head == 1


@pytest.mark.parametrize(("key", "when"), [(RUN_KEY, "after"), ("objects/", "after"), ("versions/", "before")])
def test_start_that_was_killed_is_made_good_by_the_next(
    key: str, when: str, bucket: Hooked, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", KILLED, str(bucket.folder), key, when]
    assert subprocess.run(command, env=environment, timeout=300).returncode == -signal.SIGKILL
    claimed = bucket.get(RUN_KEY)
    with pytest.raises(ConflictError, match=r"holds run\.json.* but no whole run"):
        Publisher(trainer.live, bucket, resume=False)
    expect_run(bucket, trainer)
    assert bucket.get(RUN_KEY) != claimed
    assert "gone before its first version" in caplog.text


def test_start_of_another_model_is_replaced_too(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    other = tmp_path / "other"
    Publisher({"other": torch.ones(4)}, str(other)).close()
    for key in (RUN_KEY, TABLE_KEY):
        bucket.put(key, (other / key).read_bytes())
    expect_run(bucket, trainer)


def test_slow_start_ends_where_another_has_taken_its_place(bucket: Hooked, trainer: Trainer) -> None:
    again = Hooked(bucket.folder)

    def overtake(key: str) -> None:
        if key.startswith("objects/"):
            bucket.before = nothing
            expect_run(again, trainer)

    bucket.before = overtake
    with pytest.raises(ConflictError, match=r"another run was started at .* in place of this one"):
        Publisher(trainer.live, bucket)
    assert open_run(bucket.url).verify().head == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_failed_start_leaves_the_run_of_who_has_taken_its_place(when: str, bucket: Hooked, trainer: Trainer) -> None:
    again = Hooked(bucket.folder)

    def overtake(key: str) -> None:
        if key.startswith("objects/"):
            expect_run(again, trainer)
            raise StoreError("injected")

    setattr(bucket, when, overtake)
    with pytest.raises(StoreError, match="injected"):
        Publisher(trainer.live, bucket)
    assert open_run(bucket.url).verify().head == 1


def test_only_what_was_seen_is_replaced(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    """Somebody else begins between the look and the removal."""
    left = tmp_path / "left"
    Publisher(trainer.live, str(left)).close()
    bucket.put(RUN_KEY, (left / RUN_KEY).read_bytes())
    seen: list[str] = []

    def overtake(key: str) -> None:
        seen.append(key)
        if seen.count(RUN_KEY) == 2:
            bucket.reading = nothing
            expect_run(Hooked(bucket.folder), trainer)

    bucket.reading = overtake
    with pytest.raises(ConflictError, match="of another publisher"):
        Publisher(trainer.live, bucket)
    assert open_run(bucket.url).verify().head == 1


@pytest.mark.parametrize("look", [2, 3])
def test_start_that_comes_to_its_version_after_all_keeps_its_run(
    look: int, bucket: Hooked, trainer: Trainer, tmp_path: Path
) -> None:
    """It does so before the other removes what it has written, or while that is done."""
    Publisher(trainer.live, bucket).close()
    (bucket.folder / "HEAD.json").unlink()
    (bucket.folder / "versions").rename(tmp_path / "versions")
    seen: list[str] = []

    def commit(key: str) -> None:
        seen.append(key)
        if key == version_key(0) and seen.count(key) == look:
            (tmp_path / "versions").rename(bucket.folder / "versions")

    bucket.looking = commit
    with pytest.raises(ConflictError, match="begun by another publisher just now"):
        Publisher(trainer.live, bucket)
    assert open_run(bucket.url).verify().head == 0
