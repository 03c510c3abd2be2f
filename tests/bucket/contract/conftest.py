"""Every bucket implementation that the contract suite runs over."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.bucket.contract.crowd import patient
from tests.support.stores import STORES, Kind, Store
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.local import LocalBucket


@contextmanager
def reachable(name: str, folder: Path) -> Iterator[Store]:
    """An empty bucket of a kind, with what it takes to reach it in the environment."""
    with STORES[name](folder) as store, pytest.MonkeyPatch.context() as patch:
        for variable, value in store.environment.items():
            patch.setenv(variable, value)
        yield store


@pytest.fixture(params=sorted(STORES))
def place(request: pytest.FixtureRequest) -> str:
    """Name of an implementation. Tests that cannot run over each say over which: ``parametrize("place", …)``."""
    return str(request.param)


@pytest.fixture
def kind(request: pytest.FixtureRequest, url: str) -> Kind:
    """What can be said of the bucket at ``url``. Modules that bring their own ``url`` bring that of a directory."""
    return STORES[request.getfixturevalue("place") if "place" in request.fixturenames else "local"]


@pytest.fixture
def url(place: str, tmp_path: Path) -> Iterator[str]:
    """URL of an empty bucket."""
    with reachable(place, tmp_path) as store:
        yield store.url


@pytest.fixture
def bucket(url: str) -> Iterator[Bucket]:
    with patient(url) as opened:
        yield opened


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the directory of ``local`` is."""
    return tmp_path / "root"


@pytest.fixture
def local(root: Path) -> LocalBucket:
    """A directory, which is not there yet."""
    return LocalBucket(root)
