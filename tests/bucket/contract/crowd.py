"""Processes that work on one bucket at the same time, for the contract suite.

They are forks of one that has loaded the stores' clients, and has opened none: tests start some thirty of them.
"""

import os
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support.running import context_of_processes
from vllm_delta_sync.bucket import Bucket, StoreOptions, obstore_bucket, open_bucket
from vllm_delta_sync.bucket.hub import bucket as hub_bucket
from vllm_delta_sync.errors import ConflictError

context_of_processes(__name__)
LOADED = (obstore_bucket, hub_bucket)


def patient(url: str) -> Bucket:
    """A bucket whose calls have minutes: a busy machine may need them."""
    return open_bucket(url, StoreOptions(store_deadline=300))


def content(number: int, size: int) -> bytes:
    """``size`` bytes that say who wrote them, all the same."""
    return bytes([number % 251 + 1]) * size


def race(pipe: Connection, url: str, key: str, processes: int, size: int) -> None:
    """Let ``processes`` create a key at the same moment; send who came to what."""
    gate_read, gate_write = os.pipe()
    result_read, result_write = os.pipe()
    children = []
    for number in range(processes):
        child = os.fork()
        if child == 0:
            os.close(gate_write)
            bucket = patient(url)
            data = content(number, size)
            os.read(gate_read, 1)
            try:
                bucket.put(key, data, if_absent=True)
                outcome = "won"
            except ConflictError:
                outcome = "conflict"
            os.write(result_write, f"{number} {outcome}\n".encode())
            os._exit(0)
        children.append(child)
    for end in (result_write, gate_write, gate_read):
        os.close(end)
    for child in children:
        os.waitpid(child, 0)
    with open(result_read) as results:
        pipe.send([(int(number), outcome) for number, outcome in map(str.split, results)])


def replace(pipe: Connection, url: str, key: str, size: int) -> None:
    """Replace ``key`` over and over until killed; say so after the first time."""
    with patient(url) as bucket:
        number = 0
        while True:
            bucket.put(key, content(number, size))
            if number == 0:
                pipe.send("started")
            number += 1


def fill(pipe: Connection, url: str, folder: str, size: int) -> None:
    """Put one object after the other until killed; send each key once it is durable."""
    with patient(url) as bucket:
        for number in range(1_000_000):
            bucket.put(f"{folder}/{number:06}", content(number, size), if_absent=number % 2 == 0)
            pipe.send(f"{folder}/{number:06}")


def put_file(pipe: Connection, url: str, key: str, path: Path) -> None:
    patient(url).put(key, path)
