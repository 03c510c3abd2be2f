"""A reverse proxy on this machine makes every client local; no token is set."""

import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from tests.support.web import CHANGING, Site, code_of, exchange, listening, request_bytes

TRACES: dict[str, dict[str, str]] = {
    "Forwarded": {"Forwarded": "for=203.0.113.9"},
    "Forwarded, empty": {"Forwarded": ""},
    "X-Forwarded-For": {"X_Forwarded_For": "203.0.113.9"},
    "X-Forwarded-For, forged": {"X_Forwarded_For": "127.0.0.1"},
    "X-Forwarded-Proto alone": {"X_Forwarded_Proto": "https"},
    "X-Forwarded-Host": {"X_Forwarded_Host": "127.0.0.1"},
    "X-Real-IP": {"X_Real_IP": "127.0.0.1"},
    "Via": {"Via": "1.1 proxy"},
}
LESS_COMMON = [
    "X_Forwarded_For",
    "X-Forwarded",
    "Forwarded-For",
    "X-Original-Forwarded-For",
    "X-Envoy-External-Address",
    "X-Client-IP",
    "Client-IP",
    "CF-Connecting-IP",
    "CF-Connecting-IPv6",
    "True-Client-IP",
    "true_client_ip",
    "X-Cluster-Client-IP",
    "X-Azure-ClientIP",
    "X-Remote-Addr",
    "X-Originating-IP",
]


@pytest.mark.parametrize("traces", TRACES.values(), ids=TRACES)
def test_headers_of_a_proxy(tmp_path: Path, traces: dict[str, str]) -> None:
    site = Site(tmp_path)
    with listening(site.app) as port:
        for name in CHANGING:
            request = request_bytes(f"/delta_sync/{name}", Host="127.0.0.1", **traces)
            assert code_of(exchange(port, request)) == 403
    assert not site.was_changed()
    site.end()


@pytest.mark.parametrize("name", LESS_COMMON)
def test_less_common_headers_of_a_proxy(tmp_path: Path, name: str) -> None:
    """As they are on the wire: one that WSGI servers take for another has underscores."""
    site = Site(tmp_path)
    with listening(site.app) as port:
        request = f"POST /delta_sync/hold HTTP/1.1\r\nHost: 127.0.0.1\r\n{name}: 203.0.113.9\r\n\r\n".encode()
        assert code_of(exchange(port, request)) == 403
    assert not site.was_changed()
    site.end()


def test_headers_of_clients(tmp_path: Path) -> None:
    """None of them tells of a proxy."""
    names = ("User-Agent", "Accept", "X-Request-Id", "Traceparent", "X-Client-Name", "Description", "X-Real-Name")
    site = Site(tmp_path)
    site.serve()
    headers = "".join(f"{name}: x\r\n" for name in names)
    with listening(site.app) as port:
        request = f"POST /delta_sync/hold HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n".encode()
        assert code_of(exchange(port, request)) == 200
    site.end()


def test_proxy_that_says_nothing_but_speaks_http_1_0(tmp_path: Path) -> None:
    """As nginx has been doing unless told otherwise."""
    site = Site(tmp_path)
    with listening(site.app) as port:
        for name in CHANGING:
            request = request_bytes(f"/delta_sync/{name}", http="1.0", Host="127.0.0.1")
            assert code_of(exchange(port, request)) == 403
    assert not site.was_changed()
    site.end()


def test_address_that_a_stranger_claims(tmp_path: Path) -> None:
    """uvicorn told to believe everybody takes a client's address from the header."""
    site = Site(tmp_path)
    believing: Any = ProxyHeadersMiddleware(site.app, trusted_hosts="*")  # type: ignore[arg-type]
    client = TestClient(believing, base_url="http://127.0.0.1:8000", client=("203.0.113.9", 1))
    answer = client.post("/delta_sync/hold", headers={"X-Forwarded-For": "127.0.0.1"})
    assert answer.status_code == 403
    assert not site.was_changed()
    site.end()


def test_through_a_real_proxy(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with listening(site.app) as port:

        class Proxy(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                connection = HTTPConnection("127.0.0.1", port, timeout=30)
                forwarded = {"X-Forwarded-For": self.client_address[0], "Via": "1.1 test"}
                connection.request("POST", self.path, headers=forwarded)
                answer = connection.getresponse()
                body = answer.read()
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
            thread = threading.Thread(target=proxy.serve_forever, args=(0.02,))
            thread.start()
            try:
                request = request_bytes("/delta_sync/hold", Host="fleet.example")
                assert code_of(exchange(proxy.server_port, request)) == 403
            finally:
                proxy.shutdown()
                thread.join()
    assert not site.was_changed()
    site.end()
