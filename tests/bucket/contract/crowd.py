"""Processes that work on one bucket at the same time, for the contract suite.

Run as ``python -m tests.bucket.contract.crowd MODE URL …``. It loads little: tests start it some thirty times. Racers
are forked from one, so that all of them start together.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from vllm_delta_sync.bucket import Bucket, StoreOptions, open_bucket
from vllm_delta_sync.errors import ConflictError

ROOT = Path(__file__).resolve().parents[3]


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start this module in another interpreter, its output piped."""
    command = [sys.executable, "-m", "tests.bucket.contract.crowd", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def patient(url: str) -> Bucket:
    """A bucket whose calls have minutes: a busy machine may need them."""
    return open_bucket(url, StoreOptions(store_deadline=300))


def content(number: int, size: int) -> bytes:
    """``size`` bytes that say who wrote them, all the same."""
    return bytes([number % 251 + 1]) * size


def race(url: str, key: str, processes: int, size: int) -> None:
    """Let ``processes`` create a key at the same moment; print who came to what, a JSON list on each line."""
    # A store's client takes long to load: once, before there are many. Nothing is asked of the store, so that no
    # thread runs yet which children would lack.
    patient(url).close()
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
            os.write(result_write, json.dumps([number, outcome]).encode() + b"\n")
            os._exit(0)
        children.append(child)
    for end in (result_write, gate_write, gate_read):
        os.close(end)
    for child in children:
        os.waitpid(child, 0)
    with open(result_read) as results:
        print(results.read(), end="")


def replace(url: str, key: str, size: int) -> None:
    """Replace ``key`` over and over until killed; print a line after the first time."""
    with patient(url) as bucket:
        number = 0
        while True:
            bucket.put(key, content(number, size))
            if number == 0:
                print("started", flush=True)
            number += 1


def fill(url: str, folder: str, size: int) -> None:
    """Put one object after the other until killed; print each key once it is durable."""
    with patient(url) as bucket:
        for number in range(1_000_000):
            bucket.put(f"{folder}/{number:06}", content(number, size), if_absent=number % 2 == 0)
            print(f"{folder}/{number:06}", flush=True)


def main(mode: str, url: str, *arguments: str) -> None:
    if mode == "race":
        race(url, arguments[0], int(arguments[1]), int(arguments[2]))
    elif mode == "replace":
        replace(url, arguments[0], int(arguments[1]))
    elif mode == "fill":
        fill(url, arguments[0], int(arguments[1]))
    elif mode == "put-file":
        patient(url).put(arguments[0], Path(arguments[1]))
    else:
        raise SystemExit(f"unknown mode {mode}")


if __name__ == "__main__":
    main(*sys.argv[1:])
