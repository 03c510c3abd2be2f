"""``LogThrottle`` logs the same trouble at most once in a while."""

import logging
import math
import re
import threading
import time

REPEAT_SECONDS = 60.0
MAX_SUBJECTS = 64
ONCE = math.inf
"""For ``LogThrottle(seconds=)``: log each subject once."""


class LogThrottle:
    """Logs a line about a subject unless one was logged less than ``seconds`` ago. Any thread may use it.

    Within that time it logs at most MAX_SUBJECTS different subjects, so that a flood of them cannot fill the log.
    """

    def __init__(self, logger: logging.Logger, seconds: float = REPEAT_SECONDS) -> None:
        self._logger = logger
        self._seconds = seconds
        self._logged_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def is_due(self, subject: str) -> bool:
        """Return whether to log a line about a subject now; True counts it as logged."""
        now = time.monotonic()
        with self._lock:
            self._logged_at = {each: at for each, at in self._logged_at.items() if now - at < self._seconds}
            if subject in self._logged_at or len(self._logged_at) >= MAX_SUBJECTS:
                return False
            self._logged_at[subject] = now
            return True

    def warn(self, text: str, subject: str | None = None) -> None:
        """Log a warning if it is due; ``subject``: by default the text."""
        if self.is_due(text if subject is None else subject):
            self._logger.warning("%s", text, stacklevel=2)

    def forget(self, subject: str) -> None:
        """Let the next line about a subject be due at once."""
        with self._lock:
            self._logged_at.pop(subject, None)


def without_numbers(text: str) -> str:
    """Return a subject that is the same for texts that differ only in numbers, such as versions and seconds."""
    return re.sub(r"[0-9]+", "0", text)
