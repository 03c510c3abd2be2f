"""Which routes take a version, on the application that vLLM builds for each kind of model, and how they refuse one."""

import json
import logging
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY
from starlette.routing import Mount, WebSocketRoute
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.receiver.test_http import later
from tests.support.tiny import make_model, save_checkpoint
from tests.support.web import Site, listening
from vllm_delta_sync.engine.api import routes
from vllm_delta_sync.engine.api.admission import OWN_PREFIX, SESSION_PATHS, VERSIONED_PATHS
from vllm_delta_sync.engine.api.exact_requests import MIN_VERSION_HEADER, VERSION_HEADER, ExactRequest
from vllm_delta_sync.engine.entrypoints.endpoint import EndpointPlugin

MINIMUM, EXACT = MIN_VERSION_HEADER, VERSION_HEADER
OURS = "data: {…}"
KINDS: dict[str, tuple[tuple[str, ...], list[str], dict[str, str]]] = {
    "generate": (("generate",), ["--enable-scale-out", "--enable-fault-tolerance"], {}),
    "generate without scale-out": (("generate",), [], {}),
    "tokens only": (("generate",), ["--tokens-only"], {}),
    "speech": (("generate", "transcription", "realtime"), [], {}),
    "transcription": (("transcription",), [], {}),
    "embed": (("embed", "token_embed"), [], {"runner": "pooling"}),
    "classify": (("classify", "token_classify"), [], {"runner": "pooling", "convert": "classify"}),
}
"""By kind of model: its tasks, flags, and fields of vLLM's configuration."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model("qwen3"), tmp_path_factory.mktemp("model"))


def built(kind: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """vLLM's own application with all routes that it may have, ours among them."""
    # A package that this imports sets the level of the root logger and of its handlers to ERROR.
    levels: list[tuple[Any, int]] = [(logging.root, logging.root.level)]
    levels += [(handler, handler.level) for handler in logging.root.handlers]
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ENABLE_COHERE_API"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_PLUGINS", "delta_sync")
    # Our endpoint plugin is wanted; the general one would patch vLLM for all tests of this process.
    monkeypatch.setattr("vllm.plugins.plugins_loaded", True)
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(checkpoint))
    tasks, flags, fields = KINDS[kind]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", str(checkpoint), *flags])
    model_config = EngineArgs(model=str(checkpoint), **fields).create_model_config()  # type: ignore[arg-type]
    app: FastAPI = build_app(arguments, tasks, model_config)  # type: ignore[arg-type]
    for each, level in levels:
        each.setLevel(level)
    return app


def computing(app: FastAPI) -> set[str]:
    """Paths of its routes that may compute something, ours left out."""
    paths = {
        route.path  # type: ignore[attr-defined]
        for route in app.routes
        if isinstance(route, WebSocketRoute) or "POST" in (getattr(route, "methods", None) or ())
    }
    return {path for path in paths if not path.startswith(OWN_PREFIX)}


@pytest.mark.parametrize("kind", KINDS)
def test_routes_of_vllm_take_the_headers(kind: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = built(kind, checkpoint, monkeypatch)
    assert any(route.path == "/delta_sync/status" for route in app.routes), "nothing follows"  # type: ignore[attr-defined]
    assert computing(app) & set(VERSIONED_PATHS)
    sessions = {route.path for route in app.routes if isinstance(route, WebSocketRoute)}
    assert sessions <= set(SESSION_PATHS)


def test_every_task_but_that_of_a_server_without_an_engine_is_followed() -> None:
    from vllm.tasks import GENERATION_TASKS, POOLING_TASKS

    assert set(EndpointPlugin().required_tasks) == {*GENERATION_TASKS, *POOLING_TASKS}


# On an application of our own


class Tracker:
    """Admits every version, or raises the error that it was given.

    Attributes:
        request: the last that it admitted.
    """

    objection: str | None = None
    request: ExactRequest

    async def admit(self, version: int) -> ExactRequest:
        self.request = ExactRequest(version, frozenset())
        return self.request


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("site")
    site = Site(root, state_dir=root / "state")
    site.app.state.delta_sync_exact = Tracker()
    for path in ("/v1/embeddings", "/tokenize", "/x/v1/completions", "/brand/new"):
        site.app.add_api_route(path, answer, methods=["POST", "GET"])
    site.app.add_api_route("/v1/chat/completions", complete, methods=["POST"])
    site.app.add_api_websocket_route("/v1/realtime", converse)
    site.app.add_api_websocket_route("/v2/realtime", converse)
    site.serve()
    yield site
    site.end()


async def answer() -> dict[str, str]:
    return {"it": "was called"}


async def converse(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text("welcome")
    await websocket.close()


def test_routes_that_compute_answers_take_the_headers_and_others_refuse_them(site: Site) -> None:
    client = site.client()
    served = str(site.service.receiver.served_version)
    for header in (MINIMUM, EXACT):
        taken = client.post("/v1/embeddings", headers={header: served})
        assert (taken.status_code, taken.headers.get(EXACT)) == (200, served)
        assert client.get("/brand/new", headers={header: "7"}).status_code == 200
        for path in ("/tokenize", "/brand/new", "/x/v1/completions"):
            refused = client.post(path, headers={header: "0"})
            assert (refused.status_code, refused.json()["error"]["kind"]) == (400, "usage")
            for word in (header, path, "/v1/completions or /v1/chat/completions"):
                assert word in refused.json()["error"]["message"]
            assert client.post(path).status_code == 200
        assert client.post("/nowhere", headers={header: "0"}).status_code == 404
        assert client.post("/delta_sync/verify", headers={header: "7"}).status_code == 200


@pytest.mark.parametrize("mounted", [False, True], ids=["root path", "mounted"])
def test_paths_behind_a_prefix(site: Site, mounted: bool) -> None:
    if mounted:
        client = TestClient(FastAPI(routes=[Mount("/model", site.app)]), base_url="http://127.0.0.1:8000")
    else:
        client = TestClient(site.app, base_url="http://127.0.0.1:8000", root_path="/model")
    taken = client.post("/model/v1/embeddings", headers={MINIMUM: "0"})
    assert (taken.status_code, taken.headers.get(EXACT)) == (200, str(site.service.receiver.served_version))
    assert client.post("/model/brand/new", headers={MINIMUM: "0"}).status_code == 400


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ([(EXACT, "x")], f"{EXACT} is 'x'; send one number"),
        ([(EXACT, "1"), (EXACT, "1")], f"{EXACT} is '1, 1'; send one number"),
        ([(MINIMUM, "2"), (EXACT, "1")], f"{MINIMUM} is 2 and {EXACT} is 1, which is older; leave one out"),
    ],
    ids=["no number", "twice", "contradiction"],
)
def test_headers_that_make_no_sense(site: Site, headers: list[tuple[str, str]], words: str) -> None:
    refused = site.client().post("/v1/embeddings", headers=headers)
    assert (refused.status_code, refused.json()["error"]["kind"]) == (400, "usage")
    assert words in refused.json()["error"]["message"]
    assert refused.headers[EXACT] == str(site.service.receiver.served_version)


def test_exact_version_where_there_can_be_none(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tracker, "objection", "and prefix_cache is 'keep'")
    refused = site.client().post("/v1/embeddings", headers={EXACT: "0"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == f"version 0 is asked for ({EXACT}), and prefix_cache is 'keep'"
    assert site.client().post("/v1/embeddings", headers={MINIMUM: "0"}).status_code == 200


async def complete(request: Request, when: str) -> Any:
    """An answer that a commit meets at some point; then it goes on as vLLM's routes do."""
    exactly: ExactRequest = request.app.state.delta_sync_exact.request
    if when in ("whole answer", "refused"):
        exactly.fail("and a commit came", interrupted=when != "refused")
        return {"it": "is complete"}

    async def stream() -> AsyncGenerator[str, None]:
        begins = "event: one\n" if when.startswith("named") else ""
        if when != "first part":
            yield f"{begins}data: one\n\n"
        exactly.fail("and a commit came", interrupted=when != "refused")
        if when.endswith("raises"):
            raise RuntimeError("out of the stream")
        yield "data: theirs\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")


@pytest.mark.parametrize(
    ("when", "status", "expected"),
    [
        ("whole answer", 409, []),
        ("refused", 409, []),
        ("first part", 409, []),
        ("stream", 200, ["data: one", "data: theirs", "data: [DONE]"]),
        ("stream that raises", 200, ["data: one", "event: error", OURS]),
        ("named events", 200, ["event: one", "data: one", "event: error", OURS]),
        ("named events that raises", 200, ["event: one", "data: one", "event: error", OURS]),
    ],
)
def test_commit_at_any_point_of_an_answer_is_an_error(site: Site, when: str, status: int, expected: list[str]) -> None:
    interrupted = REGISTRY.get_sample_value("delta_sync_interrupted_total") or 0
    with listening(site.app) as port:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        answer = httpx.post(url, params={"when": when}, headers={EXACT: "0"}, timeout=120)
    assert answer.status_code == status
    message = f"version 0 is asked for ({EXACT}), and a commit came"
    if status == 409:
        assert answer.json() == {"error": {"kind": "version", "message": message}}
        assert answer.headers[EXACT] == str(site.service.receiver.served_version)
    else:
        lines = [line for line in answer.text.splitlines() if line]
        assert [line if "{" not in line else OURS for line in lines] == expected
        assert answer.headers[EXACT] == "0"
    if OURS in expected:
        event = json.loads(lines[-1].removeprefix("data: "))
        assert (event["type"], event["code"], event["message"]) == ("error", "version", message)
        assert (event["error"]["code"], event["error"]["message"]) == (409, message)
    assert REGISTRY.get_sample_value("delta_sync_interrupted_total") == interrupted + (when != "refused")


def test_session_waits_at_the_handshake_or_is_refused_there(site: Site) -> None:
    served = site.service.receiver.served_version
    assert served is not None
    with listening(site.app) as port:

        def shake_hands(path: str = "/v1/realtime", **headers: object) -> Any:
            given = {name.replace("_", "-"): str(value) for name, value in headers.items()}
            with connect(f"ws://127.0.0.1:{port}{path}", additional_headers=given, open_timeout=120) as opened:
                assert opened.recv() == "welcome"
                return opened.response

        assert shake_hands().headers[EXACT] == str(served)
        waiting = later(lambda: shake_hands(X_Delta_Sync_Min_Version=served + 1))
        while not site.app.state.delta_sync_waiters._waiting:
            assert not waiting.done(), waiting.result()
        site.publish(1)
        assert waiting.result(120).headers[EXACT] == str(served + 1)
        for refused, code, kind, words in (
            ({"X_Delta_Sync_Version": 0}, 400, "usage", "is not supported on /v1/realtime: a session outlives commits"),
            ({"X_Delta_Sync_Min_Version": "x"}, 400, "usage", "send one number"),
            ({"path": "/v2/realtime", "X_Delta_Sync_Min_Version": 0}, 400, "usage", "not supported on /v2/realtime"),
        ):
            with pytest.raises(InvalidStatus) as found:
                shake_hands(**refused)  # type: ignore[arg-type]
            response = found.value.response
            assert response.status_code == code
            assert f'"kind":"{kind}"'.encode() in response.body
            assert words.encode() in response.body
        site.service.request("hold").result(120)
        with pytest.raises(InvalidStatus) as found:
            shake_hands(X_Delta_Sync_Min_Version=served + 9)
        assert found.value.response.status_code == 409
        site.service.request("release").result(120)


def test_without_a_receiver_nothing_is_refused() -> None:
    app = FastAPI()
    routes.attach(app)
    app.add_api_route("/brand/new", answer, methods=["POST"])
    assert TestClient(app).post("/brand/new", headers={MINIMUM: "0"}).status_code == 200
    app.state.delta_sync = SimpleNamespace(receiver=SimpleNamespace(served_version=None))
    assert TestClient(app).post("/brand/new", headers={MINIMUM: "0"}).status_code == 400
