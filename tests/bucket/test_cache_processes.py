"""The cache of one node among processes: who fetches, who waits, and what happens when one dies."""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.bucket.test_cache import MANY, SECONDS, Source, names
from tests.support.running import Worker, context_of_processes, working
from tests.support.samples import ref_of
from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.errors import StoreError

context_of_processes(__name__)


def rank(pipe: Connection, directory: Path, data: bytes, pause: bool) -> None:
    """A rank: reports when it fetches and when it starts to wait, and fetches as it is told.

    Args:
        pause: stop once between opening the lock's file and locking it.
    """
    tries = 0

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal tries
        if event == "open" and str(arguments[0]).endswith(f"{ref_of(data).sha256}.lock"):
            tries += 1
            if tries == 2:
                pipe.send("waiting")
        if event == "fcntl.flock" and pause and tries == 1:
            pipe.send("opened")
            pipe.recv()

    def ask() -> None:
        pipe.send("fetching")
        if pipe.recv() == "fail":
            raise StoreError("told to fail")

    sys.addaudithook(see)
    cache, source = ObjectCache(directory, MANY), Source(data)
    source.before = ask
    try:
        pipe.send("got" if cache.get(source.ref, source) == data else "wrong bytes")
    except StoreError as error:
        pipe.send(error.message)


def split(members: Sequence[Worker]) -> tuple[Worker, list[Worker]]:
    """Who fetches, and who waits for it."""
    said = [(each.hear(), each) for each in members]
    assert sorted(word for word, _ in said) == ["fetching"] + ["waiting"] * (len(members) - 1)
    holder = next(each for word, each in said if word == "fetching")
    return holder, [each for each in members if each is not holder]


def successor(waiting: Sequence[Worker]) -> tuple[Worker, list[Worker]]:
    """Who fetches now, of those that waited, and who still waits."""
    ready = wait([each.pipe for each in waiting], SECONDS)
    assert len(ready) == 1, "one of the ranks that wait takes over"
    holder = next(each for each in waiting if each.pipe is ready[0])
    assert holder.hear() == "fetching"
    return holder, [each for each in waiting if each is not holder]


def test_a_holder_that_is_killed_or_fails_is_succeeded_by_one_that_waits(tmp_path: Path) -> None:
    directory, data = tmp_path / "cache", os.urandom(1000)
    with working(4, rank, directory, data, False) as members:
        holder, waiting = split(members)
        assert f"{ref_of(data).sha256}.part" in names(directory)
        assert holder.process.pid is not None
        os.kill(holder.process.pid, signal.SIGKILL)
        second, waiting = successor(waiting)
        second.pipe.send("fail")
        assert second.hear() == "told to fail", "which is its own failure alone"
        third, rest = successor(waiting)
        third.pipe.send("go")
        assert [each.hear() for each in [third, *rest]] == ["got"] * 2
        for each in waiting:
            each.process.join(SECONDS)
    assert names(directory) == {ref_of(data).sha256}


def test_a_lock_whose_file_is_gone_is_none(tmp_path: Path) -> None:
    """The holder removes the file just between another's opening and locking it."""
    directory, data = tmp_path / "cache", os.urandom(1000)
    with working(1, rank, directory, data, False) as [first]:
        assert first.hear() == "fetching"
        with working(1, rank, directory, data, True) as [late]:
            assert late.hear() == "opened"
            first.pipe.send("fail")
            assert first.hear() == "told to fail"
            with working(1, rank, directory, data, False) as [second]:
                assert second.hear() == "fetching"
                late.pipe.send("on")
                assert late.hear() == "waiting"
                second.pipe.send("go")
                assert (second.hear(), late.hear()) == ("got", "got")


def test_the_rest_of_a_killed_process_goes_with_the_next_object(tmp_path: Path) -> None:
    directory, data = tmp_path / "cache", os.urandom(1000)
    alive = os.urandom(1000)
    with working(1, rank, directory, data, False) as [dead]:
        assert dead.hear() == "fetching"
        dead.process.kill()
        dead.process.join()
    assert f"{ref_of(data).sha256}.part" in names(directory)
    with working(1, rank, directory, alive, False) as [holder]:
        assert holder.hear() == "fetching"
        other = Source(b"another object")
        assert not other.got_from(ObjectCache(directory, MANY))
        kept = ref_of(alive).sha256
        assert names(directory) == {other.ref.sha256, f"{kept}.part", f"{kept}.lock"}
        holder.pipe.send("go")
        assert holder.hear() == "got"


def test_threads_in_a_race_fetch_once(tmp_path: Path) -> None:
    """Fresh objects in quick succession: a lock's file is removed just when others open it."""
    rounds, members = 25, 6
    sources = [Source(number.to_bytes(4)) for number in range(rounds)]
    cache, start = ObjectCache(tmp_path, MANY), threading.Barrier(members)

    def follow() -> None:
        for source in sources:
            start.wait(SECONDS)
            assert cache.get(source.ref, source) == source.data

    with ThreadPoolExecutor(members) as pool:
        for future in [pool.submit(follow) for _ in range(members)]:
            future.result()
    assert [source.asked for source in sources] == [1] * rounds
    assert names(tmp_path) == {source.ref.sha256 for source in sources}
