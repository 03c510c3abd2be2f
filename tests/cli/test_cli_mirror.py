"""``delta-sync mirror`` as a process: it serves, says what it fetched and served, and ends on either signal."""

import argparse
import io
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.chains import Chain
from tests.support.commands import delta_sync, parsed
from tests.support.ipv6 import needs_ipv6
from tests.support.running import interruptible
from tests.support.usage import counted
from vllm_delta_sync.admin_token import VARIABLE
from vllm_delta_sync.bucket import StoreOptions, open_bucket
from vllm_delta_sync.bucket.verified import fetch_object
from vllm_delta_sync.cli.text import print_event

SECONDS = 120
ENDS = [
    ("127.0.0.1", signal.SIGINT, 130),
    ("127.0.0.1", signal.SIGTERM, 0),
    pytest.param("::1", signal.SIGTERM, 0, marks=needs_ipv6),
]


@pytest.mark.parametrize(("host", "number", "code"), ENDS)
def test_it_serves_until_a_signal(
    host: str, number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0123456789abcdef-a-token")
    chain = Chain(tmp_path)
    chain.grow()
    [ref] = chain.manifests[1].objects
    command = [sys.executable, "-m", "vllm_delta_sync.cli", "mirror", "--bucket", chain.url, "--json"]
    command += ["--to", str(tmp_path / "to"), "--host", host, "--port", "0"]
    with interruptible(), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            url = json.loads(started.stdout.readline())["data"]["url"]
            with open_bucket(chain.url, StoreOptions(peer=url)) as bucket, counted("peer_bytes") as used:
                assert len(fetch_object(bucket, ref)) == ref.bytes
                assert used() == [ref.bytes]
            fetched = json.loads(started.stdout.readline())["data"]
            started.send_signal(number)
            assert started.wait(SECONDS) == code
            served = json.loads(started.stdout.readline())["data"]
        finally:
            started.kill()
    assert (fetched["object"], fetched["bytes"]) == (ref.sha256, ref.bytes)
    assert served == {"served_bytes": ref.bytes}
    assert (tmp_path / "to" / ref.sha256).stat().st_size == ref.bytes


def test_lines_about_objects_that_are_fetched_at_once_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            time.sleep(0.001)  # in which another thread prints
            return super().write(text)

    out, options = Slow(), argparse.Namespace(json=True, command="mirror")
    monkeypatch.setattr(sys, "stdout", out)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: print_event(options, {"bytes": number}, print), range(40)))
    assert sorted(parsed(line)["data"]["bytes"] for line in out.getvalue().splitlines()) == list(range(40))


def test_without_a_token_it_serves_nothing(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    done = delta_sync("mirror", "--bucket", chain.url, "--to", tmp_path / "to")
    assert (done.code, "set admin_token_file or DELTA_SYNC_ADMIN_TOKEN" in done.err) == (2, True)


def test_without_room_it_serves_nothing(tmp_path: Path) -> None:
    set_to = {VARIABLE: "0123456789abcdef-a-token", "DELTA_SYNC_CACHE_BYTES": "0"}
    done = delta_sync("mirror", "--bucket", tmp_path, "--to", tmp_path / "to", "--port", 70000, **set_to)
    assert (done.code, "set cache_bytes above 0" in done.err) == (2, True)
