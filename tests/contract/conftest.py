"""Every bucket implementation that the contract suite runs over."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_delta_sync.bucket import Bucket, open_bucket


def _local(folder: Path) -> str:
    return (folder / "bucket with spaces").as_uri()


PLACES: dict[str, Callable[[Path], str]] = {"local": _local}
"""Name of an implementation, and what makes the URL of an empty bucket of it."""


@pytest.fixture(params=sorted(PLACES))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty bucket."""
    return PLACES[request.param](tmp_path)


@pytest.fixture
def bucket(url: str) -> Iterator[Bucket]:
    with open_bucket(url) as opened:
        yield opened
