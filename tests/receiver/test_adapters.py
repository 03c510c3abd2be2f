"""In vLLM's API server, the name of an adapter that follows a run stands for nothing else."""

import asyncio
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.lora.model_manager import AdapterLRUCache, LoRAModelManager
from vllm.lora.request import LoRARequest

from vllm_delta_sync.engine.api.adapters import announce, reserve_names
from vllm_delta_sync.engine.compat.lora import held_adapter
from vllm_delta_sync.engine.observe.status import StatusBoard
from vllm_delta_sync.engine.protocol import Adapter


class Engine:
    """The part of an engine client that vLLM's table of models uses."""

    model_config = SimpleNamespace(model="base", max_model_len=16)
    renderer = input_processor = None

    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def add_lora(self, request: Any) -> bool:
        self.loaded.append(request.lora_path)
        return True


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def models(engine: Engine) -> OpenAIServingModels:
    client: Any = engine
    return OpenAIServingModels(client, [BaseModelPath(name="base", model_path="base")])


def test_a_followed_adapter_is_neither_replaced_nor_unloaded_by_request(
    models: OpenAIServingModels, engine: Engine
) -> None:
    ours = models.lora_requests["math"] = LoRARequest("math", 1 << 30, "/ours")

    async def ask() -> None:
        for load_inplace in (False, True):
            request = LoadLoRAAdapterRequest(lora_name="math", lora_path="/other", load_inplace=load_inplace)
            with pytest.raises(HTTPException, match="adapter 'math' follows a run") as refused:
                await models.load_lora_adapter(request)
            assert refused.value.status_code == 409
        with pytest.raises(HTTPException, match="load the other adapter under another name"):
            await models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name="math"))
        # Other names are free.
        for _ in range(2):
            await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name="code", lora_path="/other"))
        assert models.lora_requests["code"].lora_path == "/other"
        await models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name="code"))

    reserve_names(models, ["math"])
    asyncio.run(ask())
    assert models.lora_requests == {"math": ours}
    assert models.lora_requests["math"] is ours
    assert engine.loaded == ["/other"]


def test_vllm_knows_an_adapter_while_a_version_of_it_is_served_and_no_other_under_its_name(
    models: OpenAIServingModels,
) -> None:
    """A resolver of vLLM's may have put another adapter there before."""
    adapter, board = Adapter("math", 1 << 30, "/ours"), StatusBoard("follow", "head", None)

    async def follow() -> None:
        announce(models, adapter, board, asyncio.get_running_loop())
        board.set(served=SimpleNamespace(version=0, run="run", held_back=None))
        await asyncio.sleep(0)
        found = models.lora_requests["math"]
        assert (found.lora_path, found.lora_int_id, found.load_inplace) == ("/ours", 1 << 30, False)
        board.set(served=None)
        await asyncio.sleep(0)
        assert "math" not in models.lora_requests
        models.lora_requests["math"] = LoRARequest("math", 3, "/resolved", load_inplace=True)
        board.set(served=SimpleNamespace(version=1, run="run", held_back=None))
        await asyncio.sleep(0)
        assert models.lora_requests["math"].lora_path == "/ours"

    asyncio.run(follow())


class Manager:
    """vLLM's table of the adapters that it holds in host memory."""

    list_adapters = LoRAModelManager.list_adapters

    def __init__(self) -> None:
        self._registered_adapters: Any = AdapterLRUCache(1000, lambda number: None)


def test_what_vllm_holds_is_read_beside_generation_while_adapters_come_and_go() -> None:
    manager, held, ended = Manager(), object(), threading.Event()
    worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager)))
    manager._registered_adapters[7] = held

    def generate() -> None:
        while not ended.is_set():
            for number in range(100, 130):
                manager._registered_adapters[number] = object()
            for number in range(100, 130):
                manager._registered_adapters.pop(number)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=generate)
    thread.start()
    try:
        assert all(held_adapter(worker, Adapter("math", 7, "/ours")) is held for _ in range(20_000))
        assert held_adapter(worker, Adapter("code", 8, "/ours")) is None
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)
    assert held_adapter(SimpleNamespace(), Adapter("math", 7, "/ours")) is None
