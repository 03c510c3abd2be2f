"""Commands and settings take IPv6 addresses: of servers, the dashboard and stores; malformed ones are usage errors."""

import json
import signal
import socket
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.answers import Answer, answering
from tests.support.commands import answer, delta_sync, kind
from tests.support.ipv6 import needs_ipv6
from tests.support.page_runs import empty_run
from tests.support.proxy import TcpProxy
from tests.support.s3_store import serving
from vllm_delta_sync.bucket import StoreOptions, open_bucket

SECONDS = 120


@needs_ipv6
def test_a_server_at_an_ipv6_address() -> None:
    status = {"state": "serving", "served": {"version": 4}}
    with answering() as server, TcpProxy(urlsplit(server.url).port or 0, host="::1") as proxy:
        server.reply = lambda asked: Answer(200, json.dumps(status).encode())
        url = f"http://[::1]:{proxy.port}"
        (row,) = answer("status", "--server", url)["servers"]
        assert row == {"server": url, "status": status}
        assert server.asked[-1].headers["host"] == f"[::1]:{proxy.port}"


@needs_ipv6
def test_a_dashboard_at_an_ipv6_address(tmp_path: Path) -> None:
    empty_run(tmp_path / "run")
    command = [sys.executable, "-m", "vllm_delta_sync.cli", "dashboard", "--bucket", str(tmp_path / "run")]
    command += ["--host", "::1", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            url = urlsplit(json.loads(started.stdout.readline())["data"]["url"])
            assert (url.hostname, url.port is not None) == ("::1", True)
            connection = HTTPConnection("::1", url.port or 0, timeout=SECONDS)
            connection.request("GET", "/")
            assert connection.getresponse().status == 200
            connection.close()
            started.send_signal(signal.SIGTERM)
            assert started.wait(SECONDS) == 0
        finally:
            started.kill()
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        done = delta_sync("dashboard", "--bucket", tmp_path / "run", "--host", "::1", "--port", port)
    assert (done.code, f"cannot listen at [::1]:{port}: " in done.err) == (2, True)


@needs_ipv6
def test_a_store_at_an_ipv6_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving("runs") as server, TcpProxy(server.port, host="::1") as proxy:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        options = StoreOptions(store_endpoint=f"http://[::1]:{proxy.port}", store_deadline=20)
        with open_bucket("s3://runs/a", options) as bucket:
            bucket.put("key", b"value")
            assert bucket.get("key") == b"value"
        assert proxy.connections > 0


def test_urls_that_look_like_an_ipv6_address() -> None:
    for url, text in (("file://[::1/run", "is not valid"), ("s3://[::1]:9000/run", "set store_endpoint")):
        assert kind(2, "log", "--bucket", url) == "usage"
        assert text in delta_sync("log", "--bucket", url).err
    assert kind(2, "status", "--server", "http://[::1:8000") == "usage"
