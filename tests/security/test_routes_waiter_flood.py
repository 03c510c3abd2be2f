"""Strangers wait for a version that never comes, as many as they can: the server answers others all the same."""

import select
import socket
import time
from pathlib import Path

from tests.support.web import BEARER, Site, code_of, exchange, listening, read_answer, request_bytes
from vllm_delta_sync.engine.http import MAX_WAITING

WAIT = "/delta_sync/wait?version=9&timeout=3600"
MANY = MAX_WAITING + 40


def test_strangers_who_wait(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.set_token()
    site.serve()
    with listening(site.app) as port:
        connections = [socket.create_connection(("127.0.0.1", port), 120) for _ in range(MANY)]
        for connection in connections:
            connection.sendall(request_bytes(WAIT, "GET", Host="127.0.0.1"))
        refused = _answered(connections, MANY - MAX_WAITING)
        assert site.app.state.delta_sync_waiting == MAX_WAITING
        for connection in refused:
            answer = read_answer(connection)
            assert code_of(answer) == 503
            assert b"retry-after: 1" in answer.lower()
        assert code_of(exchange(port, request_bytes("/delta_sync/status", "GET", Host="x"))) == 200
        # What is served already needs no place, and who has the token always gets one.
        late = request_bytes("/delta_sync/wait?version=9&timeout=0.1", "GET", Host="x", **BEARER)
        assert code_of(exchange(port, late)) == 408
        for connection in connections:
            connection.close()
        _wait_free(site)
        stranger = request_bytes("/delta_sync/wait?version=9&timeout=0", "GET", Host="x")
        assert code_of(exchange(port, stranger)) == 408
    site.end()


def _answered(connections: list[socket.socket], count: int) -> list[socket.socket]:
    """Those that have an answer, once there are so many."""
    deadline = time.monotonic() + 120
    ready: list[socket.socket] = []
    while len(ready) < count and time.monotonic() < deadline:
        ready, _, _ = select.select(connections, [], [], 1)
    assert len(ready) == count
    return ready


def _wait_free(site: Site) -> None:
    """Until nobody counts who has gone; no event tells of it."""
    deadline = time.monotonic() + 120
    while site.app.state.delta_sync_waiting:
        assert time.monotonic() < deadline, "places of clients that have gone are not given back"
        time.sleep(0.02)
