"""The HTTP routes on a real application and a real receiver service that patches a plain module."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.web import BEARER, CHANGING, ELSEWHERE, Site
from vllm_delta_sync.engine import http, http_guard
from vllm_delta_sync.errors import StoreError


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.end()


def test_notice_wakes_a_follower_that_polls_rarely(site: Site) -> None:
    site.service.start()
    client = site.client()
    assert client.get("/delta_sync/wait", params={"version": 0, "timeout": 120}).status_code == 200
    site.publish(1)
    response = client.get("/delta_sync/wait", params={"version": 1, "timeout": 120})
    assert response.status_code == 200
    status = response.json()
    assert status["served"]["version"] == 1
    assert status["lag"] == 0
    assert status["state"] == "idle"
    assert status["timings_ms"].keys() >= {"fetch", "decode", "route", "pause", "commit", "resume"}


def test_header_names_the_version_at_admission(site: Site) -> None:
    client = site.client()
    assert "x-delta-sync-version" not in client.get("/v1/completions").headers
    site.service.start()
    client.get("/delta_sync/wait", params={"version": 0, "timeout": 120})
    assert client.get("/v1/completions").headers["x-delta-sync-version"] == "0"


def test_who_may_change_state(site: Site) -> None:
    path = "/delta_sync/verify"
    site.serve()
    assert site.client().post(path).status_code == 200
    for address in ("::1", "127.9.9.9", "::ffff:127.0.0.1"):
        assert site.client((address, 1)).post(path, headers={"Host": "[::1]:8000"}).status_code == 200
    refused = site.client(ELSEWHERE).post(path)
    assert refused.status_code == 403
    assert refused.json()["error"]["kind"] == "forbidden"
    site.set_token()
    refused = site.client().post(path)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    # With a token neither the address, nor the name, nor a proxy on the way matters.
    headers = {**BEARER, "Host": "fleet.example", "X-Forwarded-For": "203.0.113.9"}
    assert site.client(ELSEWHERE).post(path, headers=headers).status_code == 200
    assert site.client(ELSEWHERE).get("/delta_sync/status").status_code == 200


def test_every_route_that_is_not_read_only_is_guarded(site: Site) -> None:
    document = site.app.openapi()
    ours = {path: set(methods) for path, methods in document["paths"].items() if path.startswith("/delta_sync")}
    changing = {path for path, methods in ours.items() if methods != {"get"}}
    assert changing == {f"/delta_sync/{name}" for name in CHANGING}
    assert all(isinstance(route, http_guard.GuardedRoute) for route in http.router.routes)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("sync", {"version": -1}),
        ("sync", {"version": "one"}),
        ("sync", {"version": 10**30}),
        ("sync", {"wersion": 1}),
        ("sync", [1]),
        ("rollback", {}),
        ("rollback", {"version": None}),
    ],
)
def test_body_that_makes_no_sense(site: Site, path: str, body: Any) -> None:
    answer = site.client().post(f"/delta_sync/{path}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["kind"] == "usage"
    assert not site.was_changed()


def test_every_answer_is_json_and_kept_by_nobody(site: Site) -> None:
    site.serve()
    client = site.client()
    answers = [
        client.get("/delta_sync/status"),
        client.get("/delta_sync/wait", params={"version": 0}),
        client.get("/delta_sync/wait", params={"version": 9, "timeout": 0}),
        client.get("/delta_sync/wait", params={"version": "x"}),
        client.post("/delta_sync/hold"),
        client.post("/delta_sync/sync", json={"version": 7}),
        client.post("/delta_sync/sync", content=b"{", headers={"Content-Type": "application/json"}),
        client.post("/delta_sync/sync", content=b"{", headers={"Content-Type": "text/plain"}),
        site.client(ELSEWHERE).post("/delta_sync/hold"),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 408, 400, 200, 404, 400, 415, 403]
    assert answers[2].json()["served"]["version"] == 0
    assert answers[5].json()["error"]["kind"] == "not_found"
    for answer in answers:
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert isinstance(json.loads(answer.content), dict)


def test_bug_is_answered_without_credentials(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[str, Any]:
        raise ValueError("cannot read https://key:hidden@store.example/a?X-Amz-Signature=hidden")

    monkeypatch.setattr(site.service.receiver, "status", broken)
    answer = site.client().get("/delta_sync/status")
    assert answer.status_code == 500
    assert answer.json()["error"]["kind"] == "engine"
    assert "https://store.example/a" in answer.text
    assert "hidden" not in answer.text


def test_status_shows_no_credentials(site: Site) -> None:
    board = site.service.receiver.board
    board.show_error(StoreError("cannot read s3://key:hidden@bucket/run?sig=hidden#hidden: 403"))
    text = site.client().get("/delta_sync/status").text
    assert "s3://bucket/run" in text
    assert "hidden" not in text
