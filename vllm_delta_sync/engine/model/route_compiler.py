"""``trace_routes`` turns a trace of the model's loader into routes; what cannot be routed becomes a unit or is refused.

A checkpoint tensor that is copied element by element is patched by address. A tensor that is changed in another way (a
cast, a transform, a kernel's layout made after loading) becomes part of a reload unit, together with all memory it
affects and all other tensors that affect that memory; ``reload_units`` reloads it. The rest must add up: no element is
loaded twice, no memory is shared, and no parameter may depend on others in a way that was not observed.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.model.load_record import LoadRecord, load_record_of
from vllm_delta_sync.engine.model.loader_trace import Copy, Target, Trace, trace_loader
from vllm_delta_sync.engine.model.model_replica import MetaLeaf, is_plain, replicate
from vllm_delta_sync.engine.model.model_with_draft import ModelWithDraft
from vllm_delta_sync.engine.model.reload_units import (
    LoaderReplay,
    LoadTimeReader,
    ReloadScope,
    ReloadUnits,
    destination_of,
    find_owners,
    live_tensors,
)
from vllm_delta_sync.engine.model.route import Destination, Route, find_overlap
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.model.tied_head import TiedHead
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.table import TensorTable


# As in vLLM's own loading: inference mode would show a recorder other operators, and make other tensors.
@torch.inference_mode(False)
def trace_routes(
    model: torch.nn.Module,
    table: TensorTable,
    load_time_bits: LoadTimeReader | None = None,
    memory: WeightMemory | None = None,
    tied_head: TiedHead | None = None,
) -> RouteMap:
    """Trace and prove the routes of a run's tensors in a model. Writes no weight.

    Args:
        load_time_bits: returns the bits of tensors that the loader computes with; if None, such a model is refused.
        memory: guards the weights; None means ``WeightMemory.for_model(model)``.
        tied_head: when a fresh load ties the output head; None means that it does not depend on the tensors.

    Raises:
        ModelError: a tensor is computed and ``load_time_bits`` is None, or reloading does not give what the model
            holds; a parameter is covered in part, or the loader fails; a fresh load would use a tensor that this model
            leaves out. The message names the tensor and the reason.
        DeltaSyncError: what ``load_time_bits`` raises.
    """
    memory = WeightMemory.for_model(model) if memory is None else memory
    record = load_record_of(model)
    if record is not None and record.opaque_operations:
        raise ModelError(
            "this model cannot be patched in place: after loading, weights were passed to "
            f"{', '.join(record.opaque_operations)}, which keeps a copy that cannot be reached; serve it without that "
            "quantization or kernel"
        )
    added_since_load = [] if record is None else record.added_since_load(model)
    if added_since_load:
        more = f" and {len(added_since_load) - 3} more" if len(added_since_load) > 3 else ""
        raise ModelError(
            f"this model cannot be patched in place: {', '.join(added_since_load[:3])}{more} did not exist after "
            "loading, may have been computed from weights since, and would go stale; serve the model without the "
            "kernel or feature that keeps it"
        )
    if record is None:
        with memory.reading():
            skeleton = replicate(model, MetaLeaf(model))
    else:
        skeleton = record.skeleton
    # A wrapper that was set on the instance would lead to the model itself.
    skeleton.__dict__.pop("load_weights", None)
    live = live_tensors(model, record)

    def make_replica() -> Any:
        made = replicate(skeleton, MetaLeaf(skeleton))
        if tied_head is not None:
            tied_head.match(made, live)
        return made

    trace = trace_loader(make_replica(), table)
    if not trace.copies and not trace.computed:
        raise ModelError(
            f"this model loads none of the {len(table)} tensors of the run, such as {table[0].name!r}: the run is of "
            "another model; check the setting bucket, or start vLLM from the checkpoint that the run refers to"
        )
    if trace.shared and isinstance(model, ModelWithDraft) and model.own_checkpoint:
        raise ModelError(
            f"tensor {table[min(trace.shared)].name!r} is of the draft, which uses that of the served model in its "
            "place, because it had none when vLLM loaded it, or an equal one: versions in which they differ could not "
            "be served; publish the draft without it (exclude=)"
        )
    if tied_head is not None:
        skeleton = tied_head.fill_untied_heads(trace, skeleton)
        tied_head.check_left_out(trace, make_replica)
    compiler = _Compiler(model, trace, record, memory)
    scopes = compiler.scopes()
    if scopes and load_time_bits is None:
        raise ModelError(f"this model cannot be patched in place: {scopes[0].reason}")
    routes = compiler.routes()
    if compiler.unfilled:
        logger.warning("no tensor of the run is loaded to %s; it keeps its value", ", ".join(compiler.unfilled))
    if scopes and load_time_bits is not None:
        tensor_paths = frozenset(_split_name(name) for target in trace.targets for name in target.names)
        replay = LoaderReplay(model, skeleton, table, record, tensor_paths, memory)
        routes.add_reload_units(ReloadUnits.build(replay, routes.destinations, scopes, load_time_bits))
    return routes


class _Compiler:
    """Separates memory that is patched by address from memory that must be reloaded."""

    def __init__(self, model: torch.nn.Module, trace: Trace, record: LoadRecord | None, memory: WeightMemory) -> None:
        self.trace, self.record, self._memory = trace, record, memory
        # Tensor path → modules that the step after loading left with something made of that tensor.
        self._processed_by: dict[tuple[str, str], list[str]] = defaultdict(list)
        for path, tensor_paths in record.changed.items() if record is not None else ():
            for at in tensor_paths:
                self._processed_by[at].append(path)
        self._live = live_tensors(model, record)
        self._owners = find_owners(model)
        self._of_tensor: dict[int, list[Copy]] = defaultdict(list)
        self._of_target: dict[int, list[Copy]] = defaultdict(list)
        self._tensors_in: dict[int, set[int]] = defaultdict(set)
        self._targets_of: dict[int, set[int]] = defaultdict(set)
        for copy in trace.copies:
            self._of_tensor[copy.tensor].append(copy)
            self._of_target[copy.target].append(copy)
            self._tensors_in[copy.target].add(copy.tensor)
            self._targets_of[copy.tensor].add(copy.target)
        for computed in trace.computed:
            self._tensors_in[computed.target] |= computed.tensors
            for tensor in computed.tensors:
                self._targets_of[tensor].add(computed.target)
        # Of each target, a live tensor in its memory; None if that is not a single storage of the same size.
        self._places = [self._place(target) for target in trace.targets]
        # What is not patched by address: target → reason, and ids of tensors.
        self._reasons: dict[int, str] = {}
        self.unfilled: list[str] = []
        self._reloaded_tensors: set[int] = set()

    def scopes(self) -> list[ReloadScope]:
        """Return the scopes to reload; they have nothing in common."""
        self._find_reasons()
        groups = _Groups()
        # Every tensor of a scope adds its other targets to the scope, and those add their tensors.
        reloaded = list(self._reasons)
        for target in reloaded:
            for node in self._neighbours(target):
                groups.join(("target", target), node)
            for tensor in self._tensors_in[target]:
                self._reloaded_tensors.add(tensor)
                for other in self._targets_of[tensor]:
                    groups.join(("target", other), ("tensor", tensor))
                    if other not in self._reasons:
                        self._reasons[other] = self._reasons[target]
                        reloaded.append(other)
        for tensor_path, tensors in self.trace.kept.items():
            # This includes tensors that are loaded nowhere else.
            self._reloaded_tensors.update(tensors)
            for tensor in tensors:
                groups.join(("kept", tensor_path), ("tensor", tensor))
        found = [self._make_scope(nodes) for nodes in groups.all()]
        return [scope for scope in found if scope.tensors]

    def _make_scope(self, nodes: Iterable[tuple[str, Any]]) -> ReloadScope:
        members: dict[str, list[Any]] = defaultdict(list)
        for kind, value in nodes:
            members[kind].append(value)
        targets = sorted(members["target"])
        names = {_split_name(name) for target in targets for name in self.trace.targets[target].names}
        reason = next((self._reasons[target] for target in targets if target in self._reasons), "")
        return ReloadScope(sorted(members["tensor"]), names | set(members["kept"]), set(members["module"]), reason)

    def _find_reasons(self) -> None:
        """Find targets that hold something other than checkpoint elements, or that moved after loading."""
        for computed in self.trace.computed:
            self._reasons.setdefault(computed.target, computed.reason)
        for tensor_path, tensors in self.trace.kept.items():
            for other in (other for tensor in tensors for other in self._targets_of[tensor]):
                self._reasons.setdefault(other, f"{'.'.join(tensor_path)} is kept by the loader")
        for tensor, copies in self._of_tensor.items():
            reason = _find_repetition(self.trace.table[tensor].name, copies)
            if reason is not None:
                for copy in copies:
                    self._reasons.setdefault(copy.target, reason)
        users = Counter(place.untyped_storage()._cdata for place in self._places if place is not None)
        for position, (target, place) in enumerate(zip(self.trace.targets, self._places, strict=True)):
            if position in self._reasons:
                continue
            modules = [path for name in target.names for path in self._processed_by[_split_name(name)]]
            if modules:
                where = modules[0] or "the model"
                self._reasons[position] = f"{target.names[0]} is changed after loading, in {where!r}"
            elif place is None:
                self._reasons[position] = f"{target.names[0]} is not where the loader left it"
            elif users[place.untyped_storage()._cdata] > 1:
                self._reasons[position] = f"{target.names[0]} was joined with other memory after loading"
            else:
                conflict = self._find_conflict(position)
                if conflict is not None:
                    self._reasons[position] = conflict

    def _neighbours(self, target: int) -> Iterable[tuple[str, Any]]:
        """Yield the memory, and modules changed after loading, that a target shares with others."""
        names = self.trace.targets[target].names
        for name in names:
            for path in self._processed_by[_split_name(name)]:
                yield "module", path
            tensor = self._live.get(_split_name(name))
            if tensor is not None:
                yield "storage", tensor.untyped_storage()._cdata

    def _find_conflict(self, target: int) -> str | None:
        """Return why copies into a target collide; None if they do not."""
        copies = self._of_target[target]
        destination = self.trace.targets[target]
        repeated = next((copy for copy in copies if not copy.target_region.is_injective), None)
        if repeated is not None:
            return f"tensor {self.trace.table[repeated.tensor].name!r} is loaded with repeated elements"
        pair = find_overlap([copy.target_region for copy in copies])
        if pair is not None:
            first, second = (self.trace.table[copies[position].tensor].name for position in pair)
            return f"tensors {first!r} and {second!r} are loaded to the same memory of {destination.names[0]!r}"
        for of, region, before in self.trace.paddings:
            if of != target or not region.numel:
                continue
            # Copies overwrite constants that were set before; constants set later must not overwrite copies.
            earlier = [copy for copy in self.trace.copies[:before] if copy.target == target]
            if earlier and find_overlap([*(copy.target_region for copy in earlier), region]) is not None:
                name = self.trace.table[earlier[0].tensor].name
                return f"tensors {name!r} and 'padding' are loaded to the same memory of {destination.names[0]!r}"
        return None

    def routes(self) -> RouteMap:
        """Return the routes of everything that is patched by address."""
        destinations: list[Destination] = []
        numbers: dict[int, int] = {}
        routes: list[list[Route]] = [[] for _ in self.trace.table]
        for position, target in enumerate(self.trace.targets):
            if position in self._reasons:
                continue
            self._check_covered(position)
            if (place := self._places[position]) is not None:
                numbers[position] = len(destinations)
                destinations.append(destination_of(target.names[0], place, self._owners))
        for copy in self.trace.copies:
            if copy.tensor not in self._reloaded_tensors:
                routes[copy.tensor].append(Route(numbers[copy.target], copy.source, copy.target_region))
        return RouteMap(self.trace.table, destinations, routes, memory=self._memory)

    def _place(self, target: Target) -> torch.Tensor | None:
        found = [self._live.get(_split_name(name)) for name in target.names]
        first = found[0]
        if first is None or not is_plain(first) or first.device.type == "meta":
            return None
        storage = first.untyped_storage()
        same = all(tensor is not None and tensor.untyped_storage()._cdata == storage._cdata for tensor in found)
        fits = first.dtype == target.dtype and storage.nbytes() == target.numel * first.element_size()
        return first if same and fits else None

    def _check_covered(self, position: int) -> None:
        """Refuse a parameter that the checkpoint does not fill: it may be computed from another weight, and would go
        stale unnoticed. Where loading was recorded, such a computation has been seen."""
        target = self.trace.targets[position]
        if not target.is_parameter:
            return
        if self.record is not None:
            if not self._of_target[position]:
                self.unfilled.append(target.names[0])
            return
        # What is copied is disjoint, as ``_find_conflict`` has found; constants may have been overwritten.
        regions = [copy.target_region for copy in self._of_target[position]]
        for of, region, _ in self.trace.paddings:
            own = of == position and region.numel and region.is_injective
            if own and find_overlap([*regions, region]) is None:
                regions.append(region)
        covered = sum(region.numel for region in regions)
        if covered != target.numel:
            raise ModelError(
                f"parameter {target.names[0]!r} gets {covered} of its {target.numel} elements from the checkpoint: "
                "the rest may be derived from other weights and would go stale, so this model is refused"
            )


def _find_repetition(name: str, copies: Sequence[Copy]) -> str | None:
    """Return why a tensor's copies are neither equal nor disjoint; None if they are."""
    if not all(copy.source.is_injective for copy in copies):
        return f"tensor {name!r} is loaded with repeated elements (an expanded view)"
    if find_overlap(sorted({copy.source for copy in copies}, key=lambda region: region.offset)) is not None:
        return f"an element of tensor {name!r} is loaded to two places"
    return None


def _split_name(name: str) -> tuple[str, str]:
    path, _, attribute = name.rpartition(".")
    return path, attribute


class _Groups:
    """Disjoint sets (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[tuple[str, Any], tuple[str, Any]] = {}

    def _root(self, node: tuple[str, Any]) -> tuple[str, Any]:
        while self._parent.setdefault(node, node) != node:
            node = self._parent[node]
        return node

    def join(self, first: tuple[str, Any], second: tuple[str, Any]) -> None:
        """Merge the sets of two nodes."""
        self._parent[self._root(second)] = self._root(first)

    def all(self) -> list[list[tuple[str, Any]]]:
        """Return every set, in the order of its first member."""
        found: dict[tuple[str, Any], list[tuple[str, Any]]] = defaultdict(list)
        for node in list(self._parent):
            found[self._root(node)].append(node)
        return list(found.values())
