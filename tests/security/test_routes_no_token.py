"""No token is set, and a request comes from another address: nothing is changed, whatever the method."""

import socket
from pathlib import Path

import pytest

from tests.support.web import CHANGING, ELSEWHERE, Site, code_of, exchange, listening, request_bytes


def own_address() -> str | None:
    """An address of this machine that is not loopback; what connects to it comes from it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return None if address.startswith("127.") else address


def test_routes_from_another_address(tmp_path: Path) -> None:
    address = own_address()
    if address is None:
        pytest.skip("this machine has loopback alone")
    site = Site(tmp_path)
    try:
        with listening(site.app, "0.0.0.0") as port:
            for name in CHANGING:
                for host in (f"{address}:{port}", f"127.0.0.1:{port}"):
                    answer = exchange(port, request_bytes(f"/delta_sync/{name}", Host=host), address)
                    assert code_of(answer) == 403
                    assert b'"forbidden"' in answer
            reading = request_bytes("/delta_sync/status", "GET", Host=f"{address}:{port}")
            assert code_of(exchange(port, reading, address)) == 200
        assert not site.was_changed()
    finally:
        site.end()


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "post", "POST"])
def test_no_method_gets_around_it(tmp_path: Path, method: str) -> None:
    site = Site(tmp_path)
    for name in CHANGING:
        for path in (f"/delta_sync/{name}", f"//delta_sync/{name}", f"/delta_sync//{name}", f"/delta_sync/{name}/"):
            answer = site.client(ELSEWHERE).request(method, path, follow_redirects=False)
            assert answer.status_code in (307, 403, 404, 405)
    assert not site.was_changed()
    site.end()


@pytest.mark.parametrize("header", ["X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"])
def test_no_header_turns_a_read_into_a_change(tmp_path: Path, header: str) -> None:
    site = Site(tmp_path)
    answer = site.client(ELSEWHERE).get("/delta_sync/hold", headers={header: "POST"})
    assert answer.status_code == 405
    assert not site.was_changed()
    site.end()


def test_client_without_an_address(tmp_path: Path) -> None:
    """As over a Unix socket, behind which anything may be."""
    site = Site(tmp_path)
    for address in ("", "localhost", "unix:", "127.0.0.1.example", "0177.0.0.1", "10.0.0.1", "0.0.0.0", "::"):
        assert site.client((address, 0)).post("/delta_sync/hold").status_code == 403
    assert not site.was_changed()
    site.end()
