"""A page's own name is made to point at 127.0.0.1, so that the browser counts this server as the page's own site."""

from pathlib import Path

import pytest

from tests.support.web import BEARER, CHANGING, Site, code_of, exchange, listening, request_bytes

REBOUND = [
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil.example:8000",
    "192.0.2.1",
    "[2001:db8::1]",
    "[::1].evil.example",
    "[::1",
    "127.0.0.1@evil.example",
    "evil.example,127.0.0.1",
    "localhost:1@evil.example",
    "localhost:x",
    "localhost:",
    "localhost:1:2",
    "127.0.0.1:80.evil.example",
    "[::1]:80.evil.example",
    "[::1]:",
    "[localhost]",
    "localhost/evil.example",
    "0.0.0.0",
    "",
]


@pytest.mark.parametrize("host", REBOUND)
def test_name_of_another_host(tmp_path: Path, host: str) -> None:
    site = Site(tmp_path)
    with listening(site.app) as port:
        for name in CHANGING:
            request = request_bytes(f"/delta_sync/{name}", Host=host, Sec_Fetch_Site="same-origin")
            assert code_of(exchange(port, request)) in (400, 403)
    assert not site.was_changed()
    site.end()


def test_two_names(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with listening(site.app) as port:
        request = b"POST /delta_sync/hold HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n"
        assert code_of(exchange(port, request)) in (400, 403)
    assert not site.was_changed()
    site.end()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:8000", "[::1]:8000", "127.3.2.1:1"])
def test_names_of_this_machine(tmp_path: Path, host: str) -> None:
    site = Site(tmp_path)
    site.serve()
    with listening(site.app) as port:
        assert code_of(exchange(port, request_bytes("/delta_sync/hold", Host=host))) == 200
    site.end()


def test_any_name_with_the_token(tmp_path: Path) -> None:
    """A page does not know it."""
    site = Site(tmp_path)
    site.set_token()
    site.serve()
    with listening(site.app) as port:
        assert code_of(exchange(port, request_bytes("/delta_sync/hold", Host="evil.example"))) == 401
        assert code_of(exchange(port, request_bytes("/delta_sync/hold", Host="fleet.example", **BEARER))) == 200
    site.end()
