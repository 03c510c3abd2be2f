"""Commands and settings take IPv6 addresses: of servers, the dashboard and stores; malformed ones are usage errors."""

import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cli.test_cli_dashboard import Dashboard
from tests.support.answers import Answer, answering
from tests.support.commands import answer, delta_sync, kind
from tests.support.ipv6 import needs_ipv6
from tests.support.page_runs import empty_run
from tests.support.proxy import TcpProxy
from tests.support.s3_store import serving
from vllm_delta_sync.bucket import StoreOptions, open_bucket


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
    started = Dashboard("--bucket", tmp_path / "run", "--host", "::1")
    try:
        assert started.host == "::1"
        assert started.get("/")[0] == 200
        started.end()
    finally:
        started.process.kill()
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
