"""Versions named by optimizer step or by age: the newest that fits, whatever order steps and clocks have."""

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.support.commands import answer, delta_sync, envelope, kind
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.cli.main import parse
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import NotFoundError, UsageError
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.manifest import version_key
from vllm_delta_sync.maintenance.follow import follow

# Of version 0, 1 …: a training that went back to step 20, and a clock that went back by an hour at version 3.
STEPS = (0, 10, 20, 30, 20, 25, 40)
HOURS_AGO = (50, 49, 30, 31, 3, 2, 0.5)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("names") / "run")
    now = datetime.now(UTC)
    tensors = {"w": torch.zeros(8)}
    moments = [timestamp(now - timedelta(hours=hours)) for hours in HOURS_AGO]
    with (
        mock.patch("trainer_side.writer.timestamp", side_effect=moments),
        Publisher(tensors, bucket=url) as publisher,
    ):
        for step in STEPS[1:]:
            tensors["w"] += 1
            publisher.publish(step=step, wait=True)
    return url


@pytest.fixture
def run(url: str) -> Iterator[Run]:
    with open_run(url) as run:
        yield run


def test_step_is_the_newest_version_of_that_step_or_refused_with_its_neighbours(run: Run) -> None:
    assert [run.resolve(f"step:{step}").version for step in (0, 10, 20, 30, 25, 40)] == [0, 1, 4, 3, 5, 6]
    for step, neighbours in (
        (22, "version 5 (step 25) and version 4 (step 20)"),
        (41, "version 6 (step 40)"),
        (10**17, "version 6 (step 40)"),
    ):
        with pytest.raises(NotFoundError, match=f"no version was published at step {step}; the nearest: ") as refused:
            run.resolve(f"step:{step}")
        assert refused.value.message.endswith(neighbours)


def test_ago_is_the_newest_version_that_is_so_old(run: Run) -> None:
    found = {span: run.resolve(f"ago:{span}").version for span in ("1m", "1h", "2.5h", "1d", "31h", "2d", "180000")}
    assert found == {"1m": 6, "1h": 5, "2.5h": 4, "1d": 3, "31h": 3, "2d": 1, "180000": 0}
    for older in ("3d", "999999999d"):
        with pytest.raises(NotFoundError, match=f"no version is {older} old: version 0 was published at "):
            run.resolve(f"ago:{older}")


def test_names_that_are_none(run: Run, url: str, tmp_path: Path) -> None:
    steps = ("step:", "step:-1", "step:x", "Step:1")
    for wrong in (*steps, "ago:", "ago:h", "ago:-1h", "ago:1w", "ago:1h1m", "ago:٣h", "1h"):
        with pytest.raises(UsageError, match="give a number, head~N, tag:NAME, step:N, ago:TIME"):
            run.resolve(wrong)
        assert kind(2, "inspect", "--bucket", url, "--version", wrong) == "usage"
    for moving in ("step:20", "ago:1h"):
        with pytest.raises(UsageError, match="moves with the head"):
            follow(url, tmp_path / "kept", moving)


def test_commands_take_them(url: str, tmp_path: Path) -> None:
    assert answer("export", "--bucket", url, "--version", "step:30", "--to", tmp_path / "export")["version"] == 3
    moved = answer("diff", "ago:1d", "step:40", "--bucket", url)
    assert (moved["old"]["version"], moved["new"]["version"]) == (3, 6)
    kept = answer("follow", "--bucket", url, "--version", "step:20", "--to", tmp_path / "kept")
    assert [row["version"] for row in kept["versions"]] == [4]


def test_last_takes_a_time(url: str) -> None:
    versions = {
        last: [row["version"] for row in answer("log", "--bucket", url, "--last", last)["versions"]]
        for last in ("1h", "2.5h", "1d", "7d", "999999999999999d", "2")
    }
    assert (versions.pop("7d"), versions.pop("999999999999999d")) == (list(range(7)), list(range(7)))
    assert versions == {"1h": [6], "2.5h": [5, 6], "1d": [4, 5, 6], "2": [5, 6]}
    stats = answer("stats", "--bucket", url, "--last", "1d")
    assert ([row["version"] for row in stats["versions"]], stats["read"]["manifests"]) == ([4, 5, 6], 5)
    for command in ("log", "stats"):
        refused = envelope(command, "--bucket", url, "--last", "1m", code=3)["error"]
        assert (refused["kind"], "version 6, is of 20" in refused["message"]) == ("not_found", True)
        for wrong in ("0", "0s", "-1", "1.5", "yesterday"):
            assert kind(2, command, "--bucket", url, "--last", wrong) == "usage"
    assert parse(["stats", "--bucket", url, "--last", "2h"]).last == timedelta(hours=2)


def test_a_lost_manifest_on_the_way_is_damage(url: str, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(url, copy)
    (copy / version_key(5)).unlink()
    for command in (["log", "--last", "1d"], ["stats", "--last", "1d"]):
        done = delta_sync(*command, "--bucket", copy)
        assert (done.code, done.err.split(": ")[1]) == (1, "not_found")
