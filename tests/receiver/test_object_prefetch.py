"""Objects that a message names are downloaded before the manifest that lists them is there, within bounds."""

from collections import Counter
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.hub_buckets import URL
from tests.support.hub_store import Hub
from tests.support.notices import LOOPBACK, RUN
from tests.support.services import Site, wait_until
from tests.support.world import World
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.engine.follow import object_prefetch
from vllm_delta_sync.engine.follow.object_prefetch import MAX_BYTES, MAX_SECONDS, ObjectPrefetch
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.format.manifest import object_key
from vllm_delta_sync.notice import Upcoming


class Counted(LocalBucket):
    """A directory that counts what is read from it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reads: Counter[str] = Counter()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.reads[key] += 1
        return super().get_range(key, start, length)


class Store:
    """A bucket with objects, a cache, and a clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bucket = Counted(folder / "run")
        self.folder = folder / "cache"
        self.prefetch = ObjectPrefetch(ObjectCache(self.folder, 1 << 30), lambda: self.bucket)
        self.now = 0.0
        monkeypatch.setattr(object_prefetch, "time", SimpleNamespace(monotonic=lambda: self.now))

    def put(self, content: bytes) -> tuple[str, int]:
        digest = sha256(content).hexdigest()
        self.bucket.put(object_key(digest), content)
        return digest, len(content)

    def offer(self, *objects: tuple[str, int]) -> bool:
        """Offer, and wait for the end of what it began."""
        begun = self.prefetch.offer(Upcoming(RUN, objects))
        wait_until(lambda: not self.prefetch._busy)
        return begun

    def see(self, *objects: tuple[str, int]) -> None:
        """A version is there that lists these."""
        manifest: Any = SimpleNamespace(objects=[SimpleNamespace(sha256=digest) for digest, _ in objects])
        self.prefetch.seen(manifest)

    def is_cached(self, digest: str) -> bool:
        return any(digest in path.name for path in self.folder.rglob("*") if path.is_file())


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(tmp_path, monkeypatch)


def test_named_objects_are_cached_once(store: Store) -> None:
    first, second = store.put(b"first"), store.put(b"second")
    assert store.offer(first, second)
    assert all(store.is_cached(digest) for digest, _ in (first, second))
    # Publishers repeat their last message, also after the version is there.
    assert not store.offer(first, second)
    store.see(first, second)
    assert not store.offer(first, second)
    assert store.bucket.reads == {object_key(first[0]): 1, object_key(second[0]): 1}


def test_true_messages_follow_one_another_without_delay(store: Store) -> None:
    for number in range(20):
        item = store.put(b"%d" % number)
        assert store.offer(item)
        store.see(item)


def test_useless_downloads_become_rare(store: Store) -> None:
    """Each doubles the time until the next; a version that lists the last one ends that."""
    begun = []
    for number in range(1000):
        store.now = float(number)
        if store.offer(store.put(b"%d" % number)):
            begun.append(number)
    gaps = [late - early for early, late in pairwise(begun)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == MAX_SECONDS
    assert len(begun) < 25
    store.now += MAX_SECONDS
    true = store.put(b"true")
    assert store.offer(true)
    store.see(true)
    assert store.offer(store.put(b"next"))


def test_large_objects_are_left_to_the_ranks(store: Store) -> None:
    digest, _ = store.put(b"small")
    assert not store.offer((digest, MAX_BYTES + 1))
    assert not store.bucket.reads


@pytest.mark.parametrize("what", ["missing", "longer", "shorter", "no run"])
def test_what_is_not_there_is_no_error(store: Store, what: str, caplog: pytest.LogCaptureFixture) -> None:
    digest, size = store.put(b"content")
    item = {"missing": ("ab" * 32, 9), "longer": (digest, size - 1), "shorter": (digest, size + 1)}
    if what == "no run":

        def gone() -> Counted:
            raise NotFoundError("no run yet")

        store.prefetch._bucket = gone
    assert store.offer(item.get(what, (digest, size)))
    assert not store.is_cached(item.get(what, (digest, size))[0])
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_a_server_reads_from_the_cache_what_the_publisher_named(hub: Hub, tmp_path: Path) -> None:
    """Over the Hub's client: the objects of each version go down once, and are there before the manifest is."""
    world = World(tmp_path, url=URL, notice=LOOPBACK)
    site = Site(world)
    early: list[str] = []
    service = site.serve(notice=str(world.publisher.notice_address), poll_seconds=600.0, cache_dir=tmp_path / "cache")
    assert service._prefetch is not None
    offer = service._prefetch.offer

    def noted(upcoming: Upcoming) -> bool:
        if begun := offer(upcoming):
            early.extend(digest for digest, _ in upcoming.objects)
        return begun

    service._prefetch.offer = noted  # type: ignore[method-assign]
    service.start()
    wait_until(lambda: service.receiver.served_version == 0)
    # Until the channel stands.
    wait_until(lambda: service.receiver.board.document()["notice"]["heard_seconds"] is not None)
    for step in (1, 2, 3):
        world.train(step)
        wait_until(lambda step=step: service.receiver.served_version == step)  # type: ignore[misc]
    world.expect_exact()
    with open_run(URL) as run:
        listed = {ref.sha256 for manifest in run.log() for ref in manifest.objects}
    assert early
    assert set(early) <= listed
    site.end()
