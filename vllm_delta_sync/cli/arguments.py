"""Arguments, settings and helpers that the subcommands share, such as ``add_bucket`` and ``opened``."""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from vllm_delta_sync import units
from vllm_delta_sync.cli.text import print_json
from vllm_delta_sync.errors import DeltaSyncError, NotFoundError, UsageError
from vllm_delta_sync.run.version_names import NAMES, match_name
from vllm_delta_sync.settings import ClientSettings, client_settings, environment_name
from vllm_delta_sync.trust import Keyring

if TYPE_CHECKING:
    from vllm_delta_sync.bucket import StoreOptions
    from vllm_delta_sync.client import Run

FLAGS = ("bucket", "trusted_keys", "signing_key")
"""Settings that commands take as flags; all others come only from the environment or the settings file."""
VERSION = "N|head~N|tag:NAME|step:N|ago:TIME"
"""Metavar of what ``version`` parses."""

Answer = tuple[dict[str, Any] | None, Callable[[], None]]
"""The data for ``--json``, None if all was printed as it came; and a function that prints them as text."""


class CommandFailedError(Exception):
    """A command failed, and has more to report than an error: what it found, or another exit code than the error's.

    Args:
        data: for ``--json``, beside the error.
        show: prints data and error as text; None prints only the error.
        exit_code: 1 for what a check found, whatever its kind.
    """

    def __init__(
        self,
        error: DeltaSyncError,
        data: dict[str, Any] | None = None,
        show: Callable[[], None] | None = None,
        exit_code: int = 1,
    ) -> None:
        super().__init__(error)
        self.error, self.data, self.show, self.exit_code = error, data, show, exit_code


def failed_check(error: DeltaSyncError) -> Exception:
    """Return the exception to raise for an error that a check found, so that the exit code is 1."""
    return error if error.exit_code == 1 else CommandFailedError(error)


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
        if is_empty(run):
            raise
        raise failed_check(error) from error


def exit_codes(failed: str, done: str = "done") -> str:
    """Return the list of exit codes in a command's help. Args: failed: meaning of 1. done: meaning of 0."""
    return f"""
exit codes:
  0 {done}
  1 {failed}
  2 usage, 3 no such run or version, 4 store or network, 5 another writer, 130 interrupted
"""


def print_event(
    options: argparse.Namespace, data: dict[str, Any], show: Callable[[], None], error: DeltaSyncError | None = None
) -> None:
    """Print one event of a command that runs until it is interrupted: a line of JSON, or what ``show`` prints."""
    if options.json:
        print_json(options.command, data, error)
    else:
        show()


def add_group(
    commands: "argparse._SubParsersAction[Any]", name: str, brief: str, examples: str
) -> "argparse._SubParsersAction[Any]":
    """Add a command that only has commands of its own, such as ``keys``, and return what adds these.

    Args:
        brief: its help. examples: lines, one for each command line.
    """
    group = commands.add_parser(
        name, help=brief, description=f"{brief[0].upper()}{brief[1:]}.", epilog=f"examples:\n{examples}"
    )
    return group.add_subparsers(dest="action", metavar="COMMAND", required=True)  # type: ignore[no-any-return]


def add_bucket(parser: argparse.ArgumentParser) -> None:
    """Add ``--bucket``; see ``bucket_url``."""
    parser.add_argument("--bucket", metavar="URL", help=f"run URL; default: {_default('bucket')}")


def add_base(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="DIR", help="checkpoint of version 0, if it is not at the recorded path")


def add_trust(parser: argparse.ArgumentParser, signing: bool = False) -> None:
    """Add ``--trusted-keys`` and, for commands that sign documents, ``--signing-key``; see ``keyring_of``."""
    parser.add_argument(
        "--trusted-keys",
        metavar="FILES",
        help="public key files, separated by commas: accept only what is signed by one of these keys, or by a key in "
        f"their key list; default: {_default('trusted_keys')}" + (", else the key of --signing-key" if signing else ""),
    )
    if signing:
        parser.add_argument(
            "--signing-key",
            metavar="PATH",
            help="private key to sign with, needed if the run is signed; default: " + _default("signing_key"),
        )


def _default(field: str) -> str:
    return f"${environment_name(field)}, else {field} in the settings file"


def settings_of(options: argparse.Namespace) -> ClientSettings:
    """Return the settings of a command: flags override the environment, which overrides the settings file. Read once.

    Raises:
        SettingsError: an unknown name, or an invalid value.
    """
    if not hasattr(options, "settings"):
        options.settings = client_settings({name: getattr(options, name, None) for name in FLAGS})
    settings: ClientSettings = options.settings
    return settings


def bucket_url(options: argparse.Namespace) -> str:
    """Return the URL of the command's run.

    Raises:
        UsageError: neither a flag nor a setting names it.
    """
    url = settings_of(options).bucket
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
    return settings_of(options).keyring(signs and hasattr(options, "signing_key"))


def without_mirror(options: argparse.Namespace) -> "StoreOptions":
    """Store options of a command that maintains a bucket: it never reads through the mirror."""
    return settings_of(options).store().model_copy(update={"mirror": None})


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


def count(text: str) -> int:
    """Parse a number that is 0 or more."""
    value = int(text) if text.isascii() and text.isdecimal() else -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; give a whole number of at least 0")
    return value


def positive(text: str) -> int:
    """Parse a number that is 1 or more."""
    value = int(text) if text.isascii() and text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; give a whole number of at least 1")
    return value


def version(text: str) -> int | str:
    """Parse a version's number or name, as ``RunDocuments.resolve`` takes it."""
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


def add_last(parser: argparse.ArgumentParser) -> None:
    """Add ``--last``; see ``last_count``."""
    parser.add_argument(
        "--last",
        type=last,
        metavar="N|TIME",
        help="only the newest N versions, or those published in this time, such as 1h",
    )


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
