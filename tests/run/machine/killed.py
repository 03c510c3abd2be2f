"""Publishers and collectors to be killed, forked by ``tests.support.forks``.

``python -m tests.run.machine.killed URL LOG`` begins a run; its tasks ``publish SEED`` and ``collect`` go on for ever.
Each publisher claims the run as on any machine. It writes to LOG, line by line: ``will SHA`` before it publishes
weights, ``done VERSION SHA`` once they are durable.
"""

import os
import sys
from pathlib import Path

import torch

from tests.run.machine.tensors import TRAININGS, first_tensors, train
from tests.support.forks import serve
from tests.support.publishing import digest
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.maintenance.compact import compact
from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy, collect

MIN_AGE_SECONDS = 3.0
"""Longer than anything here takes between putting an object and listing it."""


class Log:
    """What a publisher meant to do, and did; each line is written at once."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


def publish(url: str, log: Log, seed: int, times: int = 1_000_000) -> None:
    """Take the run over and publish as fast as it goes, from the head's weights on (even seeds) or others."""
    tensors = first_tensors(seed)
    if seed % 2 == 0:
        open_run(url).load_into(tensors)
    log.write("will", digest(tensors))
    with Publisher(list(tensors.items()), url, anchor_every=20 if seed % 3 == 0 else None) as publisher:
        before: tuple[int, str] | None = None
        for step in range(times):
            train(tensors, TRAININGS[step % len(TRAININGS)], seed + step)
            now = digest(tensors)
            log.write("will", now)
            version = publisher.publish(step, wait=True).version
            if before is not None:
                log.write("done", *before)
            before = None if version is None else (version, now)


def tidy_up(url: str) -> None:
    """Compact and collect, again and again."""
    while True:
        run = open_run(url)
        compact(run)
        collect(run, RetentionPolicy(keep_last=10, keep_every=25, min_age=MIN_AGE_SECONDS))


def main(url: str, path: str) -> None:
    torch.set_num_threads(1)
    tensors = first_tensors(0)
    log = Log(path)
    log.write("will", digest(tensors))
    Publisher(list(tensors.items()), url).close()
    # Loads and compiles what children need.
    publish(url, log, 2, times=5)
    compact(open_run(url))
    collect(open_run(url), RetentionPolicy(min_age=MIN_AGE_SECONDS))
    serve(lambda task, seed=0: publish(url, Log(path), seed) if task == "publish" else tidy_up(url))


if __name__ == "__main__":
    main(sys.argv[1], str(Path(sys.argv[2])))
