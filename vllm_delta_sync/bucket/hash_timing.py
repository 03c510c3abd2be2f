"""How long digests of objects take, apart from reading the objects: they are computed in the middle of that."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _Spent(threading.local):
    seconds = 0.0


_spent = _Spent()


@contextmanager
def hashing() -> Iterator[None]:
    """What is done inside is computing a digest."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _spent.seconds += time.perf_counter() - began


def hashed_seconds() -> float:
    """Seconds that this thread has spent inside ``hashing`` so far."""
    return _spent.seconds
