"""A body that trickles in (slow loris): the request ends after a while. Slow headers are the server's, not ours."""

import socket
import time
from pathlib import Path

import pytest

from tests.support.web import Site, code_of, listening, read_answer
from vllm_delta_sync.engine import http_guard

HEAD = (
    b"POST /delta_sync/sync HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
)


def test_body_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "BODY_SECONDS", 0.5)
    site = Site(tmp_path)
    with listening(site.app) as port:
        connections = [socket.create_connection(("127.0.0.1", port), 120) for _ in range(20)]
        began = time.monotonic()
        for connection in connections:
            connection.sendall(HEAD + b"{")
        for connection in connections:
            answer = read_answer(connection)
            assert code_of(answer) == 408
            assert b"connection: close" in answer.lower()
            assert connection.recv(1) == b""
            connection.close()
        assert time.monotonic() - began < 120
    assert not site.was_changed()
    site.end()


def test_client_that_goes_in_the_middle(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with listening(site.app) as port:
        with socket.create_connection(("127.0.0.1", port), 120) as connection:
            connection.sendall(HEAD + b"{")
        with socket.create_connection(("127.0.0.1", port), 120) as connection:
            connection.sendall(b"GET /delta_sync/status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert code_of(read_answer(connection)) == 200
    assert not site.was_changed()
    site.end()
