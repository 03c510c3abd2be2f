"""Every name of vLLM's that we depend on, looked up in the vLLM that is installed; no engine is started.

A failure here says what moved in vLLM and what of ours needs it, before a server shows the symptom.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from packaging.version import Version
from safetensors.torch import save_file

from vllm_delta_sync.engine.compat import features, patches, speculation, write_hooks
from vllm_delta_sync.engine.model import tied_head
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.settings import Settings

ENGINE = Path(patches.__file__).parents[1]
INSTALLED = patches.distribution_version()


@dataclass(frozen=True)
class Touch:
    """A name that we use.

    Attributes:
        ours: the file that needs it. module, name: where vLLM has it; the last part may be a field, or an attribute
            that the class's constructor sets.
        breaks: what happens without it. takes: parameters that we give, or read by position.
        exactly: whether it may take no others, because we put something in its place.
        since: the first release that has it, where we do without it in older ones. until: the first that does not, as
            it lacks what we follow there.
    """

    ours: str
    module: str
    name: str
    breaks: str
    takes: tuple[str, ...] = ()
    exactly: bool = False
    since: str = "0"
    until: str = "1000"

    def __str__(self) -> str:
        return f"{self.ours}-{self.module.removeprefix('vllm.')}.{self.name}"


CORE = "a controller that is lost in the middle of a commit leaves generation paused"
BREAKS = {
    "CORE": CORE,
    "STALE": "answers may come from keys and values of older weights",
    "CPU": "the CPU packs its weights, and every model is refused there",
    "CALLS": "no rank can be asked anything",
    "LOADS": "--load-format delta_sync cannot start",
    "SPANS": "answers do not say which version made which token",
    "EXACT": "requests for exactly one version are refused, or fail",
    "DOORS": "weights written from outside are not noticed before the next rescan",
    "OFFLINE": "attach() cannot drive an LLM object",
    "NATIVE": "vLLM's own weight transfer calls do not reach the controller",
    "ATTACHED": "attach_async() cannot drive an AsyncLLM object",
    "REFUSALS": "an option that cannot be followed is not refused",
    "HTTP": "the server has no /delta_sync routes and follows nothing",
    "ADAPTERS": "LoRA adapters cannot be taken over from a run",
    "HEADS": "a head that is tied because it equals the embedding is not followed once it differs",
    "DERIVED": "what vLLM computes from weights after loading goes stale",
}
CONSTRUCTORS = {"__init__", "__post_init__", "_init_executor", "load_lora_model", "create_lora_manager"}
MODEL_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
"""V1, which vLLM uses where there is no Triton, and V2; the table names both as MODEL_RUNNERS."""
TABLE = """
compat/patches.py | CPU
    vllm.model_executor.layers: utils.dispatch_cpu_unquantized_gemm(layer, remove_weight) only
compat/patches.py | on a CPU, models in int8 are refused
    vllm: _custom_ops.onednn_scaled_int8_quant(input, scale, azp, symmetric) only
    vllm.platforms: current_platform.is_cpu
    vllm.model_executor.kernels.linear.scaled_mm.cpu: CPUInt8ScaledMMLinearKernel.apply_weights(self, layer, x, bias)
        only; CPUInt8ScaledMMLinearKernel.process_weights_after_loading(self, layer) only;
        CPUInt8ScaledMMLinearKernel._get_layer_params
compat/patches.py | a busy server on few cores may stand still
    vllm.distributed: utils.USE_SCHED_YIELD
compat/patches.py | a launch without the extension goes unnoticed
    vllm.config: ParallelConfig.worker_extension_cls
compat/patches.py | DERIVED
    vllm.config: vllm._current_vllm_config; vllm.get_cached_compilation_config
entrypoints/plugin.py | CORE
    vllm.v1.engine.core: EngineCore._initialize_kv_caches(self, vllm_config) only
entrypoints/plugin.py | LOADS
    vllm.model_executor.model_loader: _LOAD_FORMAT_TO_MODEL_LOADER
entrypoints/plugin.py | NATIVE
    vllm.distributed.weight_transfer.factory: WeightTransferEngineFactory._registry;
        WeightTransferEngineFactory.register_engine(name, class_name)
core/pause_watchdog.py | CORE
    vllm.v1.engine.core: EngineCoreProc.set_weight_version; EngineCoreProc.get_weight_version; EngineCore.add_request;
        EngineCoreProc.pause_scheduler(self, mode, clear_cache) only; EngineCoreProc.resume_scheduler(self) only
core/pause_watchdog.py | a /pause during a commit lets new requests wait instead of rejecting them
    vllm.v1.engine.core: EngineCoreProc.pause_generation since 0.33
core/engine_shutdown.py | a dead engine leaves exit status 0
    vllm.v1.engine.async_llm: AsyncLLM.shutdown; AsyncLLM.errored
core/ports.py | CALLS
    vllm.v1.engine.core_client: AsyncMPClient._call_utility_async(method, engine); AsyncMPClient.core_engines
    vllm.config: ParallelConfig.world_size
compat/caches.py | STALE
    vllm.v1.core.kv_cache_manager: KVCacheManager.get_computed_blocks(self, request);
        KVCacheManager.get_computed_blocks_for_connector(self, request); KVCacheManager.get_block_ids(request_id);
        KVCacheManager.coordinator
    vllm.v1.core.kv_cache_coordinator: KVCacheCoordinator.cache_blocks(self, request, num_computed_tokens) only
    vllm.v1.core.sched.scheduler: Scheduler.requests; Scheduler.running; Scheduler.connector;
        Scheduler.hash_block_size; Scheduler.max_num_encoder_input_tokens;
        Scheduler.reset_prefix_cache(reset_running_requests, reset_connector)
    vllm.v1.engine.core: EngineCore.request_block_hasher; EngineCore.reset_encoder_cache(self) only
    vllm.v1.worker.gpu_worker: Worker.reset_encoder_cache
    MODEL_RUNNERS: GPUModelRunner.reset_encoder_cache
    vllm.v1.request: Request.cache_salt; Request.block_hashes; Request._block_hasher; Request.num_computed_tokens;
        Request.update_block_hashes(self) only; Request.lora_request; Request.kv_transfer_params
    vllm.distributed.kv_transfer.kv_connector.v1.multi_connector: MultiConnector._connectors
    vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector: OffloadingConnector.connector_scheduler
    vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler: OffloadingConnectorScheduler._req_status;
        RequestOffloadState.max_offload_tokens; RequestOffloadState.group_states; RequestGroupState.offload_keys;
        RequestGroupState.next_stored_chunk_idx; RequestGroupState.num_hit_chunks
compat/caches.py | REFUSALS
    vllm.config: VllmConfig.kv_transfer_config; VllmConfig.ec_transfer_config; KVTransferConfig.kv_connector;
        KVTransferConfig.kv_connector_extra_config; KVTransferConfig.kv_connector_module_path;
        ECTransferConfig.ec_connector
core/ports.py | a hanging engine is not ended
    vllm.utils.system_utils: kill_process_tree(pid)
core/pause_watchdog.py | CORE
    vllm.v1.engine: EngineCoreRequestType.WAKEUP
    vllm.v1.core.sched.scheduler: Scheduler.set_pause_state
core/executors.py | CALLS
    vllm.v1.executor.multiproc_executor: FutureWrapper(futures_queue, get_response); MultiprocExecutor.is_failed;
        MultiprocExecutor.collective_rpc(method, timeout, args)
    vllm.distributed.device_communicators.shm_broadcast: MessageQueue.enqueue(obj); MessageQueue.dequeue(timeout)
core/pause_watchdog.py | a lost node leaves the engine waiting
    vllm: envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
core/executors.py | a lost node leaves the engine waiting
    vllm.v1.executor.multiproc_executor: WorkerProc.worker_busy_loop(self) only; MultiprocExecutor.response_mqs
    vllm.distributed.device_communicators.shm_broadcast: MessageQueue.remote_socket
observe/spans.py | SPANS
    vllm.v1.engine.async_llm: AsyncLLM.generate(self, prompt, sampling_params)
    vllm.outputs: CompletionOutput.weight_versions; WeightVersionSpan.version; WeightVersionSpan.start;
        WeightVersionSpan.end; RequestOutput.finished; CompletionOutput.token_ids
    vllm.entrypoints.openai.completion.serving: OpenAIServingCompletion.create_completion
    vllm.entrypoints.openai.chat_completion.serving: OpenAIServingChat.create_chat_completion
observe/spans.py | SPANS
    vllm.entrypoints.openai.completion.protocol: CompletionStreamResponse.choices
    vllm.entrypoints.openai.chat_completion.protocol: ChatCompletionStreamResponse.choices
compat/patches.py | a commit ends a server while it scores
    vllm.v1.pool.late_interaction_runner: LateInteractionRunner.clear(self) only
    vllm.v1.worker.gpu_model_runner: GPUModelRunner.late_interaction_runner
    vllm.v1.worker.gpu.pool.pooling_runner: PoolingRunner.late_interaction_runner
    vllm.v1.worker.gpu.model_runner: GPUModelRunner.pooling_runner
    vllm.v1.worker.worker_base: WorkerBase.model_runner
compat/version_labels.py | vLLM shows labels that are no versions
    vllm.v1.engine.async_llm: AsyncLLM.get_weight_version(self) only; AsyncLLM.output_processor
    vllm.v1.engine.output_processor: OutputProcessor.process_outputs(weight_version)
api/exact_requests.py | EXACT
    vllm.v1.engine.async_llm: AsyncLLM.generate(lora_request); AsyncLLM.encode(lora_request); AsyncLLM.abort(request_id,
        internal)
    vllm.v1.engine.output_processor: OutputProcessor.add_request(self, request);
        OutputProcessor.process_outputs(self, engine_core_outputs, weight_version); OutputProcessor.request_states;
        RequestState.request_id
    vllm.v1.engine: EngineCoreRequest.request_id; EngineCoreRequest.lora_request; EngineCoreOutput.request_id;
        EngineCoreOutput.new_token_ids; EngineCoreOutput.pooling_output; EngineCoreOutput.finish_reason;
        EngineCoreOutputs.weight_version
    vllm.v1.engine.core_client: AsyncMPClient._call_utility_async(method, engine); AsyncMPClient.core_engines
    vllm.v1.engine.core: EngineCoreProc.get_weight_version
    vllm.exceptions: GenerationError(message); GenerationError.status_code
    vllm.entrypoints.openai.responses.serving: OpenAIServingResponses.create_responses(self, request)
    vllm.entrypoints.openai.responses.protocol: ResponsesRequest.background
    vllm.config: VllmConfig.kv_transfer_config; VllmConfig.ec_transfer_config
observe/metrics.py | /metrics shows nothing of ours
    vllm.v1.metrics.prometheus: get_prometheus_registry
entrypoints/endpoint.py | HTTP
    vllm.plugins.endpoint_plugins.interface: EndpointPlugin.attach_router(self, app) only;
        EndpointPlugin.init_state(self, engine_client, state, args) only
    vllm: tasks.SupportedTask
entrypoints/load_format.py | LOADS
    vllm.model_executor.model_loader: get_model_loader(load_config);
        DefaultModelLoader.track_weights_loading(model, loaded_weights)
    vllm.model_executor.model_loader.base_loader: BaseModelLoader.load_weights(self, model, model_config) only;
        BaseModelLoader.create_model(vllm_config, model_config, prefix); BaseModelLoader.load_model(self, vllm_config,
        model_config, prefix) only; BaseModelLoader.download_model(self, model_config) only
    vllm.config: SpeculativeConfig.target_model_config
entrypoints/serve_command.py | delta-sync serve refuses --config
    vllm.utils.argparse_utils: FlexibleArgumentParser.load_config_file(self, file_path) only
    vllm.distributed: get_world_group
    vllm.distributed.parallel_state: GroupCoordinator.broadcast_object; GroupCoordinator.rank_in_group
compat/load_hook.py | DERIVED
    vllm.model_executor.model_loader: base_loader.process_weights_after_loading(model, model_config, target_device)
        only
model/tied_head.py | HEADS
    vllm.config: ModelConfig.word_embeddings_untied_by_checkpoint; ModelConfig.hf_config; ModelConfig.runner;
        ModelConfig.maybe_untie_word_embeddings
    vllm.transformers_utils.config: checkpoint_has_lm_head(model)
    vllm.model_executor.layers.vocab_parallel_embedding: ParallelLMHead; VocabParallelEmbedding
compat/cpu_experts.py | CPU
    vllm.platforms: current_platform.is_cpu
    vllm.model_executor.layers.fused_moe.oracle.unquantized: backend_to_kernel_cls; UnquantizedMoeBackend.CPU
    vllm.model_executor.layers.fused_moe.experts.cpu_moe: CPUUnquantizedExperts.apply(self, output,
        hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, a1q_scale, a2_scale,
        workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input) only;
        CPUUnquantizedExperts.process_weights_after_loading(layer)
worker/rank_worker.py | CALLS
    vllm.v1.worker.gpu_worker: Worker.get_model
    MODEL_RUNNERS: GPUModelRunner.get_model
    vllm.v1.worker.worker_base: WorkerBase.rank; WorkerBase.model_config
compat/lora.py | ADAPTERS
    vllm.lora.request: LoRARequest(lora_name, lora_int_id, lora_path, load_inplace)
    vllm.lora.peft_helper: PEFTHelper.from_dict(config_dict) only; PEFTHelper.validate_legal(self, lora_config) only
    vllm.lora.utils: parse_fine_tuned_lora_name(name, weights_mapper) only
    vllm.v1.worker.gpu_worker: Worker.add_lora(self, lora_request) only; Worker.remove_lora(self, lora_id) only;
        Worker.list_loras
    vllm.lora.worker_manager: WorkerLoRAManager.create_lora_manager; WorkerLoRAManager.remove_all_adapters
    vllm.lora.model_manager: LoRAModelManager.modules; LoRAModelManager.packed_modules_mapping;
        LoRAModelManager.list_adapters(self) only
    MODEL_RUNNERS: GPUModelRunner.load_lora_model; GPUModelRunner.lora_manager; GPUModelRunner.add_lora(self,
        lora_request) only; GPUModelRunner.remove_lora(self, lora_id) only; GPUModelRunner.list_loras;
        GPUModelRunner.reset_lora_state
compat/loaded_adapters.py | ADAPTERS
    vllm.lora.worker_manager: WorkerLoRAManager._load_adapter(self, lora_request) only
    vllm.lora.model_manager: LoRAModelManager.lora_index_to_id; LoRAModelManager._registered_adapters;
        LoRAModelManager._active_adapters; AdapterLRUCache(capacity, deactivate_fn);
        LRUCacheLoRAModelManager.add_adapter(self, lora) only;
        LRUCacheLoRAModelManager.activate_adapter(self, lora_id) only
    vllm.lora.lora_model: LoRAModel.loras
    vllm.lora.lora_weights: LoRALayerWeights.lora_a; LoRALayerWeights.lora_b; LoRALayerWeights.scaling
compat/load_hook.py | a base is refused after an adapter was loaded
    vllm.lora.model_manager: LoRAModelManager.model
api/adapters.py | ADAPTERS
    vllm.entrypoints.openai.models.serving: OpenAIServingModels.load_lora_adapter(request);
        OpenAIServingModels.unload_lora_adapter(request)
    vllm.entrypoints.openai.models.serving: OpenAIServingModels.lora_requests; OpenAIServingModels.is_base_model(self,
        model_name) only; OpenAIServingModels.static_lora_modules; OpenAIServingModels.engine_client
compat/write_hooks.py | DOORS
    vllm.v1.worker.gpu_worker: Worker.WRITERS; Worker.sleep(level); Worker.wake_up(self, tags) only
    MODEL_RUNNERS: GPUModelRunner.reload_weights
api/weight_transfer.py | NATIVE
    vllm.config: VllmConfig.weight_transfer_config; WeightTransferConfig.backend
    vllm.exceptions: GracefulHTTPError(message, http_status)
    vllm.v1.engine.async_llm: AsyncLLM.init_weight_transfer_engine(self, request) only;
        AsyncLLM.shutdown_weight_transfer_engine(self) only; AsyncLLM.start_weight_update(self) only;
        AsyncLLM.start_draft_weight_update(self) only; AsyncLLM.update_weights(self, request) only;
        AsyncLLM.finish_weight_update(self, weight_version) only; AsyncLLM.update_weight_version(self, new_version)
        only
    vllm: LLM.init_weight_transfer_engine(self, request) only; LLM.shutdown_weight_transfer_engine(self) only;
        LLM.start_weight_update(self) only; LLM.start_draft_weight_update(self) only; LLM.update_weights(self,
        request) only; LLM.finish_weight_update(self, weight_version) only; LLM.update_weight_version(self,
        new_version) only
entrypoints/transfer_backend.py | NATIVE
    vllm.distributed.weight_transfer.base: WeightTransferEngine.init_transfer_engine;
        WeightTransferEngine.start_weight_update; WeightTransferEngine.finish_weight_update;
        WeightTransferEngine.receive_weights; WeightTransferEngine.shutdown
api/embedded.py | ATTACHED
    vllm.v1.engine.async_llm: AsyncLLM.vllm_config; AsyncLLM.engine_core
core/ports.py | OFFLINE
    vllm: LLM.llm_engine
    vllm.v1.engine.llm_engine: LLMEngine.has_unfinished_requests; LLMEngine.engine_core
    vllm.v1.engine.core_client: SyncMPClient.call_utility(method); SyncMPClient.ensure_alive();
        InprocClient.engine_core
compat/features.py | REFUSALS
    vllm.config: ParallelConfig.data_parallel_size; ParallelConfig.enable_eplb; ParallelConfig.enable_elastic_ep;
        ParallelConfig.local_engines_only; ParallelConfig.distributed_executor_backend
compat/features.py | a commit mixes two versions in an answer of a pooling model
    vllm.config: ModelConfig.runner_type
compat/features.py | REFUSALS
    vllm.config: VllmConfig.speculative_config; ModelConfig.model
    vllm.config.load: LoadConfig.load_format
    vllm.config.offload: UVAOffloadConfig.cpu_offload_gb; PrefetchOffloadConfig.offload_group_size
compat/speculation.py | drafts of speculative decoding go stale, or are refused
    vllm.config: SpeculativeConfig.method; SpeculativeConfig.parallel_drafting; SpeculativeConfig.draft_model_config;
        SpeculativeConfig.target_model_config; ModelConfig.runner
    vllm.v1.worker.gpu_model_runner: GPUModelRunner.drafter
    vllm.v1.worker.gpu.model_runner: GPUModelRunner.speculator
    vllm.v1.spec_decode.llm_base_proposer: SpecDecodeBaseProposer.load_model
    vllm.v1.spec_decode.medusa: MedusaProposer.load_model until 0.33
    vllm.v1.worker.gpu.spec_decode.speculator: DraftModelSpeculator.load_model
"""
"""A line per file of ours, with what breaks; below it a module of vLLM's, and what we need of it: names with the
parameters that we give, with "only" if there may be no others, with "since" where older releases lack them, with
"until" where newer ones do."""


def touches_of(table: str) -> Iterator[Touch]:
    text = re.sub(r"\n {8}", " ", table.strip())
    for line in text.splitlines():
        if not line.startswith(" "):
            ours, breaks = line.split(" | ")
            continue
        named, names = line.strip().split(": ", 1)
        modules = MODEL_RUNNERS if named == "MODEL_RUNNERS" else [named]
        for entry in names.split("; "):
            found = re.fullmatch(r"([\w.]+)(?:\((.*)\))?( only)?(?: since ([\d.]+))?(?: until ([\d.]+))?", entry)
            assert found is not None, entry
            owner, _, last = found[1].rpartition(".")
            for name in write_hooks.WRITE_METHODS if last == "WRITERS" else [last]:
                where = f"{owner}.{name}" if owner else name
                takes = tuple(found[2].split(", ")) if found[2] else ()
                for module in modules:
                    span = found[4] or Touch.since, found[5] or Touch.until
                    yield Touch(ours, module, where, BREAKS.get(breaks, breaks), takes, bool(found[3]), *span)


TOUCHES = list(touches_of(TABLE))
release = Version(INSTALLED[1])


@pytest.mark.parametrize(
    "touch", [touch for touch in TOUCHES if Version(touch.since) <= release < Version(touch.until)], ids=str
)
def test_vllm_has_what_we_touch(touch: Touch) -> None:
    assert problem_of(touch) == ""


def test_vllm_has_what_an_engine_is_refused_without() -> None:
    assert not features.missing_names(), CORE


def test_all_experts_of_the_cpu_compute_by_the_methods_that_are_replaced() -> None:
    unquantized = importlib.import_module("vllm.model_executor.layers.fused_moe.oracle.unquantized")
    base = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe").CPUUnquantizedExperts
    for experts in unquantized.backend_to_kernel_cls(unquantized.UnquantizedMoeBackend.CPU):
        for name in ("apply", "process_weights_after_loading"):
            assert name in vars(base)
            assert getattr(experts, name) is getattr(base, name)


def test_plugins_are_found_where_we_register_them() -> None:
    from vllm import plugins

    found = {value for name, value in vars(plugins).items() if name.endswith("_PLUGINS_GROUP")}
    assert found == set(patches.PLUGIN_GROUPS), "VLLM_PLUGINS as delta-sync serve sets it would drop plugins"


def serve_parser() -> Any:
    """The parser of the installed ``vllm serve``."""
    arguments = importlib.import_module("vllm.utils.argparse_utils")
    package = "launchers" if release < Version("0.33") else "common"
    module = importlib.import_module(f"vllm.entrypoints.{package}.cli_args")
    return module.make_arg_parser(arguments.FlexibleArgumentParser())


def test_vllm_has_none_of_our_flags() -> None:
    """``delta-sync serve`` takes both, so ours would hide vLLM's of the same name."""
    theirs = serve_parser()._option_string_actions
    assert [flag for name in Settings.model_fields if (flag := f"--{name.replace('_', '-')}") in theirs] == []


def test_draft_methods_are_those_that_vllm_has() -> None:
    from vllm.config.speculative import SpeculativeMethod

    methods = set(flat(get_args(SpeculativeMethod)))
    if release >= Version("0.33"):  # which no longer has it
        methods.add("mlp_speculator")
    assert {*speculation.WITHOUT_WEIGHTS, speculation.OWN_MODEL, *speculation.UNKNOWN} <= methods


def test_draft_is_found_behind_its_cuda_graphs() -> None:
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper

    model: Any = torch.nn.Linear(2, 2)
    model.load_weights = lambda weights: None
    wrapper = object.__new__(BreakableCUDAGraphWrapper)  # its constructor takes a GPU
    wrapper.runnable = model
    config = SimpleNamespace(model="m", revision=None)
    speculative = SimpleNamespace(method="mtp", draft_model_config=config, target_model_config=config)
    runner = SimpleNamespace(drafter=SimpleNamespace(model=wrapper))
    worker = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=speculative), model_runner=runner)
    found = speculation.draft_of(worker)
    assert found is not None
    assert found.model is model


def test_front_end_is_chosen_as_we_refuse_it() -> None:
    from vllm import envs

    assert features.RUST_FRONT_END in envs.environment_variables, "vLLM's Rust API server is chosen in another way now"


def test_every_import_of_vllm_is_listed() -> None:
    listed = {f"{touch.module}.{touch.name}" for touch in TOUCHES}
    listed |= {f"{touch.module}.{'.'.join(touch.name.split('.')[:-1])}" for touch in TOUCHES}
    missing = [
        f"{file}: {name}"
        for file, name in imports_of_vllm()
        if name not in listed and not any(one.startswith(name + ".") for one in listed)
    ]
    assert missing == [], "list them in TOUCHES, with what breaks without"


def test_every_file_that_touches_vllm_is_named_in_compat() -> None:
    named = {touch.ours for touch in TOUCHES} | {file for file, _ in imports_of_vllm()}
    documented = patches.__doc__ or ""
    assert [file for file in sorted(named) if file != "compat/patches.py" and f"``{file}``" not in documented] == []


def problem_of(touch: Touch) -> str:
    """What vLLM has otherwise; empty if nothing."""
    installed = " ".join(INSTALLED)
    where = f"{touch.module}.{touch.name}"
    needs = f"{touch.ours} needs it: without it {touch.breaks}"
    try:
        owner: Any = importlib.import_module(touch.module)
    except ImportError as error:
        return f"{installed}: {touch.module} cannot be imported ({error}); {needs}"
    *path, last = touch.name.split(".")
    for part in path:
        owner = getattr(owner, part) if hasattr(owner, part) else submodule(owner, part)
        if owner is None:
            return f"{installed}: {touch.module}.{part} is gone; {needs}"
    if last not in attributes(owner):
        return f"{installed}: {where} is gone; {needs}"
    found: Any = getattr(owner, last, None)
    if not touch.takes or hasattr(found, "delta_sync"):
        return ""
    takes = tuple(inspect.signature(inspect.unwrap(found)).parameters)
    fits = takes == touch.takes if touch.exactly else set(touch.takes) <= set(takes)
    return "" if fits else f"{installed}: {where} now takes ({', '.join(takes)}); {needs}"


def submodule(owner: Any, name: str) -> Any:
    try:
        return importlib.import_module(f"{owner.__name__}.{name}")
    except (ImportError, AttributeError):
        return None


def attributes(owner: Any) -> set[str]:
    """Names that a module, an object, a class, or an instance of the class has."""
    names = set(dir(owner))
    for cls in getattr(owner, "__mro__", ()):
        names |= set(inspect.get_annotations(cls))
        fields = getattr(cls, "__struct_fields__", ())
        names |= set(fields if isinstance(fields, tuple) else ())
        for constructor in CONSTRUCTORS & set(vars(cls)):
            code = getattr(inspect.unwrap(vars(cls)[constructor]), "__code__", None)
            names |= set(code.co_names) if code is not None else set()
    return names


def flat(arguments: tuple[Any, ...]) -> Iterator[Any]:
    for one in arguments:
        inner = get_args(one)
        yield from flat(inner) if inner else (one,)


@cache
def imports_of_vllm() -> list[tuple[str, str]]:
    """(file, name as it would be written with dots) of everything of vLLM's that the engine package imports."""
    found = []
    for path in sorted(ENGINE.rglob("*.py")):
        file = path.relative_to(ENGINE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found += [(file, f"{node.module}.{alias.name}") for alias in node.names]
            elif isinstance(node, ast.Import):
                found += [(file, alias.name) for alias in node.names if alias.name.split(".")[0] == "vllm"]
    return found


def test_queues_sleep_between_two_looks_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import utils
    from vllm.platforms import current_platform

    calls: list[str] = []
    monkeypatch.setattr(utils, "USE_SCHED_YIELD", True)
    monkeypatch.setattr(utils.os, "sched_yield", lambda: calls.append("yielded"))
    utils.sched_yield()
    patches.sleep_between_polls()
    utils.sched_yield()
    assert calls == ["yielded"] * (1 if current_platform.is_cpu() else 2)


def test_the_current_configuration_is_left_set_only_where_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import vllm as current

    one, other = object(), object()
    monkeypatch.setattr(current, "_current_vllm_config", None)
    patches.keep_current_config(one)
    assert current.get_current_vllm_config() is one
    patches.keep_current_config(other)
    assert current.get_current_vllm_config() is one


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.language_model.lm_head.weight", "lm_head.bias", "head.weight"]
)
def test_a_checkpoint_has_a_head_if_vllm_says_so(tmp_path: Path, name: str) -> None:
    from vllm.transformers_utils.config import checkpoint_has_lm_head

    save_file({name: torch.zeros(2), "model.embed_tokens.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    table = TensorTable(TensorSpec(each, "F32", (2,)) for each in ("model.embed_tokens.weight", name))
    assert tied_head.has_own_head(table) is checkpoint_has_lm_head(str(tmp_path))
