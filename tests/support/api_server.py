"""One of several API servers, without the HTTP: a process with an engine of its own, of torch modules.

It reads requests from a pipe, and answers each: ``{"action": "status"}``, ``{"action": "stop"}`` (vLLM begins to stop
this server) or what ReceiverService.request takes.
"""

import asyncio
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.support.modules import FusedModel, ModulePort
from vllm_delta_sync.engine.api.api_servers import ApiServerGroup, LeaderElection
from vllm_delta_sync.engine.follow.service import ReceiverService
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.settings import Settings

CANNOT_START = "cannot-start"
"""The first process that finds this file where they meet removes it, and cannot start its receiver."""


def run(requests: Connection, base: Path, url: str, siblings: ApiServerGroup) -> None:
    """Answer requests until the other end of the pipe is closed."""
    with suppress(EOFError):
        asyncio.run(_serve(requests, base, url, siblings))


async def _serve(requests: Connection, base: Path, url: str, siblings: ApiServerGroup) -> None:
    model = FusedModel()
    model.load_weights(load_file(base / "model.safetensors").items())
    settings = Settings(bucket=url, poll_seconds=0.05)
    stopping = threading.Event()

    class Service(ReceiverService):
        def start(self) -> None:
            with suppress(FileNotFoundError):
                (siblings.folder / CANNOT_START).unlink()
                time.sleep(0.5)  # others connect meanwhile
                raise RuntimeError("can't start new thread")
            super().start()

    controller = LeaderElection(lambda: Service(ModulePort(model), settings), siblings, stopping)
    await controller.start()
    requests.send("ready")
    while True:
        asked = await asyncio.to_thread(requests.recv)
        if asked["action"] == "stop":
            stopping.set()
            requests.send(None)
        else:
            requests.send(await _answer(controller, **asked))


async def _answer(controller: LeaderElection, action: str, argument: Any = None) -> Any:
    try:
        if action == "status":
            return {**controller.receiver.status(), "seen": controller.receiver.served_version}
        return await asyncio.wrap_future(controller.request(action, argument))
    except DeltaSyncError as error:
        return {"error": {"kind": error.kind, "message": error.message}}
