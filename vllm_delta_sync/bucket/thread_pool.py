"""Threads that wait for work, and that nobody has to wait for."""

import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

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


def patiently(wait: Callable[[float], bool], seconds: float) -> bool:
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
