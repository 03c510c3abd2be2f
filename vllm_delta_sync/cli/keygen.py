"""``delta-sync keygen`` makes a key pair with ``trust.keys`` or ``notice.curve``: arguments and output."""

import argparse
from pathlib import Path
from typing import Any

from vllm_delta_sync.cli.arguments import Answer

EXAMPLES = """\
PATH is the private key; only its owner may read the file, so keep it secret. PATH.pub is the public key. A publisher
signs with the private key (signing_key); servers accept only what is signed by the public keys in trusted_keys.

examples:
  delta-sync keygen trainer.key
  delta-sync keygen trainer.key --json
  delta-sync keygen notice.key --notice
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    keygen = commands.add_parser(
        "keygen",
        help="make a key pair, for signatures or for notices",
        description="Make a key pair: PATH and PATH.pub.",
        epilog=EXAMPLES,
    )
    keygen.add_argument("path", metavar="PATH", type=Path, help="file for the private key; must not exist yet")
    keygen.add_argument(
        "--notice", action="store_true", help="make a CURVE key pair for encrypted notices instead of signatures"
    )
    keygen.set_defaults(handler=_keygen)


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
