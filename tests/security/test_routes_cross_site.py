"""A page of another site, open in a browser of this machine or of somebody who has the token, sends requests."""

from pathlib import Path

import pytest
from starlette.middleware.cors import CORSMiddleware

from tests.support.web import BEARER, CHANGING, Site

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
@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN)
def test_page_may_not_change_state(tmp_path: Path, headers: dict[str, str], with_token: bool) -> None:
    site = Site(tmp_path)
    if with_token:
        site.set_token()
        headers = {**headers, **BEARER}
    for name in CHANGING:
        answer = site.client().post(f"/delta_sync/{name}", headers=headers)
        assert answer.status_code == 403
        assert answer.json()["error"]["kind"] == "forbidden"
    assert not site.was_changed()
    site.end()


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "text/json"]
)
@pytest.mark.parametrize("body", [b"", b'{"version": 0}'], ids=["without body", "with body"])
def test_request_that_a_form_could_send(tmp_path: Path, kind: str, body: bytes) -> None:
    """Those that browsers send to other sites without asking; an old one sends no Origin with some of them."""
    site = Site(tmp_path)
    for name in CHANGING:
        answer = site.client().post(f"/delta_sync/{name}", content=body, headers={"Content-Type": kind})
        assert answer.status_code == 415
    assert not site.was_changed()
    site.end()


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


def test_page_may_not_read_either(tmp_path: Path) -> None:
    site = Site(tmp_path)
    client = site.client()
    for path in ("/delta_sync/status", "/delta_sync/wait?version=0&timeout=0"):
        for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
            assert client.get(path, headers=headers).status_code == 403
    for headers in (
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://127.0.0.1:8000"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    ):
        assert client.get("/delta_sync/status", headers=headers).status_code == 200
    site.end()
