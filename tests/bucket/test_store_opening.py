"""From URLs and options to buckets: what is refused, and what goes for which store."""

from pathlib import Path

import pytest

from tests.support.clouds import KEYS, far_from_clouds
from vllm_delta_sync.bucket import StoreOptions, open_beside, open_bucket
from vllm_delta_sync.bucket.factory import OpenedBucket

ENDPOINT = "http://127.0.0.1:7"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    far_from_clouds(monkeypatch, tmp_path)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


def endpoint_beside(url: str, other: str) -> str | None:
    with open_bucket(url, StoreOptions(store_endpoint=ENDPOINT)) as bucket, open_beside(bucket, other) as beside:
        assert isinstance(beside, OpenedBucket)
        return beside.options.store_endpoint


def test_an_endpoint_goes_for_one_kind_of_store() -> None:
    assert endpoint_beside("s3://a/run", "s3://b/run") == ENDPOINT
    assert endpoint_beside("hf://buckets/a/b/run", "HF://buckets/a/c/run") == ENDPOINT
    assert endpoint_beside("hf://buckets/a/b/run", "s3://a/run") is None
    assert endpoint_beside("s3://a/run", "hf://buckets/a/b/run") is None
