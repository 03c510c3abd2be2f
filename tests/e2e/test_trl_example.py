"""The TRL example in short: the whole command, with TRL's own trainer and worker and two real vLLM servers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 4
SECONDS = 900


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the example has written."""
    out = tmp_path_factory.mktemp("trl") / "out"
    command = [sys.executable, "-m", "examples.trl_async", "--steps", str(STEPS), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "✗" not in done.stdout
    return out


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_server_holds_the_trainers_weights_and_answers_like_a_fresh_one(out: Path) -> None:
    details = read(out / "details.json")
    assert set(read(out / "summary.json")["verdict"].values()) == {True}
    assert len(set(details["fingerprints"].values())) == 1
    assert details["compared_tokens"] > 30


def test_each_weight_sync_is_a_version_and_in_trls_log(out: Path) -> None:
    history = read(out / "log_history.json")
    versions = [line for line in history if "delta_sync/version" in line]
    assert [line["delta_sync/version"] for line in versions] == list(range(1, STEPS + 2))
    assert versions[0]["delta_sync/changed_percent"] == 0, "before the first step nothing has changed"
    assert all(line["delta_sync/changed_percent"] > 0 for line in versions[1:])
    learnt = [line for line in history if "reward" in line]
    assert len(learnt) == STEPS
    assert all(line["perf/weight_sync_s"] > 0 for line in learnt)
    summary = read(out / "summary.json")
    assert summary["versions"] == STEPS + 1
    assert 0 < summary["payload_bytes"] < summary["full_bytes"]


def test_staleness_comes_from_the_spans_of_the_answers(out: Path) -> None:
    steps = read(out / "details.json")["steps"]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    # The first step trains version 1, on answers of version 0 or 1, whose bits are the same.
    assert 0 <= steps[0]["lag"] <= 1
    assert all(step["lag"] >= 0 for step in steps)
    pauses = read(out / "details.json")["pauses_ms"]
    assert str(STEPS + 1) in pauses
    assert all(pause > 0 for pause in pauses.values())
    assert (out / "trl.png").stat().st_size > 10_000
