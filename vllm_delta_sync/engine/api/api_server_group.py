"""The API servers of one ``vllm serve``: where they meet, and which of them leads.

They are processes on one machine with one parent. They meet in a folder that only their user can enter. Who holds the
lock in it leads; the kernel takes it from a process that ends, however it ends.
"""

import fcntl
import multiprocessing
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_delta_sync.errors import EngineError

LONGEST_SOCKET_PATH = 100
"""What the address of a local socket may have, with some to spare."""


@dataclass(frozen=True)
class ApiServerGroup:
    """The API servers that one process started.

    Attributes:
        folder: where they meet. launch: what names them there. index: of this one. count: of all.
    """

    folder: Path
    launch: str
    index: int
    count: int

    @property
    def socket(self) -> Path:
        """Where the one that leads listens."""
        return self.folder / f"{self.launch}.sock"

    def open_lock(self) -> int:
        """A file descriptor for ``lock`` and ``try_lock``; closing it lets the lock go."""
        path = self.folder / f"{self.launch}.lock"
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def siblings_of(client: Any) -> ApiServerGroup | None:
    """Those of the process behind an engine client; None if it is alone.

    Raises:
        EngineError: there is no safe place to meet, or no way to know where.
    """
    count = int(getattr(client.engine_core, "client_count", 1))
    if count == 1:
        return None
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        raise EngineError(
            f"--api-server-count is {count}, and this process was not started by the one that started the others: two "
            "controllers would fight; use 1"
        )
    folder = _private_folder(Path(tempfile.gettempdir()) / f"delta-sync-{os.getuid()}")
    _sweep(folder)
    found = ApiServerGroup(folder, f"{parent.pid}-{_started(parent.pid)}", int(client.engine_core.client_index), count)
    if len(str(found.socket)) > LONGEST_SOCKET_PATH:
        raise EngineError(f"{str(found.socket)!r} is too long for a socket's address; set TMPDIR to a shorter one")
    return found


def lock(descriptor: int) -> None:
    """Wait until no other process holds the lock, and take it.

    A record lock: it belongs to the process, so that none which this one forks keeps it.
    """
    fcntl.lockf(descriptor, fcntl.LOCK_EX)


def try_lock(descriptor: int) -> bool:
    """Take the lock if no other process holds it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _private_folder(path: Path) -> Path:
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EngineError(
            f"{str(path)!r}, where API servers meet, is not a folder that only this user can enter; remove it, or set "
            "TMPDIR to another place"
        )
    return path


def _sweep(folder: Path) -> None:
    """Remove what servers left whose parent is gone."""
    for path in folder.iterdir():
        pid, _, started = path.stem.partition("-")
        if pid.isdecimal() and _started(int(pid)) != started:
            path.unlink(missing_ok=True)


def _started(pid: int) -> str:
    """When a process was started, in the kernel's units: its number may be another's later."""
    try:
        # The name, in brackets, may have blanks and brackets in it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "gone" if Path("/proc/self").exists() else "unknown"
