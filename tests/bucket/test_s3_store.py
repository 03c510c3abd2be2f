"""The S3 server that tests run against behaves as S3 does towards the client that we use."""

import multiprocessing
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError
from obstore.store import S3Store

from tests.support.s3_store import HOST, S3Server, serving

WRITERS, PROCESSES = 16, 4
MB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
NO_RETRY = {"max_retries": 0}
_numbers = count()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serving() as server:
        yield server


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of an empty bucket; the server is the environment's."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{next(_numbers)}"
    assert server.create_bucket(name) == f"s3://{name}"
    return name


@pytest.fixture
def store(bucket: str) -> Any:
    return S3Store(bucket, retry_config=NO_RETRY)


def create(store: Any, key: str, data: bytes) -> bool:
    try:
        obstore.put(store, key, data, mode="create")
    except AlreadyExistsError:
        return False
    return True


def listed(store: Any, prefix: str | None = None) -> list[str]:
    return [entry["path"] for page in obstore.list(store, prefix) for entry in page]


def test_an_object_is_created_once(store: Any) -> None:
    assert create(store, "head", b"one")
    assert not create(store, "head", b"two")
    assert bytes(obstore.get(store, "head").bytes()) == b"one"


# moto looks and then writes; between, it puts objects over 5 MB into a file: long enough to lose a third of the races.
@pytest.mark.parametrize(("size", "turns"), [(100, 20), (6 * MB, 6)])
def test_of_many_threads_one_creates_an_object(store: Any, size: int, turns: int) -> None:
    together = threading.Barrier(WRITERS)

    def write(number: int, turn: int) -> bool:
        data = bytes([number]) * size
        together.wait()
        return create(store, f"race/{turn}", data)

    with ThreadPoolExecutor(WRITERS) as pool:
        for turn in range(turns):
            won = list(pool.map(write, range(WRITERS), [turn] * WRITERS))
            assert won.count(True) == 1
            assert bytes(obstore.get_range(store, f"race/{turn}", start=0, length=1)) == bytes([won.index(True)])


def race(bucket: str, number: int, turns: int, together: Barrier, won: Any) -> None:
    store = S3Store(bucket, retry_config=NO_RETRY)
    with ThreadPoolExecutor(WRITERS // PROCESSES) as pool:
        for turn in range(turns):
            together.wait()
            keys = [f"race/{turn}"] * (WRITERS // PROCESSES)
            won.put((turn, sum(pool.map(create, [store] * len(keys), keys, [bytes([number])] * len(keys)))))


def test_of_many_processes_one_creates_an_object(bucket: str) -> None:
    turns = 10
    context = multiprocessing.get_context("spawn")
    together, won = context.Barrier(PROCESSES), context.Queue()
    writers = [context.Process(target=race, args=(bucket, n, turns, together, won)) for n in range(PROCESSES)]
    for writer in writers:
        writer.start()
    wins = [won.get(timeout=300) for _ in range(turns * PROCESSES)]
    for writer in writers:
        writer.join(60)
    assert [sum(count for turn, count in wins if turn == which) for which in range(turns)] == [1] * turns


def test_an_object_sent_in_parts_is_read_whole_and_by_ranges(store: Any) -> None:
    data = random.Random(1).randbytes(23 * MB)
    obstore.put(store, "anchor", data, use_multipart=True, chunk_size=5 * MB, max_concurrency=4)
    assert bytes(obstore.get(store, "anchor").bytes()) == data
    assert obstore.head(store, "anchor")["size"] == len(data)
    for start in (0, 5 * MB - 3, 22 * MB):
        assert bytes(obstore.get_range(store, "anchor", start=start, length=MB)) == data[start : start + MB]
    assert bytes(obstore.get_range(store, "anchor", start=len(data) - 4, length=9)) == data[-4:]


def test_an_object_replaced_while_it_is_read_is_read_as_it_was(store: Any) -> None:
    obstore.put(store, "anchor", b"a" * (32 * MB), use_multipart=False)
    stream = iter(obstore.get(store, "anchor").stream(min_chunk_size=MB))
    read = [bytes(next(stream))]
    obstore.put(store, "anchor", b"b")
    read += [bytes(piece) for piece in stream]
    assert b"".join(read) == b"a" * (32 * MB)


@pytest.mark.parametrize("start", [10, 20])
def test_a_range_behind_the_end_is_refused(store: Any, start: int) -> None:
    obstore.put(store, "short", b"0123456789")
    with pytest.raises(GenericError, match="416"):
        obstore.get_range(store, "short", start=start, length=5)


def test_lists_are_in_the_order_of_the_keys_over_several_pages(store: Any) -> None:
    keys = [f"v/{number}" for number in range(25)] + ["v/a/b", "v/A", "w", "vx"]
    for key in random.Random(1).sample(keys, len(keys)):
        obstore.put(store, key, b"")
    assert listed(store) == sorted(keys)
    assert listed(store, "v/") == sorted(key for key in keys if key.startswith("v/"))
    assert listed(store, "none/") == []


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_refused(bucket: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "wrong")
    store = S3Store(bucket, retry_config=NO_RETRY)
    with pytest.raises(PermissionDeniedError):
        obstore.put(store, "head", b"one")
    with pytest.raises(GenericError, match="403"):
        listed(store)


@pytest.mark.parametrize("sent", [b"0123456780", b"01234"])
def test_a_body_that_was_changed_or_cut_is_not_stored(server: S3Server, bucket: str, store: Any, sent: bytes) -> None:
    meant = b"0123456789"
    with socket.socket() as listener, ThreadPoolExecutor(1) as pool:
        listener.bind((HOST, 0))
        listener.listen()
        via = S3Store(bucket, endpoint=f"http://{HOST}:{listener.getsockname()[1]}", retry_config=NO_RETRY)
        put = pool.submit(obstore.put, via, "head", meant)
        with listener.accept()[0] as client, socket.create_connection((HOST, server.port)) as upstream:
            request = b""
            while not request.endswith(meant):
                request += client.recv(65536)
            upstream.sendall(request.removesuffix(meant) + sent)
            upstream.shutdown(socket.SHUT_WR)
            client.sendall(b"".join(iter(lambda: upstream.recv(65536), b"")))
        with pytest.raises(GenericError, match="400"):
            put.result(120)
    assert listed(store) == []


def test_the_server_ends_with_the_block() -> None:
    with serving("here") as server:
        assert server.request("GET", "/here")
    with pytest.raises(OSError):
        server.request("GET", "/here")
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_the_server_does_not_outlive_who_started_it() -> None:
    code = "import os; from tests.support.s3_store import serving\nwith serving() as server: os._exit(0)"
    # The server inherits this stderr, which therefore ends when both have.
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_signature_covers_queries(server: S3Server, bucket: str) -> None:
    assert b"<KeyCount>0</KeyCount>" in server.request("GET", f"/{bucket}?prefix=a%2Fb+c&list-type=2")
