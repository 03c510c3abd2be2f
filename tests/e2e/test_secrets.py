"""A real server with every secret that it can have: none of them is anywhere but where it was put."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.servers import Server, delta_sync_serve, end_group, serving
from tests.e2e.test_doctor import bad, doctor
from tests.security.canaries import Canaries
from tests.support.tiny import make_model, save_checkpoint, train_steps
from trainer_side import Publisher
from vllm_delta_sync import __version__
from vllm_delta_sync.admin_token import DIGEST_VARIABLE, VARIABLE
from vllm_delta_sync.engine import compat

pytestmark = pytest.mark.e2e


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


@dataclass
class Guarded:
    """A server with every secret, the trainer that it follows, and their files below ``folder``."""

    folder: Path
    canaries: Canaries
    publisher: Publisher
    server: Server

    @property
    def url(self) -> str:
        return str(self.folder / "run")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Version 1 is served."""
    folder = tmp_path_factory.mktemp("guarded")
    canaries = Canaries(folder / "secrets")
    model = make_model("qwen3")
    base = save_checkpoint(model, folder / "base")
    with Publisher(
        model,
        bucket=str(folder / "run"),
        base=base,
        notice="tcp://127.0.0.1:*",
        signing_key=canaries.signing_key,
        notice_key=canaries.server_key,
        notice_allowed=Path(f"{canaries.notice_key}.pub"),
    ) as publisher:
        command = delta_sync_serve(
            base,
            *("--bucket", str(folder / "run")),
            *("--notice", str(publisher.notice_address)),
            *("--notice-key", str(canaries.notice_key)),
            *("--notice-server-key", f"{canaries.server_key}.pub"),
            *("--trusted-keys", f"{canaries.signing_key}.pub"),
            *("--state-dir", str(folder / "state")),
            *("--poll-seconds", "0.5"),
        )
        environment = {VARIABLE: canaries.token, "VLLM_LOGGING_LEVEL": "DEBUG"}
        with serving(base, folder / "server.log", command, environment, cold=True) as server:
            server.wait_served(0)
            next(train_steps(model, lr=3e-5))
            publisher.publish(step=1, wait=True)
            server.wait_served(1)
            yield Guarded(folder, canaries, publisher, server)


def test_the_doctor_finds_nothing_wrong(guarded: Guarded, tmp_path: Path) -> None:
    server = guarded.server
    code, found = doctor(guarded.url, server.url, "--trusted-keys", f"{guarded.canaries.signing_key}.pub")
    assert (code, bad(found)) == (0, {}), found
    assert found["server"]["figures"] == {"health": 200, "models": ["tiny"], "api_key": False}
    assert found["state"]["figures"]["state"] in ("idle", "verifying")
    assert found["routes"]["figures"]["ranks"] == 1
    assert found["routes"]["figures"]["tensors"] > 10
    assert found["same run"]["figures"]["run"] == guarded.publisher.run
    assert found["lag"]["figures"] == {"served": 1, "head": 1, "lag": 0}
    assert found["versions"]["figures"] == {
        "vllm": compat.distribution_version()[1],
        "torch": found["versions"]["figures"]["torch"],
        "vllm_delta_sync": __version__,
        "tested": True,
        "here": __version__,
    }
    assert found["notice"]["figures"]["heard_seconds"] is not None
    assert found["admin"]["figures"] == {"status": 401, "token": True}
    assert guarded.canaries.in_text(json.dumps(found)) == []
    # It has changed nothing there.
    assert server.status()["state"] == "idle"
    assert server.status()["served"]["version"] == 1
    other = str(tmp_path / "other")
    with Publisher(make_model("qwen3"), bucket=other, base=guarded.folder / "base"):
        code, found = doctor(other, server.url, "--keep-going")
    assert (code, bad(found)) == (1, {"same run": "failed"})


def test_server_with_secrets(guarded: Guarded) -> None:
    check_routes(guarded.server, guarded.canaries)
    check_processes(guarded.server, guarded.canaries)
    end_group(guarded.server.process)
    text = guarded.server.log.read_text()
    assert "non-default args" in text
    assert "following" in text
    assert guarded.canaries.in_text(text) == []
    for folder in ("run", "state", "base"):
        for path in (guarded.folder / folder).rglob("*"):
            assert not path.is_file() or guarded.canaries.in_bytes(path.read_bytes()) == [], path


def check_routes(server: Server, canaries: Canaries) -> None:
    """The token counts, and no answer has it or another secret; vLLM's own routes about itself included."""
    right = {"Authorization": f"Bearer {canaries.token}"}
    answers = {
        "right": server.post("/delta_sync/hold", headers=right),
        "again": server.post("/delta_sync/release", headers=right),
        "without": server.post("/delta_sync/hold"),
        "wrong": server.post("/delta_sync/hold", headers={"Authorization": f"Bearer {canaries.token}x"}),
        "missing version": server.post("/delta_sync/sync", {"version": 99}, headers=right),
        "unknown field": server.post("/delta_sync/sync", {canaries.url: canaries.token}, headers=right),
        "no version": server.post("/delta_sync/sync", {"version": canaries.url}, headers=right),
        "large": server.post("/delta_sync/sync", {"version": "x" * 100_000}, headers=right),
        "page": server.post("/delta_sync/hold", headers={**right, "Origin": "http://evil.example"}),
        "status": server.get("/delta_sync/status"),
        "late": server.get("/delta_sync/wait", params={"version": 99, "timeout": 0}),
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
