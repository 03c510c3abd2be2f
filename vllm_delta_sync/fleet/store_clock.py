"""``StoreClock``: a lower bound on the store's current time, without synchronized clocks."""

import time
from collections.abc import Callable


class StoreClock:
    """A lower bound on the store's current time, from the times at which objects were put.

    The bound is exact if an object was observed right after its put, and otherwise too low by the time in between. It
    is never too high, however wrong this machine's clock is. Times are seconds since the epoch; the store truncates
    them to whole seconds, so the actual time may be one second later.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._bound: tuple[float, float] | None = None

    def observe(self, modified: float) -> None:
        """Note that the store put an object at that time."""
        if modified > self.earliest:
            self._bound = modified, self._monotonic()

    @property
    def earliest(self) -> float:
        """The lower bound; -inf before any object was observed."""
        if self._bound is None:
            return float("-inf")
        modified, at = self._bound
        return modified + self._monotonic() - at
