"""A publisher that fails, is killed or is overtaken before version 0 leaves its URL free, and other runs alone."""

import os
import signal
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.support.publishers import FailAt, Hooked, Once, Trainer, nothing
from tests.trainer.sharded.nursery import Nursery
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.errors import ConflictError, PublishError, StoreError
from vllm_delta_sync.format.manifest import HEAD_KEY, RUN_KEY, TABLE_KEY, version_key


def expect_run(bucket: Hooked, trainer: Trainer) -> None:
    """A publisher begins there, and what it publishes is whole."""
    with Publisher(trainer.live, bucket) as publisher:
        assert publisher.version == 0
        trainer.step()
        publisher.publish(step=1)
    assert open_run(bucket.url).verify().head == 1


def refused(match: str, bucket: Bucket, resume: bool = True) -> None:
    with pytest.raises(ConflictError, match=match):
        Publisher({"other": torch.ones(4)}, bucket, resume=resume)


@pytest.mark.parametrize("error", [StoreError("injected"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("hook", "at"),
    [
        ("before", TABLE_KEY), ("before", "objects/"), ("before", "versions/"),
        ("after", RUN_KEY), ("after", TABLE_KEY), ("after", "objects/"),
    ],
)  # fmt: skip
def test_failed_start_frees_its_url(hook: str, at: str, error: BaseException, bucket: Hooked, trainer: Trainer) -> None:
    """Whether the write that failed is there or not; what is not the publisher's stays."""
    bucket.put("notes/ours.txt", b"")
    failure, running = FailAt(at, error), set(threading.enumerate())
    setattr(bucket, hook, failure)
    with pytest.raises(type(error)):
        Publisher(trainer.live, bucket)
    assert failure.fired
    assert set(threading.enumerate()) <= running
    assert [info.key for info in bucket.list() if not info.key.startswith("objects/")] == ["notes/ours.txt"]
    expect_run(bucket, trainer)


@pytest.mark.parametrize("error", [StoreError("injected"), KeyboardInterrupt()])
@pytest.mark.parametrize("written", [True, False])
def test_start_whose_version_0_may_be_there_keeps_the_claim(
    written: bool, error: BaseException, bucket: Hooked, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    setattr(bucket, "after" if written else "before", FailAt("versions/", error))
    bucket.reading = FailAt("versions/", StoreError("still down"))
    with pytest.raises((PublishError, KeyboardInterrupt)) as caught:
        Publisher(trainer.live, bucket)
    told = str(caught.value) if isinstance(error, StoreError) else caplog.text
    assert "stays claimed by run" in told
    refused("holds a run already" if written else "but no complete run", bucket, resume=False)
    claimed = bucket.get(RUN_KEY)
    expect_run(bucket, trainer)
    assert (bucket.get(RUN_KEY) == claimed) is written


def test_start_that_cannot_tidy_says_what_is_left(bucket: Hooked, trainer: Trainer) -> None:
    bucket.after = FailAt(RUN_KEY)
    bucket.reading = FailAt(RUN_KEY, StoreError("still down"))
    with pytest.raises(StoreError, match=r"injected.*may have left run\.json"):
        Publisher(trainer.live, bucket)
    refused(r"holds run\.json but no complete run", bucket, resume=False)
    Publisher(trainer.live, bucket).close()


LEFTOVERS = {
    "no run.json": ([RUN_KEY], r"holds tensors\.json, HEAD\.json, versions/ but no complete run"),
    "table": ([RUN_KEY, HEAD_KEY, version_key(0)], r"holds tensors\.json but .* remove tensors\.json by hand"),
    "HEAD": ([RUN_KEY, TABLE_KEY, version_key(0)], r"holds HEAD\.json but no complete run"),
    "version": ([RUN_KEY, TABLE_KEY, HEAD_KEY], r"holds versions/ but no complete run"),
    "claims": ([RUN_KEY, TABLE_KEY, HEAD_KEY, version_key(0)], r"holds claims/ but no complete run"),
}


@pytest.mark.parametrize("case", LEFTOVERS)
def test_parts_of_a_run_are_refused_and_left_alone(case: str, bucket: Hooked, trainer: Trainer) -> None:
    gone, message = LEFTOVERS[case]
    Publisher(trainer.live, bucket).close()
    if case == "claims":
        Publisher(trainer.live, bucket).close()
    for key in gone:
        bucket.delete(key)
    before = [info.key for info in bucket.list()]
    refused(message, bucket)
    assert [info.key for info in bucket.list()] == before


@pytest.mark.parametrize("same", [True, False])
def test_table_of_another_is_never_removed(same: bool, bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    """It comes between the look at the URL and the write."""
    Publisher(trainer.live, str(tmp_path / "same")).close()
    table = open_bucket(str(tmp_path / "same")).get(TABLE_KEY) if same else b"{}"
    other = open_bucket(bucket.url)

    def race(key: str) -> None:
        if key == TABLE_KEY:
            other.put(key, table)
        if key.startswith("versions/"):
            raise StoreError("injected")

    bucket.before = race
    with pytest.raises(StoreError if same else ConflictError, match="injected" if same else "of another publisher"):
        Publisher(trainer.live, bucket)
    assert [info.key for info in bucket.list()] == [TABLE_KEY]
    assert bucket.get(TABLE_KEY) == table


def killed(rank: int, size: int, folder: str, key: str, when: str) -> None:
    """Begin a run, and end as by kill -9 around a put."""
    bucket = Hooked(Path(folder))
    setattr(bucket, when, lambda put: os.kill(os.getpid(), signal.SIGKILL) if put.startswith(key) else None)
    Publisher(Trainer().live, bucket)


@pytest.mark.parametrize(("key", "when"), [(RUN_KEY, "after"), ("objects/", "after"), ("versions/", "before")])
def test_start_that_was_killed_is_made_good_by_the_next(
    key: str, when: str, nursery: Nursery, bucket: Hooked, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    assert nursery.statuses(1, killed, folder=str(bucket.folder), key=key, when=when) == [-signal.SIGKILL]
    claimed = bucket.get(RUN_KEY)
    refused(r"holds run\.json.* but no complete run", bucket, resume=False)
    expect_run(bucket, trainer)
    assert bucket.get(RUN_KEY) != claimed
    assert "ended before its first version" in caplog.text


def test_start_of_another_model_is_replaced_too(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    other = tmp_path / "other"
    Publisher({"other": torch.ones(4)}, str(other)).close()
    for key in (RUN_KEY, TABLE_KEY):
        bucket.put(key, (other / key).read_bytes())
    expect_run(bucket, trainer)


@pytest.mark.parametrize(("when", "fails"), [("before", False), ("before", True), ("after", True)])
def test_overtaken_start_ends_and_spares_the_other(when: str, fails: bool, bucket: Hooked, trainer: Trainer) -> None:
    again = Hooked(bucket.folder)

    def overtake() -> None:
        expect_run(again, trainer)
        if fails:
            raise StoreError("injected")

    setattr(bucket, when, Once("objects/", overtake))
    with pytest.raises(StoreError if fails else ConflictError, match="injected" if fails else "in place of this one"):
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


@pytest.mark.parametrize(("look", "repeated"), [(2, False), (3, False), (3, True)])
def test_start_that_succeeds_late_keeps_its_run(
    look: int, repeated: bool, bucket: Hooked, trainer: Trainer, tmp_path: Path
) -> None:
    """It does so before the other removes what it has written, or while that is done.

    It is put back, also if each put is repeated because its answer was lost, and then finds its own object.
    """
    Publisher(trainer.live, bucket).close()
    (bucket.folder / "HEAD.json").unlink()
    (bucket.folder / "versions").rename(tmp_path / "versions")
    seen: list[str] = []

    def commit(key: str) -> None:
        seen.append(key)
        if key == version_key(0) and seen.count(key) == look:
            (tmp_path / "versions").rename(bucket.folder / "versions")

    bucket.looking = commit
    if repeated:
        bucket.after = mock.Mock(side_effect=ConflictError("it is there"))
    with pytest.raises(ConflictError, match="begun by another publisher just now"):
        Publisher(trainer.live, bucket)
    assert open_run(bucket.url).verify().head == 0


def test_start_that_can_start_no_threads_for_its_uploads(
    bucket: Hooked, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "delta-sync-call":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    expect_run(bucket, trainer)
