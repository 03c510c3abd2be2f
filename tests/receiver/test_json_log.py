"""Log lines as JSON: stable fields, no secrets, one line each, from servers and publishers; text is unchanged."""

import io
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import process
from tests.support.running import run_python
from tests.support.world import World
from vllm_delta_sync.logs import log_as_json

ALWAYS = {"time", "level", "logger", "event", "message"}
ABOUT_A_VERSION = {*ALWAYS, "version", "step", "run", "bytes", "changed", "timings_ms"}
PUBLISH = """
import sys, torch
from trainer_side import Publisher
weights = {"w": torch.zeros(1000)}
with Publisher(weights, bucket=sys.argv[1]) as publisher:
    weights["w"][:10] = 1
    publisher.publish(step=7, wait=True)
"""


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What the server's logger writes as JSON; afterwards it is as before."""
    logger, stream = logging.getLogger("vllm.delta_sync"), io.StringIO()
    before = list(logger.handlers), logger.propagate, logger.level
    log_as_json(logger.name, stream=stream, level=logging.INFO)
    log_as_json(logger.name, stream=stream, level=logging.INFO)
    yield stream
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_every_change_of_the_weights_is_one_object_with_its_figures(tmp_path: Path, stream: io.StringIO) -> None:
    world = World(tmp_path)
    world.receiver.advance()
    world.train_and_follow(480)
    (commit,) = world.receiver.status()["recent"]
    world.receiver.rollback(0)
    world.model.norm.data.mul_(2)
    world.receiver.verify()
    world.receiver.repair()
    found = [line for line in lines(stream.getvalue()) if line["event"] != "log"]
    assert [(line["event"], line["version"]) for line in found] == [("served", 1), ("rolled_back", 0), ("repaired", 0)]
    assert all(line.keys() == ABOUT_A_VERSION for line in found)
    assert {line["run"] for line in found} == {world.receiver.run_id}
    assert (found[0]["step"], found[0]["bytes"], found[0]["changed"]) == (
        480,
        commit["payload_bytes"],
        commit["changed"],
    )
    assert found[0]["timings_ms"].items() <= commit["timings_ms"].items()
    assert found[0]["message"].startswith("version 1 (step 480) served: ")
    assert abs((datetime.now(UTC) - datetime.fromisoformat(found[0]["time"])).total_seconds()) < 3600


def test_other_lines_and_tracebacks_are_one_object_without_secrets(stream: io.StringIO) -> None:
    logger = logging.getLogger("vllm.delta_sync")
    logger.warning("two\nlines of %s", "s3://me:password1@host/run")
    try:
        raise ValueError("token=abcdef123456")
    except ValueError:
        logger.exception("failed")
    first, second = lines(stream.getvalue())
    assert first.keys() == ALWAYS
    assert (first["level"], first["event"], first["message"]) == ("WARNING", "log", "two\nlines of s3://host/run")
    assert second.keys() == {*ALWAYS, "exception"}
    assert second["exception"].startswith("Traceback")
    assert "abcdef123456" not in second["exception"]


def test_a_publisher_logs_each_version_on_request(tmp_path: Path) -> None:
    done = run_python("-c", PUBLISH, str(tmp_path / "run"), environment={"DELTA_SYNC_LOG_FORMAT": "json"})
    (line,) = (line for line in lines(done.stderr) if line["event"] == "published")
    assert line.keys() == ABOUT_A_VERSION
    assert (line["version"], line["step"], line["changed"], line["level"]) == (1, 7, 10, "INFO")
    assert line["timings_ms"].keys() == {"diff", "encode", "upload", "total"}
    assert line["bytes"] > 0


def test_a_publisher_of_folders_does_so_before_it_has_published_any(tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-1" / "model.safetensors").write_bytes(b"half")
    arguments = ("--watch", tmp_path / "out", "--bucket", tmp_path / "run", "--once", "--poll", "0.05")
    done = process("publish", *arguments, "--json", DELTA_SYNC_LOG_FORMAT="json")
    assert done.code == 1
    (line,) = map(json.loads, done.err.splitlines())
    assert (line["level"], line["event"]) == ("WARNING", "log")
    assert line["message"].startswith("checkpoint-1 is not published: ")
