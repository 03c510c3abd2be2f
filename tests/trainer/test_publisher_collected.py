"""Collections that do not wait until an upload is over: what is published is readable all the same."""

import logging
import threading
from pathlib import Path

import pytest

from tests.support.publishers import Hooked, Trainer, assert_holds, nothing
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.chain import Run
from vllm_delta_sync.chain.plan import plan
from vllm_delta_sync.upkeep.retention import Policy, collect
from vllm_delta_sync.wire.documents import anchor_key
from vllm_delta_sync.wire.manifest import version_key

AT_ONCE = Policy(keep_last=1, min_age=0.0)


class Paused(Hooked):
    """Waits before its first removal."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.here, self.go = threading.Event(), threading.Event()

    def delete(self, key: str) -> None:
        self.here.set()
        assert self.go.wait(60)
        super().delete(key)


def test_object_that_is_removed_before_its_manifest_is_there_is_put_again(
    bucket: Hooked, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer()
    removed: list[str] = []

    def collected(key: str) -> None:
        if key == version_key(1):
            removed.extend(collect(open_run(bucket.url), AT_ONCE).objects)

    bucket.before = collected
    with Publisher(trainer.live, bucket, fold=False) as publisher, caplog.at_level(logging.WARNING):
        trainer.step()
        publisher.publish(step=1)
        publisher.flush()
    run = open_run(bucket.url)
    assert removed == [run.head().objects[0].key]
    assert "it is put again" in caplog.text
    assert run.verify().head == 1
    assert_holds(bucket, 1, trainer.copy())


def test_object_of_a_version_that_is_committed_while_a_collection_removes_stays(bucket: Hooked) -> None:
    trainer = Trainer()
    paused = Paused(bucket.folder)
    # What is nobody's, and older: removed first, or its key sorts behind and it stays for the next collection.
    with open_bucket(bucket.url) as plain, Publisher(trainer.live, bucket, fold=False) as publisher:
        plain.put(f"objects/{0:064x}.safetensors", b"nobody's")
        collector = threading.Thread(target=lambda: collect(Run(paused), AT_ONCE))

        def begin(key: str) -> None:
            if key == version_key(1):
                bucket.before = nothing
                collector.start()
                assert paused.here.wait(60)

        bucket.before = begin
        trainer.step()
        publisher.publish(step=1)
        publisher.flush()
        paused.go.set()
        collector.join()
    assert open_run(bucket.url).verify().head == 1
    assert_holds(bucket, 1, trainer.copy())


def test_shards_that_are_removed_before_their_anchor_is_there_are_put_again(bucket: Hooked) -> None:
    trainer = Trainer()
    removed: list[str] = []

    def collected(key: str) -> None:
        if key == anchor_key(1):
            removed.extend(collect(open_run(bucket.url), AT_ONCE).objects)

    with Publisher(trainer.live, bucket, fold=False, shard_bytes=4000) as publisher:
        trainer.step()
        publisher.publish(step=1)
        publisher.flush()
        bucket.before = collected
        assert publisher.anchor() == 1
    run = open_run(bucket.url)
    objects = run.anchor(1).objects
    assert {ref.key for ref in objects} == set(removed)
    assert len(objects) > 1
    assert plan(run, run.head()).beside
    assert_holds(bucket, 1, trainer.copy())
