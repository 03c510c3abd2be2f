"""``delta-sync report`` and ``dashboard``: one page and one document; they only read and load nothing else."""

import base64
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from html.parser import HTMLParser
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest

from tests.cli.test_cli_signing import KeyedRun
from tests.support.answers import Answer, answering, closed_port
from tests.support.commands import answer, delta_sync, kind, shown
from tests.support.page_runs import HOSTILE, PageRun, busy_run, empty_run, hostile_run, hostile_status
from vllm_delta_sync import http_server
from vllm_delta_sync.cache.peer_server import PeerServer
from vllm_delta_sync.dashboard import page
from vllm_delta_sync.dashboard.web_server import DashboardServer
from vllm_delta_sync.format.manifest import version_key
from vllm_delta_sync.settings import environment_name

SECONDS = 120
ADMIN = ("sync", "rollback", "hold", "release", "verify", "target")


class Elements(HTMLParser):
    """The elements of a page as a browser finds them.

    Attributes:
        found: name and attributes of each. texts: what is in each ``script``, in order.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.texts.append(data)


def document_of(file: Path) -> Any:
    return json.loads(Elements(file.read_text()).texts[0])


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> PageRun:
    return busy_run(tmp_path_factory.mktemp("busy") / "run", layers=2, versions=40, width=16)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> PageRun:
    return hostile_run(tmp_path_factory.mktemp("hostile") / "run")


def test_report_is_one_file_with_the_figures_of_the_run(busy: PageRun, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text("an older report")
    done = answer("report", "--bucket", busy.folder, "--to", file, "--last", "30")
    assert (done["to"], done["bytes"], done["first"], done["last"]) == (str(file), file.stat().st_size, 11, 40)
    assert (done["receivers"], done["errors"]) == (6, 1)
    found = document_of(file)
    stats = answer("stats", "--bucket", busy.folder, "--last", "30")
    columns = found["run"]["versions"]
    assert columns["payload"] == [row["payload_bytes"] for row in stats["versions"]]
    assert found["run"]["summary"]["payload"]["median"] == stats["summary"]["payload_bytes"]["median"]
    assert found["run"]["summary"]["saved"] == stats["summary"]["saved_share"]
    assert (found["source"], found["seconds"], found["servers"]) == ("report", None, [])
    text = shown("report", "--bucket", busy.folder, "--to", file)
    assert text.startswith(f"{file}: 41 versions, 6 receivers, 1 error, no warnings; ")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_report_asks_servers_and_says_which_do_not_answer(busy: PageRun, tmp_path: Path) -> None:
    dead = f"http://127.0.0.1:{closed_port()}"
    with answering() as live:
        body = json.dumps(busy.status(40, "rollout-1")).encode()
        live.reply = lambda asked: Answer(200, body, {"Content-Type": "application/json"})
        arguments = ("--server", live.url, "--server", dead)
        done = answer("report", "--bucket", busy.folder, *arguments, "--to", tmp_path / "report.html")
        assert [(asked.method, asked.path) for asked in live.asked] == [("GET", "/delta_sync/status")]
    assert done["errors"] == 2
    first, second = document_of(tmp_path / "report.html")["servers"]
    assert (first["name"], first["served"]["version"], len(first["recent"])) == (live.url, 40, 40)
    assert (second["name"], second["error"]["kind"]) == (dead, "unavailable")


def test_a_page_has_no_markup_but_its_own(hostile: PageRun, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    with answering() as live:
        body = json.dumps(hostile_status(hostile)).encode()
        live.reply = lambda asked: Answer(200, body, {"Content-Type": "application/json"})
        answer("report", "--bucket", hostile.folder, "--server", live.url, "--to", file)
    text = file.read_text()
    own = Elements(page.live_page().decode())
    report = Elements(text)
    # One more element than the page of a server has: the policy, which a file has no header for.
    added = [item for item in report.found if item not in own.found]
    assert [tag for tag, _ in added] == ["meta"]
    assert len(report.found) == len(own.found) + 1
    assert len(report.texts) == len(own.texts) == 2
    for hostile_text in HOSTILE:  # those without a bracket are data wherever they stand
        assert "<" not in hostile_text or hostile_text not in text
    found = document_of(file)
    assert HOSTILE[1] in found["servers"][0]["state"]
    assert found["run"]["quarantined"][0]["reasons"][0] == HOSTILE[0]


def directives(policy: str) -> dict[str, list[str]]:
    return {words[0]: words[1:] for part in policy.split(";") if (words := part.split())}


def test_policy_allows_the_pages_own_script_and_no_other_host(tmp_path: Path, busy: PageRun) -> None:
    answer("report", "--bucket", busy.folder, "--to", tmp_path / "report.html")
    report = (tmp_path / "report.html").read_text()
    inline = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', report)
    assert inline is not None
    for text, policy in ((page.live_page().decode(), page.policy()), (report, inline[1])):
        found = directives(policy)
        assert found["default-src"] == ["'none'"]
        for name in ("style", "script"):
            blocks = re.findall(rf"<{name}>(.*?)</{name}>", text, re.S)
            digests = [base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() for block in blocks]
            assert len(digests) == 1
            assert found[f"{name}-src"] == [f"'sha256-{digest}'" for digest in digests]
        assert found["require-trusted-types-for"] == ["'script'"]
        assert found["trusted-types"] == found["base-uri"] == found["form-action"] == ["'none'"]
        assert "unsafe" not in policy
        assert "http" not in policy
        for _, attributes in Elements(text).found:
            assert not {name for name in attributes if name.startswith("on") or name == "style"}
            for name in ("src", "href", "action"):
                assert (attributes.get(name) or "#").startswith(("#", "data:"))
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
    assert not re.search(markup, page.live_page().decode())
    # Only the page of a server asks anything, and only that server.
    assert directives(page.policy())["connect-src"] == ["'self'"]
    assert directives(page.policy())["frame-ancestors"] == ["'none'"]
    assert "connect-src" not in directives(inline[1])


def test_no_route_that_changes_anything_is_on_the_page() -> None:
    text = page.live_page().decode()
    assert re.findall(r"fetch\(([^,)]*)", text) == ['"overview" + location.search']
    assert not re.search(r"method|POST|<form|<button|<input", text)
    for name in ADMIN:
        assert f"delta_sync/{name}" not in text


def test_what_report_cannot_do_is_said(busy: PageRun, tmp_path: Path) -> None:
    assert kind(2, "report", "--bucket", busy.folder, "--to", tmp_path / "no" / "report.html") == "usage"
    wrong = ("--server", "ftp://host")
    assert kind(2, "report", "--bucket", busy.folder, *wrong, "--to", tmp_path / "report.html") == "usage"
    assert not list(tmp_path.iterdir())
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link", ".", "", "long" * 100):
        assert kind(2, "report", "--bucket", busy.folder, "--to", name and tmp_path / name) == "usage"
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()


def test_report_keeps_the_link_that_leads_to_it(busy: PageRun, tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "report.html")
    for _ in range(2):
        assert answer("report", "--bucket", busy.folder, "--to", tmp_path / "link.html")["last"] == 40
        assert (tmp_path / "link.html").is_symlink()
        assert (tmp_path / "report.html").read_bytes().startswith(b"<!doctype html>")


def test_a_damaged_and_an_empty_run_have_a_report(tmp_path: Path) -> None:
    run = busy_run(tmp_path / "run", layers=1, versions=8, width=16)
    (run.folder / version_key(3)).write_bytes(b"{}")
    assert answer("report", "--bucket", run.folder, "--to", tmp_path / "report.html")["errors"] == 2
    empty_run(tmp_path / "empty")
    done = answer("report", "--bucket", tmp_path / "empty", "--to", tmp_path / "report.html")
    assert (done["first"], done["last"], done["errors"]) == (None, None, 0)


# The dashboard, in a process of its own


class Dashboard:
    """``delta-sync dashboard`` at a free port."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "vllm_delta_sync.cli", "dashboard", "--port", "0", "--json"]
        self.process = subprocess.Popen([*command, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = str(json.loads(self.process.stdout.readline())["data"]["url"])
        where = urlsplit(self.url)
        self.host, self.port = where.hostname or "", where.port or 0

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = HTTPConnection(self.host, self.port, timeout=SECONDS)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
            reply = connection.getresponse()
            return reply.status, {name.lower(): text for name, text in reply.getheaders()}, reply.read()
        finally:
            connection.close()

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(SECONDS) == 0

    def overview(self) -> Any:
        """The document, once the run is read."""
        while True:
            status, _, body = self.get("/overview")
            assert status == 200
            document = json.loads(body)
            if not document["run_pending"]:
                return document


@pytest.fixture(scope="module")
def dashboard(busy: PageRun) -> Iterator[Dashboard]:
    with answering() as live:
        body = json.dumps(busy.status(39, "rollout-4")).encode()
        live.reply = lambda asked: Answer(200, body, {"Content-Type": "application/json"})
        opened = Dashboard("--bucket", busy.folder, "--server", live.url)
        yield opened
        opened.end()


def test_dashboard_serves_the_page_and_its_document(dashboard: Dashboard, busy: PageRun) -> None:
    status, headers, body = dashboard.get("/")
    assert (status, body) == (200, page.live_page())
    assert headers["content-security-policy"] == page.policy()
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    found = dashboard.overview()
    assert (found["source"], found["run"]["head"]["version"]) == ("dashboard", 40)
    assert found["run"]["url"].endswith(str(busy.folder))
    assert found["servers"][0]["served"]["version"] == 39
    assert found["run"]["heat"]["versions"][0] == 40


def test_dashboard_answers_nothing_else(dashboard: Dashboard) -> None:
    for path in ("/x", "/overview/", "/../etc/passwd", "/delta_sync/status"):
        assert dashboard.get(path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert dashboard.get("/overview", method)[0] == 501


def test_dashboard_is_not_read_by_pages_of_other_sites(dashboard: Dashboard) -> None:
    for name in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "[::1", "192.0.2.1", ""):
        assert dashboard.get("/overview", Host=name)[0] == 403
    for name in (f"localhost:{dashboard.port}", "127.0.0.1", "[::1]:80"):
        assert dashboard.get("/overview", Host=name)[0] == 200
    assert dashboard.get("/overview", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors")[0] == 403
    assert dashboard.get("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200
    assert dashboard.get("/overview", Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="cors")[0] == 200


def test_dashboard_ends_at_once_if_it_cannot_begin(busy: PageRun, tmp_path: Path) -> None:
    assert kind(2, "dashboard", "--bucket", busy.folder, "--host", "192.0.2.1") == "usage"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = delta_sync("dashboard", "--bucket", busy.folder, "--port", taken.getsockname()[1])
        assert done.code == 2
        assert "--port" in done.err
    signed = KeyedRun(tmp_path, first="stranger")
    trusted = {environment_name("trusted_keys"): signed.pub("root")}
    assert kind(1, "dashboard", "--bucket", signed.url, **trusted) == "signature"


@pytest.mark.parametrize("make", [DashboardServer, PeerServer])
def test_a_dns_server_that_does_not_answer_delays_no_start(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    error = AssertionError("a name is looked up, which takes 10 s where DNS does not answer")
    monkeypatch.setattr(socket, "getfqdn", mock.Mock(side_effect=error))
    make("0.0.0.0", 0, dict).server_close()


@pytest.mark.parametrize("make", [DashboardServer, PeerServer])
def test_connections_are_bounded_and_slow_ones_are_cut(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.3)
    server = make("127.0.0.1", 0, dict)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    with ExitStack() as stack:
        stack.callback(server.server_close)
        stack.callback(serving.join)
        stack.callback(server.shutdown)
        slow = [stack.enter_context(socket.create_connection(server.server_address, 30)) for _ in range(3)]
        for each in slow[:2]:
            each.sendall(b"GET / HTTP/1.1\r\n")
        assert [each.recv(1) for each in slow] == [b""] * 3
        while server.deadlines:  # room for others
            time.sleep(0.01)
