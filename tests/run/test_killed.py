"""Killed at any moment, a publisher leaves a run that verifies, and an export a whole checkpoint or none."""

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.run.machine.killed_folders import EIGHT_FILES, TABLE, VERSIONS, write_run
from tests.support.exporting import expected, held, names
from tests.support.forks import Forks
from tests.support.publishing import digest
from tests.support.running import eventually
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format.manifest import object_key
from vllm_delta_sync.maintenance.export import WORK_NAME
from vllm_delta_sync.tensors.checkpoint import EXPORT_NAME, INDEX_NAME, SINGLE_NAME

LONGEST_SECONDS, MOST_SECONDS = 0.8, 3.0
"""How long a publisher may live, at least; and at most, where the first one took long for its first version."""
AFTER_CLAIM, VERIFY_EVERY = 4, 5
"""Of so many publishers one is killed after it has claimed the run, even on a slow machine; the rest at any time."""
SHARD_BYTES = (10**9, EIGHT_FILES)
"""Of an export: one file, or eight."""
STEPS = 40
"""Changes of names that an export makes, about."""


@pytest.fixture
def chance(campaign_seed: int | None) -> random.Random:
    return random.Random(campaign_seed or 0)


# Publishers


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


@contextmanager
def child(nursery: Forks, *task: object) -> Iterator[None]:
    """A child, killed at exit."""
    pid = nursery.begin(*task)
    try:
        yield
    finally:
        killed = nursery.kill(pid)
    assert killed, f"{task} ended by itself"


@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_publisher_killed_many_times_leaves_whole_states(tmp_path: Path, kills: int, chance: random.Random) -> None:
    url, log = str(tmp_path / "run"), tmp_path / "log"
    nursery = Forks("tests.run.machine.killed", url, log)
    began, head = time.monotonic(), 0
    try:
        with child(nursery, "publish", chance.randrange(1000)):
            eventually(lambda: log.exists() and bool(Recorded.read(log).done), 300)
        longest = min(MOST_SECONDS, max(LONGEST_SECONDS, 2 * (time.monotonic() - began)))
        for kill in range(1, kills + 1):
            epoch = open_run(url).newest_epoch()
            with child(nursery, "publish", chance.randrange(1000)):
                if kill % AFTER_CLAIM == 1:
                    eventually(lambda epoch=epoch: open_run(url).newest_epoch() > epoch, 300)  # type: ignore[misc]
                if kill % 2:
                    time.sleep(chance.uniform(0, longest))
                else:
                    with child(nursery, "collect"):
                        time.sleep(chance.uniform(0, longest))
                    end_claim(url)
            head = expect_whole(open_run(url), Recorded.read(log), head, chance)
            if kill % VERIFY_EVERY == 0:
                report = open_run(url).verify()
                assert (report.head, report.replayed) == (head, True)
        # However soon each was killed: a publisher that is left alone goes on, and a collection comes to an end.
        with child(nursery, "publish", 2):
            eventually(lambda: open_run(url).head().version > max(30, kills), 300)
        with child(nursery, "collect"):
            eventually(lambda: (record := open_run(url).retention()) is not None and bool(record.gone), 300)
    finally:
        nursery.close()
    assert expect_whole(open_run(url), Recorded.read(log), head, chance) > kills
    assert open_run(url).newest_epoch() >= kills // AFTER_CLAIM


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


# Exports


class Exports:
    """A run, a folder that its versions are exported to, and what is in there.

    Attributes:
        version: the one that the folder holds; None if it holds none.
    """

    def __init__(self, nursery: Forks, folder: Path) -> None:
        self.nursery, self._folder = nursery, folder
        self.out = folder / "out"
        self.bits = write_run(folder).bits
        self.version: int | None = None
        self.finish(0, SHARD_BYTES[1])
        began = time.monotonic()
        self.finish(1, SHARD_BYTES[0])
        self.seconds = time.monotonic() - began

    def begin(self, version: int, shard_bytes: int, step: int = 0) -> int:
        """Process id of an export."""
        return self.nursery.begin(self._folder, step, "export", version, shard_bytes)

    def finish(self, version: int, shard_bytes: int) -> None:
        """An export that nobody kills comes to its end, whatever the folder holds, and leaves nothing else there."""
        assert not self.nursery.end(self.begin(version, shard_bytes))
        self.version = self.shown()
        assert self.version == version
        about = json.loads((self.out / EXPORT_NAME).read_bytes())
        assert names(self.out) == about["files"]
        assert len(about["files"]) == (2 if shard_bytes > TABLE.full_bytes else 10)

    def shown(self) -> int | None:
        """The version that a reader finds in the folder: all of it, or nothing that looks like a checkpoint."""
        if not any((self.out / name).exists() for name in (SINGLE_NAME, INDEX_NAME)):
            return None
        found = held(self.out)
        return next(version for version in range(VERSIONS) if found == expected(TABLE, self.bits[version]))


@pytest.fixture
def exports(nursery: Forks, tmp_path: Path) -> Exports:
    return Exports(nursery, tmp_path)


@pytest.mark.slow
def test_export_killed_at_random_is_made_whole_by_the_next(exports: Exports, chance: random.Random) -> None:
    interrupted = 0
    for kill in range(20):
        version, shard_bytes = chance.randrange(VERSIONS), chance.choice(SHARD_BYTES)
        before = exports.version
        if kill % 2:
            pid = exports.begin(version, shard_bytes)
            time.sleep(chance.uniform(0, exports.seconds))
            exports.nursery.kill(pid)
        else:
            exports.nursery.end(exports.begin(version, shard_bytes, chance.randint(1, STEPS) if kill else 5))
        exports.version = exports.shown()
        assert exports.version in (before, version, None)
        interrupted += (exports.out / WORK_NAME).exists()
        # Now and then it is killed again, also on the way to another version.
        if chance.random() < 0.6:
            exports.finish(version if chance.random() < 0.7 else chance.randrange(VERSIONS), chance.choice(SHARD_BYTES))
    exports.finish(VERSIONS - 1, SHARD_BYTES[1])
    assert interrupted > 0


def test_export_killed_at_each_step_shows_whole_checkpoints(exports: Exports) -> None:
    """Steps are changes of names; those at the end, where one checkpoint takes the place of another, matter most."""
    seen: list[int | None] = []
    step, version = 1, 1
    while exports.nursery.end(exports.begin(version, SHARD_BYTES[version % 2], step)):
        found = exports.shown()
        assert found in (exports.version, version, None), f"step {step}"
        seen.append(found if found is None else found - version)
        exports.version = found
        if step % 3 == 0:  # else the next one is killed on the way to another version
            exports.finish(version, SHARD_BYTES[version % 2])
        version = version % (VERSIONS - 1) + 1
        step += 1
    assert exports.shown() == version
    assert None in seen, "nothing was shown while the files were moved"
    assert 0 in seen, "all was there before the end"


def test_what_was_fetched_by_one_that_was_killed_is_not_fetched_again(exports: Exports, tmp_path: Path) -> None:
    pid = exports.begin(VERSIONS - 1, SHARD_BYTES[0])
    work = exports.out / WORK_NAME / "objects"
    eventually(lambda: any(len(path.name) == 64 for path in work.glob("*")))
    assert exports.nursery.kill(pid), "it was too fast"
    kept = [path.name for path in work.iterdir() if path.is_file() and len(path.name) == 64]
    assert kept
    # The store has lost it meanwhile.
    bucket = open_bucket(str(tmp_path / "run"))
    for name in kept:
        bucket.delete(object_key(name))
    exports.finish(VERSIONS - 1, SHARD_BYTES[0])
