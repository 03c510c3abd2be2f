"""The real model as one case of a benchmark: ``add_flag`` and ``find_checkpoint``.

A benchmark measures it beside its other cases where the checkpoint is or can be made, and it alone with ``--real``.
Rows of it have a case that begins with ``CASE``.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.common.real_model import NAME, checkpoint

CASE = "SmolLM2"


def add_flag(known: argparse.ArgumentParser) -> None:
    """``--real``."""
    known.add_argument("--real", action="store_true", help=f"only {NAME}")


def find_checkpoint(options: argparse.Namespace) -> Path | None:
    """The real model's folder; None if it is left out: in quick runs, and without its packages, which is printed.

    Raises:
        SystemExit: ``--real`` asks for it, and a package is missing or ``--quick`` leaves it out.
    """
    if options.quick:
        if options.real:
            raise SystemExit("--quick leaves out the real model: give it or --real")
        return None
    try:
        return checkpoint()
    except SystemExit as missing:
        if options.real:
            raise
        print(f"left out: {missing}", file=sys.stderr, flush=True)
        return None
