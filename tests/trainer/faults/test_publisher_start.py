"""A publisher that cannot start: what it leaves behind, and what it refuses to start on."""

from pathlib import Path

import pytest
import torch

from tests.trainer.faults.hooks import FailAt, Hooked, Trainer
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.errors import ConflictError, NotFoundError, PublishError, StoreError
from vllm_delta_sync.wire.manifest import HEAD_KEY, RUN_KEY, TABLE_KEY, version_key


@pytest.mark.parametrize("at", ["tensors.json", "objects/", "versions/"])
def test_run_that_cannot_be_started_gives_its_url_back(at: str, bucket: Hooked, trainer: Trainer) -> None:
    bucket.before = FailAt(at)
    with pytest.raises(StoreError, match="injected"):
        Publisher(trainer.live, bucket)
    with pytest.raises(NotFoundError):
        open_run(bucket.url)
    with Publisher(trainer.live, bucket) as publisher:
        trainer.step()
        publisher.publish(step=1)
    assert open_run(bucket.url).verify().head == 1


def refused(match: str, bucket: Bucket, resume: bool = True) -> None:
    with pytest.raises(ConflictError, match=match):
        Publisher({"other": torch.ones(4)}, bucket, resume=resume)


@pytest.mark.parametrize("at", [RUN_KEY, TABLE_KEY, "objects/"])
def test_failed_start_removes_what_it_wrote_and_nothing_else(at: str, bucket: Hooked, trainer: Trainer) -> None:
    """The store fails after the write, which is there all the same."""
    bucket.put("notes/ours.txt", b"")
    failure = bucket.after = FailAt(at)
    with pytest.raises(StoreError, match="injected"):
        Publisher(trainer.live, bucket)
    assert failure.fired
    assert [info.key for info in bucket.list() if not info.key.startswith("objects/")] == ["notes/ours.txt"]
    Publisher(trainer.live, bucket).close()


@pytest.mark.parametrize("error", [StoreError("injected"), KeyboardInterrupt()])
@pytest.mark.parametrize("written", [True, False])
def test_start_whose_version_0_may_be_there_keeps_the_claim(
    written: bool, error: BaseException, bucket: Hooked, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    failure = FailAt("versions/", error)
    if written:
        bucket.after = failure
    else:
        bucket.before = failure
    bucket.reading = FailAt("versions/", StoreError("still down"))
    with pytest.raises((PublishError, KeyboardInterrupt)) as caught:
        Publisher(trainer.live, bucket)
    told = str(caught.value) if isinstance(error, StoreError) else caplog.text
    assert "stays claimed by run" in told
    assert "start again" in told
    refused("holds a run already" if written else "but no whole run", bucket, resume=False)
    claimed = bucket.get(RUN_KEY)
    with Publisher(trainer.live, bucket) as publisher:
        assert publisher.version == 0
        publisher.publish(step=1)
    assert (bucket.get(RUN_KEY) == claimed) is written
    assert open_run(bucket.url).verify().head == 1


def test_interrupted_start_gives_its_url_back(bucket: Hooked, trainer: Trainer) -> None:
    for at in (RUN_KEY, TABLE_KEY, "objects/"):
        bucket.after = FailAt(at, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            Publisher(trainer.live, bucket)
    Publisher(trainer.live, bucket).close()


def test_start_that_cannot_tidy_says_what_is_left(bucket: Hooked, trainer: Trainer) -> None:
    bucket.after = FailAt(RUN_KEY)
    bucket.reading = FailAt(RUN_KEY, StoreError("still down"))
    with pytest.raises(StoreError, match=r"injected.*may have left run\.json in .*start again"):
        Publisher(trainer.live, bucket)
    refused(r"holds run\.json but no whole run", bucket, resume=False)
    Publisher(trainer.live, bucket).close()


LEFTOVERS = {
    "no run.json": ([RUN_KEY], r"holds tensors\.json, HEAD\.json, versions/ but no whole run"),
    "table": ([RUN_KEY, HEAD_KEY, version_key(0)], r"holds tensors\.json but .* remove tensors\.json by hand"),
    "HEAD": ([RUN_KEY, TABLE_KEY, version_key(0)], r"holds HEAD\.json but no whole run"),
    "version": ([RUN_KEY, TABLE_KEY, HEAD_KEY], r"holds versions/ but no whole run"),
    "claims": ([RUN_KEY, TABLE_KEY, HEAD_KEY, version_key(0)], r"holds claims/ but no whole run"),
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

    def race(key: str) -> None:
        if key == TABLE_KEY:
            bucket._inner.put(key, table)
        if key.startswith("versions/"):
            raise StoreError("injected")

    bucket.before = race
    with pytest.raises(StoreError if same else ConflictError, match="injected" if same else "of another publisher"):
        Publisher(trainer.live, bucket)
    assert [info.key for info in bucket.list()] == [TABLE_KEY]
    assert bucket.get(TABLE_KEY) == table
