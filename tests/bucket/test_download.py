"""Large objects by ranges: every byte in its place, what is there stays, and nothing is written once it has ended."""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.samples import ref_of
from vllm_delta_sync.bucket import ranged as downloads
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware
from vllm_delta_sync.bucket.ranged import download
from vllm_delta_sync.bucket.verified import download_object
from vllm_delta_sync.errors import DigestError, NotFoundError, UnavailableError
from vllm_delta_sync.format.manifest import ObjectRef, object_key

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0
PIECE = 1000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PIECE_BYTES", PIECE)


class Counting(BucketMiddleware):
    """Counts ranges by the number of their piece; ``before`` is called with it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(LocalBucket(folder))
        self.pieces: Counter[int] = Counter()
        self.before: Callable[[int], object] = lambda piece: None
        self.most = self._now = 0
        self._lock = threading.Lock()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._lock:
            self.pieces[start // PIECE] += 1
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            self.before(start // PIECE)
            return self._inner.get_range(key, start, length)
        finally:
            with self._lock:
                self._now -= 1


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    return Counting(tmp_path / "store")


def put(store: Counting, size: int) -> tuple[ObjectRef, bytes]:
    data = os.urandom(size)
    ref = ref_of(data)
    store.put(ref.key, data)
    return ref, data


def journal_of(ref: ObjectRef, *numbers: int) -> bytes:
    return f"pieces of {PIECE} of {ref.bytes} {ref.key}\n".encode() + b"".join(b"%d\n" % number for number in numbers)


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 20 * PIECE + 7])
@pytest.mark.parametrize("journal", [False, True])
def test_all_bytes_in_their_place(store: Counting, tmp_path: Path, size: int, journal: bool) -> None:
    ref, data = put(store, size)
    path = tmp_path / "file"
    path.write_bytes(bytes(30 * PIECE))
    noted = tmp_path / "journal" if journal else None
    assert not download(store, ref.key, size, path, connections=4, journal=noted)
    assert path.read_bytes() == data
    assert store.pieces == Counter(range(-(-size // PIECE)))
    assert store.most <= 4


def test_ranges_are_asked_for_at_once(store: Counting, tmp_path: Path) -> None:
    ref, data = put(store, 6 * PIECE)
    meet = threading.Barrier(3)
    store.before = lambda piece: meet.wait(SECONDS)
    download(store, ref.key, ref.bytes, tmp_path / "file", connections=3)
    assert store.most == 3
    assert (tmp_path / "file").read_bytes() == data


def test_a_failing_range_ends_the_others(store: Counting, tmp_path: Path) -> None:
    """The others are under way, or not yet begun; what they bring is not written any more."""
    ref, _ = put(store, 10 * PIECE)
    under_way = threading.Barrier(3)
    threads: dict[int, threading.Thread] = {}

    def before(piece: int) -> None:
        threads[piece] = threading.current_thread()
        under_way.wait(SECONDS)
        if piece == 1:
            raise UnavailableError("cut")
        threads[1].join(SECONDS)

    store.before = before
    path, journal = tmp_path / "file", tmp_path / "journal"
    with pytest.raises(UnavailableError, match="cut"):
        download(store, ref.key, ref.bytes, path, connections=3, journal=journal)
    assert store.pieces == Counter([0, 1, 2])
    assert path.read_bytes() == bytes(10 * PIECE)
    assert journal.read_bytes() == journal_of(ref)


def test_an_object_that_is_shorter_than_listed(store: Counting, tmp_path: Path) -> None:
    ref, _ = put(store, 3 * PIECE)
    with pytest.raises(DigestError, match="truncated"):
        download(store, ref.key, 3 * PIECE + 1, tmp_path / "file")
    with pytest.raises(NotFoundError):
        download(store, object_key("0" * 64), PIECE, tmp_path / "file")


def test_a_file_that_cannot_be_written_is_the_caller_s(store: Counting, tmp_path: Path) -> None:
    ref, _ = put(store, PIECE)
    (tmp_path / "target").write_bytes(b"theirs")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none" / "file", tmp_path, tmp_path / "link", tmp_path / "pipe"):
        with pytest.raises(OSError):
            download(store, ref.key, ref.bytes, path)
        with pytest.raises(OSError):
            download(store, ref.key, ref.bytes, tmp_path / "good", journal=path)
    assert (tmp_path / "target").read_bytes() == b"theirs"
    assert not store.pieces


# Going on


def broken_off(store: Counting, ref: ObjectRef, path: Path, journal: Path, after: int) -> None:
    """Fetch the first pieces, and no more."""

    def before(piece: int) -> None:
        if piece >= after:
            raise UnavailableError("cut")

    store.before = before
    with pytest.raises(UnavailableError):
        download(store, ref.key, ref.bytes, path, connections=1, journal=journal)
    store.before = lambda piece: None
    store.pieces.clear()


@pytest.mark.parametrize("torn", [b"", b"4", b"9"])
def test_what_is_there_is_not_fetched_again(store: Counting, tmp_path: Path, torn: bytes) -> None:
    ref, data = put(store, 9 * PIECE + 1)
    path, journal = tmp_path / "file", tmp_path / "journal"
    broken_off(store, ref, path, journal, after=4)
    assert journal.read_bytes() == journal_of(ref, 0, 1, 2, 3)
    with journal.open("ab") as file:
        file.write(torn)
    # Once more, so that what is noted behind a torn record can be read too.
    broken_off(store, ref, path, journal, after=6)
    assert journal.read_bytes() == journal_of(ref, 0, 1, 2, 3, 4, 5)
    assert download(store, ref.key, ref.bytes, path, journal=journal)
    assert path.read_bytes() == data
    assert store.pieces == Counter(range(6, 10))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path, journal, ref: journal.write_bytes(b""),
        lambda path, journal, ref: journal.write_bytes(journal_of(ref)[:-1]),
        lambda path, journal, ref: journal.write_bytes(journal_of(ref, 0, 1, 10)),
        lambda path, journal, ref: journal.write_bytes(journal_of(ref, 0, -1)),
        lambda path, journal, ref: journal.write_bytes(journal_of(ref, 0) + b"\n1\n"),
        lambda path, journal, ref: journal.write_bytes(journal_of(ref, 0) + bytes(100)),
        lambda path, journal, ref: journal.write_bytes(journal_of(ref, 0) + b"\0\0\n"),
        lambda path, journal, ref: journal.write_bytes(journal_of(ref, 0).replace(b" 9001 ", b" 9002 ")),
        lambda path, journal, ref: journal.write_bytes(journal_of(ref, 0).replace(b" 1000 ", b" 1001 ")),
        lambda path, journal, ref: journal.write_bytes(journal_of(ref_of(bytes(9001)), 0)),
        lambda path, journal, ref: journal.unlink(),
        lambda path, journal, ref: path.unlink(),
        lambda path, journal, ref: os.truncate(path, 9000),
    ],
)
def test_a_journal_of_something_else_counts_for_nothing(
    store: Counting, tmp_path: Path, spoil: Callable[[Path, Path, ObjectRef], object]
) -> None:
    ref, data = put(store, 9 * PIECE + 1)
    path, journal = tmp_path / "file", tmp_path / "journal"
    broken_off(store, ref, path, journal, after=4)
    spoil(path, journal, ref)
    took_over = download(store, ref.key, ref.bytes, path, connections=1, journal=journal)
    assert path.read_bytes() == data
    if journal_of(ref, 0) + bytes(100) not in journal.read_bytes():
        assert took_over == (store.pieces != Counter(range(10)))
    assert journal.read_bytes().startswith(journal_of(ref))
    assert sorted(journal.read_bytes().splitlines()[1:]) == [b"%d" % number for number in range(10)]


@pytest.mark.parametrize("truth", [True, False])
def test_pieces_that_are_wrong_are_found_and_fetched_once_more(store: Counting, tmp_path: Path, truth: bool) -> None:
    """The journal says that they are there, as after a power failure. Else the object itself is damaged."""
    ref, data = put(store, 9 * PIECE)
    path, journal = tmp_path / "file", tmp_path / "journal"
    broken_off(store, ref, path, journal, after=4)
    with path.open("r+b") as file:
        file.write(bytes(PIECE))
    if not truth:
        store.put(ref.key, data[::-1])

    def read() -> bytes | None:
        return data if path.read_bytes() == data else None

    if truth:
        assert download_object(store, ref, path, read, journal) == data
    else:
        with pytest.raises(DigestError, match="damaged"):
            download_object(store, ref, path, read, journal)
        assert not path.exists()
        assert not journal.exists()
    assert store.pieces == Counter(range(9)) + Counter(range(4, 9))


INTERRUPTED = """
import os, signal, sys, threading
from pathlib import Path
from tests.bucket import test_download as test
from vllm_delta_sync.bucket import ranged as downloads

downloads.PIECE_BYTES = test.PIECE
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background shell takes away
folder, key = Path(sys.argv[1]), sys.argv[2]
store = test.Counting(folder / "store")

def before(piece):
    if piece >= 3:
        os.write(1, b"hangs\\n")  # at once, unlike what two threads print
        threading.Event().wait()

store.before = before
try:
    downloads.download(store, key, 10 * test.PIECE, folder / "file", connections=2, journal=folder / "journal")
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_ends_it_at_once_and_keeps_what_is_there(store: Counting, tmp_path: Path) -> None:
    ref, data = put(store, 10 * PIECE)
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), ref.key]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(2)] == ["hangs\n"] * 2
            process.send_signal(signal.SIGINT)
            # Two ranges still hang.
            assert process.stdout.readline() == "interrupted\n"
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()
    assert download(store, ref.key, ref.bytes, tmp_path / "file", journal=tmp_path / "journal")
    assert store.pieces == Counter(range(3, 10))
    assert (tmp_path / "file").read_bytes() == data
