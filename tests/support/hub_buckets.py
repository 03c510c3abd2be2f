"""A bucket on a loopback Hub, as the tests of the Hub's client use it: ``team/weights``, empty, for one test."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support import stores
from tests.support.hub_store import Hub
from vllm_delta_sync.bucket import StoreOptions
from vllm_delta_sync.bucket.hub.bucket import HubBucket
from vllm_delta_sync.urls import parse_store_url

ID = "team/weights"
URL = f"hf://buckets/{ID}/run"


@contextmanager
def a_bucket(server: Hub) -> Iterator[None]:
    """The bucket, and what it takes to reach it in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        server.create_bucket(ID)
        server.forget_requests()
        try:
            yield
        finally:
            server.clear_faults()
            server.change(quota=0, page=1000)
            server.delete_bucket(ID)


@pytest.fixture(scope="session")
def hub_server() -> Hub:
    return stores.hub()


@pytest.fixture
def hub(hub_server: Hub) -> Iterator[Hub]:
    with a_bucket(hub_server):
        yield hub_server


def opened(url: str = URL, **options: object) -> HubBucket:
    """The store itself, without anything around it."""
    return HubBucket(parse_store_url(url), StoreOptions.model_validate(options))
