"""What several files of these tests start from."""

from collections.abc import Iterator

import pytest

from tests.support.answers import Answers, answering
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.bucket.middleware import retry


@pytest.fixture
def answers() -> Iterator[Answers]:
    """A web server of the test."""
    with answering() as server:
        yield server


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to no pauses between tries."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", 1e-5)
    monkeypatch.setattr(retry, "LONGEST_PAUSE_SECONDS", 1e-4)


@pytest.fixture
def local(url: str) -> Bucket:
    """A directory without wrappers."""
    return open_bucket(url)
