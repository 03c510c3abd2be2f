"""Directory buckets whose names are links, pipes, sockets and devices, or become so while they are read."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.security.build import untouched
from tests.security.reader import Reader
from tests.support.written import Written
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import NotFoundError, StoreError

SECRET = b"not-for-readers-7f3a"
GETS = 3000

Swap = Callable[[Path], None]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory with a secret under every name that is read."""
    folder = tmp_path / "outside"
    for name in ("HEAD.json", "run.json", "0000000004.json", "x"):
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(SECRET)
    return folder


def linked(path: Path, outside: Path) -> None:
    path.unlink()
    path.symlink_to(outside / "x")


def dangling(path: Path, outside: Path) -> None:
    path.unlink()
    path.symlink_to(outside / "nothing")


def looping(path: Path, outside: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def to_zero(path: Path, outside: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def pipe(path: Path, outside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def listening(path: Path, outside: Path) -> None:
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def device(path: Path, outside: Path) -> None:
    path.unlink()
    try:
        os.mknod(path, 0o20666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root makes devices")


ODD = [linked, dangling, looping, to_zero, pipe, listening, device]
PLACES = ["HEAD.json", "versions/0000000004.json", "run.json", "object"]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("place", PLACES)
def test_an_object_that_is_no_file(
    place: str, odd: Callable[[Path, Path], None], reader: Reader, written: Written, outside: Path
) -> None:
    key = written.writer.manifests[4].objects[0].key if place == "object" else place
    odd(written.folder / key, outside)
    for door in ("tensors", "verify"):
        message = reader.refused(door, written.folder, kind="store")
        assert key in message
        assert SECRET.decode() not in message
    assert key not in reader.reads("list", written.folder)
    if place in ("HEAD.json", "object"):
        untouched(reader, written)


@pytest.mark.parametrize("folder", ["versions", "objects"])
def test_a_directory_that_is_a_link(folder: str, reader: Reader, written: Written, tmp_path: Path) -> None:
    """Even one that leads to the right files: what it leads to later is somebody else's choice."""
    (written.folder / folder).rename(tmp_path / folder)
    (written.folder / folder).symlink_to(tmp_path / folder)
    assert "symbolic link" in reader.refused("tensors", written.folder, kind="store")
    assert not [key for key in reader.reads("list", written.folder) if key.startswith(folder)]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("folder", ["anchors", "folds", "tags", "claims"])
def test_names_that_are_listed(
    folder: str, odd: Callable[[Path, Path], None], reader: Reader, written: Written, outside: Path
) -> None:
    """They are left out, and hold nobody up."""
    names = {"folds": "0000000000-0000000004.json", "tags": "x.json"}
    path = written.folder / folder / names.get(folder, "0000000001.json")
    path.parent.mkdir()
    path.touch()
    odd(path, outside)
    assert reader.reads("head", written.folder) == 4
    assert reader.reads("findings", written.folder) == []
    if folder != "folds":
        assert reader.reads("tensors", written.folder)


@contextmanager
def swapping(path: Path, make: Callable[[Path], None]) -> Iterator[None]:
    """Somebody puts something else in a file's place and takes it back, over and over."""
    good = path.read_bytes()
    ended = threading.Event()

    def swap() -> None:
        while not ended.is_set():
            for put in (make, lambda target: target.write_bytes(good)):
                other = path.with_name("~other")
                with suppress(FileNotFoundError):
                    other.unlink()
                put(other)
                other.rename(path)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("what", ["link", "pipe"])
def test_a_file_swapped_between_check_and_open(what: str, written: Written, outside: Path) -> None:
    """What comes is the object, or an error; never what a link leads to, and no waiting for a pipe's writer."""
    bucket = open_bucket(written.folder)
    good = bucket.get("HEAD.json")
    outcomes = {"good": 0, "refused": 0}

    def make(path: Path) -> None:
        if what == "link":
            path.symlink_to(outside / "HEAD.json")
        else:
            os.mkfifo(path)

    with swapping(written.folder / "HEAD.json", make):
        for _ in range(GETS):
            try:
                assert bucket.get("HEAD.json") == good
                outcomes["good"] += 1
            except StoreError:
                outcomes["refused"] += 1
    assert min(outcomes.values()) > 0, outcomes


def test_a_directory_swapped_for_a_link(written: Written, outside: Path, tmp_path: Path) -> None:
    bucket = open_bucket(written.folder)
    key, folder, aside = "versions/0000000004.json", written.folder / "versions", tmp_path / "aside"
    good = bucket.get(key)
    ended = threading.Event()

    def swap() -> None:
        while not ended.is_set():
            folder.rename(aside)
            folder.symlink_to(outside)
            folder.unlink()
            aside.rename(folder)

    thread = threading.Thread(target=swap)
    thread.start()
    outcomes = {"good": 0, "refused": 0}
    try:
        for _ in range(GETS):
            try:
                assert bucket.get(key) == good
                outcomes["good"] += 1
            except (StoreError, NotFoundError):
                outcomes["refused"] += 1
    finally:
        ended.set()
        thread.join()
    assert min(outcomes.values()) > 0, outcomes
