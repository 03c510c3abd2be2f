"""The three-machines example in short: real vLLM, every part killed once, and the verdict on what is in the bucket."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.three_machines.machines import PREFIX, why_not
from examples.three_machines.settings import MACHINES, PARTS, PICTURE, SUMMARY, TABLES

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
VERSIONS = 10
SECONDS = 900


@pytest.mark.parametrize("network", ["auto", "loopback"])
def test_it_learns_from_a_bucket_and_goes_on_after_each_kill(network: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "examples.three_machines", "--versions", str(VERSIONS), "--warm-up", "10"]
    command += ["--network", network, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / SUMMARY).read_text())
    isolated = network == "auto" and not why_not()
    claims = {"weights_exact", "never_connected", "told_nothing", "went_on", "trained_once", "none_too_stale"}
    claims |= {"versions_explain_tokens"} | ({"no_way_between"} if isolated else set())
    assert summary["verdict"] == dict.fromkeys(claims, True)
    assert (summary["versions"], [kill["part"] for kill in summary["kills"]]) == (VERSIONS, list(PARTS))
    assert 0 < summary["payload_bytes"] < summary["full_bytes"] / 2
    assert summary["fresh_seconds"]["median"] > 0.05
    assert "seconds to fresh" in (out / TABLES).read_text()
    assert (out / PICTURE).stat().st_size > 10_000
    made = re.findall(rf"{PREFIX}-\d+-\w+", done.stdout)
    assert len(made) == (len(MACHINES) if isolated else 0)
    if isolated:
        left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=60, check=True).stdout
        assert not [name for name in made if name in left]
