"""Exports to be killed: a warm process that forks one for each line it reads.

``python -m tests.run.machine.killed_export FOLDER`` warms up in the folder, says ``ready``, and for each line
``FOLDER VERSION SHARD_BYTES STEP`` forks a process that exports ``FOLDER/run`` to ``FOLDER/out``, and says its id.
Before the STEP-th change that it makes to names in a folder it kills itself; 0: never. ``reap ID`` waits until it is
gone and says how it ended.
"""

import os
import signal
import sys
import traceback
from pathlib import Path

import numpy as np

from tests.support.samples import RunWriter, nudge, random_bits
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.upkeep.export import export
from vllm_delta_sync.wire.anchor import write_anchor
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

TABLE = TensorTable(TensorSpec(f"layers.{number}", "BF16", (128, 1024)) for number in range(24))
VERSIONS = 6
NAMES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate")
"""Audit events of what changes names in a folder."""


def write_run(folder: Path) -> RunWriter:
    """Write the run ``folder/run``."""
    random = np.random.default_rng(11)
    writer = RunWriter(open_bucket(str(folder / "run")), TABLE)
    bits = random_bits(TABLE, random)
    path = folder / "anchor"
    write_anchor(path, TABLE, ((spec.name, bits[tensor]) for tensor, spec in enumerate(TABLE)))
    writer.anchor(bits, path.read_bytes())
    path.unlink()
    for version in range(1, VERSIONS):
        writer.delta(nudge(writer.bits[-1], random, 0.05), full=[version])
    return writer


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


def forked(folder: str, version: int, shard_bytes: int, step: int) -> int:
    """Process id of a child that exports."""
    child = os.fork()
    if child:
        return child
    try:
        if step:
            die_at(step)
        export(open_run(f"{folder}/run"), f"{folder}/out", version, shard_bytes=shard_bytes)
        os._exit(0)
    finally:
        traceback.print_exc()
        os._exit(1)


def main(folder: str) -> None:
    write_run(Path(folder))
    # Loads and compiles what children need.
    export(open_run(f"{folder}/run"), f"{folder}/out", 1)
    print("ready", flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "reap":
            print(os.waitstatus_to_exitcode(os.waitpid(int(words[1]), 0)[1]), flush=True)
        else:
            print(forked(words[0], *map(int, words[1:])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
