"""Every name of vLLM's that we depend on, looked up in the vLLM that is installed; no engine is started.

A failure here says what moved in vLLM and what of ours needs it, before a server shows the symptom.
"""

import ast
import asyncio
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
from packaging.version import Version

from vllm_delta_sync.engine import compat, core_guard, features, foreign_writers, plain_moe, plugin

ENGINE = Path(compat.__file__).parent
INSTALLED = compat.distribution_version()


@dataclass(frozen=True)
class Touch:
    """A name that we use.

    Attributes:
        ours: the file that needs it. module, name: where vLLM has it; the last part may be a field, or an attribute
            that the class's constructor sets.
        breaks: what happens without it. takes: parameters that we give, or read by position.
        exactly: whether it may take no others, because we put something in its place.
        since: the first release that has it, where we do without it in older ones.
    """

    ours: str
    module: str
    name: str
    breaks: str
    takes: tuple[str, ...] = ()
    exactly: bool = False
    since: str = "0"

    def __str__(self) -> str:
        return f"{self.ours}-{self.module.removeprefix('vllm.')}.{self.name}"


CPU = "the CPU packs its weights, and every model is refused there"
CORE = "a controller that is lost in the middle of a commit leaves generation paused"
CALLS = "no rank can be asked anything"
LOADS = "--load-format delta_sync cannot start"
SPANS = "answers do not say which version made which token"
DOORS = "weights written from outside are not noticed before the next rescan"
OFFLINE = "attach() cannot drive an LLM object"
NATIVE = "vLLM's own weight transfer calls do not reach the controller"
ATTACHED = "attach_async() cannot drive an AsyncLLM object"
REFUSALS = "an option that cannot be followed is not refused"
HTTP = "the server has no /delta_sync routes and follows nothing"
DERIVED = "what vLLM computes from weights after loading goes stale"

CLIENT = "vllm.v1.engine.core_client"
ENGINE_CORE = "vllm.v1.engine.core"
EXECUTOR = "vllm.v1.executor.multiproc_executor"
LOADERS = "vllm.model_executor.model_loader"
EXPERTS = "vllm.model_executor.layers.fused_moe"
WORKER = "vllm.v1.worker.gpu_worker"
TRANSFER = "vllm.distributed.weight_transfer"
ENDPOINTS = "vllm.plugins.endpoint_plugins.interface"
COMMUNICATORS = "vllm.distributed.device_communicators"

CONSTRUCTORS = {"__init__", "_init_executor"}

TOUCHES = [
    Touch(
        "compat.py",
        "vllm.triton_utils",
        "dispatcher._rebind_kernels",
        "an LLM after a Publisher crashes",
        exactly=True,
        takes=("overrides",),
    ),
    Touch(
        "compat.py",
        "vllm.model_executor.layers",
        "utils.dispatch_cpu_unquantized_gemm",
        CPU,
        ("layer", "remove_weight"),
        exactly=True,
    ),
    Touch("compat.py", "vllm.distributed", "utils.USE_SCHED_YIELD", "a busy server on few cores may stand still"),
    Touch(
        "compat.py",
        "vllm.config",
        "ParallelConfig.worker_extension_cls",
        "a launch without the extension goes unnoticed",
    ),
    Touch("compat.py", "vllm.config", "vllm._current_vllm_config", DERIVED),
    Touch("compat.py", "vllm.config", "vllm.get_cached_compilation_config", DERIVED),
    Touch("compat.py", CLIENT, "AsyncMPClient.set_weight_version_async", SPANS),
    Touch("core_guard.py", ENGINE_CORE, "EngineCoreProc.set_weight_version", CORE),
    Touch(
        "core_guard.py",
        ENGINE_CORE,
        "EngineCoreProc.pause_generation",
        "a /pause during a commit lets new requests wait instead of rejecting them",
        since="0.33",
    ),
    Touch("core_guard.py", "vllm.v1.engine.async_llm", "AsyncLLM.shutdown", "a dead engine leaves exit status 0"),
    Touch("core_guard.py", "vllm.v1.engine.async_llm", "AsyncLLM.errored", "a dead engine leaves exit status 0"),
    Touch("engines.py", CLIENT, "AsyncMPClient._call_utility_async", CALLS, ("method", "engine")),
    Touch("engines.py", CLIENT, "AsyncMPClient.pause_scheduler_async", CORE, ("mode", "clear_cache")),
    Touch("engines.py", CLIENT, "AsyncMPClient.resume_scheduler_async", CORE),
    Touch("engines.py", CLIENT, "AsyncMPClient.core_engines", CALLS),
    Touch(
        "engines.py",
        "vllm.renderers.base",
        "BaseRenderer.clear_mm_cache_async",
        "images are answered from the policy before",
    ),
    Touch("engines.py", "vllm.utils.system_utils", "kill_process_tree", "a hanging engine is not ended", ("pid",)),
    Touch("engines.py", "vllm.v1.engine.async_llm", "AsyncLLM.collective_rpc", CALLS, ("method", "args")),
    Touch("lease.py", "vllm.v1.engine", "EngineCoreRequestType.WAKEUP", CORE),
    Touch("lease.py", "vllm.v1.core.sched.scheduler", "Scheduler.set_pause_state", CORE),
    Touch("rank_calls.py", EXECUTOR, "FutureWrapper", CALLS, ("futures_queue", "get_response")),
    Touch("rank_calls.py", EXECUTOR, "MultiprocExecutor.is_failed", CALLS),
    Touch("rank_calls.py", EXECUTOR, "MultiprocExecutor.collective_rpc", CALLS, ("method", "timeout", "args")),
    Touch("rank_calls.py", f"{COMMUNICATORS}.shm_broadcast", "MessageQueue.enqueue", CALLS, ("obj",)),
    Touch(
        "rank_calls.py",
        f"{COMMUNICATORS}.shm_broadcast",
        "MessageQueue.dequeue",
        CALLS,
        ("timeout",),
    ),
    Touch("spans.py", "vllm.v1.engine.async_llm", "AsyncLLM.generate", SPANS, ("self", "prompt", "sampling_params")),
    Touch("spans.py", "vllm.outputs", "CompletionOutput.weight_versions", SPANS),
    *(Touch("spans.py", "vllm.outputs", f"WeightVersionSpan.{name}", SPANS) for name in ("version", "start", "end")),
    Touch("spans.py", "vllm.outputs", "RequestOutput.finished", SPANS),
    Touch("spans.py", "vllm.outputs", "CompletionOutput.token_ids", SPANS),
    *(
        Touch("span_stream.py", f"vllm.entrypoints.openai.{api}.protocol", f"{chunk}.choices", SPANS)
        for api, chunk in (
            ("completion", "CompletionStreamResponse"),
            ("chat_completion", "ChatCompletionStreamResponse"),
        )
    ),
    Touch("spans.py", "vllm.entrypoints.openai.completion.serving", "OpenAIServingCompletion.create_completion", SPANS),
    Touch(
        "spans.py", "vllm.entrypoints.openai.chat_completion.serving", "OpenAIServingChat.create_chat_completion", SPANS
    ),
    Touch("metrics.py", "vllm.v1.metrics.prometheus", "get_prometheus_registry", "/metrics shows nothing of ours"),
    Touch("plugin.py", ENDPOINTS, "EndpointPlugin.attach_router", HTTP, ("self", "app"), exactly=True),
    Touch(
        "plugin.py",
        ENDPOINTS,
        "EndpointPlugin.init_state",
        HTTP,
        ("self", "engine_client", "state", "args"),
        exactly=True,
    ),
    Touch("loader.py", LOADERS, "_LOAD_FORMAT_TO_MODEL_LOADER", LOADS),
    Touch("loader.py", LOADERS, "register_model_loader", LOADS, ("load_format",)),
    Touch("loader.py", LOADERS, "DefaultModelLoader.track_weights_loading", LOADS, ("model", "loaded_weights")),
    Touch(
        "loader.py",
        f"{LOADERS}.base_loader",
        "BaseModelLoader.load_weights",
        LOADS,
        ("self", "model", "model_config"),
        exactly=True,
    ),
    Touch(
        "loader.py",
        f"{LOADERS}.base_loader",
        "BaseModelLoader.create_model",
        LOADS,
        ("vllm_config", "model_config", "prefix"),
    ),
    Touch(
        "loader.py",
        f"{LOADERS}.base_loader",
        "BaseModelLoader.download_model",
        LOADS,
        ("self", "model_config"),
        exactly=True,
    ),
    Touch("loader.py", "vllm.distributed", "get_world_group", LOADS),
    Touch("loader.py", "vllm.distributed.parallel_state", "GroupCoordinator.broadcast_object", LOADS),
    Touch("loader.py", "vllm.distributed.parallel_state", "GroupCoordinator.rank_in_group", LOADS),
    Touch(
        "loading.py",
        LOADERS,
        "base_loader.process_weights_after_loading",
        DERIVED,
        ("model", "model_config", "target_device"),
        exactly=True,
    ),
    Touch("plain_moe.py", "vllm.platforms", "current_platform.is_cpu", CPU),
    Touch("plain_moe.py", f"{EXPERTS}.oracle.unquantized", "backend_to_kernel_cls", CPU),
    Touch("plain_moe.py", f"{EXPERTS}.oracle.unquantized", "UnquantizedMoeBackend.CPU", CPU),
    Touch(
        "plain_moe.py",
        f"{EXPERTS}.experts.cpu_moe",
        "CPUUnquantizedExperts.apply",
        CPU,
        plain_moe.APPLY_PARAMETERS,
        exactly=True,
    ),
    Touch(
        "plain_moe.py",
        f"{EXPERTS}.experts.cpu_moe",
        "CPUUnquantizedExperts.process_weights_after_loading",
        CPU,
        ("layer",),
    ),
    Touch("worker.py", WORKER, "Worker.get_model", CALLS),
    Touch("worker.py", "vllm.v1.worker.worker_base", "WorkerBase.rank", CALLS),
    Touch("worker.py", "vllm.v1.worker.worker_base", "WorkerBase.model_config", CALLS),
    *(Touch("foreign_writers.py", WORKER, f"Worker.{name}", DOORS) for name in foreign_writers.WRITERS),
    Touch("foreign_writers.py", WORKER, "Worker.sleep", DOORS, ("level",)),
    Touch("foreign_writers.py", WORKER, "Worker.wake_up", DOORS, ("self", "tags"), exactly=True),
    Touch("foreign_writers.py", "vllm.v1.worker.gpu_model_runner", "GPUModelRunner.reload_weights", DOORS),
    Touch("transfer.py", TRANSFER, "WeightTransferEngineFactory._registry", NATIVE),
    Touch("transfer.py", TRANSFER, "WeightTransferEngineFactory.register_engine", NATIVE, ("name", "class_name")),
    Touch("transfer.py", "vllm.config", "VllmConfig.weight_transfer_config", NATIVE),
    Touch("transfer.py", "vllm.config", "WeightTransferConfig.backend", NATIVE),
    Touch("transfer.py", "vllm.exceptions", "GracefulHTTPError", NATIVE, ("message", "http_status")),
    *(
        Touch("transfer.py", owner, f"{cls}.{name}", NATIVE, takes, exactly=True)
        for owner, cls in (("vllm.v1.engine.async_llm", "AsyncLLM"), ("vllm", "LLM"))
        for name, takes in (
            ("init_weight_transfer_engine", ("self", "request")),
            ("shutdown_weight_transfer_engine", ("self",)),
            ("start_weight_update", ("self",)),
            ("start_draft_weight_update", ("self",)),
            ("update_weights", ("self", "request")),
            ("finish_weight_update", ("self", "weight_version")),
            ("update_weight_version", ("self", "new_version")),
        )
    ),
    *(
        Touch("transfer_worker.py", f"{TRANSFER}.base", f"WeightTransferEngine.{name}", NATIVE)
        for name in (
            "init_transfer_engine",
            "start_weight_update",
            "finish_weight_update",
            "receive_weights",
            "shutdown",
        )
    ),
    Touch("attached.py", "vllm.v1.engine.async_llm", "AsyncLLM.vllm_config", ATTACHED),
    Touch("attached.py", "vllm.v1.engine.async_llm", "AsyncLLM.engine_core", ATTACHED),
    Touch("ports.py", "vllm", "LLM.collective_rpc", OFFLINE, ("method", "args")),
    Touch("ports.py", "vllm", "LLM.reset_prefix_cache", OFFLINE),
    Touch("ports.py", "vllm", "LLM.llm_engine", OFFLINE),
    Touch("ports.py", "vllm.v1.engine.llm_engine", "LLMEngine.has_unfinished_requests", OFFLINE),
    Touch("ports.py", "vllm.v1.engine.llm_engine", "LLMEngine.set_weight_version", OFFLINE),
    *(
        Touch("layout.py", "vllm.config", f"ParallelConfig.{name}", REFUSALS)
        for name in ("data_parallel_size", "enable_eplb", "enable_elastic_ep", "local_engines_only", "world_size")
    ),
    Touch("layout.py", f"{COMMUNICATORS}.base_device_communicator", "DeviceCommunicatorBase.all_gatherv", REFUSALS),
    Touch("layout.py", f"{COMMUNICATORS}.cpu_communicator", "CpuCommunicator.all_gatherv", REFUSALS),
    Touch("features.py", "vllm.config", "VllmConfig.speculative_config", REFUSALS),
    Touch("features.py", "vllm.config", "SpeculativeConfig.method", REFUSALS),
    Touch("features.py", "vllm.config", "SpeculativeConfig.draft_model_config", REFUSALS),
    Touch("features.py", "vllm.config", "ModelConfig.model", REFUSALS),
    Touch("features.py", "vllm.config.load", "LoadConfig.load_format", REFUSALS),
    Touch("features.py", "vllm.config.offload", "UVAOffloadConfig.cpu_offload_gb", REFUSALS),
    Touch("features.py", "vllm.config.offload", "PrefetchOffloadConfig.offload_group_size", REFUSALS),
]


def test_nothing_is_found_where_there_is_nothing() -> None:
    gone = Touch("compat.py", "vllm.config", "ParallelConfig.no_such_field", "nothing")
    assert "vllm.config.ParallelConfig.no_such_field is gone" in problem_of(gone)
    moved = Touch("compat.py", "vllm.no_such_module", "x", "nothing")
    assert "vllm.no_such_module cannot be imported" in problem_of(moved)
    other = Touch("compat.py", "vllm.distributed", "get_world_group", "nothing", ("a_parameter",))
    assert "now takes ()" in problem_of(other)


@pytest.mark.parametrize(
    "touch", [touch for touch in TOUCHES if Version(touch.since) <= Version(INSTALLED[1])], ids=str
)
def test_vllm_has_what_we_touch(touch: Touch) -> None:
    assert problem_of(touch) == ""


def test_engine_core_has_what_the_watchdog_needs() -> None:
    assert core_guard.missing_names() == [], CORE


def test_plugins_are_found_where_we_register_them() -> None:
    from vllm import plugins

    found = {value for name, value in vars(plugins).items() if name.endswith("_PLUGINS_GROUP")}
    assert found == set(compat.PLUGIN_GROUPS), "VLLM_PLUGINS as delta-sync serve sets it would drop plugins"


def serve_parser() -> Any:
    """The parser of the installed ``vllm serve``."""
    arguments = importlib.import_module("vllm.utils.argparse_utils")
    module = importlib.import_module("vllm.entrypoints.launchers.cli_args")
    return module.make_arg_parser(arguments.FlexibleArgumentParser())


def test_a_flag_that_vllm_has_too_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    parser = serve_parser()

    def started() -> list[str]:
        caplog.clear()
        with pytest.raises(SystemExit), caplog.at_level("WARNING", "vllm.delta_sync"):
            asyncio.run(plugin.endpoint_plugin().init_state(None, None, parser.parse_args([])))
        ours = [record for record in caplog.records if record.name == "vllm.delta_sync"]
        return [record.getMessage() for record in ours if record.levelname == "WARNING"]

    # No bucket is set, so the server ends; a release that has one of our flags fails here first.
    assert started() == []
    parser.add_argument("--mirror")
    parser.add_argument("--max-lag", type=int)
    [line] = started()
    for word in ("--max-lag, --mirror", INSTALLED[1], "delta-sync serve", "`--`"):
        assert word in line


def test_draft_methods_are_those_that_vllm_has() -> None:
    from vllm.config import speculative

    methods = set(flat(get_args(speculative.SpeculativeMethod)))
    assert {*features.WITHOUT_WEIGHTS, features.OWN_WEIGHTS} <= methods


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
    documented = compat.__doc__ or ""
    assert [file for file in sorted(named) if file != "compat.py" and f"``{file}``" not in documented] == []


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
        names |= set(getattr(cls, "__struct_fields__", ()))
        for constructor in CONSTRUCTORS & set(vars(cls)):
            code = getattr(inspect.unwrap(vars(cls)[constructor]), "__code__", None)
            names |= set(code.co_names) if code is not None else set()
    return names


def flat(arguments: tuple[Any, ...]) -> Iterator[Any]:
    for one in arguments:
        inner = get_args(one)
        yield from flat(inner) if inner else (one,)


def imports_of_vllm() -> list[tuple[str, str]]:
    """(file, name as it would be written with dots) of everything of vLLM's that the engine package imports."""
    found = []
    for path in sorted(ENGINE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found += [(path.name, f"{node.module}.{alias.name}") for alias in node.names]
            elif isinstance(node, ast.Import):
                found += [(path.name, alias.name) for alias in node.names if alias.name.split(".")[0] == "vllm"]
    return found


def test_queues_sleep_between_two_looks_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import utils
    from vllm.platforms import current_platform

    calls: list[str] = []
    monkeypatch.setattr(utils, "USE_SCHED_YIELD", True)
    monkeypatch.setattr(utils.os, "sched_yield", lambda: calls.append("yielded"))
    utils.sched_yield()
    compat.sleep_between_looks()
    utils.sched_yield()
    assert calls == ["yielded"] * (1 if current_platform.is_cpu() else 2)


def test_the_current_configuration_is_left_set_only_where_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import vllm as current

    one, other = object(), object()
    monkeypatch.setattr(current, "_current_vllm_config", None)
    compat.keep_current_config(one)
    assert current.get_current_vllm_config() is one
    compat.keep_current_config(other)
    assert current.get_current_vllm_config() is one
