"""A run, a service that follows it, and our routes in front of it: in the process, or on a real socket."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.support.modules import FusedModel, ModulePort, checkpoint_tensors, save_base
from tests.support.services import wait_until
from trainer_side import Publisher
from vllm_delta_sync.admin_token import AdminToken
from vllm_delta_sync.engine.api import routes as http
from vllm_delta_sync.engine.api.live_page import LivePage
from vllm_delta_sync.engine.api.shared_objects import SharedObjects
from vllm_delta_sync.engine.follow.service import ReceiverService
from vllm_delta_sync.settings import Settings

HERE, ELSEWHERE = ("127.0.0.1", 50000), ("192.0.2.7", 50000)
SECONDS = 120
TOKEN = "correct-horse-battery-staple"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
CHANGING = ("sync", "rollback", "target", "hold", "release", "verify")
"""Every route that changes state."""


class Site:
    """A world with an application. Until the service serves, what is asked of it is noted, and answered with nothing.

    Attributes:
        asked: actions that routes handed on to the service.

    Args:
        publishing: further arguments of the publisher. settings: further settings of the service.
    """

    def __init__(self, root: Path, publishing: dict[str, Any] | None = None, **settings: Any) -> None:
        self.tensors = checkpoint_tensors()
        base = save_base(root / "base", self.tensors)
        chosen: dict[str, Any] = {"notice": "tcp://127.0.0.1:*", **(publishing or {})}
        self.publisher = Publisher(lambda: self.tensors.items(), str(root / "run"), base, **chosen)  # type: ignore[arg-type]
        model = FusedModel()
        model.load_weights((name, tensor.bfloat16()) for name, tensor in self.tensors.items())
        followed: dict[str, Any] = {"notice": self.publisher.notice_address, "poll_seconds": 30, **settings}
        self.settings = Settings(bucket=str(root / "run"), **followed)
        self.port = ModulePort(model)
        self.service = ReceiverService(self.port, self.settings)
        self.asked: list[str] = []
        hand_on = self.service.request

        def note(action: str, argument: Any = None) -> "Future[Any]":
            self.asked.append(action)
            if self.service.receiver.served_version is not None:
                return hand_on(action, argument)
            nothing: Future[Any] = Future()
            nothing.set_result({})
            return nothing

        self.service.request = note  # type: ignore[method-assign]
        self.app = FastAPI()
        http.attach(self.app)

        @self.app.get("/v1/completions")
        async def completions() -> dict[str, str]:
            return {"text": "x"}

        self.app.state.delta_sync = self.service
        self.app.state.delta_sync_token = None
        self.app.state.delta_sync_objects = SharedObjects(self.settings)
        self.app.state.delta_sync_pages = {None: LivePage(self.settings)}

    def set_token(self) -> None:
        self.app.state.delta_sync_token = AdminToken.of(TOKEN, "test")

    def client(self, address: tuple[str, int] = HERE) -> TestClient:
        return TestClient(self.app, base_url="http://127.0.0.1:8000", client=address)

    def serve(self) -> None:
        """Start the service, and wait until it serves."""
        self.service.start()
        if self.settings.policy == "manual":
            # Until it has looked it says that nothing comes by itself.
            wait_until(lambda: self.service.receiver.served_version is not None)
        assert self.client().get("/delta_sync/wait", params={"version": 0, "timeout": SECONDS}).status_code == 200

    def publish(self, step: int) -> None:
        self.tensors["q.weight"] = self.tensors["q.weight"] + 0.01
        self.publisher.publish(step=step, wait=True)
        self.publisher.flush()

    def end(self) -> None:
        self.service.stop()
        self.publisher.close()

    def was_changed(self) -> bool:
        """Whether a request got through that would change state."""
        return bool(self.asked)


@contextmanager
def listening(app: FastAPI, host: str = "127.0.0.1") -> Iterator[int]:
    """The port of a real server, as vLLM runs it, on all the machine's addresses or on one."""
    with socket.create_server((host, 0)) as opened:
        port: int = opened.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([opened],))
        thread.start()
        try:
            yield port
        finally:
            server.should_exit = True
            server.force_exit = True
            thread.join(120)


def exchange(port: int, request: bytes, host: str = "127.0.0.1", timeout: float = 120) -> bytes:
    """Send bytes as they are; what comes back until the server closes, or the answer is whole."""
    with socket.create_connection((host, port), timeout) as connection:
        connection.sendall(request)
        return read_answer(connection)


def read_answer(connection: socket.socket) -> bytes:
    found = b""
    while b"\r\n\r\n" not in found:
        chunk = connection.recv(65536)
        if not chunk:
            return found
        found += chunk
    head, _, body = found.partition(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            while len(body) < int(value):
                chunk = connection.recv(65536)
                if not chunk:
                    break
                body += chunk
    return head + b"\r\n\r\n" + body


def code_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def request_bytes(path: str, method: str = "POST", http: str = "1.1", **headers: str) -> bytes:
    """A request with the headers given alone; ``_`` in their names is ``-``."""
    lines = [f"{method} {path} HTTP/{http}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
