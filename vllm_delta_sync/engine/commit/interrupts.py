"""Let Ctrl-C wait while weights are written.

Cause: Python raises KeyboardInterrupt between any two instructions, so also after a compiled loop has written weights
and before that is noted. Only an engine in the caller's own process is concerned: workers end on signals anyway.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def postpone_interrupts() -> Iterator[None]:
    """Interrupts that come inside are raised at its end. Outside the main thread, which they never reach: nothing."""
    before = signal.getsignal(signal.SIGINT)
    # None: somebody who is not Python handles it, and could not be put back.
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[0])
        elif came:
            signal.raise_signal(signal.SIGINT)
