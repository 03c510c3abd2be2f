"""Large objects in the cache of one node: by ranges, resumed after a crash, and once for all processes."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from tests.bucket.test_cache import MANY, SECONDS, Source, names, script
from tests.support.running import context_of_processes, eventually, working
from tests.support.samples import ref_of
from vllm_delta_sync.bucket import ranged as downloads
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware
from vllm_delta_sync.bucket.ranged import CONNECTIONS
from vllm_delta_sync.cache import ObjectCache, object_cache
from vllm_delta_sync.cache.folder import STALE_SECONDS
from vllm_delta_sync.errors import DigestError, NotFoundError, UnavailableError
from vllm_delta_sync.format.manifest import ObjectRef, object_key

context_of_processes(__name__)
PIECE = 300_000
SIZE = 4 * PIECE + 1
SMALL = 1 << 20
"""Below which nothing of a download is resumed here, where pieces are small too."""


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(object_cache, "RESUMED_BYTES", SMALL)


def left_of(source: Source) -> set[str]:
    return {f"{source.ref.sha256}.part", f"{source.ref.sha256}.pieces"}


def break_off(directory: Path, source: Source, after: int = 2, limit: int = MANY) -> None:
    """Download the first pieces, and fail once they are noted: a failure stops what is still being written."""
    count = iter(range(after))
    journal = directory / f"{source.ref.sha256}.pieces"

    def cut() -> None:
        if next(count, None) is None:
            # A line for each piece, after one that says what they are pieces of.
            eventually(lambda: journal.read_bytes().count(b"\n") > after)
            raise UnavailableError("cut")

    source.before = cut
    with pytest.raises(UnavailableError):
        ObjectCache(directory, limit).get(source.ref, source)
    source.before = lambda: None


@pytest.fixture
def source() -> Source:
    return Source(os.urandom(SIZE))


# Among processes


class Logged(BucketMiddleware):
    """Writes a line to a file of all processes for each read."""

    def __init__(self, folder: Path, log: Path) -> None:
        super().__init__(LocalBucket(folder))
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        os.write(self._log, f"{key} whole\n".encode())
        return super().get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        os.write(self._log, f"{key} {start}\n".encode())
        return super().get_range(key, start, length)


def serve(pipe: Connection, folder: Path, limit: int, refs: list[ObjectRef], mapped: bool) -> None:
    """A rank of a server, which reads objects when it is told to."""
    downloads.PIECE_BYTES, object_cache.RESUMED_BYTES = PIECE, SMALL
    cache, bucket = ObjectCache(folder / "cache", limit), Logged(folder / "store", folder / "log")
    pipe.send("ready")
    pipe.recv()
    for ref in refs:
        file = cache.open(ref, bucket) if mapped else None
        data = cache.get(ref, bucket) if file is None else bytes(np.memmap(file, np.uint8, mode="r"))
        pipe.send(sha256(data).hexdigest() == ref.sha256)


def test_two_servers_of_two_ranks_fetch_each_object_once(tmp_path: Path) -> None:
    contents = [os.urandom(size) for size in (1000, 5 * PIECE + 1, PIECE, PIECE - 1)]
    refs = [ref_of(data) for data in contents]
    for ref, data in zip(refs, contents, strict=True):
        LocalBucket(tmp_path / "store").put(ref.key, data)
    with (
        working(2, serve, tmp_path, MANY, refs, False) as reading,
        working(2, serve, tmp_path, MANY, refs, True) as mapping,
    ):
        ranks = [*reading, *mapping]
        assert [rank.hear() for rank in ranks] == ["ready"] * 4
        for rank in ranks:
            rank.pipe.send("go")
        for rank in ranks:
            assert [rank.hear() for _ in refs] == [True] * 4
    asked = Counter((tmp_path / "log").read_text().splitlines())
    assert set(asked.values()) == {1}
    starts = [f"{refs[1].key} {start}" for start in range(0, refs[1].bytes, PIECE)]
    assert asked.keys() >= set(starts)
    assert names(tmp_path / "cache") == {ref.sha256 for ref in refs}


def doomed(pipe: Connection, folder: Path, ref: ObjectRef, pieces: int, hangs: bool) -> None:
    """Downloads, and says so after a number of pieces, when all connections hang, or some pieces before they do."""
    downloads.PIECE_BYTES, object_cache.RESUMED_BYTES = PIECE, SMALL
    lock, begun = threading.Lock(), iter(range(1, MANY))

    class Doomed(Logged):
        def get_range(self, key: str, start: int, length: int) -> bytes:
            with lock:
                number = next(begun)
                if number == pieces + (CONNECTIONS if hangs else 0):
                    pipe.send("now")
            if number > pieces + (0 if hangs else CONNECTIONS // 2):
                threading.Event().wait()
            return super().get_range(key, start, length)

    ObjectCache(folder / "cache", MANY).get(ref, Doomed(folder / "store", folder / "log"))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("hangs", [True, False])
def test_a_killed_download_is_gone_on_with_by_another_process(tmp_path: Path, hangs: bool) -> None:
    """No piece is fetched again but those that were under way."""
    data = os.urandom(30 * PIECE - 7)
    ref = ref_of(data)
    LocalBucket(tmp_path / "store").put(ref.key, data)
    total = 30
    with working(1, doomed, tmp_path, ref, total // 2, hangs) as [process]:
        assert process.hear() == "now"
    assert names(tmp_path / "cache") == {ref.sha256 + suffix for suffix in (".part", ".pieces", ".lock")}
    fetched = (tmp_path / "log").read_text().splitlines()
    (tmp_path / "log").unlink()
    assert ObjectCache(tmp_path / "cache", MANY).get(ref, Logged(tmp_path / "store", tmp_path / "log")) == data
    again = (tmp_path / "log").read_text().splitlines()
    assert len(set(again) & set(fetched)) <= 2 * CONNECTIONS
    assert len(set(again) | set(fetched)) == total
    assert not hangs or len(again) == total - total // 2
    assert names(tmp_path / "cache") == {ref.sha256}


# Going on


def allocate_by_writing(file: int, start: int, length: int) -> None:
    """As glibc does it on a file system without fallocate, such as NFS before 4.2: what is there is read first."""
    if os.fstat(file).st_size:
        os.pread(file, 1, start)
    else:
        os.pwrite(file, b"\0", start + length - 1)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("allocate", [os.posix_fallocate, allocate_by_writing])
def test_a_failed_download_is_gone_on_with(
    tmp_path: Path, source: Source, allocate: Callable[[int, int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    break_off(tmp_path, source)
    assert names(tmp_path) == left_of(source)
    other = Source(os.urandom(SIZE))
    assert not other.got_from(ObjectCache(tmp_path, MANY))
    assert names(tmp_path) == {other.ref.sha256} | left_of(source), "it is not swept at once"
    source.pieces.clear()
    assert ObjectCache(tmp_path, MANY).get(source.ref, source) == source.data
    assert set(source.pieces.values()) == {1}
    assert source.fetched == 0
    assert len(source.pieces) <= 3
    assert names(tmp_path) == {other.ref.sha256, source.ref.sha256}
    assert (tmp_path / source.ref.sha256).stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("small_pieces")
def test_what_nobody_wants_any_more_goes_after_a_day(tmp_path: Path, source: Source) -> None:
    break_off(tmp_path, source)
    for name, left in (("young", True), ("old", False)):
        when = time.time() - STALE_SECONDS + (60 if left else -60)
        for path in tmp_path.iterdir():
            if path.name in left_of(source):
                os.utime(path, (when, when))
        other = Source(name.encode())
        assert not other.got_from(ObjectCache(tmp_path, MANY))
        assert (names(tmp_path) >= left_of(source)) == left
        assert not left or names(tmp_path) == {other.ref.sha256} | left_of(source)
    assert not names(tmp_path) & left_of(source)


@pytest.mark.usefixtures("small_pieces")
def test_a_damaged_object_leaves_nothing(tmp_path: Path, source: Source) -> None:
    right, source.data = source.data, source.data[::-1]
    cache = ObjectCache(tmp_path, MANY)
    for read in (cache.get, cache.open):
        with pytest.raises(DigestError, match="damaged"):
            read(source.ref, source)
        assert names(tmp_path) == set()
    source.data = right[:-1]
    with pytest.raises(DigestError, match="truncated"):
        cache.get(source.ref, source)
    missing = ObjectRef(key=object_key("0" * 64), bytes=SIZE, sha256="0" * 64)
    with pytest.raises(NotFoundError):
        cache.get(missing, source)
    assert names(tmp_path) == set()


# Room


@pytest.mark.usefixtures("small_pieces")
def test_what_was_begun_counts_and_goes_in_its_turn(tmp_path: Path, source: Source) -> None:
    limit = 3 * SIZE
    older, newer = Source(os.urandom(SIZE)), Source(os.urandom(SIZE))
    older.got_from(ObjectCache(tmp_path, limit))
    break_off(tmp_path, source, limit=limit)
    newer.got_from(ObjectCache(tmp_path, limit))
    assert names(tmp_path) == {older.ref.sha256, newer.ref.sha256} | left_of(source)
    more = [Source(os.urandom(SIZE)) for _ in range(2)]
    more[0].got_from(ObjectCache(tmp_path, limit))
    assert names(tmp_path) == {newer.ref.sha256, more[0].ref.sha256} | left_of(source)
    more[1].got_from(ObjectCache(tmp_path, limit))
    assert names(tmp_path) == {newer.ref.sha256, *(each.ref.sha256 for each in more)}
    # What was begun before takes no room of its own twice.
    break_off(tmp_path, source, limit=limit)
    kept = names(tmp_path)
    assert len(kept) == 4
    ObjectCache(tmp_path, limit).get(source.ref, source)
    assert names(tmp_path) == kept - left_of(source) | {source.ref.sha256}


@pytest.mark.usefixtures("small_pieces")
def test_what_comes_in_just_now_is_not_removed(tmp_path: Path, source: Source) -> None:
    limit = SIZE
    others = [Source(os.urandom(SIZE)) for _ in range(2)]

    lock = threading.Lock()

    def meanwhile() -> None:
        with lock:
            while others:
                assert not others.pop().got_from(ObjectCache(tmp_path, limit))
                assert names(tmp_path) >= left_of(source)

    source.before = meanwhile
    assert not source.got_from(ObjectCache(tmp_path, limit))
    assert names(tmp_path) == {source.ref.sha256}


@pytest.mark.usefixtures("small_pieces")
def test_an_open_file_stays_when_the_cache_lets_go(tmp_path: Path, source: Source) -> None:
    cache = ObjectCache(tmp_path, SIZE)
    files = [cache.open(source.ref, source), cache.open(source.ref, source)]
    assert set(source.pieces.values()) == {1}
    Source(os.urandom(SIZE)).got_from(cache)
    assert source.ref.sha256 not in names(tmp_path)
    for file in files:
        assert file is not None
        with file:
            data = np.memmap(file, np.uint8, mode="r")
        assert bytes(data) == source.data
        assert not data.flags.writeable
    assert ObjectCache(tmp_path, SIZE - 1).open(source.ref, source) is None


FULL = """
import sys
from pathlib import Path
from tests.bucket import test_cache_large as test
from vllm_delta_sync.bucket import ranged as downloads

downloads.PIECE_BYTES, test.object_cache.RESUMED_BYTES = test.PIECE, test.SMALL
folder, small, large = Path(sys.argv[1]), test.Source(bytes(600 << 10)), test.Source(bytes(1 << 20))
cache = test.ObjectCache(folder, test.MANY)
print([each.got_from(cache) for each in (small, small, large, large)], large.fetched, dict(large.pieces))
print(cache.open(large.ref, large), test.names(folder) <= {small.ref.sha256})
"""


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    """No piece is fetched for a file that cannot be."""
    output, warnings = script(FULL, tmp_path, on_tmpfs=True)
    assert output == ["[False, True, False, False] 2 {}", "None True"]
    assert len(warnings) == 1
    assert "lower cache_bytes" in warnings[0]


# Waiting


@pytest.fixture
def slow(tmp_path: Path, source: Source) -> Iterator[threading.Semaphore]:
    """A download of one piece at a time, each when it is let."""
    let, begun = threading.Semaphore(0), threading.Event()

    def wait() -> None:
        begun.set()
        let.acquire(timeout=SECONDS)

    source.before = wait
    thread = threading.Thread(target=ObjectCache(tmp_path, MANY).get, args=(source.ref, source))
    thread.start()
    assert begun.wait(SECONDS)
    yield let
    let.release(100)
    thread.join(SECONDS)


class Clock:
    """In place of the module ``time``, for one that waits.

    Attributes:
        now: what it shows.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._looks = threading.Semaphore(0)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self._looks.release()
        time.sleep(0.001)

    def wait_for_looks(self) -> None:
        """Until two looks have ended, so that one of them began after this call."""
        while self._looks.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self._looks.acquire(timeout=SECONDS)


@pytest.mark.usefixtures("small_pieces")
def test_who_waits_goes_on_waiting_while_something_comes(
    tmp_path: Path, source: Source, slow: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than it would wait for nothing."""
    journal = tmp_path / f"{source.ref.sha256}.pieces"
    own, got, clock = Source(source.data), list[bytes](), Clock()
    monkeypatch.setattr(object_cache, "time", clock)
    monkeypatch.setattr(object_cache, "STALL_SECONDS", 10.0)
    cache = ObjectCache(tmp_path, MANY)
    waiting = threading.Thread(target=lambda: got.append(cache.get(own.ref, own)))
    waiting.start()
    for noted in range(4):
        # What has come so far has been seen.
        eventually(lambda: journal.read_bytes().count(b"\n") > noted)  # noqa: B023 - called here
        clock.wait_for_looks()
        clock.now += 6.0
        clock.wait_for_looks()
        slow.release()
    slow.release()
    waiting.join(SECONDS)
    assert got == [source.data]
    assert not own.pieces
    assert own.fetched == 0


@pytest.mark.usefixtures("small_pieces", "slow")
def test_none_waits_for_a_download_at_rest(
    tmp_path: Path, source: Source, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Source(source.data)
    monkeypatch.setattr(object_cache, "STALL_SECONDS", 0.2)
    assert ObjectCache(tmp_path, MANY).get(own.ref, own) == source.data
    assert own.fetched == 1
    assert "and nothing has arrived for" in caplog.text
