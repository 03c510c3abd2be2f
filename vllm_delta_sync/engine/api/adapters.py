"""LoRA adapters that a server follows, each with a run of its own: ``make_adapter``, ``check_lora``, ``announce``,
``reserve_names``.

vLLM's API server knows an adapter once the first version of its run is served, and no longer than that.
"""

import asyncio
from hashlib import sha256
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException

from vllm_delta_sync.engine.api.api_servers import call_soon
from vllm_delta_sync.engine.compat import patches
from vllm_delta_sync.engine.compat.lora import lora_request
from vllm_delta_sync.engine.observe.status import StatusBoard
from vllm_delta_sync.engine.protocol import Adapter
from vllm_delta_sync.errors import EngineError, SettingsError, StoreError
from vllm_delta_sync.process_folders import ProcessFolder

FIRST_NUMBER = 1 << 30
"""vLLM counts its own adapters from 1; ours are above, at a number that follows from the name."""


def make_adapter(name: str) -> Adapter:
    """Return an adapter with a new folder for its files, which does not outlive this process.

    Raises:
        EngineError: the folder cannot be made.
    """
    try:
        folder = ProcessFolder()
    except StoreError as error:
        raise EngineError(f"adapter {name!r} has no place for its files: {error}") from error
    number = FIRST_NUMBER + int.from_bytes(sha256(name.encode()).digest()[:4], "little") % FIRST_NUMBER
    return Adapter(name, number, str(folder.path))


def check_lora(vllm_config: Any, names: list[str], models: Any = None) -> None:
    """Refuse to serve adapters where vLLM would not.

    Args:
        names: of the adapters. models: vLLM's ``OpenAIServingModels``; None for an engine without a server.

    Raises:
        EngineError: vLLM was started without --enable-lora, or with several API servers.
        SettingsError: a name is taken.
    """
    if not names:
        return
    if vllm_config.lora_config is None:
        raise EngineError(f"adapter {names[0]!r} is to be served, and vLLM was started without --enable-lora; add it")
    if models is None:
        return
    if getattr(models.engine_client.engine_core, "client_count", 1) > 1:
        raise EngineError(
            "--api-server-count is above 1: only one of the API servers would know the adapters that are followed; "
            "use 1"
        )
    for name in names:
        if models.is_base_model(name) or name in {module.name for module in models.static_lora_modules or ()}:
            raise SettingsError(f"adapter {name!r}: vLLM serves another model under that name; choose another one")


def announce(models: Any, adapter: Adapter, board: StatusBoard, loop: asyncio.AbstractEventLoop) -> None:
    """Let vLLM's API server accept requests for an adapter while a version of it is served."""
    request = lora_request(adapter)

    def update() -> None:
        if board.served is None:
            models.lora_requests.pop(adapter.name, None)
        elif models.lora_requests.get(adapter.name) is not request:
            models.lora_requests[adapter.name] = request

    board.watch(lambda: call_soon(loop, update))


def reserve_names(models: Any, names: list[str]) -> None:
    """Refuse requests to vLLM's API server that would load something else as an adapter that is followed, or unload it.

    Cause: vLLM's routes /v1/load_lora_adapter (with ``load_inplace``) and /v1/unload_lora_adapter take any name.
    Symptom: requests for the name are answered by another adapter, from then on for each step, or not at all, while the
    status shows the version of the run. Remove when: vLLM lets a plugin reserve names.
    """

    async def check(original: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.lora_name in names:
            raise HTTPException(
                HTTPStatus.CONFLICT,
                f"adapter {request.lora_name!r} follows a run, which alone changes it: publish a version, call "
                "/delta_sync/target or /delta_sync/rollback, or load the other adapter under another name",
            )
        return await original(request, *args, **kwargs)

    for method in ("load_lora_adapter", "unload_lora_adapter"):
        patches.wrap_method(models, method, check)
