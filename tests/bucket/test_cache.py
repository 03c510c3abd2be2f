"""The cache of one node: one download for all, a limit that holds, and no problem of its own that stops a sync."""

import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.running import run_python, small_disk
from tests.support.samples import ref_of
from vllm_delta_sync.bucket import Bucket, ObjectInfo
from vllm_delta_sync.cache import ObjectCache, folder
from vllm_delta_sync.errors import NotFoundError, StoreError
from vllm_delta_sync.settings import load_settings

SECONDS = 60.0
MANY = 1 << 40


def names(directory: Path) -> set[str]:
    return set(os.listdir(directory))


class Source(Bucket):
    """A bucket of one object, which counts what is fetched.

    Attributes:
        fetched: how often the object as a whole. pieces: how often each range of it, by its start.
        before: called before every fetch.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.ref = ref_of(data)
        self.url = "test:"
        self.fetched = 0
        self.pieces: Counter[int] = Counter()
        self.before: Callable[[], object] = lambda: None

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        self._check(key)
        self.before()
        self.fetched += 1
        return self.data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._check(key)
        self.before()
        self.pieces[start] += 1
        return self.data[start : start + length]

    def stat(self, key: str) -> ObjectInfo:
        self._check(key)
        return ObjectInfo(key, len(self.data), 0.0)

    def _check(self, key: str) -> None:
        if key != self.ref.key:
            raise NotFoundError(key)

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        raise StoreError("a cache writes nothing")

    def delete(self, key: str) -> None:
        raise StoreError("a cache deletes nothing")

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        raise StoreError("a cache knows what it wants")

    def got_from(self, cache: ObjectCache) -> bool:
        """Whether the bytes came without a fetch."""
        before = self.asked
        assert cache.get(self.ref, self) == self.data
        return self.asked == before

    @property
    def asked(self) -> int:
        """How often bytes were asked for."""
        return self.fetched + self.pieces.total()


# Objects


def test_kept_privately_and_read_back(tmp_path: Path) -> None:
    source = Source(os.urandom(1000))
    directory = tmp_path / "deep" / "cache"
    caches = [ObjectCache(directory, MANY), ObjectCache(directory, MANY)]
    assert [source.got_from(cache) for cache in (caches[0], *caches)] == [False, True, True]
    assert names(directory) == {source.ref.sha256}
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / source.ref.sha256).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data + b"?"],
    ids=["shorter", "other", "longer"],
)
def test_a_damaged_file_is_replaced(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    source, during = Source(os.urandom(1000)), set[str]()
    cache = ObjectCache(tmp_path, MANY)
    assert not source.got_from(cache)
    (tmp_path / source.ref.sha256).write_bytes(damage(source.data))

    source.before = lambda: during.update(names(tmp_path))
    assert cache.get(source.ref, source) == source.data
    assert source.asked == 2
    # Removed first: ranks that wait would read it over and over.
    assert during == {f"{source.ref.sha256}.lock", f"{source.ref.sha256}.part"}
    assert source.got_from(cache)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert names(tmp_path) == {source.ref.sha256}


def test_the_limit_holds_while_others_write(tmp_path: Path) -> None:
    a, b, c, d = (Source(letter * 100) for letter in (b"a", b"b", b"c", b"d"))
    cache = ObjectCache(tmp_path, 200)
    assert not a.got_from(cache)
    assert not b.got_from(cache)

    def meanwhile() -> None:
        assert a.ref.sha256 not in names(tmp_path), "room is made before the download"
        assert not d.got_from(ObjectCache(tmp_path, 200))
        assert b.ref.sha256 not in names(tmp_path), "what comes in counts"
        os.utime(tmp_path / d.ref.sha256, (2**33, 2**33))

    c.before = meanwhile
    assert not c.got_from(cache)
    kept = names(tmp_path)
    assert c.ref.sha256 in kept, "what was just written stays, whatever the clocks of others say"
    assert len(kept) == 2


@given(st.integers(0, 60), st.lists(st.integers(1, 40), max_size=30))
def test_the_limit_holds_and_the_order_is_that_of_use(limit: int, sizes: list[int]) -> None:
    """Against a list in order of use. Objects of one size are the same; what is not ours stays and does not count."""
    held: list[Source] = []
    sources = {size: Source(bytes([size]) * size) for size in sizes}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "not-ours.txt").write_bytes(bytes(1000))
        for size in sizes:
            source = sources[size]
            assert source.got_from(ObjectCache(Path(directory), limit)) == (source in held)
            if source in held:
                held.remove(source)
                held.append(source)
            elif size <= limit:
                while sum(each.ref.bytes for each in held) + size > limit:
                    held.pop(0)
                held.append(source)
            assert names(Path(directory)) == {each.ref.sha256 for each in held} | {"not-ours.txt"}


def test_objects_are_few_however_small_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each download looks at all files: of weeks of small versions, that took longer than the rest of an update."""
    monkeypatch.setattr(folder, "MOST_OBJECTS", 3)
    cache = ObjectCache(tmp_path, MANY)
    a, b, c, d, e = (Source(letter) for letter in (b"a", b"b", b"c", b"d", b"e"))
    assert not any(source.got_from(cache) for source in (a, b, c))
    assert a.got_from(cache)
    assert not any(source.got_from(cache) for source in (d, e))
    assert names(tmp_path) == {source.ref.sha256 for source in (a, d, e)}


def test_a_cache_of_no_size_makes_no_directory(tmp_path: Path) -> None:
    source, cache = Source(b"one"), ObjectCache(tmp_path / "unused", 0)
    assert [source.got_from(cache), source.got_from(cache)] == [False, False]
    assert not (tmp_path / "unused").exists()


# Problems of the cache


def expect_without(
    caplog: pytest.LogCaptureFixture, cache: ObjectCache, words: str, before: Callable[[], None] = lambda: None
) -> None:
    """Objects come though none is kept, and the log says so once."""
    for data in (b"one", b"two"):
        source = Source(data)
        source.before = before
        assert not source.got_from(cache)
        assert source.fetched == 1
    [record] = caplog.records
    assert words in record.getMessage()
    assert record.levelno == logging.WARNING


def test_a_directory_of_another_user_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "theirs"
    directory.mkdir(mode=0o777)
    if os.geteuid() == 0:
        os.chown(directory, 12345, -1)
    else:
        directory = Path("/")
    before = names(directory)
    expect_without(caplog, ObjectCache(directory, MANY), "belongs to user")
    assert names(directory) == before
    assert "such as a new one below it" in caplog.text, "as in a volume, whose own folder belongs to root"
    assert not Source(b"three").got_from(ObjectCache(directory / "new", MANY))
    assert len(names(directory / "new")) == 1


def test_a_directory_that_vanishes_during_the_download(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "cache"
    cache = ObjectCache(directory, MANY)
    expect_without(caplog, cache, "No such file", lambda: shutil.rmtree(directory, ignore_errors=True))
    source = Source(b"three")
    assert [source.got_from(cache), source.got_from(cache)] == [False, True]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_without_write_permission(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = Source(b"kept")
    assert not kept.got_from(ObjectCache(tmp_path, MANY))
    tmp_path.chmod(0o500)
    try:
        cache = ObjectCache(tmp_path, MANY)
        expect_without(caplog, cache, "of this user")
        assert kept.got_from(cache)
    finally:
        tmp_path.chmod(0o700)


LIMITED = """
import resource, sys
from pathlib import Path
from tests.bucket.test_cache import MANY, ObjectCache, Source, names
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
cache, small, large = ObjectCache(Path(sys.argv[1]), MANY), Source(bytes(1000)), Source(bytes(1001))
print([each.got_from(cache) for each in (large, large, small, small)], names(Path(sys.argv[1])) == {small.ref.sha256})
"""

FULL = """
import os, sys
from pathlib import Path
from tests.bucket.test_cache import MANY, ObjectCache, Source, names
folder = Path(sys.argv[1])
(folder / "somebody-else").write_bytes(bytes(512 << 10))
objects = [Source(os.urandom(200 << 10)) for _ in range(3)]
# Two fit, the third in place of the first.
print([each.got_from(ObjectCache(folder, MANY)) for each in (*objects, *objects[:0:-1])])
print(names(folder) == {"somebody-else", *(each.ref.sha256 for each in objects[1:])})
cache, large, during = ObjectCache(folder, MANY), Source(bytes(600 << 10)), []
large.before = lambda: during.append(names(folder))
for _ in range(2):
    cache.get(large.ref, large)
# No lock either: others need not wait for what will not be kept.
print(large.fetched, during == [{"somebody-else"}] * 2, names(folder) == {"somebody-else"})
"""

READ_ONLY = """
import subprocess, sys
from pathlib import Path
from tests.bucket.test_cache import MANY, ObjectCache, Source, names
folder, kept, new = Path(sys.argv[1]), Source(b"kept"), Source(b"new")
kept.got_from(ObjectCache(folder, MANY))
subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
cache = ObjectCache(folder, MANY)
print([each.got_from(cache) for each in (new, kept, new)], names(folder) == {kept.ref.sha256})
"""


def script(code: str, folder: Path, *, on_tmpfs: bool) -> tuple[list[str], list[str]]:
    """Lines of stdout and of stderr, which has the warnings."""
    prefix = small_disk(folder, "1m") if on_tmpfs else []
    done = run_python("-c", code, str(folder), prefix=prefix)
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    output, warnings = script(LIMITED, tmp_path, on_tmpfs=False)
    assert output == ["[False, False, False, True] True"]
    assert len(warnings) == 1
    assert "ulimit -f" in warnings[0]


def test_a_full_disk(tmp_path: Path) -> None:
    output, warnings = script(FULL, tmp_path, on_tmpfs=True)
    assert output == ["[False, False, False, True, True]", "True", "2 True True"]
    assert len(warnings) == 2, "one of each cache that met the full disk"
    assert all("lower cache_bytes" in line for line in warnings)


def test_a_mount_that_is_read_only(tmp_path: Path) -> None:
    output, warnings = script(READ_ONLY, tmp_path, on_tmpfs=True)
    assert output == ["[False, True, False] True"]
    assert len(warnings) == 1
    assert "writable directory" in warnings[0]


# Where it is


@pytest.mark.parametrize(
    ("given", "cache_home", "expected"),
    [
        ({"bucket": "s3://bucket/run"}, "/var/xdg", "/var/xdg/vllm-delta-sync"),
        ({"bucket": "hf://buckets/me/runs"}, "", "/home/me/.cache/vllm-delta-sync"),
        ({"bucket": "s3://bucket/run", "cache_dir": "/mine"}, "/var/xdg", "/mine"),
        ({"bucket": "s3://bucket/run", "cache_bytes": 0}, "/var/xdg", None),
        ({"bucket": "/bucket", "cache_dir": "/mine", "cache_bytes": 0}, "/var/xdg", None),
        ({"bucket": "/bucket"}, "/var/xdg", None),
        ({"bucket": "file:///bucket", "cache_dir": "/mine"}, "/var/xdg", "/mine"),
    ],
)
def test_on_by_default_where_the_bucket_is_far(
    given: dict[str, Any], cache_home: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home)
    monkeypatch.setenv("HOME", "/home/me")
    assert load_settings(given, {}).cache_folder() == (None if expected is None else Path(expected))
