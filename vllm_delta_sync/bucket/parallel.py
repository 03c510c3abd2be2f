"""What several callers ask of a bucket: many small requests at once, and whether an object is there."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import ParamSpec, TypeVar

from vllm_delta_sync.bucket.base import Bucket
from vllm_delta_sync.bucket.thread_pool import SLICE_SECONDS
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.format.manifest import Stored

PARALLEL = 16
"""Requests in flight: on a store far away each takes tens of milliseconds, most of them spent waiting."""

_Arguments = ParamSpec("_Arguments")
_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


def begun(
    call: Callable[_Arguments, _Answer], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> "Future[_Answer]":
    """A call under way in a thread of its own, which does not keep the process alive.

    Not by a ThreadPoolExecutor: that takes nothing more once the main thread has ended, when a publisher's last
    version may still be on its way, and waits for its calls at the end of the process, however long they take.

    Raises:
        RuntimeError: there are too many threads.
    """
    future: Future[_Answer] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  raised to whoever asks for the answer
            future.set_exception(error)

    threading.Thread(target=run, name="delta-sync-call", daemon=True).start()
    return future


def in_parallel(
    call: Callable[[_Item], _Answer], items: Iterable[_Item], ahead: int | None = None
) -> Iterator[_Answer]:
    """Yield ``call(item)`` in the order of the items; raises what the first call that fails raises.

    No call is under way any more when it does. After an interrupt, and where no more answers are asked for, calls that
    have begun are left to themselves: a store that hangs would hold up whoever wants to end.

    Args:
        ahead: calls that may have begun whose answers were not taken yet; None: any number.
    """
    room = None if ahead is None else threading.Semaphore(ahead)
    waiting: deque[tuple[_Item, Future[_Answer]]] = deque((item, Future()) for item in items)
    answers = deque(future for _, future in waiting)
    threads: list[Future[None]] = []
    try:
        _staff(threads, call, waiting, room)
        while answers:
            ended(answers[0])
            yield answers.popleft().result()
            if room is not None:
                room.release()
    except Exception:  # whatever a call raised, none goes on behind the caller's back; an interrupt waits for nobody
        _dismiss(waiting, threads, room)
        for thread in threads:
            ended(thread)
        raise
    finally:
        # Calls that have not begun are of no use after an error or an interrupt.
        _dismiss(waiting, threads, room)


def ended(future: "Future[_Answer]") -> None:
    """Wait until a call has ended, in such a way that an interrupt gets through."""
    while not future.done():
        wait((future,), SLICE_SECONDS)


def _staff(
    threads: "list[Future[None]]",
    call: Callable[[_Item], _Answer],
    waiting: "deque[tuple[_Item, Future[_Answer]]]",
    room: threading.Semaphore | None,
) -> None:
    for _ in range(min(PARALLEL, len(waiting))):
        try:
            threads.append(begun(_serve, call, waiting, room))
        except RuntimeError:  # there are too many already
            break
    if not threads:
        _serve(call, waiting, None)


def _dismiss(
    waiting: "deque[tuple[_Item, Future[_Answer]]]", threads: "list[Future[None]]", room: threading.Semaphore | None
) -> None:
    """Leave no item to begin with, and no thread that waits for room."""
    waiting.clear()
    if room is not None:
        room.release(max(1, len(threads)))


def _serve(
    call: Callable[[_Item], _Answer],
    waiting: "deque[tuple[_Item, Future[_Answer]]]",
    room: threading.Semaphore | None,
) -> None:
    while True:
        if room is not None:
            room.acquire()
        try:
            item, future = waiting.popleft()
        except IndexError:
            return
        try:
            future.set_result(call(item))
        except BaseException as error:  # noqa: BLE001  raised to whoever asks for the answer
            future.set_exception(error)
            # Nobody asks for more than this: what comes before it has begun already.
            waiting.clear()


def has_object(bucket: Bucket, ref: Stored) -> bool:
    """Whether an object is there, at its size; its bytes are not read. Raises StoreError."""
    try:
        return bucket.stat(ref.key).bytes == ref.bytes
    except NotFoundError:
        return False
