"""A process that was forked from one that has used an object store."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stores import STORES

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
        command = [sys.executable, "-c", PROGRAM, store.url, before, str(size)]
        done = subprocess.run(command, env=os.environ | store.environment, capture_output=True, text=True, timeout=400)
    assert (done.stdout, done.returncode) == (said, 0), done.stderr
