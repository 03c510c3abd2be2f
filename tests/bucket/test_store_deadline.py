"""Calls that hang: they are given up in time, and do no harm when they end after all."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.running import interrupted, run_python
from tests.support.store_faults import GATE_SECONDS, GatedBucket, Impatience, SwallowingBucket
from vllm_delta_sync.bucket import Bucket, ObjectInfo, StoreOptions
from vllm_delta_sync.bucket.base import report_bytes
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware
from vllm_delta_sync.bucket.middleware.deadline import DeadlineBucket
from vllm_delta_sync.errors import UnavailableError

LONG = StoreOptions(store_deadline=3600)
CALLS: dict[str, Callable[[Bucket], object]] = {
    "put": lambda bucket: bucket.put("key", b"new"),
    "get": lambda bucket: bucket.get("key"),
    "stat": lambda bucket: bucket.stat("key"),
    "delete": lambda bucket: bucket.delete("key"),
}


@pytest.fixture
def local(local: Bucket) -> Bucket:
    local.put("key", b"first")
    return local


@pytest.mark.parametrize("name", CALLS)
def test_what_hangs_is_given_up(local: Bucket, name: str) -> None:
    gated = GatedBucket(local, name)
    bucket = DeadlineBucket(gated, Impatience.while_set(gated.begun[name]))
    began = time.monotonic()
    with pytest.raises(UnavailableError, match=r"'key' of file:.*no answer within 0\.1 s; .*store_deadline"):
        CALLS[name](bucket)
    assert time.monotonic() - began >= 0.1
    gated.let_go(name)
    assert gated.ended[name].wait(60)


def test_a_listing_that_hangs_is_given_up(local: Bucket) -> None:
    gate, closed, hangs = threading.Event(), threading.Event(), threading.Event()

    class Hanging(BucketMiddleware):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            try:
                yield from self._inner.list(prefix)
                hangs.set()
                gate.wait(60)
            finally:
                closed.set()

    with pytest.raises(UnavailableError, match="list keys 'k'"):
        list(DeadlineBucket(Hanging(local), Impatience.while_set(hangs)).list("k"))
    assert not closed.is_set()
    gate.set()
    assert closed.wait(60), "what the listing held was not given back"


@pytest.mark.parametrize(
    ("late", "newer"),
    [("put", "put"), ("put", "put file"), ("put", "delete"), ("delete", "put"), ("delete", "put file")],
)
def test_a_late_write_does_not_undo_a_newer_one(local: Bucket, tmp_path: Path, late: str, newer: str) -> None:
    gated = GatedBucket(local, late)
    bucket = DeadlineBucket(gated, Impatience.while_set(gated.begun[late]))
    file = tmp_path / "file"
    file.write_bytes(b"newer")
    with pytest.raises(UnavailableError, match="no answer"):
        CALLS[late](bucket)
    held_up, said = threading.Event(), list[str]()

    def write() -> None:
        while True:
            try:
                if newer == "delete":
                    bucket.delete("key")
                else:
                    bucket.put("key", file if newer == "put file" else b"newer")
                return
            except UnavailableError as error:
                said.append(error.message)
                held_up.set()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert held_up.wait(60)
        assert gated.log == [(late, "key")]
    finally:
        gated.begun[late].clear()
        gated.let_go(late)
        thread.join(60)
    assert all("could overwrite this one" in message for message in said)
    found = [(item.key, local.get(item.key)) for item in local.list()]
    assert found == ([] if newer == "delete" else [("key", b"newer")])


def test_the_same_write_once_more_waits_for_nothing(local: Bucket, tmp_path: Path) -> None:
    file = tmp_path / "file"
    for data in (b"content", file):
        file.write_bytes(b"content")
        gated = GatedBucket(local, "put")
        bucket = DeadlineBucket(gated, Impatience.while_set(gated.begun["put"]))
        with pytest.raises(UnavailableError):
            bucket.put("key", data)
        gated.begun["put"].clear()
        bucket.put("key", data)
        assert local.get("key") == b"content"
        bucket.put("other", b"another key")
        file.write_bytes(b"CONTENT")
        gated.begun["put"].set()
        with pytest.raises(UnavailableError, match="could overwrite this one"):
            bucket.put("key", file)
        gated.let_go("put")


def test_a_transfer_that_was_given_up_ends_at_its_next_bytes(local: Bucket) -> None:
    gated = GatedBucket(local, "put")
    gated.after = lambda: report_bytes(1)
    with pytest.raises(UnavailableError):
        DeadlineBucket(gated, Impatience.while_set(gated.begun["put"])).put("key", b"too late")
    gated.let_go("put")
    assert gated.ended["put"].wait(60)
    assert local.get("key") == b"first"


def test_a_put_has_time_for_its_size(local: Bucket) -> None:
    gated = GatedBucket(SwallowingBucket(local), "put")
    timer = threading.Timer(1.5, lambda: gated.let_go("put"))
    timer.start()
    DeadlineBucket(gated, Impatience.while_set(gated.begun["put"])).put("key", bytes(60_000_000))
    timer.join()


@pytest.mark.parametrize("name", CALLS)
def test_interrupts_get_through_at_once(local: Bucket, name: str) -> None:
    gated = GatedBucket(local, name)
    bucket = DeadlineBucket(gated, LONG)
    with interrupted(gated.begun[name]):
        CALLS[name](bucket)
    gated.let_go(name)
    assert gated.ended[name].wait(60)
    bucket.put("key", b"after")
    assert local.get("key") == b"after"


def test_a_hanging_call_does_not_hold_up_the_end_of_the_process(tmp_path: Path) -> None:
    script = f"""
import threading
from tests.support.store_faults import GatedBucket
from vllm_delta_sync.bucket import StoreOptions, open_bucket
from vllm_delta_sync.bucket.middleware.deadline import DeadlineBucket
from vllm_delta_sync.errors import UnavailableError
bucket = DeadlineBucket(GatedBucket(open_bucket({str(tmp_path / "run")!r}), "put"), StoreOptions(store_deadline=0.05))
try:
    bucket.put("key", b"x")
except UnavailableError:
    print("given up")
"""
    ended = run_python("-c", script, seconds=GATE_SECONDS / 2)
    assert (ended.stdout, ended.stderr) == ("given up\n", "")
