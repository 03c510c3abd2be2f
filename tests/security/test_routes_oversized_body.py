"""Bodies that are large, lie of their size, or are built to cost much: refused before anything of them is parsed."""

import json
import socket
from pathlib import Path

import pytest

from tests.support.web import Site, code_of, exchange, listening, read_answer
from vllm_delta_sync.engine.http_guard import MAX_BODY_BYTES

HEAD = b"POST /delta_sync/sync HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


def test_declared_size(tmp_path: Path) -> None:
    """Refused at the header, without a byte of the body."""
    site = Site(tmp_path)
    with listening(site.app) as port:
        for size in (MAX_BODY_BYTES + 1, 10**9, 10**18):
            answer = exchange(port, HEAD + f"Content-Length: {size}\r\n\r\n".encode())
            assert code_of(answer) == 413
            assert b"connection: close" in answer.lower()
    assert not site.was_changed()
    site.end()


@pytest.mark.parametrize("size", ["-1", "1e3", "0x10", "1_000", "", "9" * 5000])
def test_size_that_is_no_number(tmp_path: Path, size: str) -> None:
    site = Site(tmp_path)
    with listening(site.app) as port:
        assert code_of(exchange(port, HEAD + f"Content-Length: {size}\r\n\r\n".encode())) in (400, 413)
    assert not site.was_changed()
    site.end()


def test_chunks_without_end(tmp_path: Path) -> None:
    site = Site(tmp_path)
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
    sent = 0
    with listening(site.app) as port, socket.create_connection(("127.0.0.1", port), 120) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(MAX_BODY_BYTES // 4096 + 1):
            connection.sendall(chunk)
            sent += 4096
        assert code_of(read_answer(connection)) == 413
    assert sent < 2 * MAX_BODY_BYTES
    assert not site.was_changed()
    site.end()


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 60_000,
        b'{"version":' * 5_000,
        b'{"version": ' + b"9" * 60_000 + b"}",
        b'{"version": 1e999}',
        b'{"version": NaN}',
        b"\xff" * 60_000,
        b'{"' + b"x" * 60_000 + b'": 1}',
        json.dumps({f"field{i}": i for i in range(3_000)}).encode(),
        b'{"version": "' + b"<script>" * 7_000 + b'"}',
    ],
    ids=["deep lists", "deep objects", "giant integer", "infinity", "NaN", "no text", "long name", "names", "text"],
)
def test_body_that_costs_much(tmp_path: Path, body: bytes) -> None:
    """Small enough to be read; the answer is short whatever was sent."""
    site = Site(tmp_path)
    with listening(site.app) as port:
        answer = exchange(port, HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert code_of(answer) == 400
        assert len(answer) < 1024
        assert b"<script>" not in answer
        status = exchange(port, b"GET /delta_sync/status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert code_of(status) == 200
    assert not site.was_changed()
    site.end()


def test_no_body_is_read_of_somebody_who_may_not(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.set_token()
    with listening(site.app) as port:
        answer = exchange(port, HEAD + b"Content-Length: 1000\r\n\r\n")
        assert code_of(answer) == 401
    site.end()
