"""``register`` is vLLM's general plugin (every process), ``endpoint_plugin`` makes its endpoint plugin (API server).

vLLM calls ``register`` in every process of every server of an environment in which this package is installed, whether
it follows a run or not. Therefore this module imports nothing of ours but names, changes nothing in vLLM until that
is asked for, and lets no failure end the process. What it leaves in vLLM: two entries in registries, which import our
code when they are chosen, and one wrapped method, which looks for our worker extension in the configuration and
otherwise calls the original.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import ModuleType
from typing import Any

from vllm_delta_sync.engine.names import LOAD_FORMAT, TRANSFER_BACKEND, is_our_extension

ENV_PREFIX = "DELTA_SYNC_"
LOGGER = "vllm.delta_sync"


def register() -> None:
    """Prepare a process of vLLM's. vLLM calls this in every process, possibly more than once."""
    for prepare in (_apply_settings, lambda: AfterImport.watch(CHANGES)):
        try:
            prepare()
        except Exception as error:  # noqa: BLE001  whatever it is, this process may have nothing to do with us
            logging.getLogger(LOGGER).warning("vllm-delta-sync is installed and cannot prepare this process: %s", error)


def _apply_settings() -> None:
    """Where a setting of ours is set: choose the form of log lines, and keep the admin token from child processes."""
    if not any(name.startswith(ENV_PREFIX) for name in os.environ):
        return
    from vllm_delta_sync import admin_token
    from vllm_delta_sync.engine.logger import set_format

    # In the API server this runs before the engine's processes start, so they do not inherit the token.
    admin_token.hide()
    set_format()


class AfterImport(importlib.abc.MetaPathFinder):
    """Changes modules when they are imported, or at once if they have been; imports none.

    A plugin is called before vLLM has imported what it needs in that process, and a forked process calls none.

    Args:
        changes: name of a module → what is done to it, once.
    """

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes
        self._finding: set[str] = set()

    @classmethod
    def watch(cls, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        """Change these modules of this process. A second call does nothing."""
        if any(isinstance(finder, cls) for finder in sys.meta_path):
            return
        finder = cls(dict(changes))
        sys.meta_path.insert(0, finder)
        for name in changes:
            if name in sys.modules:
                finder.change(sys.modules[name])

    def change(self, module: ModuleType) -> None:
        """Do what is to be done to a module, if it is still to be done."""
        change = self._changes.pop(module.__name__, None)
        try:
            if change is not None:
                change(module)
        except Exception as error:  # noqa: BLE001  a vLLM that lacks a name must still import its module
            logging.getLogger(LOGGER).debug("%s is not as expected: %s", module.__name__, error)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Let Python find a module that is to be changed, and change it once it has been executed."""
        if fullname not in self._changes or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.change(module)

        # A loader belongs to one module.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _add_load_format(model_loader: Any) -> None:
    def load(load_config: Any) -> Any:
        from vllm_delta_sync.engine.entrypoints.load_format import DeltaSyncLoader

        return DeltaSyncLoader(load_config)

    model_loader._LOAD_FORMAT_TO_MODEL_LOADER[LOAD_FORMAT] = load


def _add_transfer_backend(factory: Any) -> None:
    if TRANSFER_BACKEND not in factory.WeightTransferEngineFactory._registry:
        factory.WeightTransferEngineFactory.register_engine(
            TRANSFER_BACKEND, "vllm_delta_sync.engine.entrypoints.transfer_backend", "BucketTransferEngine"
        )


def _wrap_engine_core(core: Any) -> None:
    """Equip engine cores whose workers have our extension, before they serve anything.

    Cause: a controller that is lost in the middle of a commit must not leave generation paused, and caches inside the
    engine core must not outlive the weights that they were computed from; vLLM has no plugin for its engine core.
    Symptom: it cannot be paused safely, and is refused. Remove when: vLLM has one.
    """
    original = core.EngineCore._initialize_kv_caches

    @wraps(original)
    def initialize(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if is_our_extension(vllm_config.parallel_config.worker_extension_cls):
            from vllm_delta_sync.engine.core import pause_watchdog

            pause_watchdog.install(self)
        return original(self, vllm_config, *args, **kwargs)

    core.EngineCore._initialize_kv_caches = initialize


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "vllm.model_executor.model_loader": _add_load_format,
    "vllm.distributed.weight_transfer.factory": _add_transfer_backend,
    "vllm.v1.engine.core": _wrap_engine_core,
}


def endpoint_plugin() -> Any:
    """Return the factory that vLLM calls in the API server, if VLLM_PLUGINS names ``delta_sync``."""
    from vllm_delta_sync.engine.entrypoints.endpoint import EndpointPlugin

    return EndpointPlugin()
