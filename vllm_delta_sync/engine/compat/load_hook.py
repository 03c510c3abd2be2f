"""Stand around what vLLM does to weights once a model's loader has filled it."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from vllm_delta_sync.engine.model.load_record import record_load


class _ModuleSubset:
    """Some modules of a model, as vLLM's step after loading goes through them."""

    def __init__(self, model: Any, paths: Iterable[str]) -> None:
        self._model, self._paths = model, list(paths)
        if "" in self._paths and hasattr(model, "process_weights_after_loading"):
            self.process_weights_after_loading = model.process_weights_after_loading

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for path in self._paths:
            yield path, self._model.get_submodule(path)


def is_runtime_state(name: str) -> bool:
    """Whether vLLM fills a tensor of that name from requests or adapters: KV caches and what LoRA layers hold."""
    attribute = name.partition("[")[0].rpartition(".")[2]
    return attribute == "kv_cache" or "lora" in attribute


def watch_loading() -> None:
    """Note of every model that vLLM loads in this process what it was before weights were worked on, and how to do that
    again to some of its modules.

    Cause: vLLM packs, quantizes and multiplies weights after loading, and keeps no way to tell which. Symptom: routes
    that lead to memory no kernel reads, or projections that go stale. Remove when: vLLM's own reloading can be done to
    single layers beside the model.
    """
    from vllm.model_executor.model_loader import base_loader

    original = base_loader.process_weights_after_loading
    if hasattr(original, "delta_sync"):
        return

    def process(model: Any, model_config: Any, target_device: torch.device) -> None:
        def step(target: Any, paths: Iterable[str] | None) -> None:
            original(target if paths is None else _ModuleSubset(target, paths), model_config, target_device)

        record_load(model, step, is_runtime_state)

    process.delta_sync = True  # type: ignore[attr-defined]
    base_loader.process_weights_after_loading = process
