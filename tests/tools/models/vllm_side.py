"""A worker of vLLM's own in this process, as an engine would start it, but without one."""

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.e2e.fresh import load_with
from tests.tools.models.checkpoints import NotBuildableError, said

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_PLUGINS": "delta_sync",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TQDM_DISABLE": "1",
}


def prepare() -> None:
    """Import once what every architecture needs; processes that are forked from here find it done."""
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)
    import vllm.engine.arg_utils
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.model_executor.models import registry

    # It looks at each model's class in a process of its own, which keeps CUDA from being initialized here.
    registry._run_in_subprocess = lambda look: look()
    # vLLM collects garbage at each load, and would look at all that was imported.
    gc.collect()
    gc.freeze()


def worker_config(
    folder: Path, load_format: str = "auto", runner: str = "auto", speculative: Any = None, **overrides: Any
) -> Any:
    """vLLM's configuration for a checkpoint. ``overrides``: of the checkpoint's own configuration."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        return EngineArgs(
            model=str(folder),
            runner=runner,
            hf_overrides=overrides,
            skip_tokenizer_init=not overrides,
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=256,
            language_model_only=True,
            seed=0,
            load_format=load_format,
            speculative_config=speculative,
        ).create_engine_config()
    except Exception as error:  # foreign code, which may raise anything of a configuration that it does not like
        raise NotBuildableError(f"vLLM's configuration: {said(error)}") from error


def started_worker(config: Any) -> Any:
    """A worker on the CPU, with our plugin and extension, that has no model yet."""
    from vllm.config import set_current_vllm_config
    from vllm.plugins import load_general_plugins

    import vllm_delta_sync.engine as engine

    load_general_plugins()
    assert engine.WorkerExtension is not None  # what it is asked for does the rest, see there
    from vllm.v1.worker.cpu_worker import CPUWorker

    store = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115  torch opens it by name
    try:
        with set_current_vllm_config(config):
            worker = CPUWorker(config, 0, 0, f"file://{store.name}", is_driver_worker=True)
            worker.init_device()
    except Exception as error:  # foreign code
        raise NotBuildableError(f"vLLM's worker: {said(error)}") from error
    return worker


def worker_model(worker: Any, config: Any) -> Any:
    """The model of a worker, which loads it. Raises NotBuildableError if it cannot."""
    from vllm.config import set_current_vllm_config

    reproducible()
    try:
        with set_current_vllm_config(config):
            worker.load_model()
    except Exception as error:  # foreign code
        raise NotBuildableError(f"vLLM cannot load it on a CPU: {said(error)}") from error
    return worker.get_model()


def reproducible() -> None:
    """Make what a load does not fill, or fills at random, the same in every load: then all bits can be compared."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def fresh_model(config: Any, folder: Path) -> Any:
    """Another model, loaded from a checkpoint by vLLM's own loader."""
    reproducible()
    return load_with(config, folder)
