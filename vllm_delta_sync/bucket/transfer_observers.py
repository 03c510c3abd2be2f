"""``TransferObserver``: receives, during a call, the number of bytes moved between a store and this process.

Stores call ``report_bytes`` in their loops and do not know the observers. Middleware installs observers (progress,
metrics, limits) for one call with ``observed_by``. Both use a context variable; other threads of the same call inherit
the observers through ``with_observers``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial


class TransferObserver:
    """Observes one call. Its methods are called from any thread of the call."""

    def on_bytes(self, count: int) -> None:
        """Count ``count`` bytes as transferred; a negative count takes back the bytes of a failed attempt.

        May wait, in order to slow the transfer down. May raise, in order to end the call.
        """

    def on_wait(self, seconds: float) -> None:
        """Count ``seconds`` that a limit made the call wait."""


_observers: ContextVar[tuple[TransferObserver, ...]] = ContextVar("delta_sync_observers", default=())


def report_bytes(count: int) -> None:
    """Notify all observers that ``count`` bytes were transferred."""
    for observer in _observers.get():
        observer.on_bytes(count)


def report_wait(seconds: float) -> None:
    """Notify all observers that a limit made the call wait."""
    for observer in _observers.get():
        observer.on_wait(seconds)


@contextmanager
def observed_by(observer: TransferObserver) -> Iterator[None]:
    """Notify ``observer`` too of the calls in the block."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


def with_observers(call: Callable[[], None]) -> Callable[[], None]:
    """Return ``call`` bound to this thread's observers, to be run in one other thread."""
    return partial(copy_context().run, call)
