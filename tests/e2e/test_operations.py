"""What an operator sees of a real server: metrics, the log's lines, and what is said of a set-up that cannot work."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.servers import plain_vllm_serve, refused, serving
from tests.e2e.world import Follower, World
from tests.support.monitoring import Selector, queries
from tests.support.tiny import make_model, save_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("follower")]
OF_PROMETHEUS = ("up", "ALERTS")
EXTENSION = ["--worker-extension-cls", "vllm_delta_sync.engine.WorkerExtension"]


def test_metrics_and_log_lines_of_a_server_that_follows(follower: Follower) -> None:
    world, server = follower.world, follower.server
    before = server.metrics()
    for _ in range(2):
        server.wait_served(world.publish())
    status = server.wait_idle()
    found = server.metrics()
    version = world.version
    assert found["delta_sync_served_version"] == found["delta_sync_head_version"] == version
    assert found["delta_sync_lag_versions"] == 0
    assert found["delta_sync_ready"] == 1
    assert grown(before, found, 'delta_sync_commits_total{move="forward"}') == 2
    assert grown(before, found, "delta_sync_versions_total") == 2
    recent = status["recent"][-2:]
    assert [each["version"] for each in recent] == [version - 1, version]
    payload = sum(each["payload_bytes"] for each in recent)
    assert grown(before, found, "delta_sync_payload_bytes_total") == payload > 0
    pauses = sum(each["timings_ms"]["pause"] for each in recent) / 1e3
    assert grown(before, found, "delta_sync_pause_seconds_sum") == pytest.approx(pauses, abs=1e-4)
    assert found["delta_sync_look_timestamp_seconds"] > 1e9
    (line,) = server.log_lines(f"version {version} (step {version}) served")
    assert re.search(r"served: [\d.]+ % changed, .* committed [\d.]+ ms, (resumed [\d.]+ ms, )?paused [\d.]+ ms", line)
    assert server.post("/delta_sync/rollback", {"version": version - 1}).status_code == 200
    held = server.metrics()
    assert held['delta_sync_state{state="held"}'] == 1
    assert grown(found, held, 'delta_sync_commits_total{move="rollback"}') == 1
    assert len(server.log_lines(f"(step {version - 1}) served: rolled back from version {version}; ")) == 1
    assert "Traceback" not in server.logged()


def test_alerts_and_dashboard_find_their_metrics_at_a_server(follower: Follower) -> None:
    text = follower.server.get("/metrics").text
    samples = [
        (sample.name, sample.labels) for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    for query in queries():
        for name, matchers in ((selector.name, selector.matchers) for selector in query.selectors):
            if name in OF_PROMETHEUS:
                continue
            # A server does not know what Prometheus calls it.
            own = Selector(name, tuple(each for each in matchers if each[0] not in ("instance", "job")))
            assert any(name == each and own.matches(labels) for each, labels in samples), (query.of, own)


@pytest.mark.slow
def test_log_lines_are_json_on_request_and_those_of_vllm_are_not(follower: Follower) -> None:
    world = follower.world
    server = follower.start("--log-format", "json")
    try:
        server.wait_served(world.publish())
        server.wait_idle()
        lines = server.logged().splitlines()
    finally:
        follower.start()
    ours = [json.loads(line) for line in lines if line.startswith("{")]
    assert not [line for line in lines if "served: " in line and not line.startswith("{")]
    assert [line for line in lines if " INFO " in line and not line.startswith("{")]
    assert all({"time", "level", "logger", "event", "message"} <= line.keys() for line in ours)
    served = [line for line in ours if line["event"] == "served"][-1]
    assert (served["version"], served["step"]) == (world.version, world.version)
    assert served["run"] == world.publisher.run
    assert served["message"].startswith(f"version {world.version} (step {world.version}) served: ")
    assert min(served["bytes"], served["changed"], served["timings_ms"]["pause"]) > 0


def grown(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after[name] - before.get(name, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "flags", "code", "words"),
    [
        pytest.param({}, EXTENSION, 2, "setting 'bucket' is missing", id="no bucket"),
        pytest.param({"DELTA_SYNC_BUCKET": "s4://b/r"}, EXTENSION, 2, "'s4://b/r'", id="typo"),
        pytest.param({"DELTA_SYNC_BUCKET": "/r"}, [], 1, "--worker-ext", id="no extension"),
    ],
)
def test_set_up_that_cannot_work_ends_the_server_with_one_line(
    tmp_path: Path, environment: dict[str, str], flags: list[str], code: int, words: str
) -> None:
    base = save_checkpoint(make_model("qwen3"), tmp_path / "base")
    environment = {"VLLM_PLUGINS": "delta_sync", **environment}
    status, text = refused(tmp_path / "log", plain_vllm_serve(base, *flags), environment)
    assert status == code
    assert text.count(words) == 1
    assert "; the server exits" in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_several_api_servers_show_the_same_metrics(tmp_path: Path) -> None:
    world = World(tmp_path)
    command = plain_vllm_serve(world.base, "--api-server-count", "2", *EXTENSION)
    environment = {"VLLM_PLUGINS": "delta_sync", "DELTA_SYNC_BUCKET": world.url}
    # Whether processes add up their metrics is decided when their library is imported.
    with serving(tmp_path / "server.log", command, environment, cold=True) as server:
        server.wait_served(0)
        for _ in range(8):
            found = server.metrics()
            assert found["delta_sync_served_version"] == 0
            assert found['delta_sync_state{state="idle"}'] == 1
            assert not [name for name in found if "pid=" in name]
    world.close()
