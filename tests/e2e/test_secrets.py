"""A real server with every secret that it can have: none of them is anywhere but where it was put."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.servers import Server
from tests.e2e.siege.world import Siege
from tests.security.canaries import Canaries
from vllm_delta_sync.admin_token import DIGEST_VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("signed")]


def family_of(server: Server) -> list[int]:
    """Ids of all processes of the server's group."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                group = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[2])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if group == server.process.pid:
                found.append(int(folder.name))
    return found


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
        "right": server.post("/delta_sync/hold", headers=right),
        "again": server.post("/delta_sync/release", headers=right),
        "without": server.post("/delta_sync/hold"),
        "wrong": server.post("/delta_sync/hold", headers={"Authorization": f"Bearer {canaries.token}x"}),
        "missing version": server.post("/delta_sync/sync", {"version": 9999}, headers=right),
        "unknown field": server.post("/delta_sync/sync", {canaries.url: canaries.token}, headers=right),
        "no version": server.post("/delta_sync/sync", {"version": canaries.url}, headers=right),
        "large": server.post("/delta_sync/sync", {"version": "x" * 100_000}, headers=right),
        "page": server.post("/delta_sync/hold", headers={**right, "Origin": "http://evil.example"}),
        "status": server.get("/delta_sync/status"),
        "late": server.get("/delta_sync/wait", params={"version": 9999, "timeout": 0}),
        "parameter": server.get("/delta_sync/wait", params={"version": "x"}),
        "no route": server.get("/delta_sync/nothing"),
    }
    codes = {name: answer.status_code for name, answer in answers.items()}
    assert codes == {
        "right": 200,
        "again": 200,
        "without": 401,
        "wrong": 401,
        "missing version": 404,
        "unknown field": 400,
        "no version": 400,
        "large": 413,
        "page": 403,
        "status": 200,
        "late": 408,
        "parameter": 400,
        "no route": 404,
    }
    for name, answer in answers.items():
        assert answer.headers["content-type"] == "application/json"
        if name != "no route":
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["x-content-type-options"] == "nosniff"
    others = [server.get(path) for path in ("/metrics", "/openapi.json", "/version", "/v1/models", "/health", "/docs")]
    for answer in [*answers.values(), *others]:
        assert canaries.in_text(shown(answer)) == [], answer.url


def shown(answer: httpx.Response) -> str:
    return answer.text + str(answer.headers)


def check_processes(server: Server, canaries: Canaries) -> None:
    """Arguments, environments and titles of the API server, the engine and everything they started."""
    family = family_of(server)
    assert len(family) >= 2, "the engine is a process of its own"
    for process in family:
        for where, data in shown_by_the_kernel(process):
            assert canaries.in_bytes(data) == [], where
    environments = [Path(f"/proc/{process}/environ").read_bytes() for process in family]
    assert any(DIGEST_VARIABLE.encode() in data for data in environments)
