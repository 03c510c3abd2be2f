"""What the Bucket contract promises when many work on one bucket, and when one of them is killed."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.bucket.contract import crowd
from tests.bucket.contract.crowd import patient
from tests.support.running import Worker, working
from tests.support.stores import ACROSS_PROCESSES, STORES, Kind
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import ConflictError, NotFoundError

SIZE = 300_000
PATIENCE_SECONDS = 120

across_processes = pytest.mark.parametrize("place", ACROSS_PROCESSES)
within_one_process = pytest.mark.parametrize("place", sorted(set(STORES) - set(ACROSS_PROCESSES)))


@within_one_process
def test_another_process_has_a_bucket_of_its_own(url: str, bucket: Bucket) -> None:
    bucket.put("versions/0.json", b"of this process", if_absent=True)
    assert raced(url, "versions/0.json", 1, 10) == [(0, "won")]
    assert bucket.get("versions/0.json") == b"of this process"


def raced(url: str, key: str, processes: int, size: int) -> list[tuple[int, str]]:
    with working(1, crowd.race, url, key, processes, size) as [racers]:
        outcomes: list[tuple[int, str]] = racers.hear()
    return outcomes


def check_created(kind: Kind, won: list[int], found: bytes, size: int) -> None:
    """One writer was first. Where creation is not exclusive several may think so, and one of those has stayed."""
    assert len(won) == 1 if kind.exclusive else won
    assert found in [crowd.content(number, size) for number in won]


@across_processes
def test_of_8_processes_one_creates(url: str, bucket: Bucket, kind: Kind) -> None:
    outcomes = raced(url, "versions/0.json", 8, 10)
    won = [number for number, outcome in outcomes if outcome == "won"]
    lost = [number for number, outcome in outcomes if outcome == "conflict"]
    assert sorted(won + lost) == list(range(8))
    check_created(kind, won, bucket.get("versions/0.json"), 10)


def test_of_16_threads_one_creates(bucket: Bucket, kind: Kind) -> None:
    for turn in range(5 if kind.exclusive else 2):
        key, gate = f"versions/{turn}.json", threading.Barrier(16)

        def creates(number: int, key: str = key, gate: threading.Barrier = gate) -> bool:
            gate.wait()
            try:
                bucket.put(key, crowd.content(number, 1000), if_absent=True)
            except ConflictError:
                return False
            return True

        with ThreadPoolExecutor(16) as pool:
            won = [number for number, created in enumerate(pool.map(creates, range(16))) if created]
        check_created(kind, won, bucket.get(key), 1000)


@across_processes
def test_a_reader_sees_old_or_new_whole(url: str, bucket: Bucket) -> None:
    writer = Worker(crowd.replace, url, "HEAD.json", SIZE)
    try:
        assert writer.hear() == "started"
        seen, reads = set[int](), 0
        end = time.monotonic() + PATIENCE_SECONDS
        while len(seen) <= 3 or reads < 15:
            assert time.monotonic() < end, "the writer never got in between; nothing was tested"
            reads += 1
            data = bucket.get("HEAD.json")
            assert data == data[:1] * SIZE
            seen.add(data[0])
            part = bucket.get_range("HEAD.json", 1000, SIZE)
            assert part == part[:1] * (SIZE - 1000)
            assert [(info.key, info.bytes) for info in bucket.list()] == [("HEAD.json", SIZE)]
            assert bucket.stat("HEAD.json").bytes == SIZE
    finally:
        writer.kill()


@across_processes
def test_a_killed_writer_leaves_whole_objects_only(url: str, bucket: Bucket, place: str) -> None:
    chance = random.Random(7)
    for turn in range(2):
        folder = f"fill-{turn}"
        writer = Worker(crowd.fill, url, folder, SIZE)
        first = writer.hear()
        time.sleep(chance.uniform(0.01, 0.2))
        durable = {first, *writer.kill()}
        found = [info.key for info in bucket.list(f"{folder}/")]
        assert durable <= set(found)
        assert found == [f"{folder}/{number:06}" for number in range(len(found))]
        for number, key in enumerate(found):
            assert bucket.get(key) == crowd.content(number, SIZE)
        following = f"{folder}/{len(found):06}"
        try:
            bucket.put(following, b"next", if_absent=True)
        except ConflictError:
            # What was on its way to a store over a network when the writer died has arrived since.
            assert place != "local"
            assert bucket.get(following) == crowd.content(len(found), SIZE)


@across_processes
def test_a_writer_killed_in_the_middle_leaves_nothing(url: str, bucket: Bucket, kind: Kind, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for existing in (None, b"old"):
        if existing is not None:
            bucket.put("objects/a", existing)
        writer = Worker(crowd.put_file, url, "objects/a", pipe)
        with open(pipe, "wb") as feed:
            # More than the writer's buffers and the pipe hold: when this returns, part of it is in the store.
            feed.write(b"x" * (12 << 20))
            feed.flush()
            writer.kill()
        if existing is None:
            assert list(bucket.list()) == []
            with pytest.raises(NotFoundError):
                bucket.get("objects/a")
            bucket.put("objects/a", b"by another", if_absent=not kind.parts_count_as_objects)
            assert bucket.get("objects/a") == b"by another"
            bucket.delete("objects/a")
        else:
            assert bucket.get("objects/a") == existing
            assert [info.bytes for info in bucket.list()] == [len(existing)]


def test_listing_while_others_put_and_delete(url: str, bucket: Bucket) -> None:
    kept = [f"keep/{number:03}" for number in range(20)]
    for key in kept:
        bucket.put(key, b"x")
    stop = threading.Event()

    def churn() -> None:
        with patient(url) as other:
            while not stop.is_set():
                for number in range(20):
                    other.put(f"churn/{number}/x", b"y")
                for number in range(20):
                    other.delete(f"churn/{number}/x")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(20):
            found = [info.key for info in bucket.list()]
            assert found == sorted(set(found))
            assert [key for key in found if key.startswith("keep/")] == kept
    finally:
        stop.set()
        thread.join()
