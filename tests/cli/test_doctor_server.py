"""What the doctor says of servers: ours on a real socket, and everything else that may answer at an address."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.web import Site, listening
from vllm_delta_sync import __version__
from vllm_delta_sync.bucket import StoreOptions
from vllm_delta_sync.errors import UnavailableError, UsageError
from vllm_delta_sync.upkeep import doctor, doctor_client
from vllm_delta_sync.upkeep.doctor import BUCKET_CHECKS, SERVER_CHECKS, Request, examine
from vllm_delta_sync.upkeep.doctor_client import MAX_ANSWER_BYTES, Client, field
from vllm_delta_sync.upkeep.doctor_findings import Finding

RUN = "ab" * 16
POINT = {"version": 3, "step": 30, "fingerprint": "cd" * 16, "quarantined": []}
WELL: dict[str, Any] = {
    "run": RUN,
    "served": POINT,
    "head": POINT,
    "lag": 0,
    "state": "idle",
    "last_error": None,
    "policy": "follow",
    "target": "head",
    "holding": False,
    "ranks": [{"rank": 0, "tensors": 6, "unloaded": []}],
    "notice": {"listens": False, "heard_seconds": None},
    "versions": {"vllm": "0.32.0", "torch": "2.13.0", "vllm_delta_sync": __version__, "tested": True},
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine nothing is found to hang that does not."""
    for module in (doctor, doctor_client):
        monkeypatch.setattr(module, "REQUEST_SECONDS", 120.0)


def look(bucket: Path | str, server: str, **request: Any) -> dict[str, Finding]:
    """Findings on the server's side, of a doctor who goes on and puts nothing."""
    chosen = {"keep_going": True, "reads_only": True, "size": 0, **request}
    examined = examine(Request(str(bucket), StoreOptions(store_deadline=60), server=server, **chosen))
    found = examined[len(BUCKET_CHECKS) :]
    assert [finding.check for finding in found] == list(SERVER_CHECKS)
    return {finding.check: finding for finding in found}


def verdicts(findings: dict[str, Finding]) -> dict[str, str]:
    """What did not come out well."""
    return {finding.check: finding.verdict for finding in findings.values() if finding.verdict != "ok"}


# Our own routes


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A server of version 0, which says of itself what vLLM says."""
    site = Site(tmp_path)

    @site.app.get("/health")
    async def health() -> None:
        return None

    @site.app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "tiny"}]}

    yield site
    site.end()


def test_a_server_that_follows(site: Site) -> None:
    site.serve()
    site.publish(1)
    with listening(site.app) as port:
        url = f"http://127.0.0.1:{port}"
        Client(url).ask("/delta_sync/wait?version=1&timeout=120")
        found = look(site.settings.bucket, url)
        assert verdicts(found) == {}
        assert found["server"].figures == {"health": 200, "models": ["tiny"], "api_key": False}
        assert found["state"].figures == {"state": "idle", "policy": "follow"}
        assert found["routes"].figures["tensors"] > 0
        assert found["lag"].figures == {"served": 1, "head": 1, "lag": 0}
        assert found["same run"].figures["run"] == site.publisher.run
        assert found["versions"].figures["vllm_delta_sync"] == __version__
        assert "tested" in found["versions"].said
        assert found["notice"].figures["listens"] is True
        assert found["notice"].figures["heard_seconds"] < 30
        assert found["admin"].figures["token"] is False
        assert not site.was_changed()
        site.set_token()
        assert look(site.settings.bucket, url + "/")["admin"].figures["token"] is True
        assert not site.was_changed()


def test_a_server_without_a_run(tmp_path: Path, site: Site) -> None:
    for file in (tmp_path / "run").glob("*.json"):
        file.unlink()
    with listening(site.app) as port:
        site.service.start()
        found = look(site.settings.bucket, f"http://127.0.0.1:{port}")
    assert verdicts(found) == {
        "state": "warning",
        "routes": "warning",
        "same run": "warning",
        "lag": "warning",
        **({"last error": "failed"} if found["last error"].verdict == "failed" else {}),
        "notice": "warning",
    }


def test_a_plain_vllm_has_no_plugin() -> None:
    with answering({"/health": (200, b""), "/v1/models": (401, b'{"error": "no key"}')}) as url:
        found = look("/nowhere", url)
    assert found["server"].figures == {"health": 200, "models": [], "api_key": True}
    assert found["plugin"].verdict == "failed"
    for word in ("VLLM_PLUGINS", "DELTA_SYNC_BUCKET", "--worker-extension-cls", "delta-sync serve"):
        assert word in found["plugin"].mend
    assert [finding.verdict for finding in found.values()][2:] == ["skipped"] * 8


def test_what_a_mend_says_to_set_is_what_is_read() -> None:
    from vllm_delta_sync.config import environment_name
    from vllm_delta_sync.engine import WORKER_EXTENSION, compat
    from vllm_delta_sync.upkeep.doctor_server import NOT_LOADED

    for word in (WORKER_EXTENSION, compat.PLUGIN_NAME, environment_name("bucket")):
        assert word in NOT_LOADED


# Odd answers


@contextmanager
def answering(answers: dict[str, tuple[int, bytes]], asked: Callable[[str], None] = lambda path: None) -> Iterator[str]:
    """The URL of a server that has these answers by path, and 404 otherwise. Args: asked: told of each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked(self.path)
            status, body = answers.get(self.path.partition("?")[0], (404, b"{}"))
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            return None

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(120)


def told(status: dict[str, Any], **rest: tuple[int, bytes]) -> dict[str, Finding]:
    """Findings on a server that says this of itself."""
    paths = {"/" + name.replace("__", "/"): value for name, value in rest.items()}
    answers = {
        "/health": (200, b""),
        "/delta_sync/status": (200, json.dumps(status).encode()),
        "/delta_sync/rollback": (415, b"{}"),
        **paths,
    }
    with answering(answers) as url:
        return look("/nowhere", url)


def changed(**members: Any) -> dict[str, Any]:
    return {**deepcopy(WELL), **members}


def test_nothing_but_the_unknown_run_is_wrong_with_that_status() -> None:
    assert verdicts(told(WELL)) == {"same run": "warning"}


ODD: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("refused", changed(state="refused", served=None, last_error={"kind": "tensor", "message": "w is odd; mend it"}),
     "state", "failed", "refused: w is odd; mend it"),
    ("lost", changed(state="lost"), "state", "failed", "lost: no reason"),
    ("proving", changed(state="proving", served=None), "state", "warning", "serves no version"),
    ("unknown state", changed(state="\x1b[2J"), "state", "failed", "no reason"),
    ("no ranks", changed(ranks=[]), "routes", "warning", "no rank has traced"),
    ("ranks of nonsense", changed(ranks=[7, None, {"tensors": "x", "unloaded": 3}]), "routes", "ok", "1 rank, 0"),
    ("unproven", changed(served=None), "routes", "warning", "proven to be no version"),
    ("two ranks", changed(ranks=[{"tensors": 6}] * 2), "routes", "ok", "2 ranks, 6 tensors"),
    ("unloaded", changed(ranks=[{"tensors": 6, "unloaded": ["head"]}]), "routes", "ok", "1 of which the model"),
    ("no run", changed(run=None), "same run", "warning", "no run yet"),
    ("lags", changed(head={**POINT, "version": 9}, lag=6), "lag", "warning", "6 behind the head"),
    ("held", changed(head={**POINT, "version": 9}, lag=6, holding=True, state="held"), "lag", "ok", "as it was told"),
    ("target", changed(head={**POINT, "version": 9}, target="3"), "lag", "ok", "as it was told"),
    ("quarantined", changed(head={**POINT, "version": 9}, lag=0), "lag", "ok", "quarantined"),
    ("versions of nonsense", changed(served={"version": "3"}, head=[]), "lag", "warning", "serves no version"),
    ("error", changed(last_error={"kind": "store", "message": "disk; mend"}), "last error", "warning", "disk; mend"),
    ("fatal error", changed(served=None, last_error={"kind": "store", "message": "x"}), "last error", "failed", "x"),
    ("untested", changed(versions={**WELL["versions"], "tested": False}), "versions", "warning", "never tested"),
    ("other release", changed(versions={**WELL["versions"], "vllm_delta_sync": "9"}), "versions", "warning", "is here"),
    ("older plugin", changed(versions=None), "versions", "warning", "does not say its version"),
    ("deaf", changed(notice={"listens": True, "heard_seconds": None}), "notice", "warning", "none has come yet"),
    ("gone deaf", changed(notice={"listens": True, "heard_seconds": 99.5}), "notice", "warning", "came 100 s ago"),
    ("hears", changed(notice={"listens": True, "heard_seconds": 1.0}), "notice", "ok", "1 s ago"),
    ("no word of notices", changed(notice=None), "notice", "skipped", "does not say"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "status", "check", "verdict", "said"), ODD, ids=[case[0] for case in ODD])
def test_states(name: str, status: dict[str, Any], check: str, verdict: str, said: str) -> None:
    found = told(status)[check]
    assert (found.verdict, said in found.said) == (verdict, True), found


def test_a_server_that_is_behind_is_waited_for() -> None:
    behind = changed(head={**POINT, "version": 4}, lag=1)
    there = changed(served={**POINT, "version": 4}, head={**POINT, "version": 4})
    answers = {"/health": (200, b""), "/delta_sync/status": (200, json.dumps(behind).encode())}
    asked: list[str] = []

    def note(path: str) -> None:
        asked.append(path)
        if path.startswith("/delta_sync/wait"):
            answers["/delta_sync/status"] = (200, json.dumps(there).encode())

    with answering(answers, note) as url:
        found = look("/nowhere", url)["lag"]
    assert (found.verdict, found.figures["served"]) == ("ok", 4)
    assert "/delta_sync/wait?version=4&timeout=5" in asked


def test_the_exit_code_is_of_the_servers_error() -> None:
    error = {"kind": "not_found", "message": "there is no run"}
    found = told(changed(state="refused", served=None, last_error=error))["state"]
    assert found.error is not None
    assert (found.error.kind, found.error.exit_code) == ("not_found", 3)
    unknown = told(changed(state="refused", served=None, last_error={**error, "kind": "strange"}))["state"]
    assert unknown.error is not None
    assert unknown.error.kind == "engine"


@pytest.mark.parametrize(
    ("status", "verdict"), [(401, "ok"), (403, "ok"), (400, "ok"), (200, "warning"), (404, "warning")]
)
def test_admin(status: int, verdict: str) -> None:
    found = told(WELL, delta_sync__rollback=(status, b"{}"))["admin"]
    assert (found.verdict, found.figures["status"]) == (verdict, status)


SPACES = b" " * (MAX_ANSWER_BYTES + 9)
ANSWERS: list[tuple[str, dict[str, tuple[int, bytes]], str, str]] = [
    ("nothing of vLLM", {}, "server", "is no vLLM server: /health says 404"),
    ("a dead engine", {"/health": (503, b"")}, "server", "engine is dead"),
    ("a redirect", {"/health": (302, b"")}, "server", "/health says 302"),
    ("no JSON", {"/health": (200, b""), "/delta_sync/status": (200, b"<html>")}, "plugin", "no status of ours"),
    ("a list", {"/health": (200, b""), "/delta_sync/status": (200, b"[1]")}, "plugin", "no status of ours"),
    ("a bomb", {"/health": (200, b""), "/delta_sync/status": (200, b"[" * 100_000)}, "plugin", "no status of ours"),
    ("an error", {"/health": (200, b""), "/delta_sync/status": (500, b"{}")}, "plugin", "answers with 500"),
    ("too much", {"/health": (200, b""), "/delta_sync/status": (200, SPACES)}, "plugin", "more than"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "answers", "check", "said"), ANSWERS, ids=[case[0] for case in ANSWERS])
def test_answers(name: str, answers: dict[str, tuple[int, bytes]], check: str, said: str) -> None:
    with answering(answers) as url:
        found = look("/nowhere", url)[check]
    assert (found.verdict, said in found.said) == ("failed", True), found


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        port = opened.getsockname()[1]
    found = look("/nowhere", f"http://127.0.0.1:{port}")["server"]
    assert found.error is not None
    assert (found.error.kind, found.error.exit_code) == ("unavailable", 4)
    assert "Connection refused" in found.said


@pytest.mark.parametrize(
    ("data", "pause", "said"),
    [(b"SSH-2.0-OpenSSH\r\n", 0.0, "does not answer"), (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 999, 0.2, "within 1 s")],
    ids=["no HTTP", "drips"],
)
def test_what_is_no_http_server_or_drips(monkeypatch: pytest.MonkeyPatch, data: bytes, pause: float, said: str) -> None:
    monkeypatch.setattr(doctor_client, "REQUEST_SECONDS", 1.0)
    stop = threading.Event()

    def serve() -> None:
        connection, _ = opened.accept()
        with connection:
            for byte in data:
                if stop.wait(pause):
                    return
                connection.sendall(bytes([byte]))

    with socket.create_server(("127.0.0.1", 0)) as opened:
        thread = threading.Thread(target=serve)
        thread.start()
        began = time.monotonic()
        try:
            with pytest.raises(UnavailableError, match=said):
                Client(f"http://127.0.0.1:{opened.getsockname()[1]}").ask("/health")
            assert time.monotonic() - began < 120
        finally:
            stop.set()
            thread.join(120)


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://x", "http://", "http://u:p@x", "http://x?y", "http://x#y", "http://x:99999", "http://[x"]
)  # fmt: skip
def test_urls_that_are_none_of_a_server(url: str) -> None:
    with pytest.raises(UsageError, match="server URL"):
        Client(url)


def test_proxies_are_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://192.0.2.1:1")
    with answering({"/health": (200, b"")}) as url:
        assert Client(url).ask("/health").status == 200


def test_fields() -> None:
    document = {"a": {"b": 1, "c": True}, "d": None}
    assert field(document, "a.b", int) == 1
    assert field(document, "a.c", bool) is True
    for path, kind in (("a.c", int), ("a.b", str), ("a.x", int), ("d.b", int), ("a.b.c", int), ("d", dict)):
        assert field(document, path, kind) is None
