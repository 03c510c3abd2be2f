"""The vLLM side: all code that uses vLLM is in this package.

Launch vLLM with ``--worker-extension-cls vllm_delta_sync.engine.WorkerExtension`` (``delta-sync serve`` does it all),
or pass ``worker_extension_cls=WORKER_EXTENSION`` to ``vllm.LLM`` and call ``attach(llm, bucket=URL)``, or to the
arguments of ``vllm.AsyncLLM`` and call ``await attach_async(engine, bucket=URL)``.
"""

import os
from typing import TYPE_CHECKING

from vllm_delta_sync.engine.names import WORKER_EXTENSION

if TYPE_CHECKING:
    from vllm_delta_sync.engine.api.embedded import AsyncSync, OfflineSync, attach, attach_async
    from vllm_delta_sync.engine.worker.worker_extension import WorkerExtension

__all__ = ["WORKER_EXTENSION", "AsyncSync", "OfflineSync", "WorkerExtension", "attach", "attach_async"]


def __getattr__(name: str) -> object:
    if name == "WorkerExtension":
        # vLLM resolves the name in each worker before it builds the worker and loads the model: the one moment to
        # decide how the CPU keeps its weights.
        from vllm_delta_sync.engine.compat import cpu_experts, features, load_hook, patches
        from vllm_delta_sync.engine.core import executors
        from vllm_delta_sync.engine.worker.worker_extension import WorkerExtension, watch_for_controller

        features.check_front_end(os.environ)
        executors.install()
        patches.initialize_amx()
        patches.sleep_between_polls()
        patches.keep_plain_cpu_weights()
        patches.keep_plain_cpu_int8()
        cpu_experts.keep_plain_cpu_experts()
        load_hook.watch_loading()
        watch_for_controller()
        return WorkerExtension
    if name in ("AsyncSync", "OfflineSync", "attach", "attach_async"):
        from vllm_delta_sync.engine.api import embedded

        return getattr(embedded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
