"""Clients of stores in processes of their own: forks, ends, memory."""

import os
from pathlib import Path

import pytest

from tests.support.hub_store import Hub
from tests.support.running import run_python
from tests.support.stores import STORES

USE = """
import os, sys
from pathlib import Path
from vllm_delta_sync.bucket.hub.bucket import HubBucket
from vllm_delta_sync.bucket.ranged import download
from vllm_delta_sync.urls import parse_store_url
from vllm_delta_sync.settings import StoreOptions
bucket, folder = HubBucket(parse_store_url("hf://buckets/team/weights/run"), StoreOptions()), Path(sys.argv[1])
def use(name):
    bucket.put(name, os.urandom(2_000_000))
    download(bucket, name, 2_000_000, folder / name)
    assert (folder / name).read_bytes() == bucket.get(name)
use("first")
"""


def test_a_forked_process_uses_the_same_bucket(hub: Hub, tmp_path: Path) -> None:
    script = """
import threading
stop = threading.Event()
def busy():
    while not stop.is_set():
        bucket.put("busy", os.urandom(1_000_000))
thread = threading.Thread(target=busy)
thread.start()
children = []
for number in range(2):
    child = os.fork()
    if child == 0:
        use(f"child{number}")
        os._exit(7)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
stop.set()
thread.join()
use("parent")
"""
    done = run_python("-c", USE + script, str(tmp_path), environment=hub.environment)
    assert done.stdout == "[7, 7]\n"


@pytest.mark.slow
def test_a_large_object_takes_bounded_memory(hub: Hub, tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        for _ in range(64):
            file.write(os.urandom(1 << 24))
    script = """
bucket.put("big", folder / "source")
download(bucket, "big", 64 << 24, folder / "copy")
# Not getrusage(): its maximum includes the process that this one was forked from.
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) // 1024)
"""
    done = run_python("-c", USE + script, str(tmp_path), environment=hub.environment)
    assert int(done.stdout) < 600
    with source.open("rb") as first, (tmp_path / "copy").open("rb") as second:
        while block := first.read(1 << 24):
            assert second.read(1 << 24) == block


PROGRAM = """
import os, signal, sys
from vllm_delta_sync.bucket import StoreOptions, open_bucket
from vllm_delta_sync.errors import StoreError

bucket = open_bucket(sys.argv[1], StoreOptions(store_deadline=60))
if sys.argv[2] == "used":
    bucket.put("a", b"1")
child = os.fork()
if not child:
    signal.alarm(300)
    for opened in (bucket, open_bucket(sys.argv[1], StoreOptions(store_deadline=60))):
        try:
            opened.put("a", b"22")
        except StoreError as error:
            os.write(1, error.kind.encode() + (b" spawn " if "spawn" in error.message else b" "))
        else:
            os.write(1, b"put ")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert bucket.stat("a").bytes == int(sys.argv[3])
os.write(1, b"parent")
"""


@pytest.mark.parametrize(
    ("before", "size", "said"), [("used", 1, "store spawn store spawn parent"), ("unused", 2, "put put parent")]
)
def test_is_told_at_once_and_does_no_harm_to_the_other_one(before: str, size: int, said: str, tmp_path: Path) -> None:
    with STORES["s3"](tmp_path) as store:
        done = run_python("-c", PROGRAM, store.url, before, str(size), environment=store.environment)
    assert done.stdout == said
