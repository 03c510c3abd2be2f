"""``TiedHead``: an output head is what a fresh load of the run would make of it, by vLLM's rule for output heads.

If config.json says ``tie_word_embeddings`` and the checkpoint contains a tensor ``…lm_head.weight``, vLLM creates the
head as if untied (``ModelConfig.maybe_untie_word_embeddings``), and ties it again after loading if both turn out equal
(``maybe_retie_word_embeddings``). vLLM asks the model folder; the tensors that are served are those of a run.

So which tensors a fresh load uses can depend on their names. A model that was loaded from a checkpoint without a head
has no memory for the run's head, so it is refused. A model with a head of its own follows a run without one: the
embedding fills both. Traces of the loader prove both.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from vllm_delta_sync.engine.model.load_record import TensorPath, dotted_path
from vllm_delta_sync.engine.model.loader_trace import Trace, trace_loader
from vllm_delta_sync.engine.model.model_replica import MetaLeaf, replicate, view_in_storage
from vllm_delta_sync.engine.model.model_with_draft import MODEL, ModelWithDraft
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.table import DRAFT_PREFIX, TensorTable

HEAD = "lm_head.weight"
"""How the name of a head ends, in vLLM's ``checkpoint_has_lm_head``."""


def has_own_head(table: TensorTable) -> bool:
    """Return whether a checkpoint with these tensors has a head of its own, for vLLM."""
    return any(spec.name.endswith(HEAD) and not spec.name.startswith(DRAFT_PREFIX) for spec in table)


def is_untied_by_checkpoint(model_config: Any) -> bool:
    """Return whether vLLM has untied the head because the model folder has one."""
    return bool(getattr(model_config, "word_embeddings_untied_by_checkpoint", False))


def is_tied_by_config(model_config: Any) -> bool:
    """Return whether config.json ties the head, so that the checkpoint decides."""
    return bool(getattr(model_config.hf_config, "tie_word_embeddings", False)) or is_untied_by_checkpoint(model_config)


def decide_by(table: TensorTable, model_config: Any) -> None:
    """Let these tensors decide in place of those in the model folder, before the model is created."""
    if is_tied_by_config(model_config):
        own = has_own_head(table)
        _set_tied(model_config.hf_config, not own)
        model_config.word_embeddings_untied_by_checkpoint = own


class TiedHead:
    """The rule for a model that was created with a ``ModelConfig``."""

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config

    def _unties(self, table: TensorTable) -> bool | None:
        """Return whether a fresh load gives the head memory of its own because of these tensors; None if it does not
        depend on them."""
        return has_own_head(table) if is_tied_by_config(self._model_config) else None

    def match(self, replica: Any, live: dict[TensorPath, Any]) -> None:
        """Tie in a replica what is tied in the live model, which may have been tied after loading."""
        first: dict[int, torch.nn.Parameter] = {}
        for path, module, name, parameter in _embedding_parameters(replica):
            tensor = live.get((path, name))
            if tensor is not None and first.setdefault(id(tensor), parameter) is not parameter:
                module._parameters[name] = first[id(tensor)]
                _set_all_tied(replica, True)

    def _untie(self, replica: Any) -> bool:
        """Give tied heads of a replica memory of their own; returns whether there were any."""
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

    def check_left_out(self, trace: Trace, replica: Callable[[], Any]) -> None:
        """Refuse a model that ties its head, and so leaves out a tensor of the run that a fresh load would use.

        Args:
            replica: makes a replica like the one that was traced.

        Raises:
            ModelError: the model leaves one out; or the loader of an untied model fails.
        """
        left_out = {tensor for tensor, spec in enumerate(trace.table) if spec.numel} - trace.loaded
        if not left_out or not self._unties(trace.table):
            return
        separate = replica()
        missed = left_out & trace_loader(separate, trace.table).loaded if self._untie(separate) else set()
        if missed:
            raise ModelError(
                f"tensor {trace.table[min(missed)].name!r} is left out by this model, which has tied its output head, "
                "and a fresh load of the run would use it; start vLLM with --load-format delta_sync, or from a "
                "checkpoint that has the head and the embedding; or publish without the head (exclude=)"
            )

    def fill_untied_heads(self, trace: Trace, skeleton: Any) -> Any:
        """Let the embedding fill heads that this model has, and that a fresh load of the run would tie to it.

        Args:
            trace: is changed accordingly.

        Returns:
            the skeleton that a loader can be replayed on: a copy with these heads tied, if there are any.

        Raises:
            ModelError: this rank has no such embedding.
        """
        if self._unties(trace.table) is not False:
            return skeleton
        places = {name: place for place, target in enumerate(trace.targets) for name in target.names}
        filled = {copy.target for copy in trace.copies} | {found.target for found in trace.computed if found.tensors}
        heads = {
            head: embedding
            for head, embedding in _untied_heads(skeleton).items()
            if head in places and places[head] not in filled
        }
        if not heads:
            return skeleton
        tied = replicate(skeleton, MetaLeaf(skeleton))
        for head, embedding in heads.items():
            if embedding not in places:
                raise ModelError(
                    f"the run has no tensor for {head}, so a fresh load would tie it to the embedding, and this rank "
                    "has none: it was loaded from a checkpoint with a head; start vLLM with --load-format delta_sync"
                )
            module, _, attribute = head.rpartition(".")
            tied.get_submodule(module)._parameters[attribute] = tied.get_parameter(embedding)
            place, own = places[embedding], places[head]
            trace.copies += [replace(copy, target=own) for copy in trace.copies if copy.target == place]
            trace.paddings += [(own, region, 0) for of, region, _ in trace.paddings if of == place]
            trace.computed += [replace(computed, target=own) for computed in trace.computed if computed.target == place]
        return tied


def _untied_heads(replica: Any) -> dict[str, str | None]:
    """Return the name of each head with memory of its own → that of the embedding that a tied model has in its place;
    None if this rank has no such embedding."""
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
    """Set in the modules of a replica, which has configurations of its own, what vLLM sets in those of its model."""
    from transformers import PretrainedConfig

    for module in (replica.model if isinstance(replica, ModelWithDraft) else replica).modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PretrainedConfig):
                _set_tied(value, tied)
            elif name == "tie_word_embeddings":
                setattr(module, name, tied)
