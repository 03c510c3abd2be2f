"""``missing_names``: the names of vLLM that this package cannot do without, and that the installed release lacks."""

import importlib
import inspect
from functools import cache

NEEDED = {
    "vllm.v1.engine": ("EngineCoreRequestType.WAKEUP",),
    "vllm.v1.engine.core": (
        "EngineCore._initialize_kv_caches",
        "EngineCore._idle_state_callbacks",
        "EngineCore.add_request",
        "EngineCore.request_block_hasher",
        "EngineCore.reset_encoder_cache",
        "EngineCore.scheduler",
        "EngineCoreProc.pause_scheduler",
        "EngineCoreProc.resume_scheduler",
        "EngineCoreProc.set_weight_version",
        "EngineCoreProc.get_weight_version",
        "EngineCoreProc.run_busy_loop",
        "EngineCoreProc.input_queue",
        "EngineCoreProc._handle_client_request",
        "EngineCoreProc._send_engine_dead",
    ),
    "vllm.v1.engine.async_llm": ("AsyncLLM.generate", "AsyncLLM.encode", "AsyncLLM.abort"),
    "vllm.v1.engine.output_processor": (
        "OutputProcessor.add_request",
        "OutputProcessor.process_outputs",
        "OutputProcessor.request_states",
    ),
    "vllm.v1.engine.core_client": ("AsyncMPClient._call_utility_async", "MPClient.core_engines"),
    "vllm.v1.core.sched.scheduler": ("Scheduler.hash_block_size", "Scheduler.reset_prefix_cache"),
    "vllm.v1.core.kv_cache_manager": ("KVCacheManager.get_computed_blocks", "KVCacheManager.coordinator"),
    "vllm.v1.core.kv_cache_coordinator": ("KVCacheCoordinator.cache_blocks",),
    "vllm.lora.model_manager": (
        "LoRAModelManager.modules",
        "LoRAModelManager.packed_modules_mapping",
        "LoRAModelManager.lora_index_to_id",
        "LoRAModelManager.list_adapters",
        "LoRAModelManager.add_adapter",
        "LoRAModelManager.activate_adapter",
        "LoRAModelManager._registered_adapters",
        "LoRAModelManager._active_adapters",
    ),
    "vllm.lora.worker_manager": ("WorkerLoRAManager._load_adapter",),
    "vllm.v1.request": ("Request.block_hashes", "Request.cache_salt", "Request.update_block_hashes"),
}
"""Module of vLLM → what this package cannot do without: methods, and attributes that a constructor sets."""


@cache
def missing_names() -> tuple[str, ...]:
    """Return which names of ``NEEDED`` the installed vLLM lacks. Imports vLLM."""
    missing = []
    for path, names in NEEDED.items():
        try:
            module = importlib.import_module(path)
        except ImportError:
            missing.append(path)
            continue
        for owner, _, name in (each.partition(".") for each in names):
            cls = getattr(module, owner, None)
            set_by_constructor = inspect.unwrap(cls.__init__).__code__.co_names if inspect.isclass(cls) else ()
            if not hasattr(cls, name) and name not in set_by_constructor:
                missing.append(f"{owner}.{name}")
    return tuple(missing)
