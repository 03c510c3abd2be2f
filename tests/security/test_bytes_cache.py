"""The node's cache directory, with something else where an object should be."""

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from tests.security.reader import Reader
from vllm_delta_sync.bucket.download import PIECE_BYTES
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.wire.manifest import object_key

SMALL = bytes(range(256)) * 100
LARGE = bytes(range(256)) * 10_000
"""Downloaded by ranges, into a file that may be there already."""


def digest_of(data: bytes) -> str:
    return sha256(data).hexdigest()


def key_of(data: bytes) -> str:
    return object_key(digest_of(data))


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "stored"
    for data in (SMALL, LARGE):
        LocalBucket(path).put(key_of(data), data)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path


def to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def tebibyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


def other_bytes(path: Path) -> None:
    path.write_bytes(LARGE[::-1])


def claims(path: Path) -> None:
    """Says that all of it is there, and nothing is."""
    part = path.with_suffix(".part")
    part.touch()
    os.truncate(part, len(LARGE))
    path.write_text(f"pieces of {PIECE_BYTES} of {len(LARGE)} {key_of(LARGE)}\n0\n")


ODD: list[Callable[[Path], None]] = [to_zero, tebibyte, other_bytes, os.mkfifo, Path.mkdir, Path.touch, claims]


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("suffix", ["", ".part", ".pieces", ".lock"])
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.__name__)
def test_something_else_in_its_place(
    odd: Callable[[Path], None], suffix: str, data: bytes, reader: Reader, cache: Path, stored: Path
) -> None:
    """Whatever it is, the object comes, and it is the right one."""
    digest = digest_of(data)
    odd(cache / (digest + suffix))
    for _ in range(2):
        assert reader.reads("cached", cache, key_of(data), len(data), digest, stored) == len(data)


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_a_link_to_somebody_elses_file(data: bytes, reader: Reader, cache: Path, stored: Path, tmp_path: Path) -> None:
    """It is neither read nor written to."""
    target = tmp_path / "target"
    target.write_bytes(b"theirs")
    digest = digest_of(data)
    for suffix in ("", ".part", ".pieces", ".lock"):
        (cache / (digest + suffix)).symlink_to(target)
    assert reader.reads("cached", cache, key_of(data), len(data), digest, stored) == len(data)
    assert target.read_bytes() == b"theirs"


def test_a_size_that_nobody_has(reader: Reader, cache: Path, stored: Path) -> None:
    """A manifest's lie about a size allocates nothing, and is found out by what comes."""
    key, digest = key_of(SMALL), digest_of(SMALL)
    assert "truncated" in reader.refused("cached", cache, key, 2**53 - 1, digest, stored, kind="digest")
    assert sum(path.stat().st_blocks for path in cache.iterdir()) == 0


def test_directories_cost_no_descriptors(cache: Path, stored: Path) -> None:
    from vllm_delta_sync.cache import ObjectCache
    from vllm_delta_sync.wire.manifest import ObjectRef

    bucket = LocalBucket(stored)
    refs = [ObjectRef(key=key_of(data), bytes=len(data), sha256=digest_of(data)) for data in (SMALL, LARGE)]
    for ref in refs:
        (cache / ref.sha256).mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert [ObjectCache(cache, 2**30).get(ref, bucket) for ref in refs] == [SMALL, LARGE]
        assert [ObjectCache(cache, 2**30).open(ref, bucket) for ref in refs] == [None, None]
    assert len(os.listdir("/proc/self/fd")) == before
