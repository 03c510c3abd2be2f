"""A publisher whose store fails or gives back other bytes, anywhere: a version is durable and whole, or not there."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.publishers import Down, FailAt, Gated, Hooked, Trainer, assert_holds, expect_failure, publish
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.bucket import base as bucket_base
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware, Call
from vllm_delta_sync.errors import DeltaSyncError, PublishError, StoreError
from vllm_delta_sync.format.manifest import HEAD_KEY
from vllm_delta_sync.notice import NoticeSubscriber

STEPS = ["objects/", "versions/"]
PATIENCE_SECONDS = 60.0


@pytest.mark.parametrize("error", [StoreError("injected"), MemoryError("injected")])
@pytest.mark.parametrize("told_by", ["flush", "publish", "payload_bytes", "seconds"])
@pytest.mark.parametrize("at", STEPS)
def test_failed_version_is_taken_back_and_its_changes_go_out_with_the_next(
    at: str, told_by: str, error: Exception, bucket: Hooked, trainer: Trainer
) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer)
        failure = bucket.before = FailAt(at, error)
        trainer.step()
        result = publisher.publish(step=2)
        tell: dict[str, Callable[[], object]] = {
            "flush": publisher.flush,
            "publish": lambda: publisher.publish(step=3, wait=True),
            "payload_bytes": lambda: result.payload_bytes,
            "seconds": lambda: result.seconds["upload"],
        }
        with pytest.raises(PublishError, match="injected") as caught:
            tell[told_by]()
        assert type(caught.value.__cause__) is type(error)
        assert failure.fired
        assert publisher.version == 1
        assert open_run(bucket.url).head().version == 1
        trainer.step()
        assert publisher.publish(step=4).version == 2
        publisher.flush()
    report = open_run(bucket.url).verify()
    assert (report.head, report.replayed) == (2, True)
    assert [manifest.step for manifest in open_run(bucket.url).log()] == [0, 1, 4]
    assert_holds(bucket, 2, trainer.live)


def test_head_that_cannot_be_written_lags_and_is_rolled_forward(
    bucket: Hooked, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        bucket.before = FailAt(HEAD_KEY)
        trainer.step()
        assert publisher.publish(step=1).payload_bytes > 0
        assert publisher.version == 1
        assert "version 1 is durable but HEAD.json still points before it" in caplog.text
        assert b'"version":0' in bucket.get(HEAD_KEY)
        assert open_run(bucket.url).head().version == 1
        publisher.publish(step=2)
        publisher.flush()
        assert b'"version":2' in bucket.get(HEAD_KEY)
        bucket.before = FailAt(HEAD_KEY)
        publisher.publish(step=3)
        publisher.flush()
        assert b'"version":2' in bucket.get(HEAD_KEY)
    assert b'"version":3' in bucket.get(HEAD_KEY), "closing writes it, too"
    assert open_run(bucket.url).verify().head == 3


def test_manifest_that_was_written_before_the_store_failed_counts(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        bucket.after = FailAt("versions/")
        trainer.step()
        expected = trainer.copy()
        assert publisher.publish(step=1).payload_bytes > 0
        assert publisher.version == 1
        trainer.step()
        publisher.publish(step=2)
    assert open_run(bucket.url).verify().head == 2
    assert_holds(bucket, 1, expected)
    assert_holds(bucket, 2, trainer.live)


@pytest.mark.parametrize("rebased", [False, True])
@pytest.mark.parametrize("written", [True, False])
def test_fate_of_a_manifest_is_looked_up_afterwards(
    written: bool, rebased: bool, bucket: Hooked, trainer: Trainer
) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        if rebased:
            publish(publisher, trainer, 2)
            publisher.rebase(0)
        before = publisher.version or 0
        setattr(bucket, "after" if written else "before", FailAt("versions/"))
        away = bucket.reading = Down("versions/")
        trainer.step()
        publisher.publish(step=11)
        expect_failure(publisher, "is not known")
        trainer.step()
        with pytest.raises(PublishError, match="is not known"):
            publisher.publish(step=12, wait=True)
        away.down = False
        assert publisher.publish(step=13, wait=True).version == before + 1 + written
    assert open_run(bucket.url).verify().replayed
    log = list(open_run(bucket.url).log())[before + 1 :]
    expected = [(11, 0), (13, before + 1)] if written else [(13, 0)]
    assert [(manifest.step, manifest.base_version) for manifest in log] == expected
    assert_holds(bucket, before + len(log), trainer.live)


def test_call_while_a_version_is_under_way_is_skipped_or_waits(bucket: Hooked, trainer: Trainer) -> None:
    drained: list[str] = []

    def handed() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in trainer.live.items():
            yield name, tensor
            drained.append(name)

    with Publisher(trainer.live, bucket) as publisher:
        gate = bucket.before = Gated()
        trainer.step()
        first_weights = trainer.copy()
        first = publisher.publish(step=1)
        assert gate.reached.wait(120)
        trainer.step()
        for skipped in (publisher.publish(step=2), publisher.publish(step=2, weights=handed())):
            assert (skipped.version, skipped.kind, skipped.payload_bytes) == (None, "skipped", 0)
        assert drained == list(trainer.live)
        assert publisher.version == 0
        threading.Timer(0.2, gate.open.set).start()
        trainer.step()
        waited = publisher.publish(step=3, wait=True)
        assert (first.version, waited.version) == (1, 2)
        assert waited.changed > 0
    assert [manifest.step for manifest in open_run(bucket.url).log()] == [0, 1, 3]
    assert_holds(bucket, 1, first_weights)
    assert_holds(bucket, 2, trainer.live)


def test_own_manifest_found_at_its_place_is_no_conflict(bucket: Hooked, trainer: Trainer) -> None:
    """A put whose answer was lost and that the store's client repeats finds its own object."""
    inner = open_bucket(bucket.url)
    with Publisher(trainer.live, bucket) as publisher:
        original = Hooked.put

        def twice(key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
            if key.startswith("versions/"):
                inner.put(key, data, if_absent=if_absent)
            original(bucket, key, data, if_absent=if_absent)

        bucket.put = twice  # type: ignore[method-assign]
        trainer.step()
        assert publisher.publish(step=1).payload_bytes > 0
    assert open_run(bucket.url).verify().head == 1


def test_a_notice_goes_out_before_head_is_written(bucket: Hooked, trainer: Trainer) -> None:
    heard: list[int | None] = []
    with Publisher(trainer.live, bucket, notice="tcp://127.0.0.1:*") as publisher:
        run = open_run(bucket.url).info.run
        with closing(NoticeSubscriber(str(publisher.notice_address), run)) as subscriber:
            assert subscriber.receive(PATIENCE_SECONDS) is not None

            def listen(key: str) -> None:
                deadline = time.monotonic() + PATIENCE_SECONDS
                while key == HEAD_KEY and heard[-1:] != [1] and time.monotonic() < deadline:
                    notice = subscriber.receive(1.0)
                    heard.append(None if notice is None else notice.version)
                    assert notice is None or notice.manifest == open_run(bucket.url).manifest(notice.version).digest

            bucket.before = listen
            publish(publisher, trainer)
    assert heard[-1:] == [1]
    assert open_run(bucket.url).head().version == 1


MOST_READS = 100


class Flipping(BucketMiddleware):
    """Flips a bit in the middle of the read with number ``at``."""

    def __init__(self, inner: Bucket, exclusive: bool) -> None:
        super().__init__(inner)
        self.supports_conditional_put = exclusive
        self.at = -1
        self.reads = 0

    def _around(self, call: Call, run: Callable[[], Any]) -> Any:
        data = run()
        if call.direction == "down":
            self.reads += 1
            if self.reads - 1 == self.at and data:
                middle = len(data) // 2
                return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        return data


@pytest.fixture(params=[True, False], ids=["exclusive", "single writer"])
def flipping(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flipping:
    monkeypatch.setattr(bucket_base, "SETTLING_SECONDS", 0.0)
    return Flipping(open_bucket(str(tmp_path / "run")), request.param)


def test_a_byte_that_flips_in_a_read_stops_no_publisher(flipping: Flipping, trainer: Trainer) -> None:
    with Publisher(trainer.live, flipping) as publisher:
        for at in range(MOST_READS):
            flipping.at, flipping.reads = at, 0
            trainer.step()
            assert publisher.publish(step=at, wait=True).version == at + 1
            publisher.flush()
            assert_holds(flipping, at + 1, trainer.live)
            if flipping.reads <= at:
                break
        assert 1 < at < MOST_READS
    assert open_run(flipping.url).verify().head == at + 1


def test_a_byte_that_flips_in_any_read_of_a_takeover_does_no_harm(flipping: Flipping, trainer: Trainer) -> None:
    with Publisher(trainer.live, flipping) as publisher:
        trainer.step()
        publisher.publish(step=0)
    for at in range(MOST_READS):
        flipping.at, flipping.reads = at, 0
        try:
            with Publisher(trainer.live, flipping, resume=True) as later:
                assert later.version is not None
        except DeltaSyncError:
            pass
        reads, flipping.at = flipping.reads, -1
        assert open_run(flipping.url).verify().replayed
        if reads <= at:
            break
    assert 3 < at < MOST_READS
    with Publisher(trainer.live, flipping, resume=True) as last:
        trainer.step()
        last.publish(step=1)
        last.flush()
        assert last.version is not None
        assert_holds(flipping, last.version, trainer.live)


def test_head_is_written_no_more_often_than_the_store_takes_it(bucket: Hooked, trainer: Trainer) -> None:
    bucket.overwrite_seconds = 60.0
    written: list[str] = []
    bucket.before = written.append
    with Publisher(trainer.live, bucket) as publisher:
        for _ in range(5):
            publish(publisher, trainer)
        assert written.count(HEAD_KEY) == 1
        head, _ = open_run(bucket.url).reachable_head()
        assert head.version == 5
    assert written.count(HEAD_KEY) == 2
    assert open_run(bucket.url).head().version == 5
