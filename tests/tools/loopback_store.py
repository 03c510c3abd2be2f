"""Run a command with an empty bucket on loopback: ``python -m tests.tools.loopback_store hf|s3|dir|URL -- COMMAND …``.

``hf`` is a Hub, for the real huggingface_hub; ``s3`` is moto. Both last as long as the command, which finds the run's
URL in DELTA_SYNC_BUCKET, beside what clients of the store need. With ``dir`` the variable is taken away, so that the
command chooses a directory of its own; any other URL is passed on as it is.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.stores import STORES

KINDS = {"hf": "hub", "s3": "s3"}
BUCKET = "DELTA_SYNC_BUCKET"


def main(arguments: Sequence[str]) -> int:
    """Exit status of the command, 128 + n if signal n ended it; 2 for wrong usage."""
    if len(arguments) < 3 or arguments[1] != "--":
        print(__doc__, file=sys.stderr)
        return 2
    kind, command = arguments[0], arguments[2:]
    environment = dict(os.environ)
    environment.pop(BUCKET, None)
    # Ctrl-C is for the command alone: the store, whose processes inherit this, lasts until that has ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ExitStack() as stack:
        if kind in KINDS:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="loopback-")))
            store = stack.enter_context(STORES[KINDS[kind]](folder))
            environment |= store.environment | {BUCKET: store.url}
        elif kind != "dir":
            environment[BUCKET] = kind
        process = subprocess.Popen(command, env=environment, preexec_fn=_default_interrupt)
        signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
        status = process.wait()
    return status if status >= 0 else 128 - status


def _default_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
