"""The HTTP routes and admission by version on a real application, before a receiver that patches a plain module."""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import pytest
import torch
from fastapi import FastAPI
from starlette.requests import Request

from tests.support.held_calls import HeldCalls
from tests.support.services import wait_until
from tests.support.web import BEARER, CHANGING, ELSEWHERE, Site, listening
from vllm_delta_sync.engine.api import access, routes
from vllm_delta_sync.engine.api.api_servers import ApiServerGroup, FollowerClient, LeaderServer
from vllm_delta_sync.engine.observe import metrics
from vllm_delta_sync.engine.observe.states import readiness
from vllm_delta_sync.errors import StoreError
from vllm_delta_sync.format.limits import MAX_VERSION


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.end()


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
    assert all(isinstance(route, access.GuardedRoute) for route in routes.router.routes)


def test_body_that_makes_no_sense(site: Site) -> None:
    requests: dict[str, list[Any]] = {
        "sync": [{"version": -1}, {"version": "one"}, {"version": 10**30}, {"wersion": 1}, [1]],
        "rollback": [{}, {"version": None}],
    }
    for path, bodies in requests.items():
        for body in bodies:
            answer = site.client().post(f"/delta_sync/{path}", json=body)
            assert (answer.status_code, answer.json()["error"]["kind"]) == (400, "usage"), body
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


def test_answers_show_no_credentials(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    board = site.service.receiver.board
    board.report_error(StoreError("cannot read s3://key:hidden@bucket/run?sig=hidden#hidden: 403"))
    text = site.client().get("/delta_sync/status").text
    assert "s3://bucket/run" in text
    assert "hidden" not in text
    error = ValueError("cannot read https://key:hidden@store.example/a?X-Amz-Signature=hidden")
    monkeypatch.setattr(site.service.receiver, "status", mock.Mock(side_effect=error))
    answer = site.client().get("/delta_sync/status")
    assert answer.status_code == 500
    assert answer.json()["error"]["kind"] == "engine"
    assert "https://store.example/a" in answer.text
    assert "hidden" not in answer.text


# Admission by version, readiness and waiting, on a real socket


PATH = "/v1/chat/completions"


@dataclass
class Served:
    """A site on a socket, whose completions answer with the body they got."""

    site: Site
    port: int
    outcomes: list[str]
    reached: list[bytes]

    def ask(self, version: object, body: bytes = b"{}", timeout: float = 120) -> httpx.Response:
        wanted = {b"X-Delta-Sync-Min-Version": str(version).encode()}
        return httpx.post(f"http://127.0.0.1:{self.port}{PATH}", content=body, headers=wanted, timeout=timeout)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}/delta_sync/{path}", timeout=120)

    def is_not_ready(self, reason: str) -> None:
        answer = self.get("ready")
        assert (answer.status_code, answer.json()["reasons"]) == (503, [reason])

    def tell(self, path: str, body: Any = None) -> None:
        answer = httpx.post(f"http://127.0.0.1:{self.port}/delta_sync/{path}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text

    def wait_for_waiters(self, count: int) -> None:
        wait_until(lambda: len(self.site.app.state.delta_sync_waiters._waiting) == count)


@pytest.fixture
def served(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    site = Site(tmp_path, state_dir=tmp_path / "state", **getattr(request, "param", {}))
    reached: list[bytes] = []
    outcomes: list[str] = []

    @site.app.post(PATH)
    async def chat(request: Request) -> dict[str, Any]:
        reached.append(await request.body())
        return {"bytes": len(reached[-1])}

    def note(outcome: str, seconds: float) -> None:
        assert seconds >= 0
        outcomes.append(outcome)

    monkeypatch.setattr(metrics, "observe_admission", note)
    if site.settings.policy == "manual":
        site.service.request("sync")
    site.serve()
    with listening(site.app) as port:
        yield Served(site, port, outcomes, reached)
    site.end()


def later(call: Any, *arguments: Any) -> "Future[Any]":
    """In a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call, *arguments)
    pool.shutdown(wait=False)
    return future


@pytest.mark.parametrize("size", [2, 10**6])
def test_waits_for_its_version_and_keeps_its_body(served: Served, size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    waiting = later(served.ask, 1, body)
    served.wait_for_waiters(1)
    assert served.reached == []
    served.site.publish(1)
    answer = waiting.result(120)
    assert (answer.status_code, answer.headers["x-delta-sync-version"]) == (200, "1")
    assert served.reached == [body]
    assert served.ask(0).headers["x-delta-sync-version"] == "1"
    assert served.outcomes == ["served", "served"]


def test_late_is_503_with_what_is_served(served: Served) -> None:
    served.site.app.state.delta_sync_min_version_seconds = 0.05
    answer = served.ask(3)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["x-delta-sync-version"] == "0"
    error = answer.json()["error"]
    assert error["kind"] == "late"
    assert "version 3 is wanted, and 0 is served" in error["message"]
    assert (served.reached, served.outcomes) == ([], ["late"])


def test_malformed_is_400(served: Served) -> None:
    values = ("", "x", "-1", "1,2", "¹", str(MAX_VERSION + 1), "9" * 5000)
    for value in values:
        answer = served.ask(value)
        assert (answer.status_code, answer.json()["error"]["kind"]) == (400, "usage"), value
        assert "X-Delta-Sync-Min-Version" in answer.json()["error"]["message"]
    twice = [("X-Delta-Sync-Min-Version", "0"), ("x-delta-sync-min-version", "1")]
    assert httpx.post(f"http://127.0.0.1:{served.port}{PATH}", headers=twice, timeout=120).status_code == 400
    assert (served.reached, served.outcomes) == ([], ["malformed"] * (len(values) + 1))


def test_held_below_is_409_also_while_it_waits(served: Served) -> None:
    waiting = later(served.ask, 1)
    served.wait_for_waiters(1)
    served.tell("hold")
    for answer in (waiting.result(120), served.ask(1)):
        assert answer.status_code == 409
        assert answer.json()["error"]["kind"] == "unreachable"
        assert "version 1 is wanted, 0 is served, the head is 0, and this server is held" in answer.text
    assert served.ask(0).status_code == 200
    assert served.get("wait?version=0").status_code == 200
    began = time.monotonic()
    wait = served.get("wait?version=1&timeout=3600")
    assert (wait.status_code, wait.json()["error"]["kind"]) == (409, "unreachable")
    assert time.monotonic() - began < 1800
    assert served.outcomes == ["unreachable", "unreachable", "served"]


@pytest.mark.parametrize(
    ("served", "code"),
    [({"poll_seconds": 0.1}, 200), ({"policy": "manual"}, 409)],
    indirect=["served"],
    ids=["follow", "manual"],
)
def test_weights_that_are_being_rebuilt_are_waited_for(served: Served, code: int) -> None:
    """They were changed from outside, and the bucket cannot be read. With policy manual a request must come first."""
    rank: Any = served.site.port.ranks[0]
    rank.model.norm.data.view(torch.int16)[3] ^= 1
    run = Path(served.site.settings.bucket)
    away = run.rename(run.with_name("away"))
    served.site.service.request("verify").result(120)
    assert served.get("status").json()["state"] == "refused"
    waiting = later(served.ask, 0)
    if code == 200:
        served.wait_for_waiters(1)
        away.rename(run)
    answer = waiting.result(120)
    assert answer.status_code == code, answer.text
    if code == 409:
        assert "the setting policy is manual; POST /delta_sync/sync first" in answer.text


def test_waiting_ends_with_the_server(served: Served) -> None:
    """vLLM exits only once it has answered all requests, and no version comes any more."""
    waiting = [later(served.ask, 1), later(served.get, "wait?version=1&timeout=3600")]
    served.wait_for_waiters(2)
    served.site.app.state.delta_sync_has_ended = lambda: True
    for answer in (*(each.result(60) for each in waiting), served.ask(1)):
        assert (answer.status_code, answer.json()["error"]["kind"]) == (409, "unreachable")
        assert "version 1 is wanted, and this server is ending" in answer.text
    assert served.ask(0).status_code == 200


@pytest.mark.parametrize(
    ("served", "words"),
    [({"target": "0"}, "and the target is 0;"), ({"policy": "manual"}, "POST /delta_sync/sync")],
    indirect=["served"],
    ids=["fixed target", "manual"],
)
def test_version_that_does_not_come_by_itself_is_409(served: Served, words: str) -> None:
    served.site.publish(1)
    answer = served.ask(1)
    assert answer.status_code == 409
    assert words in answer.json()["error"]["message"]
    assert served.get("wait?version=1&timeout=3600").status_code == 409
    assert served.get("ready").status_code == 200
    if served.site.settings.policy == "manual":
        served.tell("sync", {})
        assert served.ask(1).status_code == 200
        assert served.get("ready").json() == {"ready": True, "reasons": [], "served": 1, "head": 1, "lag": 0}


@pytest.mark.parametrize(
    "served", [{"policy": "manual"}, {"target": "0"}], indirect=True, ids=["manual", "fixed target"]
)
def test_version_that_was_requested_is_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the bucket has been read, nothing else tells that a request is under way."""
    receiver = served.site.service.receiver
    served.site.publish(1)
    reads = HeldCalls(monkeypatch, receiver.history, "poll")
    requests = [later(served.tell, "sync", {"version": 1})]
    wait_until(lambda: receiver.board.requests)  # with a fixed target the bucket is read without a request too
    assert reads.reached.wait(120)
    if served.site.settings.policy == "manual":
        requests.append(later(served.tell, "sync"))  # waits for the one before
    waiting = [later(served.ask, 1), later(served.get, "wait?version=1&timeout=120")]
    served.wait_for_waiters(2)
    reads.open.set()
    assert [one.result(120).status_code for one in waiting] == [200, 200]
    for request in requests:
        request.result(120)
    assert served.ask(2).status_code == 409


def test_waiters_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.site.app.state.delta_sync_waiters, "slots", asyncio.Semaphore(3))
    waiting = [later(served.ask, 1) for _ in range(3)]
    served.wait_for_waiters(3)
    crowded = served.ask(1)
    assert (crowded.status_code, crowded.json()["error"]["kind"]) == (503, "busy")
    assert crowded.headers["retry-after"] == "1"
    assert served.ask(0).status_code == 200
    served.site.publish(1)
    assert [one.result(120).status_code for one in waiting] == [200, 200, 200]
    assert served.ask(1).status_code == 200


def test_clients_that_have_gone_wait_no_longer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave their places to others, and nothing of theirs reaches vLLM."""
    monkeypatch.setattr(served.site.app.state.delta_sync_waiters, "slots", asyncio.Semaphore(3))
    for body in (b"{}", b"", bytes(500_000)):
        with pytest.raises(httpx.ReadTimeout):
            served.ask(1, body, timeout=0.3)
    wait_until(lambda: served.outcomes == ["gone"] * 3)
    waiting = [later(served.ask, 1) for _ in range(3)]
    served.wait_for_waiters(3)
    served.site.publish(1)
    assert [one.result(120).status_code for one in waiting] == [200, 200, 200]
    assert served.reached == [b"{}"] * 3


def test_ready_follows_hold_loss_and_end(served: Served) -> None:
    assert served.get("ready").json() == {"ready": True, "reasons": [], "served": 0, "head": 0, "lag": 0}
    served.tell("hold")
    served.is_not_ready("held at version 0; POST /delta_sync/release to follow again")
    served.tell("release")
    assert served.get("ready").status_code == 200
    board = served.site.service.receiver.board
    board.has_ended = lambda: True
    served.is_not_ready("this server is ending; ask another server")
    board.has_ended = lambda: False
    board.enter("lost", error={"kind": "weights_lost", "message": "gone"})
    served.is_not_ready("the state is lost (gone); restart the server")
    assert served.ask(1).status_code == 409


def test_ready_while_a_version_is_taken(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = HeldCalls(monkeypatch, served.site.port, "pause")
    publishing = later(served.site.publish, 1)
    assert pauses.reached.wait(120)
    answer = served.get("ready")
    status = served.get("status").json()
    pauses.open.set()
    publishing.result(120)
    assert (answer.status_code, answer.json()["lag"]) == (200, 1)
    assert status["state"] == "committing"
    assert status["ready"] == {"ready": True, "reasons": []}
    assert served.get("wait?version=1&timeout=120").status_code == 200


@pytest.mark.parametrize(("policy", "remedy"), [("follow", "wait"), ("manual", "POST /delta_sync/sync")])
def test_not_ready_before_anything_is_proven(tmp_path: Path, policy: str, remedy: str) -> None:
    site = Site(tmp_path, state_dir=tmp_path / "state", policy=policy)
    answer = site.client().get("/delta_sync/ready")
    assert answer.status_code == 503
    assert answer.json()["reasons"] == [f"no version is served yet, the state is waiting_for_run; {remedy}"]
    assert "x-delta-sync-version" not in site.client().get("/v1/completions").headers
    site.end()


@pytest.mark.parametrize("served", [{"poll_seconds": 0.05}], indirect=True, ids=["polling"])
def test_not_ready_while_asleep(served: Served) -> None:
    port: Any = served.site.port
    for asleep, code in ((True, 503), (False, 200)):
        port.ranks[0].memory.asleep = asleep
        wait_until(lambda code=code: served.get("ready").status_code == code)  # type: ignore[misc]
        reasons = served.get("ready").json()["reasons"]
        assert reasons == ["the engine is asleep; wake it up (POST /wake_up)"] * asleep


def test_lag_counts_beyond_max_lag_alone() -> None:
    status = {"served": {"version": 3}, "head": {"version": 9}, "lag": 6, "state": "staging", "last_error": None}
    follows = {**status, "policy": "follow", "target": "head", "holding": False}
    assert readiness(follows, None, False)["ready"]
    assert readiness(follows, 6, False)["ready"]
    behind = "6 versions behind, max_lag is 5; it catches up by itself"
    assert readiness(follows, 5, False)["reasons"] == [behind]
    for target, ready in (("3", True), ("4", True), ("9", False), ("tag:gold", True)):
        assert readiness({**follows, "target": target}, 5, False)["ready"] == ready
    assert readiness({**follows, "target": "2", "state": "held"}, 5, False)["reasons"] == [
        "version 3 is newer than the target 2; use rollback"
    ]


def test_follower_admits_by_what_the_leader_serves(site: Site) -> None:
    """Of several API servers, one that does not lead; and while nobody does."""

    async def exchange() -> None:
        leads, follows = (ApiServerGroup(Path(folder), index, 2) for index in range(2))
        follower = FollowerClient(follows)
        app = FastAPI()
        routes.attach(app)
        app.add_api_route(PATH, answer, methods=["POST"])
        app.state.delta_sync = SimpleNamespace(receiver=follower)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
        nobody = await client.get("/delta_sync/ready")
        assert (nobody.status_code, nobody.json()["ready"], nobody.json()["served"]) == (503, False, None)
        waiting = asyncio.ensure_future(client.post(PATH, headers={"X-Delta-Sync-Min-Version": "1"}))
        desk = LeaderServer(leads, site.service)
        await desk.open()
        site.service.start()
        following = asyncio.ensure_future(follower.follow())
        while follower.served_version is None:
            await asyncio.sleep(0.01)
        assert (await client.get("/delta_sync/ready")).status_code == 200
        assert not waiting.done()
        await asyncio.to_thread(site.publish, 1)
        assert (await waiting).headers["x-delta-sync-version"] == "1"
        await asyncio.wrap_future(follower.request("hold", None))
        held = await client.post(PATH, headers={"X-Delta-Sync-Min-Version": "2"})
        assert (held.status_code, held.json()["error"]["kind"]) == (409, "unreachable")
        assert (await client.get("/delta_sync/ready")).status_code == 503
        following.cancel()

    async def answer() -> dict[str, str]:
        return {}

    # A short path: that of a socket.
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(asyncio.wait_for(exchange(), 120))
