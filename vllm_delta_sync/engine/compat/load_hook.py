"""``watch_loading`` records what vLLM does to weights after a model's loader has filled it, and keeps heads untied."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_delta_sync.engine.compat.patches import wrap_once
from vllm_delta_sync.engine.compat.speculation import is_draft
from vllm_delta_sync.engine.model.load_record import record_load
from vllm_delta_sync.engine.model.tied_head import is_untied_by_checkpoint


@contextmanager
def kept_untied(model_config: Any) -> Iterator[None]:
    """Keep vLLM from tying a head again in the block because it equals the embedding: later versions may differ.

    Cause: vLLM saves the memory of a head that the checkpoint has and config.json ties. Symptom: a version in which
    only one of them changes cannot be served. Remove when: vLLM has an option to leave untied heads alone.
    """
    untied = is_untied_by_checkpoint(model_config)
    # A draft shares the served model's head, or has one of its own, which no rule ties.
    if not untied or is_draft(model_config):
        yield
        return
    model_config.word_embeddings_untied_by_checkpoint = False
    try:
        yield
    finally:
        model_config.word_embeddings_untied_by_checkpoint = untied


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

    def process(original: Callable[..., Any], model: Any, model_config: Any, target_device: torch.device) -> None:
        def step(target: Any, paths: list[str] | None) -> None:
            with kept_untied(model_config):
                original(target if paths is None else _ModuleSubset(target, paths), model_config, target_device)

        record_load(model, step)

    wrap_once(base_loader, "process_weights_after_loading", process)
