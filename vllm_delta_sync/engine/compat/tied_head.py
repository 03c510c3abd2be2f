"""``TiedHead`` is vLLM's rule for output heads: config.json may tie them, and the checkpoint has the last word.

If config.json says ``tie_word_embeddings`` and the checkpoint contains a tensor ``…lm_head.weight``, vLLM creates the
head as if untied (``ModelConfig.maybe_untie_word_embeddings``), and ties it again after loading if both turn out equal
(``maybe_retie_word_embeddings``). vLLM asks the model folder; the tensors that are served are those of a run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_delta_sync.engine.compat.speculation import is_draft
from vllm_delta_sync.engine.model.load_record import TensorPath, dotted_path
from vllm_delta_sync.engine.model.model_replica import view_in_storage
from vllm_delta_sync.engine.model.model_with_draft import MODEL, ModelWithDraft
from vllm_delta_sync.format.table import DRAFT_PREFIX, TensorTable

HEAD = "lm_head.weight"
"""How the name of a head ends, in vLLM's ``checkpoint_has_lm_head``."""


def has_own_head(table: TensorTable) -> bool:
    """Return whether a checkpoint with these tensors has a head of its own, for vLLM."""
    return any(spec.name.endswith(HEAD) and not spec.name.startswith(DRAFT_PREFIX) for spec in table)


def _unties(model_config: Any) -> bool:
    """Return whether vLLM has untied the head because the model folder has one."""
    return bool(getattr(model_config, "word_embeddings_untied_by_checkpoint", False))


def is_tied_by_config(model_config: Any) -> bool:
    """Return whether config.json ties the head, so that the checkpoint decides."""
    return bool(getattr(model_config.hf_config, "tie_word_embeddings", False)) or _unties(model_config)


def decide_by(table: TensorTable, model_config: Any) -> None:
    """Let these tensors decide in place of those in the model folder, before the model is created."""
    if is_tied_by_config(model_config):
        own = has_own_head(table)
        _set_tied(model_config.hf_config, not own)
        model_config.word_embeddings_untied_by_checkpoint = own


@contextmanager
def kept_untied(model_config: Any) -> Iterator[None]:
    """Keep vLLM from tying a head again in the block because it equals the embedding: later versions may differ.

    Cause: vLLM saves the memory of a head that the checkpoint has and config.json ties. Symptom: a version in which
    only one of them changes cannot be served. Remove when: vLLM has an option to leave untied heads alone.
    """
    untied = _unties(model_config)
    # A draft shares the served model's head, or has one of its own, which no rule ties.
    if not untied or is_draft(model_config):
        yield
        return
    model_config.word_embeddings_untied_by_checkpoint = False
    try:
        yield
    finally:
        model_config.word_embeddings_untied_by_checkpoint = untied


class TiedHead:
    """A ``TieRule`` for a model that was created with a ``ModelConfig``."""

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config

    def unties(self, table: TensorTable) -> bool | None:
        """See ``TieRule``."""
        return has_own_head(table) if is_tied_by_config(self._model_config) else None

    def match(self, replica: Any, live: dict[TensorPath, Any]) -> None:
        """See ``TieRule``."""
        first: dict[int, torch.nn.Parameter] = {}
        for path, module, name, parameter in _embedding_parameters(replica):
            tensor = live.get((path, name))
            if tensor is not None and first.setdefault(id(tensor), parameter) is not parameter:
                module._parameters[name] = first[id(tensor)]
                _set_all_tied(replica, True)

    def untie(self, replica: Any) -> bool:
        """See ``TieRule``."""
        first: dict[int, str] = {}
        found = False
        for path, module, name, parameter in _embedding_parameters(replica):
            own = dotted_path((path, name))
            if first.setdefault(id(parameter), own) != own:
                storage = torch.UntypedStorage(parameter.untyped_storage().nbytes(), device="meta")
                separate: Any = view_in_storage(parameter, storage)
                separate.__class__ = parameter.__class__
                separate.__dict__.update(parameter.__dict__)
                module._parameters[name] = separate
                found = True
        if found:
            _set_all_tied(replica, False)
        return found

    def untied_heads(self, replica: Any) -> dict[str, str | None]:
        """See ``TieRule``."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        heads: dict[str, torch.nn.Parameter] = {}
        embeddings: dict[str, torch.nn.Parameter] = {}
        for path, module, name, parameter in _embedding_parameters(replica):
            if name == "weight":
                (heads if isinstance(module, ParallelLMHead) else embeddings)[dotted_path((path, name))] = parameter
        found: dict[str, str | None] = {}
        for head, parameter in heads.items():
            if not any(parameter is embedding for embedding in embeddings.values()):
                like = [at for at, embedding in embeddings.items() if embedding.shape == parameter.shape]
                found[head] = like[0] if len(like) == 1 else None
        return found


def _embedding_parameters(replica: Any) -> list[tuple[str, Any, str, torch.nn.Parameter]]:
    """Return (module path, module, name, parameter) of all embeddings and heads, embeddings first as models have it.

    Not of a draft: whether it has its own is not decided by config.json.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    served, prefix = (replica.model, MODEL) if isinstance(replica, ModelWithDraft) else (replica, "")
    return [
        (path, module, name, parameter)
        for path, module in served.named_modules(prefix=prefix)
        if isinstance(module, VocabParallelEmbedding)
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _set_tied(config: Any, tied: bool) -> None:
    config.tie_word_embeddings = tied
    config.get_text_config().tie_word_embeddings = tied


def _set_all_tied(replica: Any, tied: bool) -> None:
    """Tell the modules of a replica, which has configurations of its own, what vLLM would have told them."""
    from transformers import PretrainedConfig

    for module in (replica.model if isinstance(replica, ModelWithDraft) else replica).modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PretrainedConfig):
                _set_tied(value, tied)
            elif name == "tie_word_embeddings":
                setattr(module, name, tied)
