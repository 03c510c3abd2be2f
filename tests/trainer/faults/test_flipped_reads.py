"""A byte flips on its way from the store, in each read of a publisher once; what is stored is sound all the while."""

from pathlib import Path

import pytest

from tests.trainer.faults.hooks import Trainer, assert_holds
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import Bucket, creation, open_bucket
from vllm_delta_sync.bucket.wrapper import WrappedBucket
from vllm_delta_sync.errors import DeltaSyncError

MOST_READS = 100


class Flipping(WrappedBucket):
    """Flips a bit in the middle of the read with number ``at``."""

    def __init__(self, inner: Bucket, exclusive: bool) -> None:
        super().__init__(inner)
        self.exclusive = exclusive
        self.at = -1
        self.reads = 0

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        return self._flipped(self._inner.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._flipped(self._inner.get_range(key, start, length))

    def _flipped(self, data: bytes) -> bytes:
        self.reads += 1
        if self.reads - 1 != self.at or not data:
            return data
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.fixture(params=[True, False], ids=["exclusive", "single writer"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flipping:
    monkeypatch.setattr(creation, "SETTLING_SECONDS", 0.0)
    return Flipping(open_bucket(str(tmp_path / "run")), request.param)


@pytest.mark.parametrize("read_back", [False, True])
def test_publishing_goes_on(read_back: bool, bucket: Flipping, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, read_back=read_back) as publisher:
        for at in range(MOST_READS):
            bucket.at, bucket.reads = at, 0
            trainer.step()
            assert publisher.publish(step=at, wait=True).version == at + 1
            publisher.flush()
            assert_holds(bucket, at + 1, trainer.live)
            if bucket.reads <= at:
                break
        assert 1 < at < MOST_READS
    assert open_run(bucket.url).verify().head == at + 1


def test_resume_goes_well_or_says_why_and_does_no_harm(bucket: Flipping, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        trainer.step()
        publisher.publish(step=0)
    for at in range(MOST_READS):
        bucket.at, bucket.reads = at, 0
        try:
            with Publisher(trainer.live, bucket, resume=True) as later:
                assert later.version is not None
        except DeltaSyncError:
            pass
        reads, bucket.at = bucket.reads, -1
        assert open_run(bucket.url).verify().replayed
        if reads <= at:
            break
    assert 3 < at < MOST_READS
    with Publisher(trainer.live, bucket, resume=True) as last:
        trainer.step()
        last.publish(step=1)
        last.flush()
        assert last.version is not None
        assert_holds(bucket, last.version, trainer.live)
