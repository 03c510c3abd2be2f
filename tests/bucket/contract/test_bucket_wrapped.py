"""The Bucket contract holds with every wrapper around a store, and with all of them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bucket.contract.test_bucket import *  # noqa: F403  the same tests over these fixtures
from tests.bucket.contract.test_bucket_crowd import (  # noqa: F401
    test_listing_while_others_put_and_delete,
    test_of_16_threads_one_creates,
)
from tests.support.store_faults import dressed
from vllm_delta_sync.bucket import Bucket, StoreOptions, open_bucket
from vllm_delta_sync.bucket.middleware.deadline import DeadlineBucket
from vllm_delta_sync.bucket.middleware.progress import ProgressBucket
from vllm_delta_sync.bucket.middleware.retry import RetryingBucket
from vllm_delta_sync.bucket.middleware.usage import LimitedBucket, StoreUsage

OPTIONS = StoreOptions(store_progress="log")
WORN: dict[str, Callable[[Bucket], Bucket]] = {
    "all": lambda bucket: dressed(bucket, OPTIONS, StoreUsage()),
    "deadline": lambda bucket: DeadlineBucket(bucket, OPTIONS),
    "limited": lambda bucket: LimitedBucket(bucket, OPTIONS, StoreUsage()),
    "progress": lambda bucket: ProgressBucket(bucket, "log"),
    "retrying": lambda bucket: RetryingBucket(bucket, OPTIONS, StoreUsage()),
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "bucket").as_uri()


@pytest.fixture(params=[pytest.param(name, marks=[] if name == "all" else pytest.mark.slow) for name in sorted(WORN)])
def bucket(url: str, request: pytest.FixtureRequest) -> Iterator[Bucket]:
    with WORN[request.param](open_bucket(url)) as worn:
        yield worn


def test_wrappers_are_what_they_wrap(bucket: Bucket, url: str) -> None:
    assert (bucket.url, bucket.supports_conditional_put) == (url, True)
    bucket.put("key", b"x")
    bucket.close()
    bucket.close()


def test_lists_of_several_pages(bucket: Bucket, tmp_path: Path) -> None:
    keys = [f"a/{number:04}" for number in range(1001)]
    (tmp_path / "bucket" / "a").mkdir(parents=True)
    for key in keys:
        (tmp_path / "bucket" / key).touch()
    assert [info.key for info in bucket.list("a/")] == keys
    some = bucket.list()
    assert next(some).key == "a/0000"
    del some
    assert [info.key for info in bucket.list("a/100")] == ["a/1000"]
