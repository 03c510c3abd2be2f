"""A takeover that is cut short anywhere leaves the run as it was, and the next one goes on."""

import threading
from contextlib import nullcontext

import pytest

from tests.support.publishers import FailAt, Hooked, Once, Trainer, assert_holds, assert_stopped, nothing, publish
from tests.support.publishing import damage
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import PublishError, StoreError
from vllm_delta_sync.format.documents import CLAIMS_PREFIX, claim_key
from vllm_delta_sync.format.manifest import HEAD_KEY, RUN_KEY, TABLE_KEY, version_key


def begin(bucket: Hooked, trainer: Trainer, versions: int = 2) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, versions)


def chain(bucket: Hooked) -> dict[str, bytes]:
    keys = [info.key for info in bucket.list() if info.key.startswith(("versions/", HEAD_KEY, RUN_KEY, TABLE_KEY))]
    return {key: bucket.get(key) for key in keys}


def arm(bucket: Hooked, hook: str, at: str, error: BaseException) -> FailAt:
    failure = FailAt(at, error)
    setattr(bucket, hook, failure)
    return failure


ERRORS = [StoreError("injected"), KeyboardInterrupt(), MemoryError("injected")]
POINTS = [
    ("looking", RUN_KEY), ("reading", RUN_KEY), ("reading", TABLE_KEY), ("reading", HEAD_KEY), ("reading", "versions/"),
    ("before", CLAIMS_PREFIX), ("reading", "objects/"),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("point", POINTS)
def test_resuming_cut_short_leaves_the_run_as_it_was(
    point: tuple[str, str], error: BaseException, bucket: Hooked, trainer: Trainer
) -> None:
    begin(bucket, trainer)
    before, running = chain(bucket), set(threading.enumerate())
    failure = arm(bucket, *point, error)
    with pytest.raises(type(error)):
        Publisher(trainer.live, bucket)
    assert failure.fired
    assert chain(bucket) == before
    assert set(threading.enumerate()) <= running
    setattr(bucket, point[0], nothing)
    with Publisher(trainer.live, bucket) as publisher:
        assert publisher.version == 2
        trainer.step()
        publisher.publish(step=3)
    assert open_run(bucket.url).verify().replayed
    assert_holds(bucket, 3, trainer.live)


@pytest.mark.parametrize("error", ERRORS)
def test_claim_that_is_left_fences_the_former_writer_and_one_whose_answer_was_lost_is_recognized(
    error: BaseException, bucket: Hooked, trainer: Trainer
) -> None:
    begin(bucket, trainer)
    bucket.after = FailAt(CLAIMS_PREFIX, error)
    lost = isinstance(error, StoreError)
    if not lost:
        with pytest.raises(type(error)):
            Publisher(trainer.live, bucket)
    with Publisher(trainer.live, bucket) as publisher:
        publisher.publish(step=3)
    assert [manifest.epoch for manifest in open_run(bucket.url).log()] == [0, 0, 0, 1 if lost else 2]


def test_head_that_cannot_be_rolled_forward_while_resuming_only_warns(
    bucket: Hooked, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    begin(bucket, trainer)
    bucket.delete(HEAD_KEY)
    bucket.before = FailAt(HEAD_KEY)
    with Publisher(trainer.live, bucket) as publisher:
        assert "HEAD.json still points before it" in caplog.text
        assert publisher.version == 2
    assert b'"version":2' in bucket.get(HEAD_KEY)


ANEW = [
    ("before", "objects/"), ("after", "objects/"), ("before", "versions/"), ("looking", "claims/"),
    ("after", "versions/"),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("point", ANEW)
def test_beginning_anew_cut_short_leaves_the_run_as_it_was_or_is_written_and_counts(
    point: tuple[str, str], error: BaseException, bucket: Hooked, trainer: Trainer
) -> None:
    begin(bucket, trainer)
    damage(bucket.url, version_key(2))
    before, written = chain(bucket), point == ("after", "versions/")
    failure = arm(bucket, *point, error)
    # Of a put that failed it is looked up whether the manifest is there.
    with nullcontext() if written and isinstance(error, StoreError) else pytest.raises(type(error)):
        Publisher(trainer.live, bucket).close()
    assert failure.fired
    assert (chain(bucket) == before) is not written
    with Publisher(trainer.live, bucket) as publisher:
        assert publisher.version == 3
        trainer.step()
        publisher.publish(step=4)
    assert_holds(bucket, 4, trainer.live)


@pytest.mark.parametrize("written", [True, False])
def test_new_beginning_of_unknown_fate_is_found_or_made_again(written: bool, bucket: Hooked, trainer: Trainer) -> None:
    begin(bucket, trainer)
    damage(bucket.url, version_key(2))
    setattr(bucket, "after" if written else "before", FailAt("versions/"))

    def down(key: str) -> None:
        if key == version_key(3):
            raise StoreError("still down")

    def after_the_put(key: str) -> None:
        # The last look before the put is for a newer claim.
        if key == claim_key(2):
            bucket.reading = down

    bucket.looking = after_the_put
    with pytest.raises((PublishError, StoreError), match=r"is not known|still down"):
        Publisher(trainer.live, bucket)
    bucket.looking = bucket.reading = nothing
    with Publisher(trainer.live, bucket) as publisher:
        assert publisher.version == 3
    assert_holds(bucket, 3, trainer.live)


def test_last_commit_of_the_former_writer_comes_before_a_new_beginning(bucket: Hooked, trainer: Trainer) -> None:
    begin(bucket, trainer)
    lost = open_run(bucket.url).head()
    late = lost.model_copy(update={"version": 3, "base_version": 2, "parent": lost.digest})
    late._raw = None
    damage(bucket.url, lost.objects[0].key)
    race = Once(version_key(3), lambda: bucket._inner.put(version_key(3), late.to_bytes()))
    for info in [*bucket.list("anchors/"), *bucket.list("merged/")]:
        bucket.delete(info.key)
    bucket.before = race
    with Publisher(trainer.live, bucket) as publisher:
        assert race.done
        assert publisher.version == 4
    manifest = open_run(bucket.url).manifest(4)
    assert (manifest.parent, manifest.kind) == (late.digest, "anchor")
    assert_holds(bucket, 4, trainer.live)


@pytest.mark.parametrize("lost", ["", "before", "between"])
def test_what_the_former_writer_commits_before_the_claim_is_continued(
    lost: str, bucket: Hooked, trainer: Trainer
) -> None:
    """The weights are read back before the claim, so the former writer may commit meanwhile."""
    elsewhere, other = Trainer(), Hooked(bucket.folder)
    former = Publisher(trainer.live, bucket, merge=False)
    publish(former, trainer)
    if lost == "before":
        damage(bucket.url, open_run(bucket.url).head().objects[0].key)

    def commit() -> None:
        publish(former, trainer)
        if lost == "between":
            damage(bucket.url, open_run(bucket.url).head().objects[0].key)

    race = other.before = Once(CLAIMS_PREFIX, commit)
    with Publisher(elsewhere.live, other) as publisher:
        assert race.done
        assert publisher.version == (3 if lost else 2)
        assert_holds(bucket, publisher.version, elsewhere.live if lost else trainer.live)
        elsewhere.step()
        publisher.publish(step=5, wait=True)
        publisher.flush()
        assert_holds(bucket, publisher.version, elsewhere.live)
    former.publish(step=3, wait=True)
    assert_stopped(former, "another publisher has taken over the run")
    assert [manifest.epoch for manifest in open_run(bucket.url).log()] == [0, 0, 0, *([1, 1] if lost else [1])]
