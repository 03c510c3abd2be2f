"""What several files of these tests start from."""

from collections.abc import Iterator

import pytest

from tests.support.answers import Answers, answering
from vllm_delta_sync.bucket import Bucket, open_bucket


@pytest.fixture
def answers() -> Iterator[Answers]:
    """A web server of the test."""
    with answering() as server:
        yield server


@pytest.fixture
def local(url: str) -> Bucket:
    """A directory without wrappers."""
    return open_bucket(url)
