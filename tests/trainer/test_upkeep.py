"""What a publisher does beside publishing: folded ranges, anchors, milestones; and that none of it is in the way."""

import logging
import threading
from pathlib import Path

import pytest

from tests.support.publishers import FailAt, Hook, Hooked, Trainer, assert_holds
from trainer_side import Publisher
from trainer_side.upkeep import THREAD_NAME
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import NotFoundError, StoreError, UsageError
from vllm_delta_sync.wire.documents import ANCHORS_PREFIX, FOLDS_PREFIX, anchor_key, fold_key


class Watched(Hooked):
    """Says when upkeep has written a key."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.written = threading.Condition()

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        super().put(key, data, if_absent=if_absent)
        with self.written:
            self.written.notify_all()

    def has(self, key: str) -> bool:
        try:
            return self._inner.stat(key).bytes > 0
        except NotFoundError:
            return False

    def wait_for(self, key: str) -> None:
        with self.written:
            assert self.written.wait_for(lambda: self.has(key), 30)


@pytest.fixture
def bucket(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "run")


def publish(publisher: Publisher, trainer: Trainer, times: int) -> None:
    for step in range(1, times + 1):
        trainer.step()
        publisher.publish(step=step, wait=True)
    publisher.flush()


def few(trainer: Trainer) -> None:
    """Without the tensor that is sent in full each time, which would call for an anchor at once."""
    trainer.live["c"] = trainer.live["c"][:2].clone()


def failing(error: Exception) -> tuple[Hook, threading.Event]:
    """A hook that raises once, and says so."""
    fired = threading.Event()

    def hook(key: str) -> None:
        if not fired.is_set():
            fired.set()
            raise error

    return hook, fired


def listed(bucket: Hooked, prefix: str) -> list[str]:
    return [info.key for info in bucket.list(prefix)]


def test_folded_ranges_are_made_in_the_background(bucket: Watched, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 4)
        bucket.wait_for(fold_key(0, 4))
    assert open_run(bucket.url).folded(0, 4).last == 4


def test_anchors_are_made_of_each_kth(bucket: Watched, trainer: Trainer) -> None:
    few(trainer)
    with Publisher(trainer.live, bucket, anchor_every=2, fold=False) as publisher:
        for version in (2, 4):
            publish(publisher, trainer, 2)
            bucket.wait_for(anchor_key(version))
    assert open_run(bucket.url).anchors() == [2, 4]
    assert listed(bucket, FOLDS_PREFIX) == []


def test_anchors_are_made_where_replaying_costs_more(bucket: Watched, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, fold=False) as publisher:
        for step in range(1, 50):
            trainer.step()
            publisher.publish(step=step, wait=True)
        publisher.flush()
        with bucket.written:
            assert bucket.written.wait_for(lambda: listed(bucket, ANCHORS_PREFIX), 30)


def test_milestone_gets_an_anchor(bucket: Watched, trainer: Trainer) -> None:
    few(trainer)
    with Publisher(trainer.live, bucket, fold=False) as publisher:
        publish(publisher, trainer, 3)
        plain = publisher.tag("plain", 1)
        assert (plain.version, plain.milestone) == (1, False)
        milestone = publisher.tag("v2", 2, milestone=True)
        assert (milestone.version, milestone.milestone) == (2, True)
        bucket.wait_for(anchor_key(2))
        assert publisher.tag("newest").version == 3
    run = open_run(bucket.url)
    assert run.tag("v2").manifest == run.manifest(2).digest
    assert run.anchors() == [2]
    assert_holds(bucket, 3, trainer.live)


def test_tag_waits_for_what_is_under_way(bucket: Watched, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        trainer.step()
        publisher.publish(step=1)
        assert publisher.tag("now").version == 1
        with pytest.raises(NotFoundError, match="is not published"):
            publisher.tag("later", 2)
        with pytest.raises(UsageError, match="is not a name"):
            publisher.tag("a/b")


def test_upkeep_that_fails_only_warns(bucket: Watched, trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    bucket.upkeep, fired = failing(StoreError("disk full"))
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 4)
        assert fired.wait(120)
        publish(publisher, trainer, 4)
        assert publisher.version == 8
        bucket.wait_for(fold_key(4, 8))
    assert "disk full" in caplog.text
    assert [record.levelno for record in caplog.records if record.levelno > logging.WARNING] == []
    assert open_run(bucket.url).verify().replayed


def test_defect_in_upkeep_does_not_end_it(bucket: Watched, trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    bucket.upkeep, fired = failing(ZeroDivisionError("injected"))
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 4)
        assert fired.wait(120)
        publish(publisher, trainer, 4)
        bucket.wait_for(fold_key(4, 8))
    assert "no upkeep after version" in caplog.text


def test_upkeep_never_delays_publishing_and_is_stopped_at_the_end(bucket: Watched, trainer: Trainer) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hang(key: str) -> None:
        begun.set()
        assert go_on.wait(120)

    bucket.upkeep = hang
    others = set(threading.enumerate())
    publisher = Publisher(trainer.live, bucket)
    publish(publisher, trainer, 4)
    assert begun.wait(120)
    publish(publisher, trainer, 12)
    assert publisher.version == 16
    assert listed(bucket, FOLDS_PREFIX) == []
    closing = threading.Thread(target=publisher.close)
    closing.start()
    # Whoever closes waits for the one call under way, and for nothing that would follow.
    assert publisher._upkeep is not None
    while not publisher._upkeep._closing:
        closing.join(0.01)
    go_on.set()
    closing.join(120)
    assert not closing.is_alive()
    assert THREAD_NAME not in {thread.name for thread in set(threading.enumerate()) - others}
    assert len(listed(bucket, FOLDS_PREFIX) + listed(bucket, ANCHORS_PREFIX)) <= 1
    assert_holds(bucket, 16, trainer.live)


def test_failed_start_leaves_no_thread(bucket: Watched, trainer: Trainer) -> None:
    bucket.before = FailAt("versions/")
    others = set(threading.enumerate())
    with pytest.raises(StoreError, match="injected"):
        Publisher(trainer.live, bucket)
    assert not {thread.name for thread in set(threading.enumerate()) - others} & {THREAD_NAME, "delta-sync-publisher"}


@pytest.mark.parametrize("anchor_every", [0, -1, 2.5])
def test_every_that_makes_no_sense_is_refused(anchor_every: int, bucket: Watched, trainer: Trainer) -> None:
    with pytest.raises(UsageError, match="anchor_every is"):
        Publisher(trainer.live, bucket, anchor_every=anchor_every)
