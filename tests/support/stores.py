"""Every kind of store that tests, demo and benchmarks run over, each ready to be written to.

with STORES["s3"](folder) as store:
    os.environ.update(store.environment)
    bucket = open_bucket(store.url)
"""

import atexit
import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support import azure_store, google_store, hub_store, s3_store


@dataclass(frozen=True)
class Store:
    """An empty bucket.

    Attributes:
        url: what ``open_bucket`` takes. environment: variables that a process needs to reach it.
    """

    url: str
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """A kind of store. Called with a folder for its files it gives an empty bucket, for the length of a block.

    Attributes:
        across_processes: what one process puts, others see. refuses_folder_keys: a key that is a folder of another is
            UsageError; the others hold both. exclusive: create-if-absent holds among any number of writers.
            parts_count_as_objects: create-if-absent is refused for a key of which only parts of an upload are stored.
    """

    opened: Callable[[Path], AbstractContextManager[Store]]
    across_processes: bool = True
    refuses_folder_keys: bool = False
    exclusive: bool = True
    parts_count_as_objects: bool = False

    def __call__(self, folder: Path) -> AbstractContextManager[Store]:
        return self.opened(folder)


_servers = ExitStack()
_numbers = itertools.count()
atexit.register(_servers.close)


@functools.cache
def s3_server() -> s3_store.S3Server:
    """The one S3 server of this process, started when it is first asked for; or the one that runs already."""
    if os.environ.get(s3_store.RUNNING):
        return s3_store.S3Server(os.environ[s3_store.RUNNING], os.getpid())
    return _servers.enter_context(s3_store.serving())


@contextmanager
def _local(folder: Path) -> Iterator[Store]:
    yield Store((folder / "bucket with spaces").as_uri())


@contextmanager
def _memory(folder: Path) -> Iterator[Store]:
    yield Store(f"memory://{_fresh()}/run")


@contextmanager
def _s3(folder: Path) -> Iterator[Store]:
    server = s3_server()
    yield Store(f"{server.create_bucket(_fresh())}/run", server.environment)


@functools.cache
def google_server() -> s3_store.S3Server:
    """The one server of Google's API of this process: of its own where S3's is another program."""
    return _servers.enter_context(s3_store.serving()) if os.environ.get(s3_store.RUNNING) else s3_server()


@contextmanager
def _gs(folder: Path) -> Iterator[Store]:
    name = _fresh()
    google_server().create_bucket(name)
    folder.mkdir(parents=True, exist_ok=True)
    yield Store(f"gs://{name}/run", google_store.environment(google_server().endpoint, folder))


@functools.cache
def azure_server() -> azure_store.AzureServer:
    """The one Azurite of this process, started when it is first asked for."""
    return _servers.enter_context(azure_store.serving())


@contextmanager
def _az(folder: Path) -> Iterator[Store]:
    if not azure_store.installed():
        pytest.skip("Azurite is not installed; `make .venv/.azurite` installs it from npm")
    yield Store(f"{azure_server().create_container(_fresh())}/run", azure_server().environment)


@functools.cache
def hub() -> hub_store.Hub:
    """The one Hub of this process, started when it is first asked for."""
    folder = Path(_servers.enter_context(tempfile.TemporaryDirectory(prefix="delta-sync-hub-")))
    return _servers.enter_context(hub_store.serving(folder))


@contextmanager
def _hub(folder: Path) -> Iterator[Store]:
    bucket = f"team/{_fresh()}"
    hub().create_bucket(bucket)
    yield Store(f"hf://buckets/{bucket}/run", hub().environment)


def _fresh() -> str:
    return f"test-{os.getpid()}-{next(_numbers)}"


STORES: dict[str, Kind] = {
    "local": Kind(_local, refuses_folder_keys=True),
    "memory": Kind(_memory, across_processes=False),
    "s3": Kind(_s3),
    "gs": Kind(_gs),
    # Azurite's Put Blob with If-None-Match looks no further than whether it has an entry, and a staged block makes one.
    "az": Kind(_az, parts_count_as_objects=True),
    "hub": Kind(_hub, exclusive=False),
}
ACROSS_PROCESSES = sorted(name for name, kind in STORES.items() if kind.across_processes)
