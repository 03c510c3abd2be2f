"""``delta-sync doctor --server`` on a vLLM server with every protection."""

import json

import pytest

from tests.e2e.siege.world import Siege
from tests.support.commands import answer

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("signed")]


def test_the_doctor_finds_nothing_wrong(siege: Siege) -> None:
    head = siege.fresh()["version"]
    flags = ("--trusted-keys", f"{siege.canaries.signing_key}.pub", "--bytes", 1_000_000)
    findings = answer("doctor", "--bucket", siege.run, "--server", siege.server.url, *flags)["findings"]
    found = {row["check"]: row for row in findings}
    # How fast this machine is just now does not matter.
    bad = [row for row in findings if row["check"] != "throughput" and row["verdict"] not in ("ok", "skipped")]
    assert bad == []
    assert found["server"]["figures"] == {"health": 200, "models": ["tiny"], "api_key": False}
    assert found["state"]["figures"]["state"] in ("idle", "verifying")
    assert found["same run"]["figures"]["run"] == siege.run_id
    assert found["lag"]["figures"] == {"served": head, "head": head, "lag": 0}
    assert found["notice"]["figures"]["heard_seconds"] is not None
    assert siege.canaries.in_text(json.dumps(found)) == []
    # It has changed nothing there.
    status = siege.server.wait_idle()
    assert status["served"]["version"] == head
