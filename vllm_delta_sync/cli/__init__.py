"""The ``delta-sync`` command. ``cli/NAME.py`` holds the command NAME as a ``Command``: options, help and a function.

``main`` is the entry point: it parses, runs one command, prints its ``Report`` and returns the exit code.
"""

try:
    from vllm_delta_sync.cli.main import CLOSED_PIPE, INTERRUPTED, TERMINATED, build_parser, main, run
except KeyboardInterrupt:  # importing takes the better part of a second
    raise SystemExit(130) from None

__all__ = ["CLOSED_PIPE", "INTERRUPTED", "TERMINATED", "build_parser", "main", "run"]
