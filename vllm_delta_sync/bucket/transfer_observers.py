"""Who is told, within a call, of bytes that move between a store and this process: progress, counters, limits.

A store calls ``moved`` in its loops and knows nothing of who listens; a wrapper watches for the time of one call. Both
go through a context variable, so that threads which serve one call together take it with them (``here``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class TransferObserver:
    """Told of one call's bytes, from any of its threads."""

    def on_bytes(self, count: int) -> None:
        """``count`` bytes have come or gone; negative: taken back, because the try that moved them has failed.

        May wait: that is how a limit slows a transfer down. May raise: that ends the call.
        """

    def on_wait(self, seconds: float) -> None:
        """The call stood still for so long because a limit wants it so."""


_watchers: ContextVar[tuple[TransferObserver, ...]] = ContextVar("delta_sync_watchers", default=())


def report_bytes(count: int) -> None:
    """Tell everybody who watches that ``count`` bytes have moved."""
    for watcher in _watchers.get():
        watcher.on_bytes(count)


def report_wait(seconds: float) -> None:
    """Tell everybody who watches that a limit made the call wait."""
    for watcher in _watchers.get():
        watcher.on_wait(seconds)


@contextmanager
def observed_by(watcher: TransferObserver) -> Iterator[None]:
    """Calls within are told to ``watcher`` too."""
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


def with_observers(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """``call``, for one other thread, watched by whoever watches this one now."""
    context = copy_context()

    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return context.run(call, *args, **kwargs)

    return run
