"""``delta-sync keygen`` makes a key pair with ``trust.keys`` or ``notice.curve``."""

import argparse
from pathlib import Path

from vllm_delta_sync.cli.command import Report, command, option


@command(
    "keygen",
    "make a key pair, for signatures or for notices",
    option("path", metavar="PATH", type=Path, help="file for the private key; must not exist yet"),
    option("--notice", action="store_true", help="make a CURVE key pair for encrypted notices instead of signatures"),
)
def keygen(options: argparse.Namespace) -> Report:
    """Make a key pair: PATH and PATH.pub.

    PATH is the private key; only its owner may read the file, so keep it secret. PATH.pub is the public key. A
    publisher signs with the private key (signing_key); servers accept only what is signed by the public keys in
    trusted_keys.

    examples:
      delta-sync keygen trainer.key
      delta-sync keygen trainer.key --json
      delta-sync keygen notice.key --notice
    """
    if options.notice:
        from vllm_delta_sync.notice.curve import generate
    else:
        from vllm_delta_sync.trust.keys import generate

    data = {
        "kind": "notice" if options.notice else "signature",
        "private": str(options.path),
        "public": f"{options.path}.pub",
        "key": generate(options.path),
    }
    return Report(data, lambda data: print(data["key"]))
