"""Many small requests to a bucket at once, and the time as documents spell it."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TypeVar

PARALLEL = 16
"""Requests in flight: on a store far away each takes tens of milliseconds, most of them spent waiting."""

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


def timestamp() -> str:
    """Now, in UTC, as documents spell it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def in_parallel(call: Callable[[_Item], _Answer], items: Iterable[_Item]) -> Iterator[_Answer]:
    """Yield ``call(item)`` in the order of the items; raises what the first call that fails raises."""
    pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="delta-sync-read")
    try:
        yield from pool.map(call, items)
    finally:
        # Calls that have not begun are of no use after an error or an interrupt.
        pool.shutdown(wait=True, cancel_futures=True)
