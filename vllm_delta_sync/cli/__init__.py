"""The ``delta-sync`` command. ``cli/NAME.py`` holds the command NAME.

``main`` is the entry point: it parses, runs one command, prints and returns the exit code. ``keygen`` is in ``keys``.
"""

from vllm_delta_sync.cli.main import INTERRUPTED, build_parser, main, run

__all__ = ["INTERRUPTED", "build_parser", "main", "run"]
