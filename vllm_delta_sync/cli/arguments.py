"""What the subcommands' command lines have in common."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.errors import DeltaSyncError, UsageError
from vllm_delta_sync.settings import ClientSettings, client_settings, environment_name
from vllm_delta_sync.trust import Keyring

if TYPE_CHECKING:
    from vllm_delta_sync.bucket import StoreOptions
    from vllm_delta_sync.client import Run

FLAGS = ("bucket", "trusted_keys", "signing_key")
"""Settings that commands take as flags; all others come from the environment and the file alone."""

Answer = tuple[dict[str, Any], Callable[[], None]]
"""The document for ``--json``, and what prints it for people."""
Command = Callable[[argparse.Namespace], Answer]


class CheckFailedError(Exception):
    """What a command checks does not hold: its error is shown as it is, whatever its kind, and the exit code is 1."""

    def __init__(self, error: DeltaSyncError) -> None:
        super().__init__(error)
        self.error = error


def failed_check(error: DeltaSyncError) -> Exception:
    """What to raise for an error that a check has found, so that the command ends with 1."""
    return error if error.exit_code == 1 else CheckFailedError(error)


def exit_codes(failed: str, done: str = "done") -> str:
    """The part of a command's help that lists its exit codes.

    Args:
        failed: what it ends with 1 for. done: what it ends with 0 for.
    """
    return f"""
exit codes:
  0 {done}
  1 {failed}
  2 usage or settings, 3 no such run or version, 4 store or network, 5 another writer, 130 interrupted
"""


def add_bucket(parser: argparse.ArgumentParser) -> None:
    """``--bucket``; see ``bucket_url``."""
    parser.add_argument("--bucket", metavar="URL", help=f"run URL; default: {_default('bucket')}")


def add_base(parser: argparse.ArgumentParser) -> None:
    """``--base``."""
    parser.add_argument("--base", metavar="DIR", help="checkpoint of version 0, where it is not at the recorded path")


def add_trust(parser: argparse.ArgumentParser, signing: bool = False) -> None:
    """``--trusted-keys``, and ``--signing-key`` for what writes documents that are signed; see ``keyring_of``."""
    parser.add_argument(
        "--trusted-keys",
        metavar="FILES",
        help="public key files, separated by commas: take only what one of these keys, or one that they list, has "
        f"signed; default: {_default('trusted_keys')}" + (", else the key of --signing-key" if signing else ""),
    )
    if signing:
        parser.add_argument(
            "--signing-key",
            metavar="PATH",
            help="private key that signs what is written, where the run is signed; default: " + _default("signing_key"),
        )


def _default(field: str) -> str:
    return f"${environment_name(field)}, else {field} in the settings file"


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def settings_of(options: argparse.Namespace) -> ClientSettings:
    """The settings that a command runs under: its flags over the environment over the settings file. Read once.

    Raises:
        SettingsError: an unknown name, or a value that does not fit.
    """
    if not hasattr(options, "settings"):
        options.settings = client_settings({name: getattr(options, name, None) for name in FLAGS})
    settings: ClientSettings = options.settings
    return settings


def bucket_url(options: argparse.Namespace) -> str:
    """URL of the run that a command is about.

    Raises:
        UsageError: neither a flag nor a setting names one.
    """
    url = settings_of(options).bucket
    if not url:
        raise UsageError(f"--bucket URL is missing and {environment_name('bucket')} is not set; say which run is meant")
    return url


def keyring_of(options: argparse.Namespace, signs: bool = True) -> Keyring:
    """The keys that a command checks and signs with.

    Args:
        signs: whether the signing key is needed; otherwise, and by commands without that flag, it is not even read.

    Raises:
        SettingsError: a key file cannot be used.
    """
    return settings_of(options).keyring(signs and hasattr(options, "signing_key"))


def without_mirror(options: argparse.Namespace) -> "StoreOptions":
    """How a command that maintains a bucket talks to it: never through the mirror in front of it."""
    return settings_of(options).store().model_copy(update={"mirror": None})


def opened(options: argparse.Namespace, writes: bool = False, url: str | None = None) -> "Run":
    """The run that a command is about, checked with the keys that it trusts; closed when the command has ended.

    Args:
        writes: whether documents will be written that have to be signed where the run is.
        url: of another run than ``bucket_url`` says.

    Raises:
        UsageError: no run is named. SettingsError: a key file cannot be used, or a signed run is to be written into
            without a key that may sign it. Else as ``open_run``.
    """
    from vllm_delta_sync.client import open_run
    from vllm_delta_sync.maintenance.keys import check_signer

    run = open_run(url or bucket_url(options), keyring_of(options, writes), without_mirror(options))
    options.closing.enter_context(run)
    if writes:
        check_signer(run)
    return run


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
