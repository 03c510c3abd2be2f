"""A mirror in front of a bucket: whatever it does, objects are right; and it is asked for nothing but objects."""

import os
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import TypeVar
from unittest import mock

import pytest

from tests.support.samples import ref_of
from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.bucket import ranged as downloads
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware, Call
from vllm_delta_sync.bucket.middleware.mirror import FAILURES, PAUSE_SECONDS, MirrorBucket, Source, allow_mirrors
from vllm_delta_sync.bucket.verified import download_object, fetch_object
from vllm_delta_sync.errors import AccessError, ConflictError, DigestError, NotFoundError, UnavailableError
from vllm_delta_sync.format.manifest import object_key

PIECE = 1000
_Result = TypeVar("_Result")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PIECE_BYTES", PIECE)


class Calls(BucketMiddleware):
    """Notes who is asked for what, and may spoil what it reads."""

    def __init__(self, folder: Path) -> None:
        super().__init__(LocalBucket(folder))
        self.calls: list[tuple[str, str]] = []
        self.spoil: Callable[[bytes], bytes] = lambda data: data
        self.closed = False

    def _around(self, call: Call, run: Callable[[], _Result]) -> _Result:
        self.calls.append((call.method, call.key))
        found = run()
        return self.spoil(found) if isinstance(found, bytes) else found  # type: ignore[return-value]

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.calls.append(("list", prefix))
        return self._inner.list(prefix)

    def close(self) -> None:
        self.closed = True
        super().close()

    @property
    def read(self) -> int:
        """How often bytes were asked for."""
        return sum(name.startswith("get") for name, _ in self.calls)


class World:
    """A bucket and its mirror, each with the same object."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = os.urandom(5 * PIECE + 1)
        self.ref = ref_of(self.data)
        self.origin, self.mirror = Calls(folder / "origin"), Calls(folder / "mirror")
        self.now = 1000.0
        self.hung = threading.Event()
        self.bucket = self.patient(120)
        for store in (self.origin, self.mirror):
            store.put(self.ref.key, self.data)
            store.calls.clear()

    def patient(self, seconds: float) -> MirrorBucket:
        """The bucket with its mirror, which has so many seconds for an answer."""
        return MirrorBucket(self.origin, [Source(self.mirror, patience=seconds, now=lambda: self.now)])

    def hang(self) -> None:
        """From now on the mirror does not answer, and is given up soon."""

        def spoil(data: bytes) -> bytes:
            self.hung.wait()
            return data

        self.mirror.spoil, self.bucket = spoil, self.patient(0.2)

    def as_bytes(self) -> bytes:
        return self.bucket.get(self.ref.key, max_bytes=self.ref.bytes)

    def as_bytes_of_any_size(self) -> bytes:
        return self.bucket.get(self.ref.key)

    def as_download(self) -> bytes:
        path = self.folder / "download"
        path.unlink(missing_ok=True)

        def read() -> bytes | None:
            data = path.read_bytes()
            return data if sha256(data).hexdigest() == self.ref.sha256 else None

        return download_object(self.bucket, self.ref, path, read)


WAYS = [World.as_bytes, World.as_bytes_of_any_size, World.as_download]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.hung.set()
    world.bucket.close()


FAULTS: dict[str, Callable[[World], object]] = {
    "flipped byte": lambda world: setattr(world.mirror, "spoil", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    "truncated": lambda world: setattr(world.mirror, "spoil", lambda data: data[: len(data) // 2]),
    "nothing": lambda world: setattr(world.mirror, "spoil", lambda data: b""),
    "more": lambda world: setattr(world.mirror, "spoil", lambda data: data + b"more"),
    "refused": lambda world: setattr(world.mirror, "spoil", mock.Mock(side_effect=AccessError("403"))),
    "cut": lambda world: setattr(world.mirror, "spoil", mock.Mock(side_effect=UnavailableError("connection reset"))),
    "hangs": World.hang,
    "missing": lambda world: world.mirror.delete(world.ref.key),
    "larger": lambda world: world.mirror.put(world.ref.key, world.data + b"more"),
    "another": lambda world: world.mirror.put(world.ref.key, world.data[::-1]),
}


@pytest.mark.parametrize("way", WAYS)
def test_objects_come_from_the_mirror(
    world: World, way: Callable[[World], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert way(world) == world.data
    assert world.origin.read == 0
    assert world.mirror.read > 0
    assert not caplog.records


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_is_wrong_with_the_mirror_the_object_is_right(
    world: World, way: Callable[[World], bytes], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    FAULTS[fault](world)
    world.mirror.calls.clear()
    asked = world.mirror.read
    for _ in range(FAILURES + 1):
        assert way(world) == world.data
    # Ranges cannot show that there is more of it than the origin has.
    if fault != "larger" or way in (World.as_bytes, World.as_bytes_of_any_size):
        assert world.origin.read > 0
        kinds = {record.getMessage().split(": ")[1].split(";")[0] for record in caplog.records}
        assert len(caplog.records) == len(kinds) == 1, "said once"
        assert str(world.mirror.url) in caplog.text
    assert world.mirror.read > asked
    # Out of use by now: it is not asked at all.
    if world.origin.read:
        asked = world.mirror.read
        assert way(world) == world.data
        assert world.mirror.read == asked
    assert {name for name, _ in world.mirror.calls} <= {"get", "get_range"}


@pytest.mark.parametrize("way", WAYS)
def test_a_mirror_that_failed_gets_one_try_a_minute(world: World, way: Callable[[World], bytes]) -> None:
    world.mirror.spoil = mock.Mock(side_effect=UnavailableError("down"))
    for _ in range(FAILURES):
        assert way(world) == world.data
    asked = world.mirror.read
    world.now += PAUSE_SECONDS - 1
    assert way(world) == world.data
    assert world.mirror.read == asked
    world.now += 1
    assert way(world) == world.data
    assert world.mirror.read == asked + 1
    asked = world.mirror.read
    assert way(world) == world.data
    assert world.mirror.read == asked
    world.now += PAUSE_SECONDS
    world.mirror.spoil = lambda data: data
    # Ranges beside the one that tries do not wait for it.
    assert way(world) == world.data
    before = world.origin.read
    for _ in range(3):
        assert way(world) == world.data
    assert world.origin.read == before


def test_documents_never_come_from_a_mirror(world: World) -> None:
    keys = ["run.json", "HEAD.json", "versions/0000000001.json", "objects/x.safetensors", world.ref.key + ".sig"]
    keys += [f"a/{world.ref.key}", world.ref.key.upper().replace("OBJECTS", "objects")]
    for key in keys:
        world.origin.put(key, b"right")
        world.mirror.put(key, b"wrong")
    world.mirror.calls.clear()
    with allow_mirrors():
        for key in keys:
            assert world.bucket.get(key) == b"right"
            assert world.bucket.get_range(key, 0, 5) == b"right"
            assert world.bucket.stat(key).bytes == 5
    assert [info.key for info in world.bucket.list("HEAD")] == ["HEAD.json"]
    assert not world.mirror.calls


def test_a_range_that_nobody_verifies_never_comes_from_a_mirror(world: World) -> None:
    world.mirror.put(world.ref.key, world.data[::-1])
    world.mirror.calls.clear()
    assert world.bucket.get_range(world.ref.key, 3, 7) == world.data[3:10]
    assert not world.mirror.calls


def test_what_is_written_goes_to_the_origin_alone(world: World) -> None:
    key = object_key("0" * 64)
    world.bucket.put(key, b"new", if_absent=True)
    with pytest.raises(ConflictError):
        world.bucket.put(key, b"new", if_absent=True)
    world.bucket.delete(world.ref.key)
    assert not world.mirror.calls
    assert [info.key for info in world.origin.list()] == [key]


def test_what_the_origin_does_not_have(world: World) -> None:
    key = object_key("0" * 64)
    with pytest.raises(NotFoundError):
        world.bucket.get(key)
    with pytest.raises(NotFoundError):
        world.bucket.get(key, max_bytes=1)
    # One that retention has just removed there is still the right one.
    world.origin.delete(world.ref.key)
    assert fetch_object(world.bucket, world.ref) == world.data


def test_an_object_that_is_damaged_in_both(world: World) -> None:
    for store in (world.origin, world.mirror):
        store.put(world.ref.key, world.data[::-1])
    with pytest.raises(DigestError):
        fetch_object(world.bucket, world.ref)
    with pytest.raises(DigestError):
        world.as_download()


def test_a_mirror_that_dies_half_way_gives_what_it_can(world: World) -> None:
    """Ranges that came stay; the origin gives the others."""
    left = iter([True] * 3)

    def spoil(data: bytes) -> bytes:
        if next(left, False):
            return data
        raise UnavailableError("gone")

    world.mirror.spoil = spoil
    assert world.as_download() == world.data
    assert world.origin.read == 3


def test_both_are_closed(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.bucket.close()
    assert world.origin.closed
    assert world.mirror.closed
