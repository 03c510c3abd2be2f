"""``ModelWithDraft``: the served model and the one that drafts for it (speculative decoding), as one model.

Where drafts come from weights of the run, these must change in the same pause as the model's, and be part of the same
proof. So both are traced, patched, measured and reloaded as one module with two parts, each with its own loader:

- A draft that belongs to the served checkpoint (multi-token prediction, or the served model itself) is loaded from the
  run's tensors by their names, as the served model is.
- A draft with a checkpoint of its own (EAGLE, Medusa, …) is loaded from the tensors whose names begin with
  ``DRAFT_PREFIX``, which a run has if the trainer publishes the draft. Served models never load these.

After loading, vLLM lets a draft use the embedding and the output head of the served model, and drops the memory that
the draft's loader had filled for them. Nothing reads what a loader writes there, so it is left out of a trace.
"""

from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch import nn

from vllm_delta_sync.format.table import DRAFT_PREFIX

MODEL, DRAFT = "model", "draft"
"""Names of the two parts."""
Weights = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""Yields (name in the run, tensor) anew at each call."""


class ModelWithDraft(nn.Module):
    """A module with two parts.

    Args:
        model: the served model. draft: the one that drafts for it.

    Attributes:
        own_checkpoint: whether the draft has another checkpoint than the served model.
        shared: (module path, name) of the draft's tensors that its loader filled, and that are the served model's now.
    """

    def __init__(self, model: Any, draft: Any, own_checkpoint: bool, shared: Set[tuple[str, str]]) -> None:
        super().__init__()
        self.model, self.draft = model, draft
        self.own_checkpoint, self.shared = own_checkpoint, shared


def load_weights(model: Any, weights: Weights) -> Any:
    """Let a model load a run's tensors, and its draft, if it has one.

    Returns:
        what the served model's own ``load_weights`` returns.
    """

    def of_draft(name: str) -> bool:
        return name.startswith(DRAFT_PREFIX)

    if not isinstance(model, ModelWithDraft):
        return model.load_weights((name, tensor) for name, tensor in weights() if not of_draft(name))
    loaded = load_weights(model.model, weights)
    if model.own_checkpoint:
        model.draft.load_weights(
            (name.removeprefix(DRAFT_PREFIX), tensor) for name, tensor in weights() if of_draft(name)
        )
    else:
        load_weights(model.draft, weights)
    return loaded
