"""A real server with every secret that it can have: none of them is anywhere but where it was put."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.servers import Server
from tests.e2e.siege.world import Siege
from tests.security.canaries import Canaries
from tests.support import commands
from vllm_delta_sync.admin_token import DIGEST_VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("signed")]


def shown_by_the_kernel(process: int) -> Iterator[tuple[str, bytes]]:
    """Arguments, environment, and titles of a process and its threads."""
    folder = Path(f"/proc/{process}")
    for path in [folder / "cmdline", folder / "environ", *folder.glob("task/*/comm")]:
        try:
            yield str(path), path.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue


def test_server_with_secrets(siege: Siege) -> None:
    check_routes(siege.server, siege.canaries)
    check_processes(siege.server, siege.canaries)
    text = siege.server.log.read_text()
    assert "non-default args" in text
    assert "following" in text
    assert siege.leaks() == []


def check_routes(server: Server, canaries: Canaries) -> None:
    """The token counts, and no answer has it or another secret; vLLM's own routes about itself included."""
    right = {"Authorization": f"Bearer {canaries.token}"}
    answers = {
        "right": (200, server.post("/delta_sync/hold", headers=right)),
        "again": (200, server.post("/delta_sync/release", headers=right)),
        "without": (401, server.post("/delta_sync/hold")),
        "wrong": (401, server.post("/delta_sync/hold", headers={"Authorization": f"Bearer {canaries.token}x"})),
        "missing version": (404, server.post("/delta_sync/sync", {"version": 9999}, headers=right)),
        "unknown field": (400, server.post("/delta_sync/sync", {canaries.url: canaries.token}, headers=right)),
        "no version": (400, server.post("/delta_sync/sync", {"version": canaries.url}, headers=right)),
        "large": (413, server.post("/delta_sync/sync", {"version": "x" * 100_000}, headers=right)),
        "page": (403, server.post("/delta_sync/hold", headers={**right, "Origin": "http://evil.example"})),
        "status": (200, server.get("/delta_sync/status")),
        "late": (408, server.get("/delta_sync/wait", params={"version": 9999, "timeout": 0})),
        "parameter": (400, server.get("/delta_sync/wait", params={"version": "x"})),
        "no route": (404, server.get("/delta_sync/nothing")),
    }
    for name, (code, answer) in answers.items():
        assert (name, answer.status_code) == (name, code)
        assert answer.headers["content-type"] == "application/json"
        if name != "no route":
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["x-content-type-options"] == "nosniff"
    others = [server.get(path) for path in ("/metrics", "/openapi.json", "/version", "/v1/models", "/health", "/docs")]
    for answer in [*(answer for _, answer in answers.values()), *others]:
        assert canaries.in_text(answer.text + str(answer.headers)) == [], answer.url


def check_processes(server: Server, canaries: Canaries) -> None:
    """Arguments, environments and titles of the API server, the engine and everything they started."""
    family = server.pids()
    assert len(family) >= 2, "the engine is a process of its own"
    for process in family:
        for where, data in shown_by_the_kernel(process):
            assert canaries.in_bytes(data) == [], where
    environments = [Path(f"/proc/{process}/environ").read_bytes() for process in family]
    assert any(DIGEST_VARIABLE.encode() in data for data in environments)


def test_the_doctor_finds_nothing_wrong(siege: Siege) -> None:
    """On a server with every protection."""
    head = siege.fresh()["version"]
    flags = ("--trusted-keys", f"{siege.canaries.signing_key}.pub", "--bytes", 1_000_000)
    findings = commands.answer("doctor", "--bucket", siege.run, "--server", siege.server.url, *flags)["findings"]
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
