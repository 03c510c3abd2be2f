"""Admission by version, readiness and waiting, on a real socket in front of a receiver that patches a plain module."""

import asyncio
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request

from tests.support.web import Site, listening
from vllm_delta_sync.engine import admission, http, metrics
from vllm_delta_sync.engine.leading import Desk, Follower
from vllm_delta_sync.engine.readiness import readiness
from vllm_delta_sync.engine.siblings import Siblings
from vllm_delta_sync.wire.limits import MAX_VERSION

PATH = "/v1/chat/completions"


@dataclass
class Served:
    """A site on a socket, whose completions answer with the body they got."""

    site: Site
    port: int
    outcomes: list[str]
    reached: list[bytes]

    def ask(self, version: object, body: bytes = b"{}") -> httpx.Response:
        wanted = {b"X-Delta-Sync-Min-Version": str(version).encode()}
        return httpx.post(f"http://127.0.0.1:{self.port}{PATH}", content=body, headers=wanted, timeout=120)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}/delta_sync/{path}", timeout=120)

    def tell(self, path: str, body: Any = None) -> None:
        answer = httpx.post(f"http://127.0.0.1:{self.port}/delta_sync/{path}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text

    def wait_for_waiters(self, count: int) -> None:
        deadline = time.monotonic() + 120
        while len(self.site.app.state.delta_sync_arrivals._waiting) != count:
            assert time.monotonic() < deadline, "they do not wait, or do not give up"
            time.sleep(0.01)


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


@pytest.mark.parametrize("value", ["", "x", "-1", "1,2", "¹", str(MAX_VERSION + 1), "9" * 5000])
def test_malformed_is_400(served: Served, value: str) -> None:
    answer = served.ask(value)
    assert answer.status_code == 400
    assert answer.json()["error"]["kind"] == "usage"
    assert "X-Delta-Sync-Min-Version" in answer.json()["error"]["message"]
    twice = [("X-Delta-Sync-Min-Version", "0"), ("x-delta-sync-min-version", "1")]
    assert httpx.post(f"http://127.0.0.1:{served.port}{PATH}", headers=twice, timeout=120).status_code == 400
    assert (served.reached, served.outcomes) == ([], ["malformed", "malformed"])


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


def test_client_that_goes_away_frees_its_place(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), 120) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nX-Delta-Sync-Min-Version: 9\r\n\r\n"
        connection.sendall(head.encode() + b"{}")
        served.wait_for_waiters(1)
    served.wait_for_waiters(0)
    assert served.reached == []


def test_waiters_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_WAITING", 3)
    waiting = [later(served.ask, 1) for _ in range(3)]
    served.wait_for_waiters(3)
    crowded = served.ask(1)
    assert (crowded.status_code, crowded.json()["error"]["kind"]) == (503, "busy")
    assert crowded.headers["retry-after"] == "1"
    assert served.ask(0).status_code == 200
    served.site.publish(1)
    assert [one.result(120).status_code for one in waiting] == [200, 200, 200]
    assert served.ask(1).status_code == 200


def test_ready_follows_hold_and_loss(served: Served) -> None:
    assert served.get("ready").json() == {"ready": True, "reasons": [], "served": 0, "head": 0, "lag": 0}
    served.tell("hold")
    held = served.get("ready")
    assert held.status_code == 503
    assert held.json()["reasons"] == ["held at version 0; POST /delta_sync/release to follow again"]
    served.tell("release")
    assert served.get("ready").status_code == 200
    board = served.site.service.receiver.board
    board.set(state="lost", error={"kind": "weights_lost", "message": "gone"})
    lost = served.get("ready")
    assert lost.status_code == 503
    assert lost.json()["reasons"] == ["the state is lost (gone); start the server again"]
    assert served.ask(1).status_code == 409


def test_ready_while_a_version_is_taken(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    port: Any = served.site.port
    inside, leave = threading.Event(), threading.Event()
    pause = port.pause

    def stopped(*arguments: Any, **named: Any) -> Any:
        inside.set()
        assert leave.wait(120)
        return pause(*arguments, **named)

    monkeypatch.setattr(port, "pause", stopped)
    publishing = later(served.site.publish, 1)
    assert inside.wait(120)
    answer = served.get("ready")
    status = served.get("status").json()
    leave.set()
    publishing.result(120)
    assert (answer.status_code, answer.json()["lag"]) == (200, 1)
    assert status["state"] == "committing"
    assert status["ready"] == {"ready": True, "reasons": []}
    assert served.get("wait?version=1&timeout=120").status_code == 200


@pytest.mark.parametrize(("policy", "mend"), [("follow", "wait"), ("manual", "POST /delta_sync/sync")])
def test_not_ready_before_anything_is_proven(tmp_path: Path, policy: str, mend: str) -> None:
    site = Site(tmp_path, state_dir=tmp_path / "state", policy=policy)
    answer = site.client().get("/delta_sync/ready")
    assert answer.status_code == 503
    assert answer.json()["reasons"] == [f"no version is proven yet, the state is waiting_for_run; {mend}"]
    site.end()


@pytest.mark.parametrize("served", [{"poll_seconds": 0.05}], indirect=True, ids=["polling"])
def test_not_ready_while_asleep(served: Served) -> None:
    port: Any = served.site.port
    for asleep, code in ((True, 503), (False, 200)):
        port.ranks[0].memory.asleep = asleep
        deadline = time.monotonic() + 120
        while (answer := served.get("ready")).status_code != code:
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.01)
        assert answer.json()["reasons"] == ["the engine is asleep; wake it up (POST /wake_up)"] * asleep


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
        "version 3 is newer than the target 2; go back with rollback"
    ]


def test_follower_admits_by_what_the_leader_serves(tmp_path: Path) -> None:
    """Of several API servers, one that does not lead; and while nobody does."""

    async def exchange() -> None:
        leads, follows = (Siblings(Path(folder), "launch", index, 2) for index in range(2))
        follower = Follower(follows)
        app = FastAPI()
        http.attach(app)
        app.add_api_route(PATH, answer, methods=["POST"])
        app.state.delta_sync = SimpleNamespace(receiver=follower)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
        nobody = await client.get("/delta_sync/ready")
        assert (nobody.status_code, nobody.json()["ready"], nobody.json()["served"]) == (503, False, None)
        waiting = asyncio.ensure_future(client.post(PATH, headers={"X-Delta-Sync-Min-Version": "1"}))
        desk = Desk(leads, site.service)
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

    site = Site(tmp_path, state_dir=tmp_path / "state")
    # A short path: that of a socket.
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(asyncio.wait_for(exchange(), 120))
    site.end()
