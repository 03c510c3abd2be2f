"""Looks into a store far away: what they read first is asked for at once, and again if it was missing."""

import threading
from pathlib import Path

import pytest

from tests.support.chains import Chain
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.wrapper import WrappedBucket
from vllm_delta_sync.chain.documents import RunDocuments
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.wire.manifest import version_key

PATIENCE_SECONDS = 60.0


class Far(WrappedBucket):
    """A store that answers the first ``together`` reads only once all of them have been asked for."""

    def __init__(self, inner: Bucket) -> None:
        super().__init__(inner)
        self.url = "s3://far/run"
        self.asked: list[str] = []
        self._barrier: threading.Barrier | None = None
        self._left = 0
        self._lock = threading.Lock()

    def answer_together(self, reads: int) -> None:
        self._barrier, self._left = threading.Barrier(reads), reads

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        with self._lock:
            self.asked.append(key)
            waits, self._left = self._left > 0, self._left - 1
        if waits and self._barrier is not None:
            self._barrier.wait(PATIENCE_SECONDS)
        return super().get(key, max_bytes=max_bytes)


def test_what_a_look_reads_first_is_asked_for_at_once(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.grow()
    bucket = Far(chain.bucket)
    run = RunDocuments(bucket)
    bucket.asked.clear()
    bucket.answer_together(4)
    with run.looking(0, expected=1):
        assert run.is_current()
        assert run.head().version == 1
    # The probe for the version after it comes last: only what lies beyond what was found tells that nothing does.
    assert sorted(bucket.asked) == sorted(["run.json", "HEAD.json", version_key(0), version_key(1), version_key(2)])


def test_what_was_missing_is_asked_for_again(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    bucket = Far(chain.bucket)
    run = RunDocuments(bucket)
    with run.looking(0, expected=1):
        while bucket.asked.count(version_key(1)) < 1:
            pass
        with pytest.raises(NotFoundError):
            run.manifest(1)
        chain.grow()
        assert run.head().version == 1


def test_nothing_read_ahead_outlives_the_look(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    run = RunDocuments(Far(chain.bucket))
    with run.looking(0):
        assert run.is_current()
    chain.grow()
    assert run.head().version == 1
