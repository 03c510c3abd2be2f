"""Building on an older version: what the next version is made against, and what a failure leaves."""

import threading
from typing import Any

import pytest

from tests.support.publishers import (
    FailAt,
    Gated,
    Hooked,
    Trainer,
    assert_history,
    assert_holds,
    nothing,
    publish,
)
from tests.support.running import interrupted
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import LimitError, NotFoundError, PublishError, PublishTimeoutError, StoreError, UsageError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy, collect
from vllm_delta_sync.maintenance.tags import set_tag


def breaks(bucket: Hooked) -> list[tuple[int, int | None]]:
    return [(item.version, item.base_version) for item in open_run(bucket.url).head().breaks]


def test_next_version_builds_on_the_one_rebased_to(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        history = publish(publisher, trainer, 4)
        publisher.rebase(1)
        assert publisher.version == 4
        for name, tensor in trainer.live.items():
            tensor.copy_(history[1][name])
        trainer.live["b"][7] += 1
        result = publisher.publish(step=9)
        assert (result.version, result.changed) == (5, 40)
        history.append(trainer.copy())
        trainer.step()
        publisher.publish(step=10, wait=True)
        history.append(trainer.copy())
        publisher.rebase(0)
        trainer.step()
        publisher.publish(step=11, wait=True)
        history.append(trainer.copy())
    manifests: list[Manifest] = list(open_run(bucket.url).log())
    assert [manifest.base_version for manifest in manifests] == [None, 0, 1, 2, 3, 1, 5, 0]
    assert breaks(bucket) == [(5, 1), (7, 0)]
    assert_history(bucket, history)


def test_weights_rebased_to_are_not_skipped_as_unchanged(bucket: Hooked, trainer: Trainer) -> None:
    """Servers have those of the newest version."""
    with Publisher(trainer.live, bucket) as publisher:
        history = publish(publisher, trainer, 2)
        publisher.rebase(1)
        for name, tensor in trainer.live.items():
            tensor.copy_(history[1][name])
        assert publisher.publish(step=3, wait=True, skip_unchanged=True).version == 3
        assert publisher.publish(step=4, wait=True, skip_unchanged=True).version is None
    assert_history(bucket, [*history, history[1]])


def test_rebase_to_the_newest_version_makes_no_break(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        history = publish(publisher, trainer, 2)
        read: list[str] = []
        bucket.reading = read.append
        publisher.rebase(2)
        assert read == []
        publisher.rebase(1)
        publisher.rebase(2)
        assert publisher.publish(step=3).changed == 0
    assert open_run(bucket.url).head().base_version == 2
    assert breaks(bucket) == []
    assert_holds(bucket, 3, history[2])


@pytest.mark.parametrize("version", [-1, 1.5, "1", None, True])
def test_what_is_no_version_is_refused(version: Any, bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        with pytest.raises(UsageError, match="version is"):
            publisher.rebase(version)
    with pytest.raises(UsageError, match="closed"):
        publisher.rebase(0)


@pytest.mark.parametrize("at", ["versions/", "objects/"])
def test_rebase_that_fails_changes_nothing(at: str, bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 2)
        bucket.reading = FailAt(at)
        with pytest.raises(StoreError, match="injected"):
            publisher.rebase(1)
        assert publisher.publish(step=3).changed == 0
        publisher.flush()
        publisher.rebase(1)
        assert publisher.publish(step=4).changed > 0
    assert breaks(bucket) == [(4, 1)]
    assert_holds(bucket, 4, trainer.live)


def test_interrupted_rebase_is_waited_for(bucket: Hooked, trainer: Trainer) -> None:
    """The interrupt hits the caller while the background thread reads."""
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 2)
        gate = bucket.reading = Gated()
        with interrupted(gate.reached):
            publisher.rebase(1)
        threading.Timer(0.3, gate.open.set).start()
        publisher.publish(step=3)
    assert breaks(bucket) == [(3, 1)]
    assert_holds(bucket, 3, trainer.live)


def test_version_rebased_to_is_kept_until_the_next_builds_on_it(bucket: Hooked, trainer: Trainer) -> None:
    def tagged() -> list[int]:
        return [tag.version for tag in open_run(bucket.url).tags().values()]

    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 3)
        for version in (1, 2):
            publisher.rebase(version)
            assert tagged() == [version]
        trainer.step()
        publisher.publish(step=4, wait=True)
        publisher.flush()
        assert open_run(bucket.url).head().base_version == 2
        assert tagged() == []
        publisher.rebase(1)
        with pytest.raises(NotFoundError):
            publisher.rebase(99)
        assert tagged() == [1]
        publisher.rebase(4)
        assert tagged() == []
        publisher.rebase(1)
    assert tagged() == []


def test_one_break_too_many_is_refused_before_anything_is_published(
    bucket: Hooked, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_BREAKS", 1)
    with Publisher(trainer.live, bucket) as publisher:
        history = publish(publisher, trainer, 2)
        publisher.rebase(0)
        trainer.step()
        publisher.publish(step=3, wait=True)
        history.append(trainer.copy())
        publisher.flush()
        with pytest.raises(LimitError, match="MAX_BREAKS"):
            publisher.rebase(1)
        assert open_run(bucket.url).tags() == {}
        trainer.step()
        assert publisher.publish(step=4).version == 4
        history.append(trainer.copy())
    assert breaks(bucket) == [(3, 0)]
    assert_history(bucket, history)


def test_what_a_former_writer_was_rebased_to_is_let_go_of(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 3)
    run = open_run(bucket.url)
    # As a writer leaves it that is killed after a rebase.
    set_tag(run, "rebase-0-1", 1, rebase=True)
    set_tag(run, "rebase-to-be", 1)
    with Publisher(trainer.live, bucket) as publisher:
        assert run.tags().keys() == {"rebase-0-1", "rebase-to-be"}
        publisher.rebase(2)
        publish(publisher, trainer, 1)
        assert run.tags().keys() == {"rebase-to-be"}
    assert breaks(bucket) == [(4, 2)]


def test_no_policy_lets_go_of_what_the_publisher_has_rebased_to(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, merge=False) as publisher:
        publish(publisher, trainer, 5)
        publisher.anchor()
        publisher.rebase(2)
        report = collect(open_run(bucket.url), RetentionPolicy(keep_last=1, keep_tagged=False, min_age=0.0))
        assert 2 in report.kept
        trainer.step()
        publisher.publish(step=6, wait=True)
    assert breaks(bucket) == [(6, 2)]
    assert_holds(bucket, 6, trainer.live)


@pytest.mark.parametrize("ending", ["publish", "flush", "close"])
def test_rebase_that_fails_after_its_timeout_is_raised_by_the_next_call(
    ending: str, bucket: Hooked, trainer: Trainer
) -> None:
    """Otherwise the next version would build on the one that was to be left."""
    publisher = Publisher(trainer.live, bucket, merge=False)
    publish(publisher, trainer, 3)
    slow = bucket.reading = Gated("", StoreError("the store is away"))
    with pytest.raises(PublishTimeoutError, match="the next call says if it fails"):
        publisher.rebase(1, timeout=0.2)
    assert slow.reached.wait(60)
    slow.open.set()
    trainer.step()
    if ending == "close":
        bucket.reading = nothing
        publisher.close()
        return
    with pytest.raises(PublishError, match=r"has failed: .*the store is away"):
        publisher.publish(4, wait=True) if ending == "publish" else publisher.flush()
    bucket.reading = nothing
    publisher.publish(4, wait=True)
    publisher.close()
