"""What a person sees while it goes on: a line for everything that happened, and on a terminal what is under way."""

import time

from rich.console import Console
from rich.status import Status
from rich.text import Text


class Screen:
    """Lines with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = time.monotonic()
        self._status: Status | None = None
        if console.is_terminal:
            self._status = console.status("")
            self._status.start()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def begin(self, text: str) -> None:
        """Something begins that takes a while."""
        if self._status is None:
            self.say(text)
        else:
            self._status.update(Text(text, style="bold"))

    def say(self, text: str) -> None:
        """Something has happened."""
        self._console.print(Text(f"[{self.seconds:5.1f} s] {text}"), soft_wrap=True)

    def close(self) -> None:
        """Nothing is under way any more."""
        if self._status is not None:
            self._status.stop()
