"""All ways to say that a server, or an engine in one's own process, is to move: vLLM's own calls, ours, and both."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import warm
from tests.e2e.servers import Server, delta_sync_serve, serving
from tests.e2e.test_server import digests_of
from tests.support.tiny import make_model, save_checkpoint, train_steps
from trainer_side import Publisher

pytestmark = pytest.mark.e2e

OURS = ["--weight-transfer-config", '{"backend": "delta_bucket"}']
MANUAL = ["--policy", "manual", "--poll-seconds", "0.2"]
LONG = {"model": "tiny", "prompt": "the quick", "max_tokens": 230, "temperature": 0, "ignore_eos": True}


class Trainer:
    """Publishes from real steps."""

    def __init__(self, root: Path) -> None:
        self.model = make_model("qwen3")
        self.base = save_checkpoint(self.model, root / "base")
        self.url = str(root / "run")
        self.publisher = Publisher(self.model, bucket=self.url, base=self.base)
        self.steps = train_steps(self.model, lr=3e-5)
        self.version = 0

    def publish(self) -> int:
        next(self.steps)
        self.version += 1
        self.publisher.publish(step=self.version, wait=True)
        self.publisher.flush()
        return self.version


def test_trainer_drives_a_server_by_every_door(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    command = delta_sync_serve(trainer.base, "--bucket", trainer.url, *MANUAL, "--pause-mode", "abort", *OURS)
    environment = {"VLLM_SERVER_DEV_MODE": "1", "DELTA_SYNC_STATE_DIR": str(tmp_path / "state")}
    with trainer.publisher, serving(trainer.base, tmp_path / "server.log", command, environment) as server:
        server.wait_served(0)
        check_nothing_moves_by_itself(server, trainer)
        check_refusals(server, trainer)
        check_native_update(server, trainer)
        check_pauses_of_the_caller(server, trainer)
        check_clients_see_the_abort(server, trainer)
        assert server.post("/delta_sync/verify").json()["verdict"] is True
        # Nothing that came through these doors counts as somebody else's writing.
        assert "weights are still version" not in server.log.read_text()


def check_nothing_moves_by_itself(server: Server, trainer: Trainer) -> None:
    trainer.publish()
    version = trainer.publish()
    status = wait_until_known(server, version)
    looks = status["looks"]
    while status["looks"] < looks + 3:
        time.sleep(0.1)
        status = server.status()
    assert (status["served"]["version"], status["lag"], status["state"], status["last_error"]) == (0, 2, "idle", None)
    assert server.get("/delta_sync/ready").status_code == 200
    status = server.post("/delta_sync/sync", {"version": 1}).json()
    assert (status["served"]["version"], status["lag"], status["policy"]) == (1, 1, "manual")


def wait_until_known(server: Server, version: int) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        status = server.status()
        if status["head"] is not None and status["head"]["version"] == version:
            return status
        time.sleep(0.05)
    raise AssertionError(f"version {version} was not seen: {server.status()}")


def check_refusals(server: Server, trainer: Trainer) -> None:
    """Vllm's routes answer with our message, and not a bit changes."""
    before = digests_of(server)
    refused: list[tuple[str, Any, int, str]] = [
        ("/init_weight_transfer_engine", {"init_info": {"bucket": "/elsewhere"}}, 400, "init_info.bucket is"),
        ("/start_draft_weight_update", None, 400, "updates the served model only"),
        ("/update_weights", {"update_info": {"version": 99}}, 404, "version 99 is not published; the head is 2"),
        ("/update_weights", {"update_info": {"version": 99, "timeout_s": 0.3}}, 404, "version 99 is not published"),
        ("/update_weights", {"update_info": {"names": ["a"]}}, 400, "update_info.names"),
        ("/update_weights", {"update_info": [{}, {}]}, 400, "one document for all of them"),
        ("/finish_weight_update", {"weight_version": "mine"}, 400, "weight_version is 'mine'"),
        ("/update_weight_version", {"new_version": "7"}, 400, "weight_version is '7'"),
        ("/collective_rpc", {"method": "start_weight_update"}, 500, "start_weight_update reached a worker"),
    ]
    for route, body, code, words in refused:
        answer = server.post(route, body)
        assert (answer.status_code, words in answer.text) == (code, True), (
            route,
            body,
            answer.status_code,
            answer.text,
        )
    assert server.get("/weight_info").json() == {"weight_version": "1"}
    assert digests_of(server) == before


def check_native_update(server: Server, trainer: Trainer) -> None:
    """With vLLM's own client for trainers."""
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    client = HTTPVLLMWeightSyncClient(server.url)
    client.init_weight_transfer_engine({})
    client.init_weight_transfer_engine({"bucket": trainer.url})
    client.start_weight_update()
    assert server.status()["served"]["version"] == 1
    client.update_weights({"version": 2, "timeout_s": 60})
    client.finish_weight_update("2")
    assert server.get("/weight_info").json() == {"weight_version": "2"}
    waited = threading.Thread(target=client.update_weights, args=({"version": 3, "timeout_s": 120},))
    waited.start()
    version = trainer.publish()
    waited.join(120)
    status = server.status()
    assert (status["served"]["version"], status["lag"], version) == (3, 0, 3)
    assert status["served"]["fingerprint"] == status["head"]["fingerprint"]
    assert spans_of(server) == [{"index": 0, "version": 3, "start": 0, "end": 5}]


def check_pauses_of_the_caller(server: Server, trainer: Trainer) -> None:
    """As trainers do with other backends: pause, update, resume."""
    for mode in ("keep", "wait", "abort"):
        assert server.post(f"/pause?mode={mode}").status_code == 200
        version = trainer.publish()
        assert server.post("/update_weights", {"update_info": {}}).status_code == 200
        assert server.post("/finish_weight_update").status_code == 200
        assert server.get("/is_paused").json() == {"is_paused": True}
        assert server.post("/resume").status_code == 200
        assert spans_of(server) == [{"index": 0, "version": version, "start": 0, "end": 5}]


def check_clients_see_the_abort(server: Server, trainer: Trainer) -> None:
    served, version = trainer.version, trainer.publish()
    answers: list[dict[str, Any]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            answers.append(server.post("/v1/completions", LONG).json())

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        while len(answers) < 2:
            time.sleep(0.01)
        before = len(answers)
        assert server.post("/delta_sync/sync", {"version": version}).json()["served"]["version"] == version
        while len(answers) < before + 3:
            time.sleep(0.01)
    finally:
        over.set()
        thread.join(120)
    aborted = [answer for answer in answers if answer["choices"][0]["finish_reason"] == "abort"]
    for answer in answers:
        spans = answer["delta_sync"]["spans"]
        assert len(spans) <= 1
        if answer in aborted:
            assert answer["usage"]["completion_tokens"] < LONG["max_tokens"]
            assert [span["version"] for span in spans] in ([served], [])
    assert len(aborted) == 1


def spans_of(server: Server) -> list[dict[str, Any]]:
    body = {"model": "tiny", "prompt": "fox", "max_tokens": 5, "ignore_eos": True}
    spans: list[dict[str, Any]] = server.post("/v1/completions", body).json()["delta_sync"]["spans"]
    return spans


@pytest.mark.slow
def test_native_calls_reach_the_server_that_leads(tmp_path: Path) -> None:
    """Two API servers; which of them takes a connection is chance, so that each of the calls may go to another."""
    trainer = Trainer(tmp_path)
    command = delta_sync_serve(trainer.base, "--bucket", trainer.url, *MANUAL, *OURS, "--api-server-count", "2")
    environment = {"VLLM_SERVER_DEV_MODE": "1", "DELTA_SYNC_STATE_DIR": str(tmp_path / "state")}
    with trainer.publisher, serving(trainer.base, tmp_path / "server.log", command, environment) as server:
        server.wait_served(0)
        asked: set[str] = set()
        while len(asked) < 2 or trainer.version < 6:
            assert trainer.version < 40, "only one of the servers was ever asked"
            version = trainer.publish()
            for route, body in (
                ("/init_weight_transfer_engine", {"init_info": {}}),
                ("/start_weight_update", None),
                ("/update_weights", {"update_info": {"version": version, "timeout_s": 60}}),
                ("/finish_weight_update", {"weight_version": str(version)}),
            ):
                answer = server.post(route, body)
                assert answer.status_code == 200, (route, answer.text)
            asked.add(server.status()["role"])
            assert server.get("/weight_info").json() == {"weight_version": str(version)}


def test_async_engine_is_followed_in_the_callers_process(attached: dict[str, Any]) -> None:
    seen = attached["doors"]
    assert "start_weight_update reached a worker" in seen["unattached"]
    assert "await attach_async(engine" in seen["attach"]
    assert "followed already" in seen["twice"]
    manual = seen["manual"]
    assert (manual["served"]["version"], manual["head"]["version"], manual["lag"]) == (0, 1, 1)
    assert (manual["commits"], manual["state"], manual["policy"]) == (0, "idle", "manual")
    assert seen["follow"] == [5, 5]
    back = seen["back"]
    assert (back["served"]["version"], back["state"], seen["back label"]) == (4, "held", "4")
    assert seen["late"].startswith("OverdueError: version 5 was not served within 0.2 s; version 4 is")
    assert (seen["forward"], seen["held"], seen["verify"]["verdict"]) == (5, "held", True)
    assert "version 13 is not published; the head is 4" in seen["to"]
    assert "call attach_async again" in seen["closed"]


def test_async_engine_takes_native_calls(attached: dict[str, Any]) -> None:
    seen = attached["doors"]
    for name, words in {
        "other bucket": "TransferError: init_info.bucket is '/elsewhere'",
        "draft": "TransferError: backend delta_bucket updates the served model only",
        "unpublished": "NotFoundError: version 6 is not published",
        "unknown": "TransferError: update_info.names",
    }.items():
        assert seen[name].startswith(words)
    assert seen["after refusals"]["served"]["version"] == 0
    status, label = seen["native"]
    assert (status["served"]["version"], status["commits"], label) == (1, 1, "1")
    assert [text.split(",")[0] for text in seen["label"]] == [
        "TransferError: weight_version is 'mine'",
        "TransferError: weight_version is '9'",
    ]
    for held, asked, served, spans in seen["paused"]:
        assert (held, served) == (True, asked)
        assert spans in ([[str(asked), 0, 8]], None)


@pytest.mark.slow
def test_offline_engine_takes_native_calls(tmp_path: Path) -> None:
    done = warm.run("tests.e2e.native_offline", str(tmp_path), seconds=400)
    assert done.status == 0, done.said[-4000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert "start_weight_update reached a worker" in seen["unattached"]
    assert [step["version"] for step in seen["steps"]] == [1, 2]
    assert [step["label"] for step in seen["steps"]] == ["1", "2"]
    assert all(step["verdict"] for step in seen["steps"])
    assert "version 9 is not published" in seen["unpublished"]
    assert "weight_version is 'mine'" in seen["label"]
