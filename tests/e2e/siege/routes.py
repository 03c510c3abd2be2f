"""Somebody who reaches the server's HTTP port."""

import json
import threading
from typing import Any

import httpx

from tests.e2e.servers import PLAIN, beside
from tests.e2e.siege.world import Siege, attack

NETWORK = "HTTP port"
BROWSER = "a web page in an operator's browser"
CHANGING = ("sync", "rollback", "target", "hold", "release", "verify")


def _refused(siege: Siege, body: Any, **headers: str) -> None:
    with siege.untouched():
        for route in CHANGING:
            sent = body if route != "rollback" else {"version": 0}
            answer = siege.server.post(f"/delta_sync/{route}", sent, headers=headers)
            siege.seen.answers.append(answer.status_code)
            assert 400 <= answer.status_code < 500, (route, answer.status_code, answer.text)
            assert siege.canaries.in_text(answer.text) == []
        assert siege.server.status()["state"] != "held"


@attack("no token", NETWORK, "refused", quick=True)
def no_token(siege: Siege) -> None:
    """Every route that changes state."""
    _refused(siege, None)


@attack("wrong token", NETWORK, "refused")
def wrong_token(siege: Siege) -> None:
    """The same, with a guess."""
    _refused(siege, None, Authorization="Bearer " + "x" * len(siege.canaries.token))


@attack("cross-site request", BROWSER, "refused")
def cross_site(siege: Siege) -> None:
    """A form or fetch with Origin, token and all."""
    _refused(siege, None, Origin="https://evil.example", **siege.admin)


@attack("cross-site fetch", BROWSER, "refused")
def cross_site_fetch(siege: Siege) -> None:
    """Sec-Fetch-Site: cross-site."""
    _refused(siege, None, **siege.admin, **{"Sec-Fetch-Site": "cross-site"})


@attack("URL in a request", NETWORK, "refused, nothing fetched")
def url_in_a_request(siege: Siege) -> None:
    """A bucket of the attacker's choice."""
    body = {"version": None, "bucket": "file:///etc", "url": "http://169.254.169.254/latest"}
    with siege.untouched():
        answer = siege.server.post("/delta_sync/sync", body, headers=siege.admin)
        siege.seen.answers.append(answer.status_code)
        assert answer.status_code in (400, 422)


@attack("giant body", NETWORK, "refused, answered in a line", quick=True)
def giant_body(siege: Siege) -> None:
    """32 MB, and 100,000 levels."""
    headers = {**siege.admin, "Content-Type": "application/json"}
    with siege.untouched():
        for content in (b'{"version":"' + b"9" * 32_000_000 + b'"}', b"[" * 100_000):
            answer = httpx.post(
                siege.server.url + "/delta_sync/sync", content=content, headers=headers, timeout=600, verify=PLAIN
            )
            siege.seen.answers.append(answer.status_code)
            assert 400 <= answer.status_code < 500
            assert len(answer.content) < 10_000


@attack("flood of waiters", NETWORK, "bounded, versions continue")
def waiters(siege: Siege) -> None:
    """200 clients hold /delta_sync/wait."""

    def wait(ended: threading.Event) -> None:
        while not ended.is_set():
            try:
                path = "/delta_sync/wait?version=99999999&timeout=5"
                siege.seen.answers.append(httpx.get(siege.server.url + path, timeout=600, verify=PLAIN).status_code)
            except httpx.TransportError:
                pass
            ended.wait(0.5)

    with beside(*[wait] * 200):
        # /wait is taken, so look at the status.
        version = siege.publish()["version"]
        siege.server.wait_status(lambda status: (status["served"] or {}).get("version") == version, 60)
    siege.seen.answers = sorted(set(siege.seen.answers))


@attack("reading for secrets", NETWORK, "none")
def reads(siege: Siege) -> None:
    """Status, metrics, schema."""
    pages = [siege.server.get(path).text for path in ("/delta_sync/status", "/openapi.json", "/metrics", "/version")]
    assert [siege.canaries.in_text(page) for page in pages] == [[]] * len(pages)
    assert json.loads(pages[0])["served"] is not None
