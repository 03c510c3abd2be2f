"""The Hub's client in processes of its own: forks, ends, memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hub_store import Hub

ROOT = Path(__file__).resolve().parents[2]
PROCESS_SECONDS = 120


USE = """
import os, sys
from pathlib import Path
from vllm_delta_sync.bucket.hub import HubBucket
from vllm_delta_sync.bucket.opening import place_of
from vllm_delta_sync.config import StoreOptions
bucket, folder = HubBucket(place_of("hf://buckets/team/weights/run"), StoreOptions()), Path(sys.argv[1])
def use(name):
    bucket.put(name, os.urandom(2_000_000))
    bucket.get_file(name, folder / name)
    assert (folder / name).read_bytes() == bucket.get(name)
use("first")
"""


def run(hub: Hub, folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", USE + script, str(folder)],
        cwd=ROOT, env={**os.environ, **hub.environment}, capture_output=True, text=True, timeout=PROCESS_SECONDS,
    )  # fmt: skip


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
for number in range(3):
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
    done = run(hub, tmp_path, script)
    assert (done.returncode, done.stdout.strip()) == (0, "[7, 7, 7]"), done.stderr


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "busy()"], ids=["plain", "exit", "busy"])
def test_the_interpreter_ends_at_once(hub: Hub, tmp_path: Path, end: str) -> None:
    script = """
import threading, time
def busy():
    def write():
        while True:
            bucket.put("busy", os.urandom(9_000_000))
    threading.Thread(target=write, daemon=True).start()
    while "busy" not in [info.key for info in bucket.list()]:
        time.sleep(0.01)
print("ends", flush=True)
"""
    done = run(hub, tmp_path, script + end)
    assert (done.returncode, done.stdout) == (3 if "exit" in end.lower() else 0, "ends\n"), done.stderr


def test_offline_mode_is_said(hub: Hub, tmp_path: Path) -> None:
    script = """
os.environ["HF_HUB_OFFLINE"] = "1"
import huggingface_hub.constants
huggingface_hub.constants.HF_HUB_OFFLINE = True
for call in (lambda: bucket.get("first"), lambda: list(bucket.list())):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, "unset it" in str(error))
"""
    done = run(hub, tmp_path, script)
    assert done.stdout.split() == ["StoreError", "True"] * 2, done.stderr


@pytest.mark.slow
def test_a_large_object_takes_bounded_memory(hub: Hub, tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        for _ in range(64):
            file.write(os.urandom(1 << 24))
    script = """
bucket.put("big", folder / "source")
bucket.get_file("big", folder / "copy")
# Not getrusage(): its maximum includes the process that this one was forked from.
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) // 1024)
"""
    done = run(hub, tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 600
    with source.open("rb") as first, (tmp_path / "copy").open("rb") as second:
        while block := first.read(1 << 24):
            assert second.read(1 << 24) == block
