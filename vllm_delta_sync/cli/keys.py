"""``delta-sync keygen`` and ``delta-sync keys``: arguments and output of both commands.

The work is done by ``trust.keys``, ``notice.curve`` and ``maintenance.keys``.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from vllm_delta_sync.cli.arguments import Answer, add_bucket, add_trust, bucket_url, keyring_of, opened, without_mirror
from vllm_delta_sync.cli.text import clean, print_columns, print_fields
from vllm_delta_sync.errors import UsageError

KEYGEN_EXAMPLES = """\
PATH is the private key; only its owner may read the file, so keep it secret. PATH.pub is the public key. A publisher
signs with the private key (signing_key); servers accept only what is signed by the public keys in trusted_keys.

examples:
  delta-sync keygen trainer.key
  delta-sync keygen trainer.key --json
  delta-sync keygen notice.key --notice
"""
KEYS_EXAMPLES = """\
Without --add, --retire or --revoke, list the keys. The list, keys.json, is in the bucket and signed by a key that the
servers trust; keys that are only in the list may sign weights, but may not change the list. Retire a key that stops
signing: its signatures stay valid. Revoke a key that may be stolen: of its signatures, only those of versions up to
--version stay valid. Keep the key that signs the list off the publishing machines, where it might be stolen.

examples:
  delta-sync keys --bucket /data/runs/a --trusted-keys root.key.pub
  delta-sync keys --bucket /data/runs/a --signing-key root.key --add trainer2.key.pub
  delta-sync keys --bucket /data/runs/a --signing-key root.key --add new.key.pub --retire old.key.pub
  delta-sync keys --bucket /data/runs/a --signing-key root.key --revoke stolen.key.pub --version 419
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    keygen = commands.add_parser(
        "keygen",
        help="make a key pair, for signatures or for notices",
        description="Make a key pair: PATH and PATH.pub.",
        epilog=KEYGEN_EXAMPLES,
    )
    keygen.add_argument("path", metavar="PATH", type=Path, help="file for the private key; must not exist yet")
    keygen.add_argument(
        "--notice", action="store_true", help="make a CURVE key pair for encrypted notices instead of signatures"
    )
    keygen.set_defaults(handler=_keygen)

    parser = commands.add_parser(
        "keys",
        help="list, add, retire or revoke the keys that may sign a run",
        description="List or change the keys that may sign a run.",
        epilog=KEYS_EXAMPLES,
    )
    add_bucket(parser)
    add_trust(parser, signing=True)
    for name, text in (
        ("--add", "may sign from now on"),
        ("--retire", "stops signing; its signatures stay valid"),
        ("--revoke", "may be stolen; its signatures become invalid"),
    ):
        parser.add_argument(
            name, action="append", default=[], metavar="FILE.pub", help=f"public key file, or 64 hex digits: {text}"
        )
    parser.add_argument(
        "--version",
        type=_last_version,
        metavar="N",
        help="last version whose signatures by retired or revoked keys stay valid; with --revoke also none; default: "
        "the head",
    )
    parser.set_defaults(handler=_keys)


def _last_version(text: str) -> int | str:
    if text == "none":
        return text
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a version; give a number, or none")
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
        "checked": run.keyring.checks_signatures,
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
    signed = "no list: only trusted keys may sign"
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
        print_columns(("key", "by", "state", "valid"), rows, left=(0, 1, 2, 3))


def _until(row: dict[str, Any]) -> str:
    if row["last"] is not None:
        return f"up to version {row['last']['version']}"
    return "never" if row["state"] == "revoked" else "always"


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
    print(f"keys.json now has sequence {document['sequence']} and lists {len(document['keys'])} keys")
    for note in document["notes"]:
        print(clean(note))
