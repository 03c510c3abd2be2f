"""A publisher killed at random, again and again on one run, leaves a run that verifies, at a state that it recorded."""

import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.run.machine.killed import digest
from vllm_delta_sync import open_run
from vllm_delta_sync.chain import Run
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.wire import documents as side

LONGEST_SECONDS = 0.8
MOST_SECONDS = 3.0
"""How long a publisher may live where the first one took long for its first version: a slow machine gets more."""
VERIFY_EVERY = 5


class Nursery:
    """The warm process that children are forked from; see ``tests.run.machine.killed``."""

    def __init__(self, url: str, log: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.run.machine.killed", url, str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        assert self._read() == "ready"

    def ask(self, *words: object) -> int:
        """Process id of a child, or the status of one that is gone."""
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        return int(self._read())

    @contextmanager
    def child(self, *task: object) -> Iterator[int]:
        """A child, killed at exit."""
        pid = self.ask(*task)
        try:
            yield pid
        finally:
            os.kill(pid, signal.SIGKILL)
            status = self.ask("reap", pid)
        assert status == -signal.SIGKILL, f"{task} ended by itself"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@dataclass
class Recorded:
    """What publishers wrote into the log: digests that they meant to publish, and versions that they knew durable."""

    will: set[str] = field(default_factory=set)
    done: dict[int, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Recorded":
        found = cls()
        for line in path.read_text().splitlines():
            word, *rest = line.split()
            if word == "will":
                found.will.add(rest[0])
            else:
                found.done[int(rest[0])] = rest[1]
        return found


@pytest.mark.parametrize("kills", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_publisher_killed_again_and_again_leaves_whole_states(tmp_path: Path, kills: int) -> None:
    seed = int(os.environ.get("CHAIN_SEED", secrets.randbits(32)))
    print(f"CHAIN_SEED={seed}")
    chance = random.Random(seed)
    url, log = str(tmp_path / "run"), tmp_path / "log"
    nursery = Nursery(url, log)
    began, head = time.monotonic(), 0
    try:
        with nursery.child("publish", chance.randrange(1000)):
            while not log.exists() or not Recorded.read(log).done:
                assert time.monotonic() - began < 300, "the first publisher makes no versions"
                time.sleep(0.01)
        longest = min(MOST_SECONDS, max(LONGEST_SECONDS, 2 * (time.monotonic() - began)))
        for kill in range(1, kills + 1):
            with nursery.child("publish", chance.randrange(1000)):
                if kill % 2:
                    time.sleep(chance.uniform(0, longest))
                else:
                    with nursery.child("collect"):
                        time.sleep(chance.uniform(0, longest))
                    end_claim(url)
            head = expect_whole(open_run(url), Recorded.read(log), head, chance)
            if kill % VERIFY_EVERY == 0:
                report = open_run(url).verify()
                assert (report.head, report.replayed) == (head, True)
        # However soon each collection was killed: one that is left alone comes to an end.
        with nursery.child("collect"):
            began = time.monotonic()
            while (record := open_run(url).retention()) is None or len(record.gone) < 2:
                assert time.monotonic() - began < 120, f"nothing is collected: {record}"
                time.sleep(0.05)
    finally:
        nursery.close()
    expect_whole(open_run(url), Recorded.read(log), head, chance)
    assert head > kills
    assert open_run(url).newest_claim() >= kills // 2
    print(f"{kills} kills, {head} versions, {len(record.kept)} ranges kept, {time.monotonic() - began:.0f} s")


def end_claim(url: str) -> None:
    """End the claim of a collection that was killed, as the ten minutes would that the next one waits otherwise."""
    bucket = open_run(url).bucket
    claims = [side.collection_of_key(info.key) for info in bucket.list(side.COLLECTIONS_PREFIX)]
    for number in {found[0] for found in claims if found is not None}:
        bucket.put(side.collection_end_key(number), side.COLLECTION_END)


def expect_whole(run: Run, recorded: Recorded, before: int, chance: random.Random) -> int:
    """Versions since the last kill, and some others, are states that were recorded; returns the head."""
    head = run.head().version
    assert head >= max([before, *recorded.done])
    assert digest(dict(run.tensors(head))) in recorded.will
    for version in {chance.randint(before, head), chance.randint(0, head), max(recorded.done)}:
        try:
            found = digest(dict(run.tensors(version)))
        except NotFoundError:
            record = run.retention()
            assert record is not None
            assert record.gave_up(version), f"version {version} is lost"
            continue
        assert found in recorded.will
        assert recorded.done.get(version, found) == found, f"version {version} is not what its publisher recorded"
    return head
