"""``ReloadUnits`` keeps weights up to date that a model computes from checkpoint tensors instead of copying them.

Each rank keeps a host copy of just those checkpoint tensors, and patches it like a weight. While a version is staged,
``LoaderReplay`` runs the model's own loader (and the step after loading) again on a replica that has memory for the
affected modules only, with the host copies as they will be. The commit exchanges the results with the model's weights;
the patch then holds the old ones for a rollback. At start-up each unit is proven: reloading the current host copies
must give the model's weights bit for bit, otherwise the model is refused.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_delta_sync.engine.model.load_record import LoadRecord, TensorPath, dotted_path, is_under
from vllm_delta_sync.engine.model.loader_trace import written_by
from vllm_delta_sync.engine.model.model_replica import (
    MetaLeaf,
    is_plain,
    replicate,
    view_in_storage,
    walk_numbers,
    walk_tensors,
)
from vllm_delta_sync.engine.model.model_with_draft import load_weights
from vllm_delta_sync.engine.model.route import (
    DensePatch,
    Destination,
    Region,
    Route,
    SparsePatch,
    coalesce,
    region_view,
    signed_view,
)
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.changes import Bits, apply_distances
from vllm_delta_sync.tensors.torch_views import SIGNED, TORCH_DTYPES, tensor_from_bits

BATCH_BYTES = 1 << 30
"""Bytes of host copies that are reloaded at once: each batch needs a replica."""


@dataclass(frozen=True)
class ReloadScope:
    """Tensors that must be reloaded together.

    Attributes:
        tensors: ids, ascending.
        tensor_paths: the memory that they are loaded to.
        modules: paths of the modules among them that the step after loading changes.
        reason: why these tensors cannot be patched by address.
    """

    tensors: list[int]
    tensor_paths: set[TensorPath]
    modules: set[str]
    reason: str


_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_C_custom_ar")
_COLLECTIVE_NAMES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
"""Parts of names of operators that hide a collective, such as ``vllm::all_reduce``: dispatch does not see inside."""


def _is_collective(func: Any) -> bool:
    named = func.namespace not in ("aten", "prim") and any(name in func.__name__ for name in _COLLECTIVE_NAMES)
    return named or func.namespace in _COLLECTIVE_NAMESPACES


class _LiveMemoryGuard(TorchDispatchMode):
    """Forbids writes to the model's memory, and collectives: generation runs meanwhile and uses the same channels.

    Attributes:
        is_processing: the step after loading runs. It may move a table that generation uses too to the device of
            weights, which have no data here if they are not reloaded: the table stays where it is.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.is_processing = False
        self._storages = {t.untyped_storage()._cdata for _, _, t in walk_tensors(model) if is_plain(t)}
        self._dtype = torch.get_default_dtype()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.get_default_dtype() != self._dtype:
            raise ModelError(
                f"reloading it would change the default dtype of the whole process to {torch.get_default_dtype()} "
                "while it generates"
            )
        if _is_collective(func):
            raise ModelError(f"reloading it would communicate with other ranks while they generate, by {func}")
        if self.is_processing and func is torch.ops.aten._to_copy.default and not args[0].is_meta:
            device = (kwargs or {}).get("device")
            if device is not None and torch.device(device).type == "meta":
                kwargs = {**kwargs, "device": args[0].device}
        for tensor in written_by(func, args, kwargs or {}):
            if is_plain(tensor) and tensor.untyped_storage()._cdata in self._storages:
                raise ModelError(f"reloading it beside the model would write to the model itself, by {func}")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class ReplayedLoad:
    """The result of reloading a scope: tensors, and numbers that changed modules keep beside them."""

    tensors: dict[TensorPath, torch.Tensor]
    numbers: dict[TensorPath, float]


class LoaderReplay:
    """Reloads parts of a model into separate memory.

    Args:
        targets: all memory that the loader may write.
        memory: guards the model's weights.
    """

    def __init__(
        self,
        model: Any,
        skeleton: Any,
        table: TensorTable,
        record: LoadRecord | None,
        targets: frozenset[TensorPath],
        memory: WeightMemory,
    ) -> None:
        self.model, self.record, self.memory = model, record, memory
        self._skeleton, self.table, self._targets = skeleton, table, targets
        self.numbers = {(path, name): value for path, name, value in walk_numbers(model)}
        self.live = live_tensors(model, record)
        self.owners = find_owners(model)
        self._device = torch.device("cpu") if memory.accelerator is None else memory.accelerator.device

    def load(self, scopes: Sequence[ReloadScope], bits: dict[int, Bits]) -> Iterator[ReplayedLoad]:
        """Reload each scope from these bits, in batches of at most ``BATCH_BYTES``.

        Raises:
            ModelError: a scope cannot be reloaded beside the model.
        """
        batch: list[ReloadScope] = []
        size = 0
        for scope in scopes:
            size_of_scope = sum(bits[tensor].nbytes for tensor in scope.tensors)
            if batch and size + size_of_scope > BATCH_BYTES:
                yield from self._load(batch, bits)
                batch, size = [], 0
            batch.append(scope)
            size += size_of_scope
        if batch:
            yield from self._load(batch, bits)

    def check_all_made(self, scopes: Sequence[ReloadScope], reloaded: Set[TensorPath]) -> None:
        """Raise ModelError if the model holds a tensor that was made after loading and was not reloaded."""
        index = _ScopeIndex(scopes, self._targets)
        for path, name in sorted(set() if self.record is None else self.record.made - reloaded):
            live, numbers = self.live.get((path, name)), index.scopes_holding(path, name)
            if numbers and live is not None and live.numel() and not live.is_meta:
                scope = scopes[numbers[0]]
                raise ModelError(
                    f"tensor {self.table[scope.tensors[0]].name!r} is not patched by address ({scope.reason}), and "
                    f"reloading it beside the model does not give {dotted_path((path, name))}, which was computed from "
                    "it after loading and would go stale"
                )

    def _load(self, scopes: list[ReloadScope], bits: dict[int, Bits]) -> list[ReplayedLoad]:
        meta_leaf = MetaLeaf(self._skeleton)
        # One lock for the whole batch: vLLM's weight loaders change process-wide state, such as how tensors are copied.
        with self.memory.reading():
            replica = self._load_replica(_merge_scopes(scopes), bits, meta_leaf)
        found = [ReplayedLoad({}, {}) for _ in scopes]
        index = _ScopeIndex(scopes, self._targets)
        for path, name, tensor in walk_tensors(replica):
            if not is_plain(tensor) or tensor.device.type == "meta" or meta_leaf.is_unwritten(tensor):
                continue
            if tensor.element_size() in SIGNED:
                for number in index.scopes_holding(path, name):
                    found[number].tensors[path, name] = tensor
        for path, name, value in walk_numbers(replica):
            for number in index.scopes_processing(path):
                found[number].numbers[path, name] = value
        return found

    # See ``trace_routes``.
    @torch.inference_mode(False)
    def _load_replica(self, scope: ReloadScope, bits: dict[int, Bits], meta_leaf: MetaLeaf) -> Any:
        """Load a scope into a replica and run the step after loading on it. ``meta_leaf``: that of the skeleton."""

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            return ((self.table[i].name, tensor_from_bits(bits[i].copy(), self.table[i])) for i in scope.tensors)

        name = self.table[scope.tensors[0]].name
        replica = replicate(self._skeleton, self._leaf(scope, meta_leaf))
        try:
            with torch.no_grad(), _LiveMemoryGuard(self.model) as guard:
                load_weights(replica, weights)
                if scope.modules and self.record is not None:
                    guard.is_processing = True
                    self.record.process(replica, self._modules_to_process(scope))
        except ModelError as error:
            raise ModelError(f"tensor {name!r} is not patched by address ({scope.reason}); {error.message}") from error
        except (MemoryError, torch.OutOfMemoryError):
            # Passes: the weights are as before, and the next try may find memory.
            raise
        except Exception as error:  # loader and kernels are code of the model and may raise anything
            raise ModelError(
                f"tensor {name!r} is not patched by address ({scope.reason}), and cannot be reloaded beside the "
                f"model: {type(error).__name__}: {error}"
            ) from error
        return replica

    def _modules_to_process(self, scope: ReloadScope) -> list[str]:
        """Return the modules of a scope, and the modules within them that hold its memory."""
        holders = {path for path, _ in scope.tensor_paths}
        paths = [path for path, _ in self._skeleton.named_modules()]
        return [p for p in paths if p in scope.modules or (p in holders and is_under(p, scope.modules))]

    def _leaf(self, scope: ReloadScope, meta_leaf: MetaLeaf) -> Callable[[torch.Tensor], torch.Tensor]:
        """Give memory to a scope's tensors, initialized as before loading where known; ``meta_leaf`` makes the rest."""
        wanted: dict[int, torch.UntypedStorage] = {}
        index = _ScopeIndex([scope], self._targets)
        for path, name, tensor in walk_tensors(self._skeleton):
            live = self.live.get((path, name))
            if live is not None and live.is_meta:
                continue  # as a vision tower that is left out
            if not is_plain(tensor) or meta_leaf.keeps(tensor) or not index.scopes_holding(path, name):
                continue
            known = tensor.untyped_storage()
            if known._cdata not in wanted:
                zeros = torch.zeros(known.nbytes(), dtype=torch.uint8, device=self._device)
                wanted[known._cdata] = zeros.untyped_storage()
            initial = self._initial_value(path, name, tensor, scope)
            if initial is not None:
                view_in_storage(tensor, wanted[known._cdata]).copy_(initial)

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            found = wanted.get(tensor.untyped_storage()._cdata)
            return meta_leaf(tensor) if found is None else view_in_storage(tensor, found)

        return leaf

    def _initial_value(self, path: str, name: str, tensor: torch.Tensor, scope: ReloadScope) -> torch.Tensor | None:
        """Return the content of a tensor where no loader writes, if known."""
        if is_under(path, scope.modules):
            return None if self.record is None else self.record.initial.get((path, name))
        live = self.live.get((path, name))
        same = live is not None and (live.shape, live.dtype) == (tensor.shape, tensor.dtype)
        return live.detach() if same and live is not None else None


class _ScopeIndex:
    """Finds the scopes that a tensor or module belongs to, by number."""

    def __init__(self, scopes: Sequence[ReloadScope], targets: frozenset[TensorPath]) -> None:
        self._targets = targets
        self._of_tensor_path: dict[TensorPath, list[int]] = defaultdict(list)
        self._of_module: dict[str, list[int]] = defaultdict(list)
        for number, scope in enumerate(scopes):
            for at in scope.tensor_paths:
                self._of_tensor_path[at].append(number)
            for module in scope.modules:
                self._of_module[module].append(number)

    def scopes_holding(self, path: str, name: str) -> list[int]:
        """Return the scopes that a tensor is memory of, or that may create it."""
        known = self._of_tensor_path.get((path, name))
        if known is not None or (path, name) in self._targets:
            return known or []
        return self.scopes_processing(path)

    def scopes_processing(self, path: str) -> list[int]:
        """Return the scopes that process a module, or a module that contains it."""
        found = list(self._of_module.get(path, ()))
        while path:
            path = path.rpartition(".")[0]
            found += self._of_module.get(path, ())
        return sorted(set(found))


def _merge_scopes(scopes: list[ReloadScope]) -> ReloadScope:
    return ReloadScope(
        sorted(tensor for scope in scopes for tensor in scope.tensors),
        set().union(*(scope.tensor_paths for scope in scopes)),
        set().union(*(scope.modules for scope in scopes)),
        scopes[0].reason,
    )


Owners = dict[int, list[tuple[torch.nn.Module, str]]]
"""Storage → the (module, attribute) pairs that refer to it."""


def live_tensors(model: Any, record: LoadRecord | None) -> dict[TensorPath, torch.Tensor]:
    """Return tensor path at loading → the tensor that is now there; it may have moved to another module."""
    found = {(path, name): tensor for path, name, tensor in walk_tensors(model)}
    if record is not None:
        there = {id(tensor) for tensor in found.values()}
        for at, reference in record.live.items():
            tensor = reference()
            if tensor is not None and id(tensor) in there:
                found[at] = tensor
    return found


def find_owners(model: Any) -> Owners:
    """Return the owners of each of a model's storages."""
    found: Owners = defaultdict(list)
    for path, name, tensor in walk_tensors(model):
        module = model.get_submodule(path)
        if is_plain(tensor) and getattr(module, name, None) is tensor:
            found[tensor.untyped_storage()._cdata].append((module, name))
    return found


LoadTimeReader = Callable[[list[int]], dict[int, Bits]]
"""Tensor ids → (numel,) bits that the model was loaded with, each an array that the caller may keep."""


@dataclass
class Output:
    """Memory of the model that a scope writes.

    Attributes:
        tensor_paths: path of each tensor that contains it → how its elements lie in the reloaded tensor. All of them
            must contain the same bits.
        route: leads to the memory.
    """

    tensor_paths: dict[TensorPath, Region]
    route: Route


@dataclass
class ReloadUnit:
    """A scope that, when reloaded, was proven to give the model's weights.

    Attributes:
        inputs: tensor id → destination of its host copy.
        numbers: numbers that reloading reproduced. A number cannot be exchanged.
    """

    scope: ReloadScope
    inputs: dict[int, int]
    outputs: list[Output]
    numbers: dict[TensorPath, float]


@dataclass
class ReloadUnits:
    """All units of one rank's routes.

    Attributes:
        destinations: those of the routes, to which ``build`` adds.
    """

    replay: LoaderReplay
    destinations: list[Destination]
    units: list[ReloadUnit]

    @classmethod
    def build(
        cls,
        replay: LoaderReplay,
        destinations: list[Destination],
        scopes: Sequence[ReloadScope],
        load_time_bits: LoadTimeReader,
    ) -> "ReloadUnits":
        """Make a unit of each scope, with destinations for its host copies, and prove it.

        Raises:
            ModelError: reloading does not give the model's weights. DeltaSyncError: see ``load_time_bits``.
        """
        try:
            bits = load_time_bits(sorted(tensor for scope in scopes for tensor in scope.tensors))
        except ModelError as error:
            raise ModelError(f"{error.message}. It is not patched by address: {scopes[0].reason}") from error
        found = cls(replay, destinations, [])
        for scope in scopes:
            unit = ReloadUnit(scope, {}, [], {})
            for tensor in scope.tensors:
                spec, host_copy = replay.table[tensor], signed_view(bits[tensor])
                unit.inputs[tensor] = len(destinations)
                destinations.append(Destination(f"host copy of {spec.name}", TORCH_DTYPES[spec.dtype], host_copy))
            found.units.append(unit)
        reloaded: set[TensorPath] = set()
        for unit, replayed in zip(found.units, replay.load(scopes, bits), strict=True):
            reloaded |= replayed.tensors.keys()
            unit.outputs = _find_outputs(unit, replay, destinations, replayed.tensors)
            live = replay.numbers
            unit.numbers = {
                at: value for at, value in replayed.numbers.items() if at in live and _same_number(live[at], value)
            }
        replay.check_all_made(scopes, reloaded)
        return found

    @property
    def tensors(self) -> list[int]:
        """Ids of the tensors that are reloaded."""
        return sorted(tensor for unit in self.units for tensor in unit.inputs)

    def outputs_after(
        self, sparse: list[SparsePatch], dense: list[DensePatch], everything: bool = False
    ) -> list[DensePatch]:
        """Reload the units whose inputs these patches change; return patches with the results.

        Args:
            everything: also check unchanged units, and return what the model holds differently.

        Raises:
            ModelError: a reloaded tensor or number no longer fits the model, or a changed tensor leads nowhere.
        """
        bits: dict[int, Bits] = {}
        affected: list[ReloadUnit] = []
        changes: dict[int, list[SparsePatch | DensePatch]] = defaultdict(list)
        for patch in sparse:
            changes[patch.destination].append(patch)
        for whole in dense:
            changes[whole.route.destination].append(whole)
        for unit in self.units:
            if not unit.outputs and self._is_not_served(unit):
                continue
            changed = any(changes[number] for number in unit.inputs.values())
            if changed and not unit.outputs and not unit.numbers:
                # A scale that is 1.0, for example, may be kept as a number that was 1.0 before loading too.
                raise ModelError(
                    f"tensor {self.replay.table[unit.scope.tensors[0]].name!r} is loaded into memory that the model "
                    "has dropped since, and what the model keeps of it is not known: it cannot be exchanged while the "
                    "model runs; start the server again"
                )
            if everything or changed:
                affected.append(unit)
                for tensor, number in unit.inputs.items():
                    bits[tensor] = _bits_after(changes[number], self.destinations[number].bits)
        return list(chain.from_iterable(self._differences(affected, bits)))

    def _is_not_served(self, unit: ReloadUnit) -> bool:
        """Return whether the model has no memory for what the unit loads, as of a vision tower that is left out."""
        places = [self.replay.live.get(path) for path in unit.scope.tensor_paths]
        return bool(places) and all(tensor is not None and tensor.is_meta for tensor in places)

    def stale(self, tensors: Iterable[int]) -> set[int]:
        """Return those of the given tensors whose units do not match the model: reloading gives something else."""
        wanted = set(tensors)
        affected = [unit for unit in self.units if wanted & unit.inputs.keys()]
        bits = {tensor: self.destinations[number].bits for unit in affected for tensor, number in unit.inputs.items()}
        stale: set[int] = set()
        for unit, differences in zip(affected, self._differences(affected, bits), strict=True):
            if differences:
                stale |= wanted & unit.inputs.keys()
        return stale

    def _differences(self, units: list[ReloadUnit], bits: dict[int, Bits]) -> Iterator[list[DensePatch]]:
        """Yield, per unit, patches for where the model differs from what these bits give.

        Raises:
            ModelError: a number is another one, or what was reloaded no longer fits the model.
        """
        loaded = self.replay.load([unit.scope for unit in units], bits)
        for unit, found in zip(units, loaded, strict=True):
            for at, value in unit.numbers.items():
                if at not in found.numbers or not _same_number(found.numbers[at], value):
                    raise ModelError(
                        f"{dotted_path(at)} is {value}, a number that is computed from weights and would become "
                        f"{found.numbers.get(at)}: it cannot be exchanged while the model runs; start the server again"
                    )
            patches = (self._difference(output, found.tensors) for output in unit.outputs)
            yield [patch for patch in patches if patch is not None]

    def _difference(self, output: Output, found: dict[TensorPath, torch.Tensor]) -> DensePatch | None:
        """Return the patch that writes what was reloaded; None if the model holds that already."""
        reloaded = [
            _bits_of(found[at]).as_strided(region.sizes, region.strides, found[at].storage_offset())
            for at, region in output.tensor_paths.items()
            if at in found
        ]
        same = all(torch.equal(reloaded[0], other) for other in reloaded[1:])
        if len(reloaded) != len(output.tensor_paths) or not same:
            first = dotted_path(next(iter(output.tensor_paths)))
            raise ModelError(f"reloading {first} gave another result than at start-up; start the server again")
        live = region_view(self.destinations[output.route.destination].flat, output.route.target)
        with self.replay.memory.reading():
            if torch.equal(reloaded[0], live):
                return None
        return DensePatch(output.route, reloaded[0].to("cpu", copy=True).contiguous())

    def is_live(self, tensor: int) -> bool:
        """Return whether the model still computes with a tensor's memory."""
        unit = next((unit for unit in self.units if tensor in unit.inputs), None)
        return unit is None or all(self.destinations[output.route.destination].is_live for output in unit.outputs)


def _bits_after(changes: list[SparsePatch | DensePatch], bits: Bits) -> Bits:
    """Return the bits that a host copy will have."""
    bits = bits.copy() if changes else bits
    for change in changes:
        if isinstance(change, DensePatch):
            region_view(signed_view(bits), change.route.target).copy_(change.data)
        elif change.relative:
            apply_distances(change.element, bits, change.positions.astype(np.int64), change.data)
        else:
            bits[change.positions] = change.data
    return bits


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(SIGNED[tensor.element_size()])


def _same_number(first: float, second: float) -> bool:
    return first == second or (first != first and second != second)


def _find_outputs(
    unit: ReloadUnit, replay: LoaderReplay, destinations: list[Destination], found: dict[TensorPath, torch.Tensor]
) -> list[Output]:
    """Find the reloaded tensors in the model and compare them bit for bit."""
    first = replay.table[unit.scope.tensors[0]].name
    outputs: dict[tuple[int, Region], Output] = {}
    numbers: dict[int, int] = {}
    for where, reloaded in found.items():
        live = replay.live.get(where)
        if live is None or not is_plain(live) or not reloaded.numel():
            # The model has dropped it, or filled it later, as caches are.
            continue
        with replay.memory.reading():
            reason = _describe_difference(reloaded, live)
        if reason is not None:
            raise ModelError(
                f"tensor {first!r} is not patched by address ({unit.scope.reason}), and reloading it beside the model "
                f"gives {dotted_path(where)} {reason}"
            )
        storage = live.untyped_storage()._cdata
        source, target = coalesce(live.shape, (0, reloaded.stride()), (int(live.storage_offset()), live.stride()))
        if (storage, target) in outputs:
            outputs[storage, target].tensor_paths[where] = source
            continue
        if storage not in numbers:
            numbers[storage] = len(destinations)
            destinations.append(destination_of(dotted_path(where), live, replay.owners))
        outputs[storage, target] = Output({where: source}, Route(numbers[storage], source, target))
    return list(outputs.values())


def destination_of(name: str, tensor: torch.Tensor, owners: Owners) -> Destination:
    """Return the whole storage of a tensor, as a destination."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    flat.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
    of_storage = owners.get(storage._cdata, [])
    return Destination(name, tensor.dtype, flat.view(SIGNED[tensor.element_size()]), of_storage)


def _describe_difference(reloaded: torch.Tensor, live: torch.Tensor) -> str | None:
    if (reloaded.dtype, reloaded.shape, reloaded.device) != (live.dtype, live.shape, live.device):
        return f"as {reloaded.dtype} {tuple(reloaded.shape)}, and the model has {live.dtype} {tuple(live.shape)}"
    if not torch.equal(_bits_of(reloaded), _bits_of(live)):
        return "with other bits than the model has"
    return None
