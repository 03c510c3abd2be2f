"""``watch_loading`` records what vLLM does to weights after a model's loader has filled it."""

from collections.abc import Iterator
from typing import Any

import torch

from vllm_delta_sync.engine.compat.tied_head import kept_untied
from vllm_delta_sync.engine.model.load_record import record_load


class _ModuleSubset:
    """A subset of a model's modules, in the form that vLLM's step after loading iterates over."""

    def __init__(self, model: Any, paths: list[str]) -> None:
        self._model, self._paths = model, paths
        # It may work on any of the model's modules.
        if hasattr(model, "process_weights_after_loading"):
            self.process_weights_after_loading = model.process_weights_after_loading

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for path in self._paths:
            yield path, self._model.get_submodule(path)


def watch_loading() -> None:
    """Record every model that vLLM loads in this process before vLLM changes its weights, and how to repeat the change.

    Cause: vLLM packs, quantizes and multiplies weights after loading, and does not record which. Symptom: routes that
    lead to memory no kernel reads, or projections that go stale. Remove when: vLLM can reload single layers beside the
    model.
    """
    from vllm.model_executor.model_loader import base_loader

    original = base_loader.process_weights_after_loading
    if hasattr(original, "delta_sync"):
        return

    def process(model: Any, model_config: Any, target_device: torch.device) -> None:
        def step(target: Any, paths: list[str] | None) -> None:
            with kept_untied(model_config):
                original(target if paths is None else _ModuleSubset(target, paths), model_config, target_device)

        record_load(model, step)

    process.delta_sync = True  # type: ignore[attr-defined]
    base_loader.process_weights_after_loading = process
