"""What a directory over NFS has to stand: forgotten handles, lost replies, failed syncs, silly names, other clocks."""

import errno
import os
import time
from collections.abc import Callable
from io import BufferedIOBase
from pathlib import Path

import pytest

from vllm_delta_sync.bucket import local as local_module
from vllm_delta_sync.bucket.local import STAGING, STALE_TRIES, LocalBucket
from vllm_delta_sync.errors import ConflictError, NotFoundError, StoreError, UsageError


class Calls:
    """Counts calls of a function of ``os``, and lets some of them go wrong.

    Attributes:
        count: how often it was called.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, fail: Callable[[int, Callable[[], object]], object]):
        real = getattr(os, name)
        self.count = 0

        def call(*args: object, **more: object) -> object:
            self.count += 1
            return fail(self.count, lambda: real(*args, **more))

        monkeypatch.setattr(os, name, call)


def stale_at(*numbers: int) -> Callable[[int, Callable[[], object]], object]:
    """Calls of these numbers find that the server has forgotten a handle."""

    def fail(number: int, real: Callable[[], object]) -> object:
        if number in numbers:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real()

    return fail


def lost_reply(error: type[OSError]) -> Callable[[int, Callable[[], object]], object]:
    """The first call works, and the client asks again because it did not hear of it."""

    def fail(number: int, real: Callable[[], object]) -> object:
        if number == 1:
            real()
            raise error("asked twice")
        return real()

    return fail


@pytest.mark.parametrize(("name", "at"), [("open", 1), ("open", 2), ("open", 3), ("stat", 1), ("fstat", 1)])
def test_forgotten_handles_are_looked_up(
    name: str, at: int, local: LocalBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.put("a/b/key", b"what is there")
    for read in (lambda: local.get("a/b/key"), lambda: local.get_range("a/b/key", 0, 99)):
        with monkeypatch.context() as patch:
            calls = Calls(patch, name, stale_at(*range(at, at + STALE_TRIES - 1)))
            assert read() == b"what is there"
            assert calls.count >= STALE_TRIES
    with monkeypatch.context() as patch:
        Calls(patch, name, stale_at(at))
        assert local.stat("a/b/key").bytes == 13
        assert [info.key for info in local.list()] == ["a/b/key"]


def test_an_object_replaced_while_it_is_read_is_read_from_the_beginning(
    local: LocalBucket, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.put("key", b"old " * 3_000_000)
    taken: list[int] = []
    real = open

    class Forgotten:
        """A file whose server forgets it at the first read."""

        def __init__(self, file: BufferedIOBase) -> None:
            self._file = file

        def __enter__(self) -> "Forgotten":
            return self

        def __exit__(self, *rest: object) -> None:
            self._file.close()

        def read(self, size: int) -> bytes:
            taken.append(size)
            if len(taken) == 1:
                LocalBucket(root).put("key", b"new " * 2_000_000)
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return self._file.read(size)

    def opened(path: object, mode: str = "r") -> object:
        file = real(path, mode)  # type: ignore[call-overload]
        return Forgotten(file) if isinstance(path, int) and mode == "rb" else file

    monkeypatch.setattr(local_module, "open", opened, raising=False)
    assert local.get("key") == b"new " * 2_000_000


def test_a_handle_that_stays_forgotten_is_a_store_error(local: LocalBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    local.put("a/key", b"x")
    calls: list[Callable[[], object]] = [
        lambda: local.get("a/key"),
        lambda: local.stat("a/key"),
        lambda: list(local.list()),
        lambda: local.put("a/key", b"y"),
        lambda: local.delete("a/key"),
    ]
    for call in calls:
        with monkeypatch.context() as patch:
            counted = Calls(patch, "open", stale_at(*range(1, 100)))
            with pytest.raises(StoreError, match="mount it again"):
                call()
            assert counted.count == STALE_TRIES
    assert local.get("a/key") == b"x"


@pytest.mark.parametrize("if_absent", [False, True])
def test_a_put_over_forgotten_handles(
    if_absent: bool, local: LocalBucket, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.put("a/other", b"x")
    for name in ("open", "stat", "link", "replace", "fsync"):
        for at in range(1, 6):
            with monkeypatch.context() as patch:
                Calls(patch, name, stale_at(at))
                local.put("a/key", b"what was put", if_absent=if_absent)
            assert local.get("a/key") == b"what was put"
            assert list((root / STAGING).iterdir()) == []
            local.delete("a/key")
            assert [info.key for info in local.list()] == ["a/other"]


def test_a_name_whose_reply_was_lost_was_given(local: LocalBucket, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local.put("other", b"x")
    Calls(monkeypatch, "link", lost_reply(FileExistsError))
    local.put("key", b"mine", if_absent=True)
    assert local.get("key") == b"mine"
    with pytest.raises(ConflictError):
        local.put("key", b"theirs", if_absent=True)
    Calls(monkeypatch, "replace", lost_reply(FileNotFoundError))
    local.put("key", b"new")
    assert local.get("key") == b"new"
    assert list((root / STAGING).iterdir()) == []


def test_link_of_another_writer_is_a_conflict(local: LocalBucket, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def late(*args: object, **more: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", real)
            LocalBucket(root).put("key", b"theirs", if_absent=True)
        real(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(ConflictError):
        local.put("key", b"mine", if_absent=True)
    assert local.get("key") == b"theirs"


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("if_absent", [False, True])
def test_an_error_of_fsync_fails_the_put_and_is_not_tried_again(
    at: int, if_absent: bool, local: LocalBucket, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.put("a/other", b"x")
    synced: list[int] = []

    def fail(number: int, real: Callable[[], object]) -> object:
        synced.append(number)
        if number == at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real()

    with monkeypatch.context() as patch:
        Calls(patch, "fsync", fail)
        with pytest.raises(StoreError, match="cannot write key 'a/key'"):
            local.put("a/key", b"bytes that may be lost", if_absent=if_absent)
    assert synced == list(range(1, at + 1))
    assert list((root / STAGING).iterdir()) == []
    if at == 1:
        with pytest.raises(NotFoundError):
            local.get("a/key")
    # Whoever tries again writes another file, or finds the first made durable.
    with monkeypatch.context() as patch:
        again = Calls(patch, "fsync", lambda number, real: real())
        if at == 2 and if_absent:
            with pytest.raises(ConflictError):
                local.put("a/key", b"bytes that may be lost", if_absent=True)
            assert again.count == 1
        else:
            local.put("a/key", b"bytes that may be lost", if_absent=if_absent)
            assert again.count == 2
    assert local.get("a/key") == b"bytes that may be lost"


def test_remains_of_removed_files_are_no_objects(local: LocalBucket, root: Path) -> None:
    local.put("a/key", b"x")
    silly = ".nfs00000000012345670000001a"
    (root / "a" / silly).write_bytes(b"removed while somebody had it open")
    (root / "a" / ".hidden").write_bytes(b"")
    assert [info.key for info in local.list()] == ["a/.hidden", "a/key"]
    for call in (lambda: local.put(f"a/{silly}", b"x"), lambda: local.get(f"a/{silly}")):
        with pytest.raises(UsageError, match="choose another"):
            call()


def test_the_sweep_goes_by_the_clock_of_the_store(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LocalBucket(root).put("key", b"x")
    (root / STAGING / "fresh").write_bytes(b"of a writer that is at work")
    for skew in (-30 * 24 * 3600, 30 * 24 * 3600):
        monkeypatch.setattr(time, "time", lambda skew=skew: 1.7e9 + skew)
        LocalBucket(root).put("key", b"y")
        assert [path.name for path in (root / STAGING).iterdir()] == ["fresh"]
