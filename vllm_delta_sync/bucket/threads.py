"""Threads that wait for work, and that nobody has to wait for."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import ParamSpec, TypeVar

IDLE_SECONDS = 10.0
MOST_IDLE = 8
SLICE_SECONDS = 0.5
"""A signal that comes right before a wait begins is seen when it ends: no wait of the main thread may be longer."""
_Work = tuple[Callable[[], None], Callable[[], None]]


class DaemonPool:
    """Hands each piece of work to an idle thread, or to a new one: never does one wait for another.

    The threads are daemons, so that a piece of work that hangs does not hold up the end of the process. Starting one
    takes longer than most small requests to a near store; that is why they stay for some seconds.
    """

    def __init__(self) -> None:
        self._begin()
        self._closed = False

    def hand(self, work: Callable[[], None], end: Callable[[], None]) -> None:
        """Have ``work()`` and then ``end()`` called, neither of which may raise; here, if there can be no thread."""
        if self._pid != os.getpid():
            self._begin()  # after a fork its threads are in the other process
        try:
            member = self._idle.pop()
        except IndexError:
            member = _PoolThread(self)
            try:
                threading.Thread(target=member.serve, name="delta-sync-store", daemon=True).start()
            except RuntimeError:  # the interpreter ends, or there are too many threads
                work()
                end()
                return
        member.inbox.put((work, end))

    def close(self) -> None:
        """Let idle threads end; busy ones end after their work."""
        self._closed = True
        while self._idle:
            try:
                self._idle.pop().inbox.put(None)
            except IndexError:
                return

    def rest(self, member: "_PoolThread") -> bool:
        """Take a thread back, before it ends its last piece of work, so that the next one finds it."""
        if self._closed or len(self._idle) >= MOST_IDLE or self._pid != os.getpid():
            return False
        self._idle.append(member)
        return True

    def leave(self, member: "_PoolThread") -> bool:
        """Let an idle thread go, unless it has been given work at this moment."""
        try:
            self._idle.remove(member)
        except ValueError:
            return False
        return True

    def _begin(self) -> None:
        self._pid = os.getpid()
        # Its methods take effect as a whole, so that it needs no lock, which a fork could leave locked.
        self._idle: list[_PoolThread] = []


def wait_interruptibly(wait: Callable[[float], bool], seconds: float) -> bool:
    """``wait(timeout)`` for up to so many seconds in all, such that an interrupt gets through at any moment."""
    end = time.monotonic() + seconds
    while not wait(max(0.0, min(end - time.monotonic(), SLICE_SECONDS))):
        if time.monotonic() >= end:
            return False
    return True


class _PoolThread:
    def __init__(self, crew: DaemonPool) -> None:
        self._crew = crew
        self.inbox: SimpleQueue[_Work | None] = SimpleQueue()

    def serve(self) -> None:
        stays, missed = True, False
        while stays:
            try:
                task = self.inbox.get(timeout=IDLE_SECONDS)
            except Empty:
                # Whoever took it may have been interrupted before there was work in its inbox.
                if self._crew.leave(self) or missed:
                    return
                missed = True
                continue
            if task is None:
                return
            work, end = task
            work()
            stays = self._crew.rest(self)
            end()
            # Else an idle thread would keep the last call's bytes.
            del task, work, end


PARALLEL = 16
"""Requests in flight: on a store far away each takes tens of milliseconds, most of them spent waiting."""

_Arguments = ParamSpec("_Arguments")
_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


def start_call(
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
            wait_for_call(answers[0])
            yield answers.popleft().result()
            if room is not None:
                room.release()
    except Exception:  # whatever a call raised, none goes on behind the caller's back; an interrupt waits for nobody
        _dismiss(waiting, threads, room)
        for thread in threads:
            wait_for_call(thread)
        raise
    finally:
        # Calls that have not begun are of no use after an error or an interrupt.
        _dismiss(waiting, threads, room)


def wait_for_call(future: "Future[_Answer]") -> None:
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
            threads.append(start_call(_serve, call, waiting, room))
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
