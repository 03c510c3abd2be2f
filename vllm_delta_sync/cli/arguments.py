"""What the subcommands' command lines have in common."""

import argparse
import os
from collections.abc import Callable
from typing import Any

from vllm_delta_sync.errors import UsageError

BUCKET_VARIABLE = "DELTA_SYNC_BUCKET"

Answer = tuple[dict[str, Any], Callable[[], None]]
"""The document for ``--json``, and what prints it for people."""
Command = Callable[[argparse.Namespace], Answer]


def add_bucket(parser: argparse.ArgumentParser) -> None:
    """``--bucket``; see ``bucket_url``."""
    parser.add_argument("--bucket", metavar="URL", help=f"run URL; default: ${BUCKET_VARIABLE}")


def add_base(parser: argparse.ArgumentParser) -> None:
    """``--base``."""
    parser.add_argument("--base", metavar="DIR", help="checkpoint of version 0, where it is not at the recorded path")


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def bucket_url(options: argparse.Namespace) -> str:
    """The run that is meant.

    Raises:
        UsageError: neither the flag nor the variable is set.
    """
    url: str | None = options.bucket or os.environ.get(BUCKET_VARIABLE)
    if not url:
        raise UsageError(f"--bucket URL is missing and {BUCKET_VARIABLE} is not set; say which run is meant")
    return url


def count(text: str) -> int:
    """A number from 0 on."""
    value = int(text) if text.isascii() and text.isdecimal() else -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def positive(text: str) -> int:
    """A number from 1 on."""
    value = count(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return value


def version(text: str) -> int | str:
    """A version's number, or ``tag:NAME``."""
    if text.startswith("tag:"):
        return text
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no version; give a number, or tag:NAME")
    return int(text)
