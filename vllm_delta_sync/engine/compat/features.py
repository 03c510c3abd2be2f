"""``check_engine`` refuses, at start-up, vLLM options that the receiver does not support; docs/features.md lists them.

An option is refused if it would leave weights that a fresh start from the same version would not have, or if patches
would reach weights of other engines (``check_features``); and if ranks could not be kept consistent (``check_layout``).
A vLLM that lacks a name of ``NEEDED`` is refused by that name.

How weights are cut over tensor, pipeline and expert parallel ranks, and copied over data parallel engines, plays no
part here: every rank traces its own loader, and ``prove_ownership`` proves that together they hold every tensor. What
that proof assumes is checked: every rank can be called, all can be paused together, and nothing else moves their
weights.
"""

import importlib
import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from vllm_delta_sync.engine.compat import patches
from vllm_delta_sync.engine.compat.caches import check_caches
from vllm_delta_sync.engine.compat.speculation import check_speculation
from vllm_delta_sync.engine.names import WORKER_EXTENSION, is_our_extension
from vllm_delta_sync.errors import EngineError, SettingsError
from vllm_delta_sync.settings import Settings

ONE_RANK_EACH = "external_launcher"
"""The executor of which every process has one, with one rank."""
RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"
GRPC_FLAG = "--grpc"
"""Flag of ``vllm serve`` that starts a server which loads no endpoint plugins."""
REFUSED_FORMATS = {
    "dummy": "random weights are no version of any run; use delta_sync, which starts from the bucket, or leave it out",
    "ipc_cache": "the weights lie in the cache daemon's memory, where patches would reach every engine that maps them; "
    "use auto or delta_sync",
}
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
    "vllm.v1.executor.abstract": ("Executor.sleeping_tags",),
    "vllm.v1.request": ("Request.block_hashes", "Request.cache_salt", "Request.update_block_hashes"),
}
"""Module of vLLM → what this package cannot do without: methods, and attributes that a constructor sets."""


def check_engine(vllm_config: Any, prefix_cache: str, *, offline: bool = False) -> None:
    """Refuse an engine without our worker extension, or with unsupported options; warn of an untested vLLM.

    Args:
        vllm_config: of the engine, as its client has it.
        prefix_cache: the setting.
        offline: whether the engine is an ``LLM`` object and not a server.

    Raises:
        EngineError: names the flag, its value and the remedy.
    """
    patches.warn_untested()
    found = vllm_config.parallel_config.worker_extension_cls
    if not is_our_extension(found):
        raise EngineError(
            f"worker_extension_cls is {found!r}; launch vLLM with --worker-extension-cls {WORKER_EXTENSION}"
        )
    missing = missing_names()
    if missing:
        raise EngineError(
            f"{' '.join(patches.distribution_version())} has no {', '.join(missing)}, which this package needs; use a "
            "vLLM release that was tested"
        )
    check_features(vllm_config)
    check_caches(vllm_config, prefix_cache)
    check_layout(vllm_config, offline=offline)


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
            constructor = inspect.unwrap(cls.__init__) if inspect.isclass(cls) else None
            # A protocol has none of its own from Python 3.14 on.
            set_by_constructor = constructor.__code__.co_names if inspect.isfunction(constructor) else ()
            if not hasattr(cls, name) and name not in set_by_constructor:
                missing.append(f"{owner}.{name}")
    return tuple(missing)


def check_features(vllm_config: Any) -> None:
    """Refuse options that change where weights come from or lie. Raises EngineError."""
    load_format = str(vllm_config.load_config.load_format)
    if load_format in REFUSED_FORMATS:
        raise EngineError(f"--load-format is {load_format!r}: {REFUSED_FORMATS[load_format]}")
    quantization = vllm_config.quant_config
    # A quantized checkpoint may have such a configuration too, for the layers that it leaves as they are.
    quantization = getattr(quantization, "online_quantization_config", None) or quantization
    # Each layer would be replaced before a trace could begin.
    if quantization is not None and quantization.get_name() == "online":
        raise EngineError(
            f"--quantization is {str(vllm_config.model_config.quantization)!r}: vLLM quantizes weights while it loads "
            "them, and keeps nothing that a version could be applied to; serve a checkpoint that is quantized already, "
            "and give it to the publisher as base= (docs/quantized.md)"
        )
    offload = vllm_config.offload_config
    for flag, size in (
        ("--cpu-offload-gb", offload.uva.cpu_offload_gb),
        ("--offload-group-size", offload.prefetch.offload_group_size),
    ):
        if size:
            raise EngineError(
                f"{flag} is {size:g}: offloaded weights are moved while the engine runs, so they have no address to "
                "patch; leave it out, or use more tensor parallel ranks"
            )
    if vllm_config.speculative_config is not None:
        check_speculation(vllm_config.speculative_config)


def check_layout(vllm_config: Any, *, offline: bool = False) -> None:
    """Refuse layouts that cannot be kept consistent; arguments and errors as ``check_engine``."""
    parallel = vllm_config.parallel_config
    engines = parallel.data_parallel_size
    if parallel.enable_eplb:
        raise EngineError(
            "--enable-eplb is on: it moves experts between ranks while they serve, so that their addresses change; "
            "turn it off"
        )
    if parallel.enable_elastic_ep:
        raise EngineError("--enable-elastic-ep is on: ranks that are added later hold no version; turn it off")
    if parallel.distributed_executor_backend == ONE_RANK_EACH and parallel.world_size > 1:
        raise EngineError(
            f"--distributed-executor-backend is {ONE_RANK_EACH!r} with {parallel.world_size} ranks: each process "
            "reaches only its own rank; use mp, with --nnodes for several nodes, or ray"
        )
    if engines == 1:
        return
    if offline:
        raise EngineError(
            f"data_parallel_size is {engines}: an LLM object reaches one engine only; make one LLM for each, or use a "
            "server"
        )
    if not vllm_config.model_config.is_moe:
        return
    if parallel.local_engines_only:
        raise EngineError(
            f"--data-parallel-size is {engines} with external or hybrid load balancing: the engines of a "
            "mixture-of-experts model run in step, and this server reaches only some of them; use internal load "
            "balancing (leave out --data-parallel-external-lb, --data-parallel-hybrid-lb, --data-parallel-rank and "
            "--data-parallel-start-rank)"
        )


def fit_pause_mode(settings: Settings, vllm_config: Any) -> Settings:
    """Return settings with a pause mode that the model's requests survive: a pooling model's finish before a commit.

    Cause: of a long prompt, vLLM keeps what it pooled from the chunks so far, and not which weights made it. Symptom:
    with ``keep``, an answer that is pooled from two versions, or from chunks that count twice, because a commit makes
    running requests begin anew; with ``abort``, an AssertionError that ends the server. Remove when: vLLM drops the
    chunks of a request that begins anew, and can abort one.

    Raises:
        SettingsError: the setting is abort.
    """
    if vllm_config.model_config.runner_type != "pooling":
        return settings
    if settings.pause_mode == "abort":
        raise SettingsError("pause_mode is 'abort', and vLLM ends when requests of a pooling model are; set it to wait")
    return settings.model_copy(update={"pause_mode": "wait"})


def check_front_end(environment: Mapping[str, str]) -> None:
    """Refuse vLLM's Rust API server, which loads no plugins, so that nothing would follow the run.

    Cause: vLLM uses it instead of its own server where ``VLLM_USE_RUST_FRONTEND`` is 1. Symptom: a server without
    /delta_sync, which serves version 0 forever. Remove when: it has endpoint plugins.

    Raises:
        EngineError: names the variable, its value and the remedy.
    """
    value = environment.get(RUST_FRONT_END, "0").strip()
    if value not in ("", "0"):
        raise EngineError(
            f"{RUST_FRONT_END} is {value[:20]!r}: vLLM's Rust API server loads no plugins, so nothing would follow the "
            "run; unset it"
        )
