"""Runs one command and sees to it that nothing of it outlives whoever asked for it.

The asker holds the other end of a pipe, the lifeline. When that end closes, be it on purpose or because the
asker was killed, the command is asked to end, and after a bound it and everything it started are killed.

    python -m examples.demo.warden LIFELINE_FD GRACE_SECONDS COMMAND...
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LOOK_SECONDS = 0.1
KILL_SECONDS = 5.0


def main(arguments: list[str]) -> int:
    """Run the command until it ends or the lifeline closes; returns its exit status (128 + n for signal n)."""
    lifeline, grace, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    _adopt_orphans()
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    child = subprocess.Popen(command, process_group=0, preexec_fn=_die_with_parent)
    while child.poll() is None and not asked:
        if select.select([lifeline], [], [], LOOK_SECONDS)[0]:
            break
    if child.poll() is None:
        child.terminate()
        _wait(child, grace)
    _kill_the_rest(child)
    code = child.returncode
    return code if code >= 0 else 128 - code


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _adopt_orphans() -> None:
    """Become the parent of grandchildren whose parent ends first, so that none escapes."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(child: "subprocess.Popen[bytes]", seconds: float) -> None:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _kill_the_rest(child: "subprocess.Popen[bytes]") -> None:
    """Kill the command's process group and every descendant that left it, and wait until they are gone."""
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            if not _children():
                break
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        _reap(child)
        time.sleep(0.02)
    child.wait()


def _reap(child: "subprocess.Popen[bytes]") -> None:
    child.poll()
    for pid in _children():
        if pid != child.pid:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


def _children() -> list[int]:
    """Process ids of this process's children, ended ones included until they are waited for; Linux only."""
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in listing.read_text().split()] if listing.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
