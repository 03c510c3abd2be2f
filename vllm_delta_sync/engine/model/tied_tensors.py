"""``find_duplicates`` finds tensors of a run that are left out only because this model ties them to others.

Which tensors a fresh load uses can depend on their names: where config.json ties the output head to the embedding, vLLM
gives the head memory of its own if the checkpoint contains one. A model that was loaded from a checkpoint without a
head leaves out the run's head, and a fresh load of the same version would use it. Such a tensor is a *duplicate* of its
owner, which fills the memory of both. A version is served only if both have the same bits.

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

    @property
    def remedy(self) -> str:
        """What to do if the head of a version differs from the embedding, and this model ties both."""

    def unties(self, table: TensorTable) -> bool | None:
        """Return whether a fresh load gives the head memory of its own because of these tensors; None if it does not
        depend on them."""

    def match(self, replica: Any, live: dict[TensorPath, Any]) -> None:
        """Tie in a replica what is tied in the live model, which may have been tied after loading."""

    def untie(self, replica: Any) -> dict[str, str]:
        """Give tied heads of a replica memory of their own; returns name of each → name of what it was tied to."""

    def untied_heads(self, replica: Any) -> dict[str, str | None]:
        """Return the name of each head with memory of its own → that of the embedding that a tied model has in its
        place; None if this rank has no such embedding."""


def find_duplicates(trace: Trace, rule: TieRule, replica: Callable[[], Any]) -> dict[int, int]:
    """Return tensor that the traced model leaves out and a fresh load would use → the tensor loaded in its place.

    Args:
        replica: makes a replica like the one that was traced.

    Raises:
        ModelError: no single tensor is loaded in its place, in the same way; or the loader of an untied model fails.
    """
    left_out = {tensor for tensor, spec in enumerate(trace.table) if spec.numel} - trace.loaded
    if not left_out or not rule.unties(trace.table):
        return {}
    separate = replica()
    owners = rule.untie(separate)
    if not owners:
        return {}
    untied = trace_loader(separate, trace.table)
    found: dict[int, int] = {}
    for tensor in sorted(left_out & untied.loaded):
        places = [place for place, target in enumerate(untied.targets) if tensor in untied.tensors_in(place)]
        tied_to = {owners.get(untied.targets[place].names[0]) for place in places}
        candidates = {
            owner
            for place, target in enumerate(trace.targets)
            if tied_to & set(target.names)
            for owner in trace.tensors_in(place)
        }
        owner = candidates.pop() if len(candidates) == 1 and len(tied_to) == 1 and None not in tied_to else None
        if owner is None or not _loads_alike(untied, tensor, trace, owner):
            raise ModelError(
                f"tensor {trace.table[tensor].name!r} is left out by this model and used by a fresh load of the run, "
                f"and no tensor of the same dtype and shape is loaded in its place; {rule.remedy}"
            )
        found[tensor] = owner
    return found


def _loads_alike(untied: Trace, tensor: int, trace: Trace, owner: int) -> bool:
    """Return whether equal bits in two tensors make equal weights in the place of the first."""
    first, second = untied.table[tensor], trace.table[owner]
    copies = [
        {(copy.source, copy.target_region) for copy in found.copies if copy.tensor == id_}
        for found, id_ in ((untied, tensor), (trace, owner))
    ]
    return (first.dtype, first.shape) == (second.dtype, second.shape) and copies[0] == copies[1]


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
    heads = {
        head: embedding
        for head, embedding in rule.untied_heads(skeleton).items()
        if head in places and not trace.tensors_in(places[head])
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
