"""``delta-sync keygen``, and ``keys list``, ``add``, ``retire`` and ``revoke``: arguments and output.

The work is done by ``trust.keys``, ``notice.curve`` and ``maintenance.keys``.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from vllm_delta_sync.cli.arguments import (
    VERSION,
    Answer,
    add_bucket,
    add_group,
    add_trust,
    bucket_url,
    exit_codes,
    keyring_of,
    opened,
    version,
    without_mirror,
)
from vllm_delta_sync.cli.text import clean, print_columns, print_fields

KEYGEN_EXAMPLES = """\
PATH is the private key; only its owner may read the file, so keep it secret. PATH.pub is the public key. A publisher
signs with the private key (signing_key); servers accept only what is signed by the public keys in trusted_keys.

examples:
  delta-sync keygen trainer.key
  delta-sync keygen trainer.key --json
  delta-sync keygen notice.key --notice
"""
KEYS_TEXT = """
The list, keys.json, is in the bucket and signed by a key that the servers trust; keys that are only in the list may
sign weights, but may not change the list. Keep the key that signs the list off the publishing machines, where it might
be stolen.

"""
LIST = "  delta-sync keys list --bucket /data/runs/a --trusted-keys root.key.pub\n"
CHANGES = {
    "add": (
        "let keys sign from now on",
        "Let keys sign from now on. To replace a key, add the new one, let its publisher start, then retire the old "
        "one.",
        "  delta-sync keys add trainer2.key.pub --bucket /data/runs/a --signing-key root.key\n",
    ),
    "retire": (
        "end the use of keys; their signatures stay valid",
        "End the use of keys that stop signing. Their signatures of versions up to --version stay valid.",
        "  delta-sync keys retire old.key.pub --bucket /data/runs/a --signing-key root.key\n",
    ),
    "revoke": (
        "make the signatures of stolen keys invalid",
        "Revoke keys that may be stolen: of their signatures, only those of versions up to --version stay valid.",
        "  delta-sync keys revoke stolen.key.pub --bucket /data/runs/a --signing-key root.key --version 419\n"
        "  delta-sync keys revoke stolen.key.pub --bucket /data/runs/a --signing-key root.key --version none\n",
    ),
}
"""Help, description and examples of each command that changes the list."""


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

    group = add_group(
        commands,
        "keys",
        "list, add, retire or revoke the keys that may sign a run",
        LIST + "".join(examples for _, _, examples in CHANGES.values()),
    )
    listing = group.add_parser(
        "list",
        help="list the keys that may sign",
        description="List the keys that may sign a run: those that this command trusts, and those in the run's list.",
        epilog=KEYS_TEXT + f"examples:\n{LIST}" + exit_codes("the list is damaged, or not signed by a trusted key"),
    )
    add_bucket(listing)
    add_trust(listing)
    listing.set_defaults(handler=_list)
    for name, (brief, description, examples) in CHANGES.items():
        parser = group.add_parser(
            name,
            help=brief,
            description=description,
            epilog=f"{KEYS_TEXT}examples:\n{examples}"
            + exit_codes("a document is damaged, or the signing key is not trusted"),
        )
        parser.add_argument("keys", nargs="+", metavar="FILE.pub", help="public key file, or 64 hex digits")
        add_bucket(parser)
        if name == "retire":
            parser.add_argument(
                "--version", type=version, metavar=VERSION, help="last version that stays valid; default: the head"
            )
        elif name == "revoke":
            parser.add_argument(
                "--version",
                type=_last_version,
                metavar=f"{VERSION}|none",
                help="last version that stays valid, or none; default: the head",
            )
        add_trust(parser, signing=True)
        parser.set_defaults(handler=_change)


def _last_version(text: str) -> int | str:
    return text if text == "none" else version(text)


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


def _list(options: argparse.Namespace) -> Answer:
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

    bucket = options.closing.enter_context(open_bucket(bucket_url(options), without_mirror(options)))
    change = change_keys(
        bucket,
        keyring_of(options),
        version=getattr(options, "version", None),
        **{options.action: [_public(text) for text in options.keys]},
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
