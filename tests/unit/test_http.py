"""The HTTP routes on a real application and a real receiver service that patches a plain module."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.modules import FusedModel, ModulePort, checkpoint_tensors, save_base
from trainer_side import Publisher
from vllm_delta_sync.config import Settings
from vllm_delta_sync.engine import http
from vllm_delta_sync.engine.service import ReceiverService

HERE, ELSEWHERE = ("127.0.0.1", 50000), ("192.0.2.7", 50000)


class Site:
    """A run, a service that follows it, and the application in front of it."""

    def __init__(self, root: Path) -> None:
        self.tensors = checkpoint_tensors()
        base = save_base(root / "base", self.tensors)
        self.publisher = Publisher(lambda: self.tensors.items(), root / "run", base, notice="tcp://127.0.0.1:*")  # type: ignore[arg-type]
        model = FusedModel()
        model.load_weights((name, tensor.bfloat16()) for name, tensor in self.tensors.items())
        settings = Settings(
            bucket=str(root / "run"), notice=self.publisher.notice_address, poll_seconds=30, policy="follow"
        )
        self.service = ReceiverService(ModulePort(model), settings)
        self.app = FastAPI()
        http.attach(self.app)

        @self.app.get("/v1/completions")
        async def completions() -> dict[str, str]:
            return {"text": "x"}

        self.app.state.delta_sync = self.service
        self.app.state.delta_sync_token = None

    def client(self, address: tuple[str, int] = HERE) -> TestClient:
        return TestClient(self.app, client=address)

    def publish(self, step: int) -> None:
        self.tensors["q.weight"] = self.tensors["q.weight"] + 0.01
        self.publisher.publish(step=step, wait=True)
        self.publisher.flush()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.service.stop()
    site.publisher.close()


def test_notice_wakes_a_follower_that_polls_rarely(site: Site) -> None:
    site.service.start()
    client = site.client()
    assert client.get("/delta_sync/wait", params={"version": 0, "timeout": 20}).status_code == 200
    time.sleep(1.0)  # a subscription takes effect some time after connecting
    site.publish(1)
    began = time.monotonic()
    response = client.get("/delta_sync/wait", params={"version": 1, "timeout": 20})
    assert response.status_code == 200
    assert time.monotonic() - began < 15
    status = response.json()
    assert status["served"]["version"] == 1
    assert status["lag"] == 0
    assert status["state"] == "idle"
    assert status["timings_ms"].keys() >= {"fetch", "decode", "route", "pause", "commit", "resume"}


def test_polling_alone_is_enough(site: Site) -> None:
    settings = Settings(bucket=site.service.receiver.settings.bucket, poll_seconds=0.05)
    polling = ReceiverService(site.service.receiver.port, settings)
    site.app.state.delta_sync = polling
    polling.start()
    site.publish(1)
    assert site.client().get("/delta_sync/wait", params={"version": 1, "timeout": 20}).status_code == 200
    polling.stop()


def test_header_names_the_version_at_admission(site: Site) -> None:
    client = site.client()
    assert "x-delta-sync-version" not in client.get("/v1/completions").headers
    site.service.start()
    client.get("/delta_sync/wait", params={"version": 0, "timeout": 20})
    assert client.get("/v1/completions").headers["x-delta-sync-version"] == "0"


def test_wait_is_late(site: Site) -> None:
    response = site.client().get("/delta_sync/wait", params={"version": 5, "timeout": 0.05})
    assert response.status_code == 408
    assert response.json()["served"] is None


@pytest.mark.parametrize("path", ["/delta_sync/sync", "/delta_sync/verify"])
def test_who_may_change_state(site: Site, path: str) -> None:
    site.service.start()
    site.client().get("/delta_sync/wait", params={"version": 0, "timeout": 20})
    assert site.client().post(path).status_code == 200
    assert site.client(("::1", 1)).post(path).status_code == 200
    refused = site.client(ELSEWHERE).post(path)
    assert refused.status_code == 403
    assert refused.json()["error"]["kind"] == "forbidden"
    assert site.client().post(path, headers={"Origin": "http://localhost"}).status_code == 403
    site.app.state.delta_sync_token = "secret"
    assert site.client().post(path).status_code == 401
    assert site.client().post(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert site.client(ELSEWHERE).post(path, headers={"Authorization": "Bearer secret"}).status_code == 200
    assert site.client(ELSEWHERE).get("/delta_sync/status").status_code == 200


def test_errors_have_kind_and_code(site: Site) -> None:
    client = site.client()
    site.service.start()
    client.get("/delta_sync/wait", params={"version": 0, "timeout": 20})
    missing = client.post("/delta_sync/sync", json={"version": 7})
    assert missing.status_code == 404
    assert missing.json()["error"]["kind"] == "not_found"
    assert client.post("/delta_sync/sync", json={"version": -1}).status_code == 422
