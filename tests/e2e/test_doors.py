"""All ways to say that a server, or an engine in one's own process, is to move: vLLM's own calls, ours, and both."""

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.attached import LEFT_OPEN
from tests.e2e.servers import Load, Server, complaints, eventually
from tests.e2e.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("attached")]

OURS = ["--weight-transfer-config", '{"backend": "delta_bucket"}']
MANUAL = ["--policy", "manual", "--poll-seconds", "0.2"]


@pytest.mark.slow
def test_trainer_drives_a_server_by_every_door(tmp_path: Path) -> None:
    trainer = World(tmp_path)
    with trainer.serve(*MANUAL, "--pause-mode", "abort", *OURS) as server:
        server.wait_served(0)
        check_nothing_moves_by_itself(server, trainer)
        check_refusals(server, trainer)
        check_native_update(server, trainer)
        check_pauses_of_the_caller(server, trainer)
        check_clients_see_the_abort(server, trainer)
        assert server.post("/delta_sync/verify").json()["verdict"] is True
        # Nothing that came through these doors counts as somebody else's writing.
        assert "weights are still version" not in server.log.read_text()
    trainer.close()


def check_nothing_moves_by_itself(server: Server, trainer: World) -> None:
    trainer.publish()
    version = trainer.publish()
    eventually(lambda: (server.status()["head"] or {}).get("version") == version, f"version {version} is seen")
    looks = server.status()["polls"]
    eventually(lambda: server.status()["polls"] >= looks + 3, "it looks again and again")
    status = server.status()
    assert (status["served"]["version"], status["lag"], status["state"], status["last_error"]) == (0, 2, "idle", None)
    assert server.get("/delta_sync/ready").status_code == 200
    status = server.post("/delta_sync/sync", {"version": 1}).json()
    assert (status["served"]["version"], status["lag"], status["policy"]) == (1, 1, "manual")


def check_refusals(server: Server, trainer: World) -> None:
    """Vllm's routes answer with our message, and not a bit changes."""
    before = server.digests()
    refused: list[tuple[str, Any, int, str]] = [
        ("/init_weight_transfer_engine", {"init_info": {"bucket": "/elsewhere"}}, 400, "init_info.bucket is"),
        ("/start_draft_weight_update", None, 400, "updates the served model only"),
        ("/update_weights", {"update_info": {"version": 99}}, 404, "version 99 is not published; the head is 2"),
        ("/update_weights", {"update_info": {"names": ["a"]}}, 400, "update_info.names"),
        ("/update_weights", {"update_info": [{}, {}]}, 400, "one document for all of them"),
        ("/finish_weight_update", {"weight_version": "mine"}, 400, "weight_version is 'mine'"),
        ("/update_weight_version", {"new_version": "7"}, 400, "weight_version is '7'"),
        ("/collective_rpc", {"method": "start_weight_update"}, 500, "start_weight_update reached a worker"),
    ]
    for route, body, code, words in refused:
        answer = server.post(route, body)
        assert (answer.status_code, words in answer.text) == (code, True), (route, body, answer.text)
    assert server.get("/weight_info").json() == {"weight_version": "1"}
    assert server.digests() == before


def check_native_update(server: Server, trainer: World) -> None:
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
    assert server.traced()["spans"] == [{"index": 0, "version": 3, "start": 0, "end": 5}]


def check_pauses_of_the_caller(server: Server, trainer: World) -> None:
    """As trainers do with other backends: pause, update, resume."""
    for mode in ("keep", "wait", "abort"):
        assert server.post(f"/pause?mode={mode}").status_code == 200
        version = trainer.publish()
        assert server.post("/update_weights", {"update_info": {}}).status_code == 200
        assert server.post("/finish_weight_update").status_code == 200
        assert server.get("/is_paused").json() == {"is_paused": True}
        assert server.post("/resume").status_code == 200
        assert server.traced()["spans"] == [{"index": 0, "version": version, "start": 0, "end": 5}]


def check_clients_see_the_abort(server: Server, trainer: World) -> None:
    served, version = trainer.version, trainer.publish()
    with Load(server, threads=1) as load:
        before = len(load.answers)
        assert server.post("/delta_sync/sync", {"version": version}).json()["served"]["version"] == version
        eventually(lambda: len(load.answers) >= before + 3, "requests are answered")
    answers = [answer.json() for answer in load.answers]
    aborted = [answer for answer in answers if answer["choices"][0]["finish_reason"] == "abort"]
    for answer in answers:
        spans = answer["delta_sync"]["spans"]
        assert len(spans) <= 1
        if answer in aborted:
            assert answer["usage"]["completion_tokens"] < Load.TOKENS
            assert [span["version"] for span in spans] in ([served], [])
    assert len(aborted) == 1


@pytest.mark.slow
def test_native_calls_reach_the_server_that_leads(tmp_path: Path) -> None:
    """Two API servers; which of them takes a connection is chance, so that each of the calls may go to another."""
    trainer = World(tmp_path)
    with trainer.serve(*MANUAL, *OURS, "--api-server-count", "2") as server:
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
    trainer.close()


def test_async_engine_is_followed_in_the_callers_process(attached: dict[str, Any]) -> None:
    seen = attached["doors"]
    assert "start_weight_update reached a worker" in seen["unattached"]
    assert "await attach_async(engine" in seen["attach"]
    assert "attached already" in seen["twice"]
    for held, asked, served, spans in seen["paused"]:
        assert (held, served) == (True, asked)
        assert spans == [[str(asked), 0, 8]]
    assert seen["label"] == str(served)
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


@pytest.mark.parametrize("end", ["attached", pytest.param("attached_again", marks=pytest.mark.slow)])
def test_async_engine_or_event_loop_that_ends_first_is_no_trouble(request: pytest.FixtureRequest, end: str) -> None:
    """Of two that follow without ``close``, one ends with its engine, the other with its event loop."""
    said = request.getfixturevalue(end)["said"].partition(LEFT_OPEN)[2]
    assert complaints(said) == []
    assert "no longer following: the engine has stopped" in said
