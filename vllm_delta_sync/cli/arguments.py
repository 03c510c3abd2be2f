"""Options that the subcommands share, such as ``RUN``; parsers of their values; ``opened``, which opens the run."""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from vllm_delta_sync import units
from vllm_delta_sync.cli.command import option
from vllm_delta_sync.errors import DeltaSyncError, NotFoundError, UsageError
from vllm_delta_sync.run.run_reader import NAMES, match_name
from vllm_delta_sync.settings import environment_name
from vllm_delta_sync.trust import Keyring

if TYPE_CHECKING:
    from vllm_delta_sync.bucket import StoreOptions
    from vllm_delta_sync.client import Run

FLAGS = ("bucket", "trusted_keys", "signing_key")
"""Settings that commands take as flags; all others come only from the environment or the settings file."""
VERSION = "N|head~N|tag:NAME|step:N|ago:TIME"
"""Metavar of what ``version`` parses."""


def as_finding(error: DeltaSyncError) -> DeltaSyncError:
    """Return an error that a check found: its exit code is 1, whatever its kind."""
    vars(error).update(exit_code=1)
    return error


@contextmanager
def checking_history(run: "Run") -> Iterator[None]:
    """Report what the block finds missing in the history of a run as damage; that nothing is published is no damage.

    Raises:
        NotFoundError: nothing is published.
    """
    from vllm_delta_sync.maintenance.accounting import is_empty

    try:
        yield
    except NotFoundError as error:
        if not is_empty(run):
            as_finding(error)
        raise


# Values


def _whole_number(text: str, least: int) -> int:
    value = int(text) if text.isascii() and text.isdecimal() else -1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; give a whole number of at least {least}")
    return value


def count(text: str) -> int:
    """Parse a number that is 0 or more."""
    return _whole_number(text, 0)


def positive(text: str) -> int:
    """Parse a number that is 1 or more."""
    return _whole_number(text, 1)


def version(text: str) -> int | str:
    """Parse a version's number or name, as ``RunReader.resolve`` takes it."""
    if match_name(text):
        return text
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a version; give a number, head, {NAMES}")
    return int(text)


def duration(text: str) -> float:
    """Parse a duration into seconds, 0 or more."""
    found = units.duration(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration; give seconds, or a number with ms, s, m, h or d, such as 15m"
        )
    return found


def interval(text: str) -> float:
    """Parse a duration above 0 into seconds."""
    found = duration(text)
    if found == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is too short; give a duration above 0")
    return found


def byte_count(text: str) -> int:
    """Parse a size into bytes, 0 or more."""
    found = units.byte_count(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; give bytes, or a number with kB, MB, GB, KiB, MiB or GiB, such as 500MB"
        )
    return found


def positive_bytes(text: str) -> int:
    """Parse a size of at least 1 byte."""
    found = byte_count(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is too small; give at least 1 byte")
    return found


def last(text: str) -> int | timedelta:
    """Parse a number of versions, or a duration with a unit in which they were published."""
    if not text[-1:].isalpha():
        return positive(text)
    try:
        return timedelta(seconds=interval(text))
    except OverflowError:
        return timedelta.max


# Options


def _default(field: str) -> str:
    return f"default: ${environment_name(field)}, else {field} in the settings file"


_TRUST = (
    "public key files, separated by commas: accept only what is signed by one of these keys; "
    f"{_default('trusted_keys')}"
)
BUCKET = option("--bucket", metavar="URL", help=f"run URL; {_default('bucket')}")
RUN = (BUCKET, option("--trusted-keys", metavar="FILES", help=_TRUST))
"""The run, and the keys to verify it with: of ``opened`` and ``keyring_of``."""
SIGNED_RUN = (
    BUCKET,
    option("--trusted-keys", metavar="FILES", help=f"{_TRUST}, else the key of --signing-key"),
    option(
        "--signing-key",
        metavar="PATH",
        help=f"private key to sign with, needed if the run is signed; {_default('signing_key')}",
    ),
)
"""As ``RUN``, for commands that sign documents."""
BASE = option("--base", metavar="DIR", help="checkpoint of version 0, if it is not at the recorded path")
LAST = option(
    "--last",
    type=last,
    metavar="N|TIME",
    help="only the newest N versions, or those published in this time, such as 1h",
)
"""See ``last_count``."""
SHARD_BYTES = option(
    "--shard-bytes", type=positive_bytes, metavar="SIZE", help="bytes of tensors in one file; default: 5 GB"
)


def bucket_url(options: argparse.Namespace) -> str:
    """Return the URL of the command's run.

    Raises:
        UsageError: neither a flag nor a setting names it.
    """
    url: str = options.settings.bucket
    if not url:
        raise UsageError(f"no run is named; give --bucket URL or set {environment_name('bucket')}")
    return url


def keyring_of(options: argparse.Namespace, signs: bool = True) -> Keyring:
    """Return the keys with which a command verifies and signs.

    Args:
        signs: whether to read the signing key; commands without ``--signing-key`` never read it.

    Raises:
        SettingsError: a key file cannot be used.
    """
    keyring: Keyring = options.settings.keyring(signs and hasattr(options, "signing_key"))
    return keyring


def without_mirror(options: argparse.Namespace) -> "StoreOptions":
    """Store options of a command that maintains a bucket: it reads through no mirror and no peer."""
    store: StoreOptions = options.settings.store().without_copies()
    return store


def opened(options: argparse.Namespace, writes: bool = False, url: str | None = None) -> "Run":
    """Open the command's run with its trusted keys; it is closed when the command ends.

    Args:
        writes: whether the command writes documents, which need a signature if the run is signed.
        url: of the run; None means ``bucket_url``.

    Raises:
        UsageError: no run is named. SettingsError: a key file cannot be used, or ``writes`` and no key may sign the
            signed run. Otherwise as ``open_run``.
    """
    from vllm_delta_sync.client import open_run

    run = open_run(url or bucket_url(options), keyring_of(options, writes), without_mirror(options))
    options.closing.enter_context(run)
    if writes:
        run.keyring.check_can_sign(run.info)
    return run


def last_count(run: "Run", chosen: int | timedelta | None) -> int | None:
    """Return how many of the newest versions ``--last`` asks for; None for all.

    Raises:
        NotFoundError: nothing was published in the time, or at all. Otherwise as ``checking_history``.
    """
    if not isinstance(chosen, timedelta):
        return chosen
    with checking_history(run):
        head = run.reachable_head()[0]
        before = run.newest_before(time.time() - chosen.total_seconds(), head)
    if before is None:
        return head.version + 1
    if before.version == head.version:
        raise NotFoundError(
            f"no version was published in this time; the newest, version {head.version}, is of {head.created_at}"
        )
    return head.version - before.version
