"""What a server keeps across restarts: whole after a crash, not another user's, and of one writer at a time."""

import fcntl
import gc
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_delta_sync.durable_files import StateFile, write_atomically

ROOT = Path(__file__).parents[2]
WAIT = 60


@pytest.fixture
def file(tmp_path: Path) -> StateFile:
    """A file that says ``old``."""
    file = StateFile(tmp_path / "run.state", 100)
    file.write(b"old")
    return file


def names(file: StateFile) -> list[str]:
    return sorted(os.listdir(file.path.parent))


@contextmanager
def process(file: StateFile, body: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Another process that runs ``body``, in which ``file`` is the same file."""
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom vllm_delta_sync.durable_files import StateFile\n"
        f"file = StateFile(Path({str(file.path)!r}), 100)\n{body}"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def printed(child: "subprocess.Popen[bytes]") -> bytes:
    assert child.stdout is not None
    return child.stdout.readline()


# Content


def test_it_is_of_this_user_only(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "deep" / "state" / "run.state", 100)
    assert not file.exists()
    with pytest.raises(FileNotFoundError):
        file.read()
    assert not file.path.parent.exists()
    before = os.umask(0)
    try:
        with file.locked():
            file.write(b"mine")
    finally:
        os.umask(before)
    assert (file.exists(), file.read()) == (True, b"mine")
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in file.path.parent.iterdir()} == {0o600}
    assert names(file) == ["run.state", "run.state.lock"]
    file.remove()
    file.remove()
    assert not file.exists()


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder", "pipe"])
@pytest.mark.parametrize("check_owner", [True, False])
def test_only_a_regular_file_is_read(tmp_path: Path, kind: str, check_owner: bool) -> None:
    file = StateFile(tmp_path / "run.state", 100, check_owner=check_owner)
    if kind == "folder":
        file.path.mkdir()
    elif kind == "pipe":
        os.mkfifo(file.path, 0o600)
    else:
        file.path.symlink_to(tmp_path / "elsewhere")
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(b"theirs")
        (tmp_path / "elsewhere").chmod(0o600)
    assert file.exists()
    with pytest.raises(OSError) as caught:
        file.read()
    assert caught.value.strerror
    assert not isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize("mode", [0o602, 0o666, None])
def test_a_file_that_others_may_write_or_own_is_refused(
    file: StateFile, mode: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode is None:
        other = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: other)
    else:
        file.path.chmod(mode)
    with pytest.raises(PermissionError, match="other users"):
        file.read()
    assert StateFile(file.path, 100, check_owner=False).read() == b"old"


def test_file_in_a_volume_that_kubernetes_gave_to_the_pods_group_is_read(file: StateFile) -> None:
    """With fsGroup it adds these modes to all that is in the volume, at each start of a pod."""
    for path in (file.path.parent, *file.path.parent.iterdir()):
        path.chmod(path.stat().st_mode | (0o2770 if path.is_dir() else 0o660))
    assert file.read() == b"old"
    with file.locked():
        file.write(b"new")
    assert (file.acquire(), file.read()) == (True, b"new")


def test_what_is_too_long_is_refused(file: StateFile) -> None:
    file.path.write_bytes(b"x" * 100)
    assert len(file.read()) == 100
    file.path.write_bytes(b"x" * 101)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        file.read()


# Interrupted writes


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ended"])
def test_a_write_that_fails_leaves_the_old_content(
    file: StateFile, call: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        with pytest.raises(type(error)):
            file.write(b"new")
    assert (file.read(), names(file)) == (b"old", ["run.state"])
    file.write(b"newer")
    assert file.read() == b"newer"


def test_a_process_that_is_killed_leaves_the_old_content(file: StateFile) -> None:
    body = "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\nfile.write(b'new')"
    with process(file, body) as child:
        assert child.wait(WAIT) == -signal.SIGKILL
    assert (file.read(), names(file)) == (b"old", ["run.state", "run.state.part"])
    file.write(b"newer")
    assert (file.read(), names(file)) == (b"newer", ["run.state"])


def test_what_was_written_is_on_disk_before_it_has_its_name(file: StateFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its name is on the disk before the write returns: a power failure loses neither."""
    log: list[str] = []
    fsync, replace = os.fsync, os.replace

    def logged_fsync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        log.append("sync the folder" if stat.S_ISDIR(found.st_mode) else f"sync {found.st_size} bytes")
        fsync(descriptor)

    def logged_replace(part: Path, path: Path) -> None:
        log.append("replace")
        replace(part, path)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    file.write(b"new")
    assert log == ["sync 3 bytes", "replace", "sync the folder"]
    file.remove()
    assert log[3:] == ["sync the folder"]


def test_links_are_not_written_through(file: StateFile, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"theirs")
    file.remove()
    for name in ("run.state", "run.state.part"):
        (tmp_path / name).symlink_to(theirs)
    file.write(b"new")
    assert (file.read(), theirs.read_bytes()) == (b"new", b"theirs")
    (tmp_path / "run.state.lock").symlink_to(tmp_path / "made by others")
    with pytest.raises(OSError):
        file.acquire()
    assert not (tmp_path / "made by others").exists()


@pytest.mark.parametrize(("mode", "written"), [(None, 0o600), (0o644, 0o644)])
def test_the_mode_does_not_depend_on_the_umask(tmp_path: Path, mode: int | None, written: int) -> None:
    for umask in (0, 0o077):
        before = os.umask(umask)
        try:
            write_atomically(tmp_path / "file", b"data", tmp_path / "part", mode)
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == written
    assert os.listdir(tmp_path) == ["file"]


# Locks


def test_a_process_waits_for_the_lock_of_another(file: StateFile) -> None:
    body = "with file.locked():\n    print('locked', flush=True)\n    sys.stdin.read()\n    file.write(b'theirs')"
    seen: list[bytes] = []

    def read_locked() -> None:
        with file.locked():
            seen.append(file.read())

    with process(file, body) as child:
        assert printed(child) == b"locked\n"
        waiting = threading.Thread(target=read_locked)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        assert child.stdin is not None
        child.stdin.close()
        waiting.join(WAIT)
        assert child.wait(WAIT) == 0
    assert seen == [b"theirs"]


def test_threads_exclude_each_other(file: StateFile) -> None:
    file.write(b"0")

    def count(_: int) -> None:
        for _ in range(10):
            with StateFile(file.path, 100).locked():
                file.write(str(int(file.read()) + 1).encode())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(4)))
    assert file.read() == b"40"


def test_a_file_that_a_process_acquired_is_its_own_until_it_ends(file: StateFile) -> None:
    with process(file, "file.acquire()\nprint('acquired', flush=True)\nsys.stdin.read()") as child:
        assert printed(child) == b"acquired\n"
        assert not file.acquire()
        assert file.read() == b"old"
        child.kill()
        child.wait(WAIT)
        assert file.acquire()
        assert file.acquire()
    with process(file, "print(file.acquire(), flush=True)") as child:
        assert printed(child) == b"False\n"


def test_of_two_objects_in_a_process_one_acquires_a_file(file: StateFile) -> None:
    """A record lock would not exclude the second, and would be lost when it closes the file."""
    second = StateFile(file.path, 100)
    assert file.acquire()
    assert not second.acquire()
    with process(file, "print(file.acquire(), flush=True)") as child:
        assert printed(child) == b"False\n"
    file.release()
    assert second.acquire()
    assert not file.acquire()
    del second
    gc.collect()
    assert file.acquire()


def test_a_forked_process_does_not_keep_what_its_parent_acquired(file: StateFile) -> None:
    """Worker processes outlive a server that is killed."""
    body = (
        "file.acquire()\nif os.fork() == 0:\n    print('forked', flush=True)\n    sys.stdin.read()\n    os._exit(0)\n"
        "os.wait()"
    )
    with process(file, body) as child:
        assert printed(child) == b"forked\n"
        assert not file.acquire()
        child.kill()
        child.wait(WAIT)
        assert file.acquire()


@pytest.mark.parametrize("kind", ["state", "folder"])
def test_a_forked_process_does_not_keep_a_lock_that_its_parent_has_given_back(file: StateFile, kind: str) -> None:
    """Such as an engine that the body of ``follow`` starts, or another thread of a server in the middle of a write."""
    lock = "file.locked()" if kind == "state" else "locked_folder(file.path.parent, 'folder.lock', 'taken')"
    body = (
        f"from vllm_delta_sync.durable_files import locked_folder\nwith {lock}:\n    child = os.fork()\n"
        "    if child == 0:\n        sys.stdin.read()\n        os._exit(0)\nprint('given back', flush=True)\nos.wait()"
    )
    with process(file, body) as child:
        assert printed(child) == b"given back\n"
        name = "run.state.lock" if kind == "state" else "folder.lock"
        with open(file.path.with_name(name), "r+b") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert child.poll() is None
