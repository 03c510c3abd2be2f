"""Exports to be killed, forked by ``tests.run.machine.nursery``.

Tasks are ``FOLDER VERSION SHARD_BYTES STEP``: export ``FOLDER/run`` to ``FOLDER/out``, and be killed before the STEP-th
change that is made to names in a folder; 0: never.
"""

import os
import signal
import sys
from pathlib import Path

from tests.run.machine.nursery import serve
from tests.support.samples import RunWriter
from tests.support.written import Written
from vllm_delta_sync import open_run
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.maintenance.export import export

TABLE = TensorTable(TensorSpec(f"layers.{number}", "BF16", (128, 1024)) for number in range(24))
VERSIONS = 6
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


def act(folder: str, version: str, shard_bytes: str, step: str) -> None:
    if int(step):
        die_at(int(step))
    export(open_run(f"{folder}/run"), f"{folder}/out", int(version), shard_bytes=int(shard_bytes))


def main(folder: str) -> None:
    write_run(Path(folder))
    # Loads and compiles what children need.
    export(open_run(f"{folder}/run"), f"{folder}/out", 1)
    serve(act)


if __name__ == "__main__":
    main(sys.argv[1])
