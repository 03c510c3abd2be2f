"""The node's cache directory, with something else where an object should be."""

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from tests.attacks.reader import Reader
from vllm_delta_sync.wire.manifest import object_key

DATA = bytes(range(256)) * 100
DIGEST = sha256(DATA).hexdigest()
KEY = object_key(DIGEST)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "stored"
    path.write_bytes(DATA)
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
    path.write_bytes(DATA[::-1])


ODD: list[Callable[[Path], None]] = [to_zero, tebibyte, other_bytes, os.mkfifo, Path.mkdir, Path.touch]


@pytest.mark.parametrize("suffix", ["", ".part", ".lock"])
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.__name__)
def test_something_else_in_its_place(
    odd: Callable[[Path], None], suffix: str, reader: Reader, cache: Path, stored: Path
) -> None:
    """Whatever it is, the object comes, and it is the right one."""
    odd(cache / (DIGEST + suffix))
    for _ in range(2):
        assert reader.reads("cached", cache, KEY, len(DATA), DIGEST, stored) == len(DATA)


def test_a_link_to_somebody_elses_file(reader: Reader, cache: Path, stored: Path, tmp_path: Path) -> None:
    """It is neither read nor written to."""
    target = tmp_path / "target"
    target.write_bytes(b"theirs")
    for suffix in ("", ".part", ".lock"):
        (cache / (DIGEST + suffix)).symlink_to(target)
    assert reader.reads("cached", cache, KEY, len(DATA), DIGEST, stored) == len(DATA)
    assert target.read_bytes() == b"theirs"


def test_a_size_that_nobody_has(reader: Reader, cache: Path, stored: Path) -> None:
    """A manifest's lie about a size allocates nothing, and is found out by what comes."""
    assert "truncated" in reader.refused("cached", cache, KEY, 2**53 - 1, DIGEST, stored, kind="digest")
    assert sum(path.stat().st_blocks for path in cache.iterdir()) == 0


def test_directories_cost_no_descriptors(cache: Path, stored: Path) -> None:
    from vllm_delta_sync.cache import ObjectCache
    from vllm_delta_sync.wire.manifest import ObjectRef

    (cache / DIGEST).mkdir()
    ref = ObjectRef(key=KEY, bytes=len(DATA), sha256=DIGEST)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert ObjectCache(cache, 2**30).get(ref, stored.read_bytes) == DATA
    assert len(os.listdir("/proc/self/fd")) == before
