"""The Bucket contract holds with all wrappers around a store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bucket.contract.test_bucket import *  # noqa: F403  the same tests over these fixtures
from tests.bucket.contract.test_bucket_crowd import (  # noqa: F401
    test_listing_while_others_put_and_delete,
    test_of_16_threads_one_creates,
)
from tests.support.store_faults import dressed
from vllm_delta_sync.bucket import Bucket, StoreOptions, open_bucket
from vllm_delta_sync.bucket.middleware.usage import StoreUsage

OPTIONS = StoreOptions(store_progress="log")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "bucket").as_uri()


@pytest.fixture
def bucket(url: str) -> Iterator[Bucket]:
    with dressed(open_bucket(url), OPTIONS, StoreUsage()) as worn:
        yield worn


def test_wrappers_are_what_they_wrap(bucket: Bucket, url: str) -> None:
    assert (bucket.url, bucket.supports_conditional_put) == (url, True)
    bucket.put("key", b"x")
    bucket.close()
    bucket.close()
