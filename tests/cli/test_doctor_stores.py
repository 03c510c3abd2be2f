"""What the doctor says of stores over a network: an S3 server and a Hub, well and otherwise."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import hub_store, s3_store
from tests.support.stores import s3_server
from vllm_delta_sync.upkeep.doctor import BUCKET_CHECKS

SIZE = "3000000"


def look(url: str, environment: dict[str, str], *flags: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and findings by check; in a process of its own, since clients read their environment once."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DELTA_SYNC_", "AWS_", "HF_"))}
    command = [
        sys.executable,
        "-m",
        "vllm_delta_sync.cli",
        "doctor",
        "--bucket",
        url,
        "--json",
        "--bytes",
        SIZE,
        *flags,
    ]
    environment = {"AWS_EC2_METADATA_DISABLED": "true", "DELTA_SYNC_CACHE_BYTES": "0", **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**kept, **environment})
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    found = {row["check"]: row for row in document["findings"]}
    assert list(found)[: len(BUCKET_CHECKS)] == list(BUCKET_CHECKS)
    for secret in (s3_store.SECRET_KEY, hub_store.TOKEN):
        assert secret not in done.stdout + done.stderr
    return done.returncode, found


def verdicts(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: row["verdict"] for name, row in found.items() if row["verdict"] not in ("ok", "skipped")}


def test_s3() -> None:
    server = s3_server()
    url = server.create_bucket("doctor-well") + "/run"
    code, found = look(url, server.environment)
    assert (code, verdicts(found)) == (0, {}), found
    assert found["credentials"]["figures"] == {"source": "$AWS_ACCESS_KEY_ID"}
    assert found["race"]["figures"]["winners"] == 1
    assert found["throughput"]["figures"]["bytes"] == int(SIZE)
    assert found["library"]["figures"]["obstore"]
    # A bucket can be removed when nothing is in it.
    server.delete_bucket("doctor-well")


def test_s3_with_the_wrong_key() -> None:
    server = s3_server()
    url = server.create_bucket("doctor-refused") + "/run"
    code, found = look(url, {**server.environment, "AWS_SECRET_ACCESS_KEY": "wrong"})
    assert (code, verdicts(found)) == (4, {"credentials": "failed"})
    assert found["credentials"]["kind"] == "access"
    assert "AWS_ACCESS_KEY_ID" in found["credentials"]["said"]


def test_s3_without_a_bucket() -> None:
    environment = s3_server().environment
    code, found = look("s3://doctor-nowhere/run", environment, "--keep-going")
    assert (code, verdicts(found)) == (4, {"put": "failed"})
    assert "create it" in found["put"]["said"]
    code, found = look("s3://doctor-nowhere/run", environment, "--read-only")
    assert (code, verdicts(found)) == (0, {"run": "warning"})
    assert "s3://doctor-nowhere/run does not exist" in found["run"]["said"]


def test_s3_that_is_down() -> None:
    with s3_store.serving() as server:
        environment = server.environment
    code, found = look("s3://doctor/run", {**environment, "DELTA_SYNC_STORE_DEADLINE": "2"})
    assert (code, verdicts(found)) == (4, {"credentials": "failed"})
    assert found["credentials"]["kind"] in ("unavailable", "deadline")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hub_store.Hub]:
    with hub_store.serving(tmp_path_factory.mktemp("hub"), read_token="hf_may_only_read") as hub:
        hub.create_bucket("team/runs")
        yield hub


URL = "hf://buckets/team/runs/a"


def test_hub(hub: hub_store.Hub) -> None:
    code, found = look(URL, hub.environment)
    # Without credentials for its S3 gateway it has no create-if-absent.
    assert (code, verdicts(found)) == (0, {"race": "warning"}), found
    assert found["race"]["figures"]["exclusive"] is False
    assert "HF_S3_ACCESS_KEY_ID" in found["race"]["mend"]
    assert found["credentials"]["figures"] == {"source": "$HF_TOKEN"}
    assert "clean-up" not in found


def test_hub_with_its_gateway(hub: hub_store.Hub) -> None:
    gateway = {
        "HF_S3_ENDPOINT": f"{hub.endpoint}/s3",
        "HF_S3_ACCESS_KEY_ID": hub.options()["s3_key"],
        "HF_S3_SECRET_ACCESS_KEY": "any-secret-will-do",
    }
    code, found = look(URL, {**hub.environment, **gateway})
    assert (code, verdicts(found)) == (0, {}), found
    assert found["race"]["figures"] == {"writers": 16, "winners": 1, "exclusive": True}


def test_hub_with_a_token_that_may_only_read(hub: hub_store.Hub) -> None:
    environment = {**hub.environment, "HF_TOKEN": "hf_may_only_read"}
    code, found = look(URL, environment, "--keep-going")
    assert (code, verdicts(found)) == (4, {"put": "failed"})
    assert (found["put"]["kind"], found["credentials"]["verdict"]) == ("access", "ok")
    assert "--read-only" in found["put"]["mend"]
    assert look(URL, environment, "--read-only")[0] == 0


def test_hub_with_the_wrong_token_or_none(hub: hub_store.Hub) -> None:
    for token in ("hf_wrong", ""):
        code, found = look(URL, {**hub.environment, "HF_TOKEN": token})
        assert (code, verdicts(found)) == (4, {"credentials": "failed"})
        assert "HF_TOKEN" in found["credentials"]["said"]


def test_hub_that_fails_on_the_way(hub: hub_store.Hub) -> None:
    """What cannot be removed is named; a doctor who comes a day later removes it."""
    hub.fault("status", "/batch", code=503, times=1000, after=2)
    try:
        code, found = look(URL, {**hub.environment, "DELTA_SYNC_STORE_DEADLINE": "3"})
    finally:
        hub.clear_faults()
    assert (code, verdicts(found)) == (4, {"race": "failed", "clean-up": "warning"})
    assert found["race"]["kind"] in ("unavailable", "deadline")
    assert [key.rpartition("-")[2] for key in found["clean-up"]["figures"]["left"]] == ["small", "once"]
