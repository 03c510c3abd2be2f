"""What an operator sees of a real server: metrics, the log's lines, and what is said of a set-up that cannot work."""

import re
import time
from pathlib import Path

import pytest

from tests.e2e.servers import (
    Server,
    delta_sync_serve,
    plain_vllm_serve,
    refused,
    serving,
)
from tests.support.tiny import make_model, save_checkpoint, train_steps
from trainer_side import Publisher

pytestmark = pytest.mark.e2e
EXTENSION = ["--worker-extension-cls", "vllm_delta_sync.engine.WorkerExtension"]


def shown(server: Server) -> dict[str, float]:
    """Our metrics, by name and labels."""
    text = server.get("/metrics").text
    return {name: float(value) for name, value in re.findall(r"^(delta_sync_\S+) (\S+)$", text, re.MULTILINE)}


def lines(server: Server, words: str) -> list[str]:
    return [line for line in server.log.read_text().splitlines() if words in line]


def test_one_server_from_a_wrong_bucket_to_a_store_that_is_gone(tmp_path: Path) -> None:
    model = make_model("qwen3")
    base = save_checkpoint(model, tmp_path / "base")
    run = tmp_path / "run"
    command = delta_sync_serve(base, "--bucket", str(run), "--poll-seconds", "0.1")
    with serving(base, tmp_path / "server.log", command, {}) as server:
        status = server.wait_error("not_found")
        assert status["state"] == "waiting_for_run"
        found = shown(server)
        assert found['delta_sync_state{state="waiting_for_run"}'] == 1
        assert (found["delta_sync_ready"], found["delta_sync_pause_seconds_count"]) == (0, 0)
        assert found['delta_sync_failures_total{kind="not_found"}'] >= 1
        with Publisher(model, bucket=str(run), base=base) as publisher:
            server.wait_served(0)
            for step, _ in zip((1, 2), train_steps(model), strict=False):
                publisher.publish(step=step, wait=True)
                publisher.flush()
                server.wait_served(step)
        status = server.wait_idle()
        found = shown(server)
        assert found["delta_sync_served_version"] == found["delta_sync_head_version"] == 2
        assert found["delta_sync_lag_versions"] == 0
        assert found["delta_sync_ready"] == 1
        assert found['delta_sync_commits_total{move="forward"}'] == status["commits"]
        assert found["delta_sync_versions_total"] == 2
        assert found["delta_sync_payload_bytes_total"] == sum(each["payload_bytes"] for each in status["recent"])
        pauses = sum(each["timings_ms"]["pause"] for each in status["recent"]) / 1e3
        assert found["delta_sync_pause_seconds_sum"] == pytest.approx(pauses, abs=1e-4)
        assert found["delta_sync_look_timestamp_seconds"] > 1e9
        assert len(lines(server, "not_found: no run at ")) == 1
        line = r"version 2 \(step 2\) served: [\d.]+ % changed, .* paused [\d.]+ \(committed [\d.]+, resumed [\d.]+\)"
        assert [bool(re.search(line, each)) for each in lines(server, "version 2 (step 2) served")] == [True]
        run.rename(tmp_path / "away")
        server.wait_error("not_found")
        looks = server.status()["looks"]
        while server.status()["looks"] < looks + 3:
            time.sleep(0.05)
        assert server.status()["served"]["version"] == 2
        assert len(lines(server, "its run.json is gone")) == 1
        (tmp_path / "away").rename(run)
        assert server.post("/delta_sync/sync", {}).json()["last_error"] is None
        assert server.post("/delta_sync/rollback", {"version": 1}).status_code == 200
        found = shown(server)
        assert (found['delta_sync_state{state="held"}'], found['delta_sync_commits_total{move="rollback"}']) == (1, 1)
        assert len(lines(server, "version 1 (step 1) served: gone back from version 2; ")) == 1
        assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "flags", "code", "words"),
    [
        ({}, EXTENSION, 2, "settings: setting 'bucket' is missing; set DELTA_SYNC_BUCKET"),
        ({"DELTA_SYNC_BUCKET": "s4://b/run"}, EXTENSION, 2, "settings: setting 'bucket': bucket URL 's4://b/run' has"),
        ({"DELTA_SYNC_BUCKET": "/run"}, [], 1, "engine: worker_extension_cls is ''; launch vLLM with --worker-ext"),
    ],
    ids=["no bucket", "typo", "no extension"],
)
def test_set_up_that_cannot_work_ends_the_server_with_one_line(
    tmp_path: Path, environment: dict[str, str], flags: list[str], code: int, words: str
) -> None:
    base = save_checkpoint(make_model("qwen3"), tmp_path / "base")
    environment = {"VLLM_PLUGINS": "delta_sync", **environment}
    status, text = refused(tmp_path / "log", plain_vllm_serve(base, *flags), environment)
    assert status == code
    assert text.count(words) == 1
    assert "; the server ends" in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_several_api_servers_show_the_same_metrics(tmp_path: Path) -> None:
    model = make_model("qwen3")
    base = save_checkpoint(model, tmp_path / "base")
    Publisher(model, bucket=str(tmp_path / "run"), base=base).close()
    command = plain_vllm_serve(base, "--api-server-count", "2", *EXTENSION)
    environment = {"VLLM_PLUGINS": "delta_sync", "DELTA_SYNC_BUCKET": str(tmp_path / "run")}
    # Whether processes add up their metrics is decided when their library is imported.
    with serving(base, tmp_path / "server.log", command, environment, cold=True) as server:
        server.wait_served(0)
        for _ in range(8):
            found = shown(server)
            assert found["delta_sync_served_version"] == 0
            assert found['delta_sync_state{state="idle"}'] == 1
            assert not [name for name in found if "pid=" in name]
