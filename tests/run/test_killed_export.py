"""An export that is killed at any moment shows a whole checkpoint or none, and the next one makes it whole."""

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run.machine.killed_export import TABLE, VERSIONS, write_run
from tests.support.exporting import expected, held, names
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.checkpoint import EXPORT_NAME, INDEX_NAME, SINGLE_NAME
from vllm_delta_sync.upkeep.export import WORK_NAME
from vllm_delta_sync.wire.manifest import object_key

KILLS = 10
SHARD_BYTES = (10**9, 3 * 128 * 1024 * 2)
"""One file, or eight."""
STEPS = 40
"""Changes of names that an export makes, about."""


class Nursery:
    """The warm process that exports are forked from; see ``tests.run.machine.killed_export``."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.run.machine.killed_export", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        assert self._read() == "ready"

    def begin(self, folder: Path, version: int, shard_bytes: int, step: int = 0) -> int:
        """Process id of an export."""
        return self._ask(folder, version, shard_bytes, step)

    def end(self, pid: int) -> int:
        """Exit status of an export, once it has ended."""
        return self._ask("reap", pid)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)

    def _ask(self, *words: object) -> int:
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        return int(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class Exports:
    """A run, a folder that its versions are exported to, and what is in there.

    Attributes:
        version: the one that the folder holds; None if it holds none.
    """

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self._nursery, self._folder = nursery, folder
        self.out = folder / "out"
        self.bits = write_run(folder).bits
        self.version: int | None = None
        self.finish(0, SHARD_BYTES[1])
        began = time.monotonic()
        self.finish(1, SHARD_BYTES[0])
        self.seconds = time.monotonic() - began

    def begin(self, version: int, shard_bytes: int, step: int = 0) -> int:
        """Process id of an export."""
        return self._nursery.begin(self._folder, version, shard_bytes, step)

    def finish(self, version: int, shard_bytes: int) -> None:
        """An export that nobody kills comes to its end, whatever the folder holds, and leaves nothing else there."""
        assert self._nursery.end(self.begin(version, shard_bytes)) == 0
        self.version = self.shown()
        assert self.version == version
        about = json.loads((self.out / EXPORT_NAME).read_bytes())
        assert names(self.out) == about["files"]
        assert len(about["files"]) == (2 if shard_bytes > TABLE.full_bytes else 10)

    def killed(self, pid: int) -> bool:
        """Whether an export was killed before its end; the folder holds what it held, or what was meant, or nothing."""
        status = self._nursery.end(pid)
        assert status in (0, -signal.SIGKILL)
        return status != 0

    def shown(self) -> int | None:
        """The version that a reader finds in the folder: all of it, or nothing that looks like a checkpoint."""
        if not any((self.out / name).exists() for name in (SINGLE_NAME, INDEX_NAME)):
            return None
        found = held(self.out)
        return next(version for version in range(VERSIONS) if found == expected(TABLE, self.bits[version]))


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    made = Nursery(tmp_path_factory.mktemp("warm"))
    yield made
    made.close()


@pytest.fixture
def exports(nursery: Nursery, tmp_path: Path) -> Exports:
    return Exports(nursery, tmp_path)


@pytest.fixture
def chance() -> random.Random:
    seed = int(os.environ.get("CHAIN_SEED", secrets.randbits(32)))
    print(f"CHAIN_SEED={seed}")
    return random.Random(seed)


def test_export_killed_at_ten_moments_is_made_whole_by_the_next(exports: Exports, chance: random.Random) -> None:
    killed = interrupted = 0
    for kill in range(KILLS):
        version, shard_bytes = chance.randrange(VERSIONS), chance.choice(SHARD_BYTES)
        before = exports.version
        if kill % 2:
            pid = exports.begin(version, shard_bytes)
            time.sleep(chance.uniform(0, exports.seconds))
            os.kill(pid, signal.SIGKILL)
        else:
            pid = exports.begin(version, shard_bytes, chance.randint(1, STEPS))
        killed += exports.killed(pid)
        exports.version = exports.shown()
        assert exports.version in (before, version, None)
        interrupted += (exports.out / WORK_NAME).exists()
        # Now and then it is killed again, also on the way to another version.
        if chance.random() < 0.6:
            exports.finish(version if chance.random() < 0.7 else chance.randrange(VERSIONS), chance.choice(SHARD_BYTES))
    exports.finish(VERSIONS - 1, SHARD_BYTES[1])
    print(f"{killed} of {KILLS} killed before their end, {interrupted} left something to go on from")
    assert interrupted > 0


def test_export_killed_at_each_step_shows_whole_checkpoints(exports: Exports) -> None:
    """Steps are changes of names; those at the end, where one checkpoint takes the place of another, matter most."""
    seen: list[int | None] = []
    step, version = 1, 1
    while exports.killed(exports.begin(version, SHARD_BYTES[version % 2], step)):
        found = exports.shown()
        assert found in (exports.version, version, None), f"step {step}"
        seen.append(found if found is None else found - version)
        exports.finish(version, SHARD_BYTES[version % 2])
        version = version % (VERSIONS - 1) + 1
        step += 1
    assert exports.shown() == version
    assert None in seen, "nothing was shown while the files were moved"
    assert 0 in seen, "all was there before the end"
    print(f"{step - 1} steps, in {seen.count(None)} of them nothing was shown")


def test_what_was_fetched_by_one_that_was_killed_is_not_fetched_again(exports: Exports, tmp_path: Path) -> None:
    pid = exports.begin(VERSIONS - 1, SHARD_BYTES[0])
    work = exports.out / WORK_NAME / "objects"
    deadline = time.monotonic() + 60
    while not any(len(path.name) == 64 for path in work.glob("*")):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    assert exports.killed(pid), "it was too fast"
    kept = [path.name for path in work.iterdir() if path.is_file() and len(path.name) == 64]
    assert kept
    # The store has lost it meanwhile.
    bucket = open_bucket(str(tmp_path / "run"))
    for digest in kept:
        bucket.delete(object_key(digest))
    exports.finish(VERSIONS - 1, SHARD_BYTES[0])
