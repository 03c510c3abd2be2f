"""Processes, threads and memory: what a test has started, what of it is left, and what it takes."""

import multiprocessing
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path

from vllm_delta_sync.bucket.threads import IDLE_SECONDS


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


def context_of_processes(module: str) -> ForkServerContext:
    """Starts processes that run functions of a module of tests: forks of one that has imported it, without threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", module])
    return context


def eventually(holds: Callable[[], bool], seconds: float = 120) -> None:
    """Wait for what no event tells of."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.002)


def stores_are_closed(seconds: float = IDLE_SECONDS / 2) -> bool:
    """Whether no bucket of a network store keeps threads; those of a bucket that was left open stay for longer."""
    end = time.monotonic() + seconds
    while any(thread.name == "delta-sync-store" for thread in threading.enumerate()):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def stores_of_before_end() -> None:
    """Wait for the threads of buckets that earlier tests left open."""
    assert stores_are_closed(3 * IDLE_SECONDS)


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
