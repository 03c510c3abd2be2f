"""Requests of strangers: no page, proxy, name, token or body gets one through, and nothing they name is fetched."""

import asyncio
import json
import logging
import re
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.middleware.cors import CORSMiddleware
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from tests.support.chains import Chain
from tests.support.web import (
    BEARER,
    CHANGING,
    ELSEWHERE,
    TOKEN,
    Site,
    code_of,
    exchange,
    listening,
    read_answer,
    request_bytes,
)
from vllm_delta_sync.client import open_run
from vllm_delta_sync.engine.api import access
from vllm_delta_sync.engine.api.access import MAX_BODY_BYTES
from vllm_delta_sync.engine.planning.run_history import ancestry
from vllm_delta_sync.errors import TensorMismatchError
from vllm_delta_sync.format.base_document import dump_canonical

HEAD = b"POST /delta_sync/sync HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
WAIT_SECONDS = 120


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    found = Site(tmp_path_factory.mktemp("site"))
    yield found
    found.end()


@pytest.fixture
def open_site(started: Site) -> Iterator[Site]:
    """A site whose service notes what gets through to it."""
    started.asked.clear()
    started.app.state.delta_sync_token = None
    yield started
    started.app.state.delta_sync_token = None


@pytest.fixture
def site(open_site: Site) -> Iterator[Site]:
    """The same, and nothing may get through."""
    yield open_site
    assert not open_site.was_changed()


@pytest.fixture(scope="module")
def port(started: Site) -> Iterator[int]:
    with listening(started.app) as found:
        yield found


def refused(port: int, codes: tuple[int, ...], **headers: str) -> None:
    """Every route that changes state answers so."""
    for name in CHANGING:
        assert code_of(exchange(port, request_bytes(f"/delta_sync/{name}", **headers))) in codes, (name, headers)


# Pages of other sites

FOREIGN: dict[str, dict[str, str]] = {
    "origin": {"Origin": "http://evil.example"},
    "own origin": {"Origin": "http://127.0.0.1:8000"},
    "opaque origin": {"Origin": "null"},
    "empty origin": {"Origin": ""},
    "cross-site": {"Sec-Fetch-Site": "cross-site"},
    "same-site": {"Sec-Fetch-Site": "same-site"},
    "unknown site": {"Sec-Fetch-Site": "something-new"},
    "navigation": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
}


@pytest.mark.parametrize("with_token", [False, True], ids=["loopback", "token"])
def test_page_may_not_change_state(site: Site, with_token: bool) -> None:
    if with_token:
        site.set_token()
    for headers in FOREIGN.values():
        for name in CHANGING:
            answer = site.client().post(f"/delta_sync/{name}", headers={**headers, **(BEARER if with_token else {})})
            assert (answer.status_code, answer.json()["error"]["kind"]) == (403, "forbidden"), headers


def test_request_that_a_form_could_send(site: Site) -> None:
    """Those that browsers send to other sites without asking; an old one sends no Origin with some of them."""
    kinds = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "text/json")
    for kind in kinds:
        for body in (b"", b'{"version": 0}'):
            for name in CHANGING:
                answer = site.client().post(f"/delta_sync/{name}", content=body, headers={"Content-Type": kind})
                assert answer.status_code == 415, (kind, name)


def test_leave_that_vllm_gives_to_every_site_does_not_help(tmp_path: Path) -> None:
    """vLLM answers every preflight with yes."""
    site = Site(tmp_path)
    site.app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    asked = {
        "Origin": "http://evil.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    client = site.client()
    assert client.options("/delta_sync/sync", headers=asked).status_code == 200
    sent = client.post("/delta_sync/sync", json={"version": 0}, headers={"Origin": "http://evil.example"})
    assert sent.status_code == 403
    assert client.get("/delta_sync/status", headers={"Origin": "http://evil.example"}).status_code == 403
    assert not site.was_changed()
    site.end()


def test_page_may_not_read_either(site: Site) -> None:
    client = site.client()
    for path in ("/delta_sync/status", "/delta_sync/wait?version=0&timeout=0"):
        for headers in (
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Origin": "http://[::1"},
            {"Sec-Fetch-Site": "cross-site"},
        ):
            assert client.get(path, headers=headers).status_code == 403
    for headers in (
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://127.0.0.1:8000"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    ):
        assert client.get("/delta_sync/status", headers=headers).status_code == 200


# Names of this server that a page's own name is made to point at

REBOUND = [
    *("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example:8000", "192.0.2.1"),
    *("[2001:db8::1]", "[::1].evil.example", "[::1", "127.0.0.1@evil.example", "evil.example,127.0.0.1"),
    *("localhost:1@evil.example", "localhost:x", "localhost:", "localhost:1:2", "127.0.0.1:80.evil.example"),
    *("[::1]:80.evil.example", "[::1]:", "[localhost]", "localhost/evil.example", "0.0.0.0", ""),
]


def test_name_of_another_host(site: Site, port: int) -> None:
    for host in REBOUND:
        refused(port, (400, 403), Host=host, Sec_Fetch_Site="same-origin")
    two_names = b"POST /delta_sync/hold HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n"
    assert code_of(exchange(port, two_names)) in (400, 403)


def test_names_of_this_machine(open_site: Site, port: int) -> None:
    for host in ("127.0.0.1", "localhost", "LOCALHOST:8000", "[::1]:8000", "127.3.2.1:1"):
        assert code_of(exchange(port, request_bytes("/delta_sync/hold", Host=host))) == 200, host
    assert open_site.asked == ["hold"] * 5


# Proxies, which make every client local

TRACES: list[dict[str, str]] = [
    {"Forwarded": "for=203.0.113.9"},
    {"Forwarded": ""},
    {"X_Forwarded_For": "203.0.113.9"},
    {"X_Forwarded_For": "127.0.0.1"},
    {"X_Forwarded_Proto": "https"},
    {"X_Forwarded_Host": "127.0.0.1"},
    {"X_Real_IP": "127.0.0.1"},
    {"Via": "1.1 proxy"},
]
LESS_COMMON = [
    *("X_Forwarded_For", "X-Forwarded", "Forwarded-For", "X-Original-Forwarded-For", "X-Envoy-External-Address"),
    *("X-Client-IP", "Client-IP", "CF-Connecting-IP", "CF-Connecting-IPv6", "True-Client-IP", "true_client_ip"),
    *("X-Cluster-Client-IP", "X-Azure-ClientIP", "X-Remote-Addr", "X-Originating-IP"),
]


def test_headers_of_a_proxy(site: Site, port: int) -> None:
    for traces in TRACES:
        refused(port, (403,), Host="127.0.0.1", **traces)
    # As they are on the wire: one that WSGI servers take for another has underscores.
    for name in LESS_COMMON:
        request = f"POST /delta_sync/hold HTTP/1.1\r\nHost: 127.0.0.1\r\n{name}: 203.0.113.9\r\n\r\n".encode()
        assert code_of(exchange(port, request)) == 403, name
    # One that says nothing speaks HTTP 1.0, as nginx has been doing unless told otherwise.
    assert code_of(exchange(port, request_bytes("/delta_sync/hold", http="1.0", Host="127.0.0.1"))) == 403


def test_headers_of_clients(open_site: Site, port: int) -> None:
    """None of them tells of a proxy."""
    names = ("User-Agent", "Accept", "X-Request-Id", "Traceparent", "X-Client-Name", "Description", "X-Real-Name")
    headers = "".join(f"{name}: x\r\n" for name in names)
    request = f"POST /delta_sync/hold HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n".encode()
    assert code_of(exchange(port, request)) == 200
    assert open_site.asked == ["hold"]


def test_address_that_a_stranger_claims(site: Site) -> None:
    """uvicorn told to believe everybody takes a client's address from the header."""
    believing: Any = ProxyHeadersMiddleware(site.app, trusted_hosts="*")  # type: ignore[arg-type]
    client = TestClient(believing, base_url="http://127.0.0.1:8000", client=("203.0.113.9", 1))
    assert client.post("/delta_sync/hold", headers={"X-Forwarded-For": "127.0.0.1"}).status_code == 403


# Other addresses, methods and tokens


def test_no_method_or_header_gets_around_it(site: Site) -> None:
    client = site.client(ELSEWHERE)
    for method in ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "post", "POST"):
        for name in CHANGING:
            for path in (f"/delta_sync/{name}", f"//delta_sync/{name}", f"/delta_sync//{name}", f"/delta_sync/{name}/"):
                answer = client.request(method, path, follow_redirects=False)
                assert answer.status_code in (307, 403, 404, 405), (method, path)
    for header in ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"):
        assert client.get("/delta_sync/hold", headers={header: "POST"}).status_code == 405


def test_client_without_an_address(site: Site) -> None:
    """As over a Unix socket, behind which anything may be."""
    for address in ("", "localhost", "unix:", "127.0.0.1.example", "0177.0.0.1", "10.0.0.1", "0.0.0.0", "::"):
        assert site.client((address, 0)).post("/delta_sync/hold").status_code == 403


WRONG = {
    "none": None,
    "empty": "",
    "scheme alone": "Bearer",
    "scheme and space": "Bearer ",
    "without scheme": TOKEN,
    "another scheme": f"Basic {TOKEN}",
    "another": "Bearer " + "x" * len(TOKEN),
    "shorter": f"Bearer {TOKEN[:-1]}",
    "longer": f"Bearer {TOKEN}x",
    "other case": f"Bearer {TOKEN.upper()}",
    "twice": f"Bearer {TOKEN}, Bearer {TOKEN}",
    "zero byte in text": f"Bearer {TOKEN}%00",
    "not ASCII": f"Bearer {TOKEN[:-1]}\xe9",
    "huge": "Bearer " + "x" * 30000,
}


def test_wrong_token(site: Site, port: int) -> None:
    site.set_token()
    for value in WRONG.values():
        headers = {"Host": f"127.0.0.1:{port}", **({} if value is None else {"Authorization": value})}
        for name in CHANGING:
            answer = exchange(port, request_bytes(f"/delta_sync/{name}", **headers))
            assert code_of(answer) == 401
            assert TOKEN.encode() not in answer
    client = site.client()
    assert client.post(f"/delta_sync/hold?token={TOKEN}&access_token={TOKEN}").status_code == 401
    for header in ({"Cookie": f"token={TOKEN}"}, {"X-Api-Key": TOKEN}):
        assert client.post("/delta_sync/hold", headers=header).status_code == 401


def test_right_token_under_any_name(open_site: Site, port: int) -> None:
    """A page does not know it."""
    open_site.set_token()
    assert code_of(exchange(port, request_bytes("/delta_sync/hold", Host="evil.example"))) == 401
    assert not open_site.was_changed()
    assert code_of(exchange(port, request_bytes("/delta_sync/hold", Host="fleet.example", **BEARER))) == 200
    assert open_site.asked == ["hold"]


# Bodies


@pytest.mark.usefixtures("site")
def test_declared_size(port: int) -> None:
    """Refused at the header, without a byte of the body."""
    for size in (MAX_BODY_BYTES + 1, 10**9, 10**18):
        answer = exchange(port, HEAD + f"Content-Length: {size}\r\n\r\n".encode())
        assert code_of(answer) == 413
        assert b"connection: close" in answer.lower()
    for text in ("-1", "1e3", "0x10", "1_000", "", "9" * 5000):
        assert code_of(exchange(port, HEAD + f"Content-Length: {text}\r\n\r\n".encode())) in (400, 413), text


@pytest.mark.usefixtures("site")
def test_chunks_without_end(port: int) -> None:
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
    with socket.create_connection(("127.0.0.1", port), WAIT_SECONDS) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(MAX_BODY_BYTES // 4096 + 1):
            connection.sendall(chunk)
        assert code_of(read_answer(connection)) == 413


COSTLY = [
    b"[" * 60_000,
    b'{"version":' * 5_000,
    b'{"version": ' + b"9" * 60_000 + b"}",
    b'{"version": 1e999}',
    b'{"version": NaN}',
    b"\xff" * 60_000,
    b'{"' + b"x" * 60_000 + b'": 1}',
    json.dumps({f"field{i}": i for i in range(3_000)}).encode(),
    b'{"version": "' + b"<script>" * 7_000 + b'"}',
]


@pytest.mark.usefixtures("site")
def test_body_that_costs_much(port: int) -> None:
    """Small enough to be read; the answer is short whatever was sent."""
    for body in COSTLY:
        answer = exchange(port, HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert code_of(answer) == 400
        assert len(answer) < 1024
        assert b"<script>" not in answer
    status = exchange(port, b"GET /delta_sync/status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert code_of(status) == 200


def test_no_body_is_read_of_somebody_who_may_not(site: Site, port: int) -> None:
    site.set_token()
    assert code_of(exchange(port, HEAD + b"Content-Length: 1000\r\n\r\n")) == 401


@pytest.mark.usefixtures("site")
def test_body_that_never_ends(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow headers are the server's, not ours."""
    monkeypatch.setattr(access, "BODY_SECONDS", 0.5)
    connections = [socket.create_connection(("127.0.0.1", port), WAIT_SECONDS) for _ in range(8)]
    for connection in connections:
        connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
    # A client that goes in the middle holds nobody up.
    connections.pop().close()
    for connection in connections:
        answer = read_answer(connection)
        assert code_of(answer) == 408
        assert b"connection: close" in answer.lower()
        assert connection.recv(1) == b""
        connection.close()


# Texts that would be code in a page, or commands in a terminal

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "a&lt;b&#x27;\"'`",
    "\x1b[2J\x1b]0;owned\x07",
    "line\r\nSet-Cookie: a=b\r\n\r\n<html>",
    "\x00\x01\x7f\x80\x9b31m",
    "\u2028\u2029\u202egpj.exe\ufeff",
    "\ud800",
    "javascript:alert(1)",
]


def test_tensor_name_in_status_and_errors(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    board, client = site.service.receiver.board, site.client()
    for name in HOSTILE:
        board.set(ranks=[{"rank": 0, "tensors": 1, "unloaded": [name], "ms": {}}])
        error = TensorMismatchError(f"tensor {name} is not in the run's table")
        board.report_error(error)
        shown = client.get("/delta_sync/status")
        assert shown.json()["ranks"][0]["unloaded"] == [name]
        assert name in shown.json()["last_error"]["message"]

        def refuse() -> None:
            raise error  # noqa: B023 - called here

        with monkeypatch.context() as patch:
            patch.setattr(site.service.receiver, "status", refuse)
            answer = client.get("/delta_sync/status")
        assert answer.status_code == 422
        assert name in answer.json()["error"]["message"]
        for each in (shown, answer):
            assert each.headers["content-type"] == "application/json"
            assert each.headers["x-content-type-options"] == "nosniff"
            assert "set-cookie" not in each.headers
            assert re.fullmatch(rb"[ -;=?-~]*", each.content.replace(b"&", b"<")), "control characters, < > or &"
    board.set(ranks=[])


def test_hostile_text_in_a_request_does_not_come_back(site: Site) -> None:
    client = site.client()
    for text in HOSTILE[:4]:
        for answer in (
            client.post("/delta_sync/sync", json={"version": text}),
            client.post("/delta_sync/sync", json={text: 1}),
            client.get("/delta_sync/wait", params={"version": text}),
        ):
            assert answer.status_code == 400
            assert answer.headers["content-type"] == "application/json"
            assert not re.search(rb"[<>&\x00-\x1f\x7f]", answer.content)


# URLs: nothing is fetched from where a request, or the bucket's data, says


@contextmanager
def trap() -> Iterator[str]:
    """The host and port of a listener to which nobody may connect."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def bodies(url: str) -> list[Any]:
    return [
        *({"version": url}, {"version": f"tag:{url}"}, {"version": {"url": url}}, {"version": 0, "bucket": url}),
        *({"version": 0, "url": url}, {"version": 0, "target": url}, {"version": 0, "mirror": url}),
        *({"version": 0, "base": {"location": url}}, url, [url]),
    ]


def test_url_in_a_request(site: Site) -> None:
    client = site.client()
    with trap() as place:
        for scheme in ("http", "s3", "hf", "file", "gopher"):
            url = f"{scheme}://{place}/run"
            for path in ("sync", "rollback"):
                for body in bodies(url):
                    assert client.post(f"/delta_sync/{path}", json=body).status_code == 400, (scheme, body)
            for body in ({"target": url}, {"target": f"tag:{url}"}, {"target": "head", "bucket": url}):
                assert client.post("/delta_sync/target", json=body).status_code == 400
            assert client.get("/delta_sync/wait", params={"version": url}).status_code == 400
            assert client.get("/delta_sync/status", params={"bucket": url, "url": url}).status_code == 200


def test_url_beside_a_request_changes_nothing(open_site: Site) -> None:
    """Parameters and headers that other programs read."""
    with trap() as place:
        url = f"http://{place}/run"
        answer = open_site.client().post(
            f"/delta_sync/sync?bucket={url}&url={url}",
            json={},
            headers={"Referer": url, "X-Delta-Sync-Bucket": url, "X-Original-URL": url, "X-Rewrite-URL": "/x"},
        )
        assert answer.status_code == 200
    assert open_site.asked == ["sync"]


@pytest.fixture(scope="module")
def serving_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One that serves version 0 of a run in a folder of its own."""
    found = Site(tmp_path_factory.mktemp("serving"))
    found.serve()
    yield found
    found.end()


def test_branch_that_says_its_source_is_elsewhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only a URL of the configured bucket's own kind is opened."""
    source = Chain(tmp_path, base=False)
    source.grow(2)
    branch = source.branch("branch", 1, seed=1)
    for run in (open_run(branch.url), open_run(f"file://{branch.folder}")):
        assert [point.version for point in ancestry(run, 0)] == [0, 1]
    first = branch.folder / "versions" / "0000000000.json"
    document = json.loads(first.read_bytes())
    with trap() as place, caplog.at_level(logging.DEBUG):
        for scheme in ("http", "s3", "hf", "HTTP", "file+http"):
            caplog.clear()
            document["base"]["location"] = f"{scheme}://key:hidden@{place}/run?sig=hidden"
            first.write_bytes(dump_canonical(document))
            assert [point.version for point in ancestry(open_run(branch.url), 0)] == [0]
            assert "which is not in the branch's store 'file'" in caplog.text
            assert place in caplog.text
            assert "hidden" not in caplog.text


# Strangers who wait for a version that never comes, as many as they can

PLACES = 8


def test_strangers_who_wait(serving_site: Site) -> None:
    serving_site.set_token()
    slots = serving_site.app.state.delta_sync_slots = asyncio.Semaphore(PLACES)
    with listening(serving_site.app) as port:
        connections = [socket.create_connection(("127.0.0.1", port), WAIT_SECONDS) for _ in range(PLACES + 5)]
        for connection in connections:
            connection.sendall(request_bytes("/delta_sync/wait?version=9&timeout=3600", "GET", Host="127.0.0.1"))
        turned_away = answered(connections, 5)
        assert slots.locked()
        for connection in turned_away:
            answer = read_answer(connection)
            assert code_of(answer) == 503
            assert b"retry-after: 1" in answer.lower()
        assert code_of(exchange(port, request_bytes("/delta_sync/status", "GET", Host="x"))) == 200
        # What is served already needs no place, and who has the token always gets one.
        late = request_bytes("/delta_sync/wait?version=9&timeout=0.1", "GET", Host="x", **BEARER)
        assert code_of(exchange(port, late)) == 408
        for connection in connections:
            connection.close()
        deadline = time.monotonic() + WAIT_SECONDS
        while slots._value < PLACES:
            assert time.monotonic() < deadline, "places of clients that have gone are not given back"
            time.sleep(0.02)
        stranger = request_bytes("/delta_sync/wait?version=9&timeout=0", "GET", Host="x")
        assert code_of(exchange(port, stranger)) == 408


def answered(connections: list[socket.socket], count: int) -> list[socket.socket]:
    """Those that have an answer, once there are so many."""
    deadline = time.monotonic() + WAIT_SECONDS
    ready: list[socket.socket] = []
    while len(ready) < count and time.monotonic() < deadline:
        ready, _, _ = select.select(connections, [], [], 1)
    assert len(ready) == count
    return ready
