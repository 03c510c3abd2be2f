"""``delta-sync doctor --server`` on vLLM servers: with every protection, and without the plugin."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.siege.world import Siege

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("signed")]


def doctor(url: str, server: str, *flags: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and findings by check."""
    program = str(Path(sys.executable).with_name("delta-sync"))
    command = [program, "doctor", "--bucket", url, "--server", server, "--bytes", "1000000", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout, done.stderr
    return done.returncode, {row["check"]: row for row in json.loads(done.stdout)["data"]["findings"]}


def bad(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What is not well; how fast this machine is just now does not matter."""
    rows = {name: row["verdict"] for name, row in found.items() if name != "throughput"}
    return {name: verdict for name, verdict in rows.items() if verdict not in ("ok", "skipped")}


def test_the_doctor_finds_nothing_wrong(siege: Siege) -> None:
    head = siege.fresh()["version"]
    code, found = doctor(str(siege.run), siege.server.url, "--trusted-keys", f"{siege.canaries.signing_key}.pub")
    assert (code, bad(found)) == (0, {}), found
    assert found["server"]["figures"] == {"health": 200, "models": ["tiny"], "api_key": False}
    assert found["state"]["figures"]["state"] in ("idle", "verifying")
    assert found["same run"]["figures"]["run"] == siege.run_id
    assert found["lag"]["figures"] == {"served": head, "head": head, "lag": 0}
    assert found["notice"]["figures"]["heard_seconds"] is not None
    assert siege.canaries.in_text(json.dumps(found)) == []
    # It has changed nothing there.
    status = siege.server.wait_idle()
    assert status["served"]["version"] == head
