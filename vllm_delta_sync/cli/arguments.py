"""What the subcommands' command lines have in common."""

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.trust import Keyring

if TYPE_CHECKING:
    from vllm_delta_sync.bucket import StoreOptions
    from vllm_delta_sync.chain import Run

BUCKET_VARIABLE = "DELTA_SYNC_BUCKET"
TRUSTED_VARIABLE = "DELTA_SYNC_TRUSTED_KEYS"
SIGNING_VARIABLE = "DELTA_SYNC_SIGNING_KEY"

Answer = tuple[dict[str, Any], Callable[[], None]]
"""The document for ``--json``, and what prints it for people."""
Command = Callable[[argparse.Namespace], Answer]


def add_bucket(parser: argparse.ArgumentParser) -> None:
    """``--bucket``; see ``bucket_url``."""
    parser.add_argument("--bucket", metavar="URL", help=f"run URL; default: ${BUCKET_VARIABLE}")


def add_base(parser: argparse.ArgumentParser) -> None:
    """``--base``."""
    parser.add_argument("--base", metavar="DIR", help="checkpoint of version 0, where it is not at the recorded path")


def add_trust(parser: argparse.ArgumentParser, signing: bool = False) -> None:
    """``--trusted-keys``, and ``--signing-key`` for what writes documents that are signed; see ``keyring_of``."""
    parser.add_argument(
        "--trusted-keys",
        metavar="FILES",
        help="public key files, separated by commas: take only what one of these keys, or one that they list, has "
        f"signed; default: ${TRUSTED_VARIABLE}" + (", else the key of --signing-key" if signing else ""),
    )
    if signing:
        parser.add_argument(
            "--signing-key",
            metavar="PATH",
            help=f"private key that signs what is written, where the run is signed; default: ${SIGNING_VARIABLE}",
        )


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


def keyring_of(options: argparse.Namespace, signs: bool = True) -> Keyring:
    """The keys that are meant.

    Args:
        signs: whether the signing key is needed; otherwise it is not even read.

    Raises:
        SettingsError: a key file cannot be used.
    """
    trusted: str | None = options.trusted_keys or os.environ.get(TRUSTED_VARIABLE) or None
    signing: str | None = getattr(options, "signing_key", None)
    if signs and hasattr(options, "signing_key"):
        signing = signing or os.environ.get(SIGNING_VARIABLE) or None
    return Keyring.load(trusted, signing)


def without_mirror() -> "StoreOptions":
    """What the environment says of stores; what looks after a bucket must not be shown the one in front of it."""
    from vllm_delta_sync.bucket.options import options_from

    return options_from().model_copy(update={"mirror": None})


def opened(options: argparse.Namespace, writes: bool = False) -> "Run":
    """The run that is meant, checked with the keys that are meant.

    Args:
        writes: whether documents will be written that have to be signed where the run is.

    Raises:
        UsageError: no run is named. SettingsError: a key file cannot be used, or a signed run is to be written into
            without a key that may sign it. Else as ``open_run``.
    """
    from vllm_delta_sync.chain import open_run
    from vllm_delta_sync.upkeep.key_list import check_signer

    run = open_run(bucket_url(options), keyring_of(options, writes), without_mirror())
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
