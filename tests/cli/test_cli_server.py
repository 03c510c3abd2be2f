"""``delta-sync status``, ``sync``, ``rollback``, ``hold``, ``release`` and ``wait`` against the real routes.

What no real server answers on order (a redirect, nonsense, silence) comes from a web server of the test.
"""

import json
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tests.support.answers import Answer, answering, closed_port, dripping, silent, untrusted
from tests.support.chains import Chain
from tests.support.commands import Done, answer, delta_sync, kind, refusal, shown
from tests.support.web import TOKEN, Site, listening
from vllm_delta_sync.admin_token import VARIABLE
from vllm_delta_sync.cli.server import WAIT_SECONDS
from vllm_delta_sync.client import open_run
from vllm_delta_sync.engine.api.access import AdminRefused
from vllm_delta_sync.engine.api.admission import LateError, UnreachableError
from vllm_delta_sync.engine.commit.transaction import DrainError, PauseExpiredError
from vllm_delta_sync.errors import error_kinds
from vllm_delta_sync.format.limits import MAX_VERSION
from vllm_delta_sync.maintenance.tags import set_tag

ORDERS = ("sync", "rollback --version 0", "hold", "release", "wait --version 0")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, str]]:
    """A server that follows a run, and its URL."""
    root = tmp_path_factory.mktemp("site")
    site = Site(root, state_dir=root / "state")
    site.serve()
    with listening(site.app) as port:
        yield site, f"http://127.0.0.1:{port}"
    site.end()


@pytest.fixture
def site(shared: tuple[Site, str]) -> Site:
    """It is released and has no token."""
    shared[0].app.state.delta_sync_token = None
    if shared[0].service.receiver.board.holding:
        shared[0].service.request("release").result(60)
    shared[0].asked.clear()
    return shared[0]


@pytest.fixture
def url(site: Site, shared: tuple[Site, str]) -> str:
    return shared[1]


def fields_of(text: str) -> dict[str, str]:
    """``name  value`` lines up to the first empty line."""
    pairs = [re.split(r"  +", line, maxsplit=1) for line in text.partition("\n\n")[0].splitlines()]
    return {pair[0]: pair[-1] for pair in pairs}


def failed(done: Done, code: int, kind: str, *words: str) -> None:
    """The command ended with one line of error, which has these words and no token."""
    assert (done.code, done.out) == (code, ""), done
    assert done.err.startswith(f"delta-sync: {kind}: "), done.err
    assert len(done.err.splitlines()) == 1
    assert all(word in done.err for word in words), done.err
    assert TOKEN not in done.err


# What the server answers


def test_all_commands_on_one_server(site: Site, url: str) -> None:
    served = site.service.receiver.served_version
    assert served is not None
    one, two, three = range(served + 1, served + 4)
    for version in (one, two):
        site.publish(step=version)
        line = shown("wait", "--server", url, "--version", version, "--timeout", "120")
        # The state may still be that of the commit.
        assert line.startswith(f"{url}: done; serves version {version} (step {version}), lag 0, state ")
    rolled = f"{url}: rolled back; serves version {one} (step {one}), lag 1, state held\n"
    assert shown("rollback", "--server", url, "--version", one) == rolled
    site.publish(step=three)
    held = f"serves version {two} (step {two}), lag 1, state held\n"
    assert shown("sync", "--server", url, "--version", two).endswith(held)
    assert shown("hold", "--server", url) == f"{url}: held; {held}"
    assert shown("release", "--server", url).startswith(f"{url}: released; serves version ")
    assert (
        shown("sync", "--server", url) == f"{url}: synced; serves version {three} (step {three}), lag 0, state idle\n"
    )
    assert site.asked == ["rollback", "sync", "hold", "release", "sync"]
    assert answer("hold", "--server", url)["servers"][0]["status"]["holding"] is True
    line = shown("rollback", "--server", url, "--version", "served~2")
    assert line == f"{url}: rolled back; serves version {one} (step {one}), lag 2, state held\n"
    assert kind(3, "rollback", "--server", url, "--version", f"served~{two}") == "not_found"
    for wrong in ("served", "served~", "served~x", "head~1", "-1"):
        assert kind(2, "rollback", "--server", url, "--version", wrong) == "usage"


def test_status_for_people(site: Site, url: str) -> None:
    site.publish(10)
    head = answer("sync", "--server", url)["servers"][0]["status"]["head"]["version"]
    text = shown("status", "--server", url + "/")
    found = fields_of(text)
    served = f"version {head} (step 10)"
    assert list(found) == ["server", "served", "head", "lag", "state", "hold", "target", "ready", "last error"]
    assert (found["served"], found["head"], found["lag"]) == (served, served, "0")
    assert found["state"] == "idle: serving; no update in progress"
    assert (found["hold"], found["target"], found["ready"]) == ("no", "head", "yes")
    assert found["last error"] == "none since the last success"
    (title, *_, last) = text.partition("\n\n")[2].rstrip().splitlines()
    assert title.split() == ["version", "step", "changed", "payload", "staged", "in", "paused", "for"]
    assert re.fullmatch(rf"{head} +10 +[\d,]+ +[\d.]+ k?B +[\d.]+ ms +[\d.]+ ms", last)
    pause = site.service.receiver.status()["recent"][-1]["timings_ms"]["pause"]
    assert last.endswith(f" {pause:.1f} ms")
    shown("hold", "--server", url)
    held = fields_of(shown("status", "--server", url))
    assert held["hold"] == "yes, until delta-sync release"
    assert re.fullmatch(r"0, [0-9]+ s ago: a held server does not read the bucket", held["lag"])
    assert held["ready"] == f"no: held at version {head}; POST /delta_sync/release to follow again"


def test_status_says_what_is_wrong_and_what_happens(site: Site, url: str, tmp_path: Path) -> None:
    run = Path(site.settings.bucket)
    shutil.move(run, tmp_path / "away")
    try:
        run.write_bytes(b"no folder")
        failed(delta_sync("sync", "--server", url), 4, "store", url, str(run))
        text = shown("status", "--server", url)
    finally:
        run.unlink()
        shutil.move(tmp_path / "away", run)
    assert fields_of(text)["last error"].startswith("store: ")
    assert "the server keeps serving its version, and retries by itself" in text
    assert answer("sync", "--server", url)["servers"][0]["status"]["last_error"] is None


def test_errors_of_the_server_keep_kind_and_exit_code(site: Site, url: str) -> None:
    to = ("--server", url)
    failed(delta_sync("rollback", *to, "--version", "999"), 3, "not_found", url, "999")
    failed(delta_sync("sync", *to, "--version", MAX_VERSION + 1), 2, "usage", url, "version")
    late = delta_sync("wait", *to, "--version", "999", "--timeout", "0.2")
    failed(late, 1, "late", url, "version 999 is not served after 0.2 s: serves version ", "--timeout")
    shown("hold", *to)
    began = time.monotonic()
    failed(delta_sync("wait", *to, "--version", "999", "--timeout", "600"), 1, "unreachable", url, "held")
    failed(delta_sync("sync", *to), 1, "busy", url)
    assert time.monotonic() - began < 300
    assert kind(3, "rollback", *to, "--version", "999") == "not_found"


def test_every_kind_has_its_exit_code() -> None:
    """Those that only the engine raises are unknown to a client that has not imported it: they are 1."""
    assert {cls.exit_code for cls in (AdminRefused, DrainError, LateError, PauseExpiredError, UnreachableError)} == {1}
    kinds = {name: cls.exit_code for name, cls in error_kinds().items() if name != "forbidden"}
    with answering() as server:
        for name, code in {**kinds, "unheard_of": 1}.items():
            body = json.dumps({"error": {"kind": name, "message": "it is so"}}).encode()
            server.reply = lambda asked, body=body: Answer(500, body)  # type: ignore[misc]
            failed(delta_sync("sync", "--server", server.url), code, name, f"{server.url}: it is so")


# The right to change something


def test_the_token_comes_from_the_environment_or_a_file(site: Site, url: str, tmp_path: Path) -> None:
    site.set_token()
    shown("status", "--server", url)
    for order in ORDERS[:-1]:
        failed(delta_sync(*order.split(), "--server", url), 1, "forbidden", url, "requires", f"set {VARIABLE}")
        wrong = delta_sync(*order.split(), "--server", url, **{VARIABLE: TOKEN[::-1]})
        failed(wrong, 1, "forbidden", url, "another admin token", f"set {VARIABLE}")
        assert TOKEN[::-1] not in wrong.err
    assert not site.was_changed()
    for order in ORDERS:
        assert TOKEN not in shown(*order.split(), "--server", url, DELTA_SYNC_ADMIN_TOKEN=TOKEN)
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    shown("hold", "--server", url, DELTA_SYNC_ADMIN_TOKEN_FILE=str(file))
    both = {VARIABLE: TOKEN, "DELTA_SYNC_ADMIN_TOKEN_FILE": str(file)}
    failed(delta_sync("hold", "--server", url, **both), 2, "settings", "both set")
    failed(delta_sync("hold", "--server", url, **{VARIABLE: "too-short"}), 2, "settings", VARIABLE)


def test_a_server_without_a_token_obeys_only_its_machine(site: Site, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def local(host: str, *given: Any, **options: Any) -> Any:
        return resolve("127.0.0.1" if host == "rollout-1" else host, *given, **options)

    monkeypatch.setattr(socket, "getaddrinfo", local)
    far = url.replace("127.0.0.1", "rollout-1")
    failed(delta_sync("hold", "--server", far), 1, "forbidden", far, "no admin token is set", f"and {VARIABLE} here")
    shown("status", "--server", far)
    assert not site.was_changed()


def test_the_token_goes_to_the_named_server_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://192.0.2.1:1")
    with answering() as named, answering() as other:
        named.reply = lambda asked: Answer(307, b"", {"Location": f"{other.url}{asked.path}"})
        for order in ORDERS:
            done = delta_sync(*order.split(), "--server", named.url, **{VARIABLE: TOKEN})
            failed(done, 1, "engine", named.url, "HTTP status 307", "no redirect is followed")
        assert {asked.headers["authorization"] for asked in named.asked} == {f"Bearer {TOKEN}"}
        assert {asked.path.partition("?")[0] for asked in named.asked} == {
            f"/delta_sync/{order.split()[0]}" for order in ORDERS
        }
        named.asked.clear()
        failed(delta_sync("status", "--server", named.url, **{VARIABLE: TOKEN}), 1, "engine", "307")
        assert "authorization" not in named.asked[0].headers
        assert other.asked == []


def test_a_token_that_comes_back_is_not_shown() -> None:
    with answering() as server:
        server.reply = lambda asked: Answer(
            500, json.dumps({"error": {"kind": "engine", "message": asked.headers["authorization"]}}).encode()
        )
        done = delta_sync("hold", "--server", server.url, **{VARIABLE: TOKEN})
    failed(done, 1, "engine", "[removed]")


# No such server, or another one


def test_nobody_listens_or_answers() -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    for order in ("status", *ORDERS):
        failed(delta_sync(*order.split(), "--server", url), 4, "unavailable", url, "refused", "has started")
    with silent() as quiet:
        failed(delta_sync("hold", "--server", quiet, "--timeout", "0.3"), 4, "deadline", quiet, "within 0.3 s")
    with dripping() as slow:
        failed(delta_sync("hold", "--server", slow, "--timeout", "0.3"), 4, "deadline", slow, "within 0.3 s")


def test_a_certificate_that_is_not_trusted(tmp_path: Path) -> None:
    with untrusted(tmp_path) as url:
        failed(delta_sync("status", "--server", url), 4, "unavailable", "certificate verify failed", "SSL_CERT_FILE")


def test_the_default_is_the_port_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def refuse(address: tuple[str, int], *given: Any, **options: Any) -> socket.socket:
        asked.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    failed(delta_sync("status"), 4, "unavailable", "http://localhost:8000")
    assert asked == [("localhost", 8000)]


def test_a_long_wait_is_asked_in_short_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy answers one that is silent for long with 504, and a firewall forgets it."""
    assert WAIT_SECONDS < 30
    monkeypatch.setattr("vllm_delta_sync.cli.server.WAIT_SECONDS", 0.2)
    with answering() as server:
        server.reply = lambda asked: Answer(408, b'{"state": "idle"}')
        failed(delta_sync("wait", "--version", 9, "--timeout", "0.5", "--server", server.url), 1, "late", "after 0.5 s")
        asked = [float(each.path.rpartition("=")[2]) for each in server.asked]
    assert len(asked) > 1
    assert max(asked) <= 0.2


def test_a_server_without_the_plugin() -> None:
    with listening(FastAPI()) as port:
        url = f"http://127.0.0.1:{port}"
        for order in ("status", *ORDERS):
            done = delta_sync(*order.split(), "--server", url)
            failed(done, 1, "engine", url, "the plugin is not loaded", "delta-sync serve", "VLLM_PLUGINS")


OTHERS: dict[str, Answer] = {
    "a page": Answer(200, b"<html>"),
    "a list": Answer(200, b"[1]"),
    "another document": Answer(200, b'{"state": 5}'),
    "NaN, which is no JSON": Answer(200, b'{"state": "idle", "lag": NaN}'),
    "infinity": Answer(200, b'{"state": "idle", "lag": -1e999}'),
    "an error without a kind": Answer(503, b'{"error": "down"}'),
    "a kind that is no word": Answer(500, b'{"error": {"kind": "\\u001b[2J", "message": "x"}}'),
    "a proxy's login": Answer(401, b"<html>"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_the_plugin(name: str) -> None:
    with answering() as server:
        server.reply = lambda asked: OTHERS[name]
        failed(
            delta_sync("status", "--server", server.url),
            *(1, "engine", server.url, f"HTTP status {OTHERS[name].status}", "own address"),
        )


def test_what_a_server_says_is_harmless() -> None:
    status: dict[str, Any] = {
        "state": "\x1b[2J",
        "served": {"version": True, "step": "x", "quarantined": {"\x1b": 1}},
        "head": [],
        "lag": {},
        "ready": {"reasons": [{"\x1b": 1}, 7]},
        "last_error": {"kind": "store", "message": "\x1b]0;x" + "y" * 9999},
        "recent": [
            3,
            {"version": "1", "payload_bytes": 10**400, "timings_ms": {"pause": "x", "fetch": 1.5, "route": 10**400}},
        ],
        "ok": False,
        "error": {"kind": "of the server"},
    }
    with answering() as server:
        server.reply = lambda asked: Answer(200, json.dumps(status).encode())
        text = shown("status", "--server", server.url)
        (row,) = answer("status", "--server", server.url)["servers"]
    assert "\x1b" not in text
    assert len(text) < 5000
    assert fields_of(text)["served"] == "no version"
    assert text.rstrip().splitlines()[-1].split() == ["-", "-", "-", "-", "1.5", "ms", "-"]
    assert row == {"server": server.url, "status": status}


@pytest.mark.parametrize(
    "named",
    [
        *("", "localhost:8000", "ftp://127.0.0.1", "http://", "http://[x", "http://x:99999", "http://127.0.0.1:0"),
        *("http://x#y", "http://x..y"),
        *("http://u:p@127.0.0.1", "http://127.0.0.1/?token=x"),
    ],
)
def test_urls_of_no_server(named: str) -> None:
    with answering() as server:
        for order in ("status", *ORDERS):
            failed(delta_sync(*order.split(), "--server", server.url, "--server", named), 2, "usage", "server URL")
        assert server.asked == []


# Versions by name


def test_a_version_is_named_as_everywhere(site: Site, url: str, tmp_path: Path) -> None:
    bucket = ("--bucket", site.settings.bucket)
    for step in (11, 12, 13):
        site.publish(step)
    run = open_run(site.settings.bucket)
    head = run.head().version
    set_tag(run, "best", head - 2)
    for name, version in (("head", head), ("head~1", head - 1), ("tag:best", head - 2)):
        (row,) = answer("sync", "--server", url, "--version", name, *bucket)["servers"]
        assert row["status"]["served"]["version"] == version
    waited = shown("wait", "--server", url, "--version", "head~2", DELTA_SYNC_BUCKET=site.settings.bucket)
    assert "serves version " in waited
    assert kind(3, "rollback", "--server", url, "--version", "tag:worst", *bucket) == "not_found"
    assert kind(2, "rollback", "--server", url, "--version", "head") == "usage"  # no run is named
    other = Chain(tmp_path / "other")
    asked = len(site.asked)
    refused = refusal("sync", "--server", url, "--version", "head", "--bucket", other.url, code=2)
    assert "follows run" in refused["message"]
    assert len(site.asked) == asked


# Several servers


def test_several_servers_are_asked_in_turn(site: Site, url: str, tmp_path: Path) -> None:
    other = Site(tmp_path)
    other.serve()
    down = f"http://127.0.0.1:{closed_port()}"
    with listening(other.app) as port:
        second = f"http://127.0.0.1:{port}"
        servers = ("--server", down, "--server", url, "--server", second)
        done = delta_sync("hold", *servers)
        assert done.code == 4
        assert done.err.startswith(f"delta-sync: unavailable: {down} does not answer")
        assert [line.partition(";")[0] for line in done.out.splitlines()] == [f"{url}: held", f"{second}: held"]
        assert (site.asked, other.asked) == (["hold"], ["hold"])
        # The first failure decides: of the second server, which has no such version, then of the first.
        later = delta_sync("rollback", *servers[2:], "--server", down, "--version", "999")
        assert (later.code, len(later.err.splitlines()), later.out) == (3, 3, "")
        document = answer("status", *servers, code=4)
        assert [entry["server"] for entry in document["servers"]] == [down, url, second]
        assert document["servers"][0]["error"]["kind"] == "unavailable"
        assert [entry["status"]["state"] for entry in document["servers"][1:]] == ["held", "held"]
        both = answer("release", *servers[2:])
        assert [entry["status"]["holding"] for entry in both["servers"]] == [False, False]
    other.end()
