"""``in_parallel`` and ``start_call``: calls in threads that do not delay the end of the process."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextvars import copy_context
from typing import ParamSpec, TypeVar

SLICE_SECONDS = 0.5
"""Longest uninterrupted wait: a signal that arrives right before a wait begins is handled only when it ends."""
PARALLEL = 16
"""Requests in flight: on a distant store each takes tens of milliseconds, most of it waiting."""

_Arguments = ParamSpec("_Arguments")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def wait_interruptibly(wait: Callable[[float], bool], seconds: float) -> bool:
    """Call ``wait(timeout)`` for up to ``seconds`` in total, in slices, so that interrupts are handled at any time."""
    end = time.monotonic() + seconds
    while not wait(max(0.0, min(end - time.monotonic(), SLICE_SECONDS))):
        if time.monotonic() >= end:
            return False
    return True


def start_call(
    call: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> "Future[_Result]":
    """Start a call in a new daemon thread, with this thread's transfer observers.

    A ThreadPoolExecutor would not do: it accepts no calls once the main thread has ended, when a publisher may still be
    uploading its last version, and it delays the end of the process until all calls have ended.

    Raises:
        RuntimeError: there are too many threads.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  raised by ``Future.result``
            future.set_exception(error)

    threading.Thread(target=copy_context().run, args=(run,), name="delta-sync-call", daemon=True).start()
    return future


def in_parallel(
    call: Callable[[_Item], _Result], items: Iterable[_Item], ahead: int | None = None, workers: int = PARALLEL
) -> Iterator[_Result]:
    """Yield ``call(item)`` in the order of the items; raises what the first failing call raises.

    When it raises, no call is running any more. After an interrupt, or if the iteration is abandoned, running calls are
    left behind: waiting for a store that hangs would block the caller.

    Args:
        ahead: how many calls may start before their results are taken; None means any number.
        workers: how many calls may run at once.
    """
    queue: deque[tuple[_Item, Future[_Result]]] = deque((item, Future()) for item in items)
    answers = deque(future for _, future in queue)
    slots = threading.Semaphore(len(queue) + workers if ahead is None else ahead)
    threads: list[Future[None]] = []

    def work() -> None:
        while True:
            slots.acquire()
            try:
                item, future = queue.popleft()
            except IndexError:
                return
            try:
                future.set_result(call(item))
            except BaseException as error:  # noqa: BLE001  raised by ``Future.result``
                future.set_exception(error)
                # Later results will not be taken, and earlier items have been started already.
                queue.clear()

    def start_no_more() -> None:
        queue.clear()
        slots.release(max(1, len(threads)))

    try:
        for _ in range(min(workers, len(queue))):
            try:
                threads.append(start_call(work))
            except RuntimeError:  # too many threads
                break
        if not threads:
            slots.release(len(queue) + 1)
            work()
        while answers:
            wait_for_call(answers[0])
            yield answers.popleft().result()
            slots.release()
    except Exception:  # after any error wait for the running calls; an interrupt is a BaseException and does not wait
        start_no_more()
        for thread in threads:
            wait_for_call(thread)
        raise
    finally:
        start_no_more()


def wait_for_call(future: "Future[_Result]") -> None:
    """Wait until a call has ended; an interrupt is handled meanwhile."""
    while not future.done():
        wait((future,), SLICE_SECONDS)
