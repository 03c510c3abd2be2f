"""One of several API servers, without the HTTP.

Run as ``python -m tests.support.api_server BASE RUN FOLDER INDEX COUNT``.

Each has an engine of its own, of torch modules. Reads requests from standard input, one a line, and answers each with a
line: ``{"action": "status"}``, ``{"action": "stop"}`` (vLLM begins to stop this server) or what ReceiverService.request
takes, as JSON.
"""

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.support.modules import FusedModel, ModulePort
from vllm_delta_sync.engine.api.api_servers import ApiServerGroup, LeaderElection, error_answer
from vllm_delta_sync.engine.follow.service import ReceiverService
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.settings import Settings


async def serve(base: str, url: str, siblings: ApiServerGroup) -> None:
    model = FusedModel()
    model.load_weights(load_file(Path(base) / "model.safetensors").items())
    settings = Settings(bucket=url, poll_seconds=0.05)
    stopping = threading.Event()
    controller = LeaderElection(lambda: ReceiverService(ModulePort(model), settings), siblings, stopping)
    await controller.start()
    print(json.dumps({"ready": siblings.index}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        if asked["action"] == "stop":
            stopping.set()
            print("{}", flush=True)
        else:
            print(json.dumps(await answer(controller, **asked)), flush=True)


async def answer(controller: LeaderElection, action: str, argument: Any = None) -> Any:
    try:
        if action == "status":
            return {**controller.receiver.status(), "seen": controller.receiver.served_version}
        return await asyncio.wrap_future(controller.request(action, argument))
    except DeltaSyncError as error:
        return error_answer(error)


if __name__ == "__main__":
    base, url, folder, index, count = sys.argv[1:]
    asyncio.run(serve(base, url, ApiServerGroup(Path(folder), int(index), int(count))))
