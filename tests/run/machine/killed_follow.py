"""Processes that follow a run into a folder, to be killed; forked by ``tests.run.machine.nursery``.

Tasks are ``FOLDER STEP [FORMAT]``: follow ``FOLDER/run`` into ``FOLDER/out`` once, and be killed before the STEP-th
change that is made to names in a folder; 0: never.
"""

import sys

from tests.run.machine.killed_export import die_at
from tests.run.machine.nursery import serve
from vllm_delta_sync import follow

SHARD_BYTES = 3 * 128 * 1024 * 2
"""Eight files."""


def act(folder: str, step: str, format: str = "checkpoint") -> None:
    if int(step):
        die_at(int(step))
    for _ in follow(f"{folder}/run", f"{folder}/out", once=True, shard_bytes=SHARD_BYTES, format=format):
        pass


def main(folder: str) -> None:
    # Loads and compiles what children need.
    for _ in follow(f"{folder}/run", f"{folder}/warm", once=True):
        pass
    serve(act)


if __name__ == "__main__":
    main(sys.argv[1])
