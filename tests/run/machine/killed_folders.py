"""Exports and followers to be killed, forked by ``tests.support.forks``.

Tasks are ``FOLDER STEP export VERSION SHARD_BYTES`` and ``FOLDER STEP follow FORMAT``: put ``FOLDER/run`` into
``FOLDER/out`` once, and be killed before the STEP-th change that is made to names in a folder; 0: never.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.support.forks import serve
from tests.support.samples import RunWriter
from tests.support.written import Written
from vllm_delta_sync import follow, open_run
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.maintenance.export import export

TABLE = TensorTable(TensorSpec(f"layers.{number}", "BF16", (128, 1024)) for number in range(24))
VERSIONS = 6
EIGHT_FILES = 3 * 128 * 1024 * 2
"""Bytes per file at which the model has so many."""
NAMES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate")
"""Audit events of what changes names in a folder."""


def write_run(folder: Path) -> RunWriter:
    """Write the run ``folder/run``."""
    written = Written(folder / "run", 0, 11, TABLE)
    for version in range(1, VERSIONS):
        written.publish(0.05, full=[version])
    return written.writer


def die_at(step: int) -> None:
    """Kill this process before the ``step``-th change of names that it makes from now on."""
    seen = 0

    def hook(event: str, arguments: object) -> None:
        nonlocal seen
        if event in NAMES:
            seen += 1
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def act(folder: str, step: int, what: str, *how: Any) -> None:
    if step:
        die_at(step)
    if what == "export":
        version, shard_bytes = how
        export(open_run(f"{folder}/run"), f"{folder}/out", version, shard_bytes=shard_bytes)
    else:
        for _ in follow(f"{folder}/run", f"{folder}/out", once=True, shard_bytes=EIGHT_FILES, format=how[0]):
            pass


def main(folder: str) -> None:
    write_run(Path(folder))
    # Loads and compiles what children need.
    export(open_run(f"{folder}/run"), f"{folder}/out", 1)
    for _ in follow(f"{folder}/run", f"{folder}/followed", once=True):
        pass
    serve(act)


if __name__ == "__main__":
    main(sys.argv[1])
