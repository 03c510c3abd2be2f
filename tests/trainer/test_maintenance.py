"""Merged deltas, anchors and milestones that a publisher makes beside publishing; collections that run meanwhile."""

import logging
import threading

import pytest

from tests.support.held_calls import HeldCalls
from tests.support.publishers import FailAt, Gated, Hooked, Once, Trainer, assert_holds, publish, small_trainer
from tests.support.running import eventually
from trainer_side import Publisher
from trainer_side.maintenance import THREAD_NAME
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import StoreError
from vllm_delta_sync.format.documents import ANCHORS_PREFIX, MERGED_PREFIX, anchor_key, merged_delta_key
from vllm_delta_sync.format.manifest import version_key
from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy, collect
from vllm_delta_sync.run.read_plan import plan_read


def listed(bucket: Hooked, prefix: str) -> list[str]:
    return [info.key for info in bucket.list(prefix)]


def wait_for(bucket: Hooked, key: str) -> None:
    eventually(lambda: listed(bucket, key) == [key])


def test_merged_deltas_are_made_in_the_background(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 4)
        wait_for(bucket, merged_delta_key(0, 4))
    assert open_run(bucket.url).merged_delta(0, 4).last == 4


def test_anchors_are_made_of_each_kth(bucket: Hooked) -> None:
    trainer = small_trainer()
    with Publisher(trainer.live, bucket, anchor_every=2, merge=False) as publisher:
        for version in (2, 4):
            publish(publisher, trainer, 2)
            wait_for(bucket, anchor_key(version))
    assert open_run(bucket.url).anchors() == [2, 4]
    assert listed(bucket, MERGED_PREFIX) == []


def test_milestone_gets_an_anchor(bucket: Hooked) -> None:
    trainer = small_trainer()
    with Publisher(trainer.live, bucket, merge=False) as publisher:
        publish(publisher, trainer, 3)
        plain = publisher.tag("plain", 1)
        assert (plain.version, plain.milestone) == (1, False)
        milestone = publisher.tag("v2", 2, milestone=True)
        assert (milestone.version, milestone.milestone) == (2, True)
        wait_for(bucket, anchor_key(2))
        assert publisher.tag("newest").version == 3
    run = open_run(bucket.url)
    assert run.tag("v2").manifest == run.manifest(2).digest
    assert run.anchors() == [2]
    assert_holds(bucket, 3, trainer.live)


def test_milestones_that_the_end_leaves_without_an_anchor_are_named(
    bucket: Hooked, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, hanging = small_trainer(), Gated("")
    with Publisher(trainer.live, bucket, merge=False) as publisher:
        publish(publisher, trainer, 2)
        bucket.upkeep = hanging
        publisher.tag("under-way", 1, milestone=True)
        assert hanging.reached.wait(60)
        publisher.tag("final", 2, milestone=True)
        threading.Timer(0.3, hanging.open.set).start()
    assert "version 2, a milestone, has no anchor yet" in caplog.text
    assert "version 1, a milestone" not in caplog.text
    assert open_run(bucket.url).anchors() == [1]


@pytest.mark.parametrize(
    ("error", "said"),
    [(StoreError("disk full"), "disk full"), (ZeroDivisionError("injected"), "no maintenance after version")],
)
def test_maintenance_that_fails_does_not_end_and_hinders_nothing(
    error: Exception, said: str, bucket: Hooked, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.upkeep = fault = FailAt("", error)
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 4)
        eventually(lambda: fault.fired)
        publish(publisher, trainer, 4)
        assert publisher.version == 8
        wait_for(bucket, merged_delta_key(4, 8))
    assert said in caplog.text
    failures = [record for record in caplog.records if record.levelno > logging.WARNING]
    assert bool(failures) == isinstance(error, ZeroDivisionError)
    assert open_run(bucket.url).verify().replayed


def test_upkeep_never_delays_publishing_and_is_stopped_at_the_end(bucket: Hooked, trainer: Trainer) -> None:
    hanging = bucket.upkeep = Gated("")
    others = set(threading.enumerate())
    publisher = Publisher(trainer.live, bucket)
    publish(publisher, trainer, 4)
    assert hanging.reached.wait(120)
    publish(publisher, trainer, 12)
    assert publisher.version == 16
    assert listed(bucket, MERGED_PREFIX) == []
    closing = threading.Thread(target=publisher.close)
    closing.start()
    # Whoever closes waits for the one call under way, and for nothing that would follow.
    closing.join(0.3)
    assert closing.is_alive()
    hanging.open.set()
    closing.join(120)
    assert not closing.is_alive()
    assert THREAD_NAME not in {thread.name for thread in set(threading.enumerate()) - others}
    assert len(listed(bucket, MERGED_PREFIX) + listed(bucket, ANCHORS_PREFIX)) <= 1
    assert_holds(bucket, 16, trainer.live)


AT_ONCE = RetentionPolicy(keep_last=1, min_age=0.0)


def test_object_removed_before_its_manifest_is_put_again(bucket: Hooked, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    removed: list[str] = []
    bucket.before = Once(version_key(1), lambda: removed.extend(collect(open_run(bucket.url), AT_ONCE).objects))
    with Publisher(trainer.live, bucket, merge=False) as publisher, caplog.at_level(logging.WARNING):
        publish(publisher, trainer)
    run = open_run(bucket.url)
    assert removed == [run.head().objects[0].key]
    assert "it is stored again" in caplog.text
    assert run.verify().head == 1
    assert_holds(bucket, 1, trainer.copy())


def test_object_of_a_version_that_is_committed_while_a_collection_removes_stays(
    bucket: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, removing = Trainer(), Hooked(bucket.folder)
    removals = HeldCalls(monkeypatch, removing, "delete")
    # What is nobody's, and older: removed first, or its key sorts behind and it stays for the next collection.
    with open_bucket(bucket.url) as plain, Publisher(trainer.live, bucket, merge=False) as publisher:
        plain.put(f"objects/{0:064x}.safetensors", b"nobody's")
        collector = threading.Thread(target=lambda: collect(Run(removing), AT_ONCE))

        def begin() -> None:
            collector.start()
            assert removals.reached.wait(60)

        bucket.before = Once(version_key(1), begin)
        publish(publisher, trainer)
        removals.open.set()
        collector.join()
    assert open_run(bucket.url).verify().head == 1
    assert_holds(bucket, 1, trainer.copy())


def test_shards_that_are_removed_before_their_anchor_is_there_are_put_again(bucket: Hooked) -> None:
    trainer = Trainer()
    removed: list[str] = []
    with Publisher(trainer.live, bucket, merge=False, shard_bytes=4000) as publisher:
        publish(publisher, trainer)
        bucket.before = Once(anchor_key(1), lambda: removed.extend(collect(open_run(bucket.url), AT_ONCE).objects))
        assert publisher.anchor() == 1
    run = open_run(bucket.url)
    objects = run.anchor(1).objects
    assert {ref.key for ref in objects} == set(removed)
    assert len(objects) > 1
    assert plan_read(run, run.head()).root.anchor is not None
    assert_holds(bucket, 1, trainer.copy())
