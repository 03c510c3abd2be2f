"""``postpone_interrupts`` delays a signal that would leave something half done: Ctrl-C while weights are written.

Cause: Python raises KeyboardInterrupt between any two instructions, including after a compiled loop has written weights
but before the write is recorded. This concerns only an engine in the caller's process: workers end on signals anyway.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def postpone_interrupts(number: int = signal.SIGINT) -> Iterator[None]:
    """Raise interrupts that arrive inside at the end of the block. Does nothing outside the main thread."""
    before = signal.getsignal(number)
    # None means that the handler was not installed from Python and could not be restored.
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []
    signal.signal(number, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(number, before)
        if pending and callable(before):
            before(*pending[0])
        elif pending:
            signal.raise_signal(number)
