"""The TRL example in short: the whole script, with TRL's own trainer and worker and two real vLLM servers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "examples" / "trl_async.py"
STEPS = 4
SECONDS = 1200


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_example_holds_and_its_files_say_so(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(SCRIPT), "--steps", str(STEPS), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    summary, details, history = (read(out / f"{name}.json") for name in ("summary", "details", "log_history"))
    assert set(summary["verdict"].values()) == {True}
    assert len(set(details["fingerprints"].values())) == 1
    assert details["compared_tokens"] > 30
    assert summary["versions"] == STEPS + 1
    assert 0 < summary["payload_bytes"] < summary["full_bytes"]
    changed = [line["delta_sync/changed_percent"] for line in history if "delta_sync/version" in line]
    assert changed[0] == 0, "before the first step nothing has changed"
    assert all(percent > 0 for percent in changed[1:])
    # The first step trains version 1, on answers of version 0 or 1, whose bits are the same.
    lags = [step["lag"] for step in details["steps"]]
    assert len(lags) == STEPS
    assert 0 <= lags[0] <= 1
    assert min(lags) >= 0
    assert details["pauses_ms"][str(STEPS + 1)] > 0
    assert (out / "trl.png").stat().st_size > 10_000
