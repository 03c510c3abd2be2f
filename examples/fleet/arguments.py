"""What the command lines of the examples have in common."""

import argparse
import math
import signal


def count(text: str) -> int:
    """A whole number of at least 1. Raises ArgumentTypeError."""
    value = positive(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(value)


def positive(text: str) -> float:
    """A number above 0. Raises ArgumentTypeError."""
    value = float(text)
    if not value > 0 or not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def interrupted_by_signals() -> None:
    """Have whoever ends this process from outside end its children too: as Ctrl-C does, by KeyboardInterrupt."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
