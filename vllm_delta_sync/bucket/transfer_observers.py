"""Observers receive, during a call, the number of bytes moved between a store and this process.

Stores call ``report_bytes`` in their loops and do not know the observers. Middleware installs observers (progress,
metrics, deadlines) for one call with ``observed_by``. Both use a context variable; other threads of the same call
inherit the observers through ``with_observers``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial

TransferObserver = Callable[[int], object]
"""Counts bytes as transferred; a negative count takes back the bytes of a failed attempt.

Called from any thread of the call. May raise, in order to end the call."""

_observers: ContextVar[tuple[TransferObserver, ...]] = ContextVar("delta_sync_observers", default=())


def report_bytes(count: int) -> None:
    """Notify all observers that ``count`` bytes were transferred."""
    for observe in _observers.get():
        observe(count)


@contextmanager
def observed_by(observe: TransferObserver) -> Iterator[None]:
    """Notify ``observe`` too of the calls in the block."""
    token = _observers.set((*_observers.get(), observe))
    try:
        yield
    finally:
        _observers.reset(token)


def with_observers(call: Callable[[], None]) -> Callable[[], None]:
    """Return ``call`` bound to this thread's observers, to be run in one other thread."""
    return partial(copy_context().run, call)
