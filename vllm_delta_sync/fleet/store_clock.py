"""What time it is at a store, without a clock that agrees with it."""

import time
from collections.abc import Callable


class StoreClock:
    """A bound on a store's clock: it has put everything before now that it says it has put.

    Exact where something has just been put, and late by the time since then otherwise; never early, however wrong
    this machine's clock is. Seconds since the epoch; the store's times are whole seconds, so it may be one more.

    Args:
        monotonic: seconds that this machine's clock counts.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._bound: tuple[float, float] | None = None

    def saw(self, modified: float) -> None:
        """The store has put something at that time."""
        if modified > self.earliest:
            self._bound = modified, self._monotonic()

    @property
    def earliest(self) -> float:
        """It is at least so late; -inf before anything was seen."""
        if self._bound is None:
            return float("-inf")
        modified, at = self._bound
        return modified + self._monotonic() - at
