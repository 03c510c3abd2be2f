"""``delta-sync keygen`` and ``keys``: arguments and output; what they do is in ``trust`` and ``maintenance``."""

import argparse
import re
from pathlib import Path
from typing import Any

from vllm_delta_sync.cli.arguments import (
    Answer,
    Command,
    add_bucket,
    add_json,
    add_trust,
    bucket_url,
    keyring_of,
    opened,
    without_mirror,
)
from vllm_delta_sync.errors import UsageError

KEYGEN_EXAMPLES = """\
PATH is the private key, which only its owner may read, and nobody else gets; PATH.pub is for everybody. A publisher
signs with the first (signing_key), servers take only what the second stands for (trusted_keys).

examples:
  delta-sync keygen trainer.key
  delta-sync keygen trainer.key --json
  delta-sync keygen notice.key --notice
"""
KEYS_EXAMPLES = """\
Without a change, list them. The list, keys.json, lies in the bucket and is signed by a key that servers are told to
trust; keys that are only in the list sign weights and cannot change it. A key is retired when it signs no more: what
it signed holds. It is revoked when somebody else may have it: then only the versions up to --version hold, and nothing
else that it signed. Keep the key that signs the list off the machines that publish, where it might be stolen.

examples:
  delta-sync keys --bucket /data/runs/a --trusted-keys root.key.pub
  delta-sync keys --bucket /data/runs/a --signing-key root.key --add trainer2.key.pub
  delta-sync keys --bucket /data/runs/a --signing-key root.key --add new.key.pub --retire old.key.pub
  delta-sync keys --bucket /data/runs/a --signing-key root.key --revoke stolen.key.pub --version 419
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommands."""
    keygen = commands.add_parser(
        "keygen",
        help="make a key pair, for signatures or for notices",
        description="Make a key pair: PATH and PATH.pub.",
        epilog=KEYGEN_EXAMPLES,
    )
    keygen.add_argument("path", metavar="PATH", type=Path, help="file for the private key; it must not be there yet")
    keygen.add_argument("--notice", action="store_true", help="a CURVE pair for encrypted notices, not for signatures")
    add_json(keygen)

    parser = commands.add_parser(
        "keys",
        help="who may sign a run: list, add, retire, revoke",
        description="Say which keys may sign a run, and until which version.",
        epilog=KEYS_EXAMPLES,
    )
    add_bucket(parser)
    add_trust(parser, signing=True)
    for name, text in (
        ("--add", "it may sign from now on"),
        ("--retire", "it signs no more; what it signed holds"),
        ("--revoke", "somebody else may have it"),
    ):
        parser.add_argument(
            name, action="append", default=[], metavar="FILE.pub", help=f"public key file, or 64 hex digits: {text}"
        )
    parser.add_argument(
        "--version",
        type=_last_version,
        metavar="N",
        help="last version that the keys to retire or revoke have signed; none with --revoke; default: the head",
    )
    add_json(parser)


def _last_version(text: str) -> int | str:
    if text == "none":
        return text
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no version; give a number, or none")
    return int(text)


def _keygen(options: argparse.Namespace) -> Answer:
    if options.notice:
        from vllm_delta_sync.notice import curve

        public = curve.generate(options.path)
    else:
        from vllm_delta_sync.trust.keys import generate

        public = generate(options.path)
    document = {
        "kind": "notice" if options.notice else "signature",
        "private": str(options.path),
        "public": f"{options.path}.pub",
        "key": public,
    }
    return document, lambda: print(public)


def _keys(options: argparse.Namespace) -> Answer:
    if options.add or options.retire or options.revoke:
        return _change(options)
    if options.version is not None:
        raise UsageError("--version goes with --retire or --revoke")
    from vllm_delta_sync.maintenance.keys import list_keys

    run = opened(options)
    found = list_keys(run)
    document: dict[str, Any] = {
        "run": run.info.run,
        "url": run.bucket.url,
        "sequence": found.sequence,
        "signed_by": found.signed_by,
        "checked": run.keyring.checks,
        "keys": [
            {
                "key": row.key,
                "trusted": row.trusted,
                "state": row.state,
                "last": None if row.last is None else row.last.model_dump(),
            }
            for row in found.rows
        ],
        "notes": found.notes,
    }
    return document, lambda: _print_list(document)


def _print_list(document: dict[str, Any]) -> None:
    from vllm_delta_sync.cli.text import print_columns, print_fields

    signed = "none: only trusted keys may sign"
    if document["sequence"]:
        checked = "" if document["checked"] else ", not checked"
        signed = f"sequence {document['sequence']}, signed by key {(document['signed_by'] or 'none')[:16]}{checked}"
    print_fields(
        [("run", document["run"]), ("list", signed), *(("note", note) for note in document["notes"])],
    )
    rows = [
        (row["key"], "trusted" if row["trusted"] else "listed", row["state"], _until(row)) for row in document["keys"]
    ]
    if rows:
        print()
        print_columns(("key", "by", "state", "holds"), rows, left=(0, 1, 2, 3))


def _until(row: dict[str, Any]) -> str:
    if row["last"] is not None:
        return f"up to version {row['last']['version']}"
    return "for nothing" if row["state"] == "revoked" else "without end"


def _change(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.bucket import open_bucket
    from vllm_delta_sync.maintenance.keys import change_keys

    if options.version is not None and not (options.retire or options.revoke):
        raise UsageError("--version goes with --retire or --revoke")
    bucket = options.closing.enter_context(open_bucket(bucket_url(options), without_mirror(options)))
    change = change_keys(
        bucket,
        keyring_of(options),
        add=[_public(text) for text in options.add],
        retire=[_public(text) for text in options.retire],
        revoke=[_public(text) for text in options.revoke],
        version=options.version,
    )
    document: dict[str, Any] = {
        "run": change.file.run,
        "url": bucket.url,
        "sequence": change.file.sequence,
        "keys": [entry.model_dump() for entry in change.file.keys],
        "versions": change.versions,
        "documents": change.documents,
        "head": change.head,
        "notes": change.notes,
    }
    return document, lambda: _print_change(document)


def _public(text: str) -> str:
    from vllm_delta_sync.trust.keys import load_public

    return text if re.fullmatch(r"[0-9a-f]{64}", text) else load_public(Path(text))


def _print_change(document: dict[str, Any]) -> None:
    from vllm_delta_sync.cli.text import clean

    print(f"keys.json has sequence {document['sequence']} and lists {len(document['keys'])} keys")
    for note in document["notes"]:
        print(clean(note))


COMMANDS: dict[str, Command] = {"keygen": _keygen, "keys": _keys}
