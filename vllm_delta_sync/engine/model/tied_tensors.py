"""``check_left_out`` and ``fill_untied_heads``: an output head is what a fresh load of the run would make of it.

Which tensors a fresh load uses can depend on their names: where config.json ties the output head to the embedding, vLLM
gives the head memory of its own if the checkpoint contains one. A model that was loaded from a checkpoint without a
head has no memory for the run's head, so it is refused. A model with a head of its own follows a run without one: the
embedding fills both.

``TieRule`` is the engine's rule; this module proves by traces of the loader what follows from it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from vllm_delta_sync.engine.model.load_record import TensorPath
from vllm_delta_sync.engine.model.loader_trace import Trace, trace_loader
from vllm_delta_sync.engine.model.model_replica import MetaLeaf, replicate
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.table import TensorTable


class TieRule(Protocol):
    """When an engine ties the output head of a model to the embedding, and how to make a replica one or the other."""

    def unties(self, table: TensorTable) -> bool | None:
        """Return whether a fresh load gives the head memory of its own because of these tensors; None if it does not
        depend on them."""

    def match(self, replica: Any, live: dict[TensorPath, Any]) -> None:
        """Tie in a replica what is tied in the live model, which may have been tied after loading."""

    def untie(self, replica: Any) -> bool:
        """Give tied heads of a replica memory of their own; returns whether there were any."""

    def untied_heads(self, replica: Any) -> dict[str, str | None]:
        """Return the name of each head with memory of its own → that of the embedding that a tied model has in its
        place; None if this rank has no such embedding."""


def check_left_out(trace: Trace, rule: TieRule, replica: Callable[[], Any]) -> None:
    """Refuse a model that ties its head, and so leaves out a tensor of the run that a fresh load would use.

    Args:
        replica: makes a replica like the one that was traced.

    Raises:
        ModelError: the model leaves one out; or the loader of an untied model fails.
    """
    left_out = {tensor for tensor, spec in enumerate(trace.table) if spec.numel} - trace.loaded
    if not left_out or not rule.unties(trace.table):
        return
    separate = replica()
    missed = left_out & trace_loader(separate, trace.table).loaded if rule.untie(separate) else set()
    if missed:
        raise ModelError(
            f"tensor {trace.table[min(missed)].name!r} is left out by this model, which has tied its output head, and "
            "a fresh load of the run would use it; start vLLM with --load-format delta_sync, or from a checkpoint that "
            "has the head and the embedding; or publish without the head (exclude=)"
        )


def fill_untied_heads(trace: Trace, rule: TieRule, skeleton: Any) -> Any:
    """Let the embedding fill heads that this model has, and that a fresh load of the run would tie to it.

    Args:
        trace: is changed accordingly.

    Returns:
        the skeleton that a loader can be replayed on: a copy with these heads tied, if there are any.

    Raises:
        ModelError: this rank has no such embedding.
    """
    if rule.unties(trace.table) is not False:
        return skeleton
    places = {name: place for place, target in enumerate(trace.targets) for name in target.names}
    filled = {copy.target for copy in trace.copies} | {found.target for found in trace.computed if found.tensors}
    heads = {
        head: embedding
        for head, embedding in rule.untied_heads(skeleton).items()
        if head in places and places[head] not in filled
    }
    if not heads:
        return skeleton
    tied = replicate(skeleton, MetaLeaf(skeleton))
    for head, embedding in heads.items():
        if embedding not in places:
            raise ModelError(
                f"the run has no tensor for {head}, so a fresh load would tie it to the embedding, and this rank has "
                "none: it was loaded from a checkpoint with a head; start vLLM with --load-format delta_sync"
            )
        module, _, attribute = head.rpartition(".")
        tied.get_submodule(module)._parameters[attribute] = tied.get_parameter(embedding)
        place, own = places[embedding], places[head]
        trace.copies += [replace(copy, target=own) for copy in trace.copies if copy.target == place]
        trace.paddings += [(own, region, 0) for of, region, _ in trace.paddings if of == place]
        trace.computed += [replace(computed, target=own) for computed in trace.computed if computed.target == place]
    return tied
