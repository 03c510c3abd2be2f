"""Processes, threads and memory: what a test has started, what of it is left, and what it takes."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from vllm_delta_sync.bucket.factory import OpenedBucket

ROOT = Path(__file__).parents[2]
_PRELOADED = ["pytest"]
_HEAR_SECONDS = 300


def run_python(
    *arguments: str,
    environment: dict[str, str] | None = None,
    code: int = 0,
    seconds: float = 600,
    folder: Path = ROOT,
    prefix: Sequence[str] = (),
) -> "subprocess.CompletedProcess[str]":
    """Run a program in a folder, with further variables; it ends with that code in time.

    Args:
        prefix: words of the command before the interpreter, such as ``small_disk`` gives.
    """
    done = subprocess.run(
        [*prefix, sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == code, (done.returncode, done.stdout[-3000:], done.stderr[-6000:])
    return done


def mentioning(path: Path) -> set[int]:
    """Processes that were started with that path in their arguments or variables."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            started = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if str(path).encode() in started:
            found.add(int(folder.name))
    return found


def small_disk(folder: Path, size: str) -> list[str]:
    """The beginning of a command for which a folder is a file system of that size."""
    mount = f'mount -t tmpfs -o size={size},mode=700 tmpfs "$0" && exec "$@"'
    return _working("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(folder))


def without_rights_of_root() -> list[str]:
    """The beginning of a command for which the modes of files count, as they do for any user but root."""
    return [] if os.geteuid() else _working("setpriv", "--bounding-set=-dac_override,-dac_read_search")


def _working(*prefix: str) -> list[str]:
    """The beginning of a command; skips the test where that does not work."""
    if shutil.which(prefix[0]) is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip(f"{prefix[0]} does not work here")
    return list(prefix)


def context_of_processes(module: str) -> ForkServerContext:
    """Starts processes that run functions of a module of tests: forks of one that has imported it, without threads."""
    _PRELOADED.append(module)
    context = multiprocessing.get_context("forkserver")
    # All share one process, and each call replaces the list of what it imports.
    context.set_forkserver_preload(_PRELOADED)
    return context


class Worker:
    """A process that runs a function of a module that ``context_of_processes`` knows, with the variables of now.

    The function gets the other end of a pipe before its own arguments.
    """

    def __init__(self, act: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_begin, args=(dict(os.environ), act, theirs, *arguments))
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        """Return the next object that it sends."""
        assert self.pipe.poll(_HEAR_SECONDS), "it hangs"
        return self.pipe.recv()

    def kill(self) -> list[Any]:
        """Kill it; return what it has sent and nothing has received."""
        self.process.kill()
        self.process.join()
        said = []
        with suppress(EOFError, OSError):
            while True:
                said.append(self.pipe.recv())
        return said


def _begin(environment: dict[str, str], act: Callable[..., None], pipe: Connection, *arguments: object) -> None:
    os.environ.clear()
    os.environ.update(environment)
    act(pipe, *arguments)


@contextmanager
def working(count: int, act: Callable[..., None], *arguments: object) -> Iterator[list[Worker]]:
    """Workers that are killed at the end of the block."""
    workers: list[Worker] = []
    try:
        workers += (Worker(act, *arguments) for _ in range(count))
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def eventually(holds: Callable[[], bool], seconds: float = 120) -> None:
    """Wait for what no event tells of."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.002)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C is an error within the block. What runs in the background of a shell would ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def interrupted(when: threading.Event) -> Iterator[None]:
    """Ctrl-C comes to the main thread after the event, and ends what it is doing in the block."""

    def interrupt() -> None:
        assert when.wait(60)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with interruptible():
        thread.start()
        try:
            yield
        except KeyboardInterrupt:
            return
        finally:
            thread.join()
    pytest.fail("it ended before it was interrupted")


@contextmanager
def closes_all_stores() -> Iterator[None]:
    """Every store that is opened within the block by ``open_bucket`` is closed at its end."""
    opened: list[OpenedBucket] = []
    begin, close = OpenedBucket.__init__, OpenedBucket.close

    def noted(self: OpenedBucket, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        opened.append(self)

    def closed(self: OpenedBucket) -> None:
        close(self)
        opened[:] = [bucket for bucket in opened if bucket is not self]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenedBucket, "__init__", noted)
        patch.setattr(OpenedBucket, "close", closed)
        yield
    assert opened == [], "a bucket was left open"


@contextmanager
def counted() -> Iterator[list[int]]:
    """The most bytes allocated within the block, more than before it."""
    found: list[int] = []
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        yield found
        found.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
