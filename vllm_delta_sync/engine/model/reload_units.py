"""Weights that a model computes from the checkpoint: loaded again, beside the model, whenever they change.

Each rank keeps a shadow, in host memory, of just those checkpoint tensors, and patches it like a weight. While a
version is staged, the model's own loader (and what is done after loading) runs once more on a replica that has memory
for the touched modules only, from the shadows as they will be. What comes out is exchanged with what the model holds
when the version is committed, and lies in the patch for the way back. It is shown at the start that this gives, from
the shadows as they are, what the model holds, bit for bit; otherwise the model is refused.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_delta_sync.engine.model.load_record import LoadRecord, Place, is_under, spelled
from vllm_delta_sync.engine.model.loader_trace import written_by
from vllm_delta_sync.engine.model.model_replica import MetaLeaf, is_plain, place, replicate, walk, walk_numbers
from vllm_delta_sync.engine.model.patch import DensePatch, SparsePatch, StagedPatch, region_view
from vllm_delta_sync.engine.model.regions import Region, coalesce
from vllm_delta_sync.engine.model.route_map import Destination, Route, RouteMap
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.bits import Bits, apply_distances
from vllm_delta_sync.tensors.torch_views import SIGNED, TORCH_DTYPES, tensor_from_bits

BATCH_BYTES = 1 << 30
"""Of shadows that are loaded again at once: a replica is made for each time."""


@dataclass(frozen=True)
class ReloadScope:
    """What has to be loaded again together.

    Attributes:
        tensors: ids, ascending. places: memory that they are loaded to.
        modules: paths of those worked on after loading. reason: why they are not patched by address.
    """

    tensors: list[int]
    places: set[Place]
    modules: set[str]
    reason: str


_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_C_custom_ar")
_COLLECTIVE_NAMES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
"""Parts of names of operators that hide a collective, such as ``vllm::all_reduce``: what they call is not seen."""


def _is_collective(func: Any) -> bool:
    named = func.namespace not in ("aten", "prim") and any(name in func.__name__ for name in _COLLECTIVE_NAMES)
    return named or func.namespace in _COLLECTIVE_NAMESPACES


class _LiveMemoryGuard(TorchDispatchMode):
    """Lets nothing write to the memory of a model or talk to other ranks: generation goes on meanwhile, and uses the
    same channels."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._storages = {t.untyped_storage()._cdata for _, _, t in walk(model) if is_plain(t)}
        self._dtype = torch.get_default_dtype()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.get_default_dtype() != self._dtype:
            raise ModelError(
                f"loading it again would change the default dtype of the whole process to {torch.get_default_dtype()} "
                "while it generates"
            )
        if _is_collective(func):
            raise ModelError(f"loading it again would talk to other ranks while they generate, by {func}")
        for tensor in written_by(func, args, kwargs or {}):
            if is_plain(tensor) and tensor.untyped_storage()._cdata in self._storages:
                raise ModelError(f"loading it again beside the model would write to the model itself, by {func}")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class ReplayedLoad:
    """What loading a part again made: tensors, and numbers that worked-on modules keep beside them."""

    tensors: dict[Place, torch.Tensor]
    numbers: dict[Place, float]


class LoaderReplay:
    """Loads parts of a model again, into memory of their own.

    Args:
        targets: all memory that the loader may write. memory: that of the model.
    """

    def __init__(
        self,
        model: Any,
        skeleton: Any,
        table: TensorTable,
        record: LoadRecord | None,
        targets: frozenset[Place],
        memory: WeightMemory,
    ) -> None:
        self.model, self.record, self._memory = model, record, memory
        self._skeleton, self._table, self._targets = skeleton, table, targets
        self.numbers = {(path, name): value for path, name, value in walk_numbers(model)}
        self.live = live_tensors(model, record)
        self.owners = owners_in(model)
        self._device = next((t.device for _, _, t in walk(model) if is_plain(t)), torch.device("cpu"))

    def load(self, parts: Sequence[ReloadScope], bits: dict[int, Bits]) -> Iterator[tuple[ReloadScope, "ReplayedLoad"]]:
        """What the loader makes of these bits, for each part; several at once, as far as memory is to go.

        Raises:
            ModelError: it cannot be done beside the model.
        """
        batch: list[ReloadScope] = []
        size = 0
        for part in parts:
            of_part = sum(bits[tensor].nbytes for tensor in part.tensors)
            if batch and size + of_part > BATCH_BYTES:
                yield from self._load(batch, bits)
                batch, size = [], 0
            batch.append(part)
            size += of_part
        if batch:
            yield from self._load(batch, bits)

    def _load(self, parts: list[ReloadScope], bits: dict[int, Bits]) -> Iterator[tuple[ReloadScope, "ReplayedLoad"]]:
        bare = MetaLeaf(self._skeleton)
        # All of it at once: vLLM's own writers change process-wide state, such as how tensors are copied.
        with self._memory.reading():
            replica = self._loaded(_joined(parts), bits, bare)
        found = [ReplayedLoad({}, {}) for _ in parts]
        of = _Index(parts, self._targets)
        for path, name, tensor in walk(replica):
            if not is_plain(tensor) or tensor.device.type == "meta" or bare.is_unwritten(tensor):
                continue
            if tensor.element_size() in SIGNED:
                for number in of.holders(path, name):
                    found[number].tensors[path, name] = tensor
        for path, name, value in walk_numbers(replica):
            for number in of.workers(path):
                found[number].numbers[path, name] = value
        yield from zip(parts, found, strict=True)

    # See ``trace_routes``.
    @torch.inference_mode(False)
    def _loaded(self, part: ReloadScope, bits: dict[int, Bits], bare: MetaLeaf) -> Any:
        """A replica that has loaded a part, and is worked on as far as that needs it. ``bare``: of the skeleton."""
        weights = ((self._table[i].name, tensor_from_bits(bits[i].copy(), self._table[i])) for i in part.tensors)
        name = self._table[part.tensors[0]].name
        replica = replicate(self._skeleton, self._leaf(part, bare))
        try:
            with torch.no_grad(), _LiveMemoryGuard(self.model):
                replica.load_weights(weights)
                if part.modules and self.record is not None:
                    self.record.process(replica, self._worked_on(part))
        except ModelError as error:
            raise ModelError(f"tensor {name!r} is not patched by address ({part.reason}); {error.message}") from error
        except Exception as error:  # loader and kernels are foreign code and may raise anything
            raise ModelError(
                f"tensor {name!r} is not patched by address ({part.reason}), and cannot be loaded again beside the "
                f"model: {type(error).__name__}: {error}"
            ) from error
        return replica

    def _worked_on(self, part: ReloadScope) -> list[str]:
        """Modules of a part, and those within them that hold its memory."""
        holders = {path for path, _ in part.places}
        paths = [path for path, _ in self._skeleton.named_modules()]
        return [p for p in paths if p in part.modules or (p in holders and is_under(p, part.modules))]

    def _leaf(self, part: ReloadScope, bare: MetaLeaf) -> Callable[[torch.Tensor], torch.Tensor]:
        """Memory for a part's tensors, filled as before loading where that is known; ``bare`` makes all others."""
        wanted: dict[int, torch.UntypedStorage] = {}
        fillings: list[tuple[torch.Tensor, torch.Tensor]] = []
        of = _Index([part], self._targets)
        for path, name, tensor in walk(self._skeleton):
            if not is_plain(tensor) or bare.keeps(tensor) or not of.holders(path, name):
                continue
            known = tensor.untyped_storage()
            if known._cdata not in wanted:
                zeros = torch.zeros(known.nbytes(), dtype=torch.uint8, device=self._device)
                wanted[known._cdata] = zeros.untyped_storage()
            initial = self._initial(path, name, tensor, part)
            if initial is not None:
                fillings.append((place(tensor, wanted[known._cdata]), initial))
        for there, initial in fillings:
            there.copy_(initial)

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            found = wanted.get(tensor.untyped_storage()._cdata)
            return bare(tensor) if found is None else place(tensor, found)

        return leaf

    def _initial(self, path: str, name: str, tensor: torch.Tensor, part: ReloadScope) -> torch.Tensor | None:
        """What a tensor holds where no loader writes, if that is known."""
        if is_under(path, part.modules):
            return None if self.record is None else self.record.initial.get((path, name))
        live = self.live.get((path, name))
        same = live is not None and (live.shape, live.dtype) == (tensor.shape, tensor.dtype)
        return live.detach() if same and live is not None else None


class _Index:
    """Finds the parts that something in a model belongs to, by their numbers."""

    def __init__(self, parts: Sequence[ReloadScope], targets: frozenset[Place]) -> None:
        self._targets = targets
        self._of_place: dict[Place, list[int]] = defaultdict(list)
        self._of_module: dict[str, list[int]] = defaultdict(list)
        for number, part in enumerate(parts):
            for at in part.places:
                self._of_place[at].append(number)
            for module in part.modules:
                self._of_module[module].append(number)

    def holders(self, path: str, name: str) -> list[int]:
        """Parts that a tensor is the memory of, or may come out of."""
        known = self._of_place.get((path, name))
        if known is not None or (path, name) in self._targets:
            return known or []
        return self.workers(path)

    def workers(self, path: str) -> list[int]:
        """Parts that work on a module, or on one that it is within."""
        found = list(self._of_module.get(path, ()))
        while path:
            path = path.rpartition(".")[0]
            found += self._of_module.get(path, ())
        return sorted(set(found))


def _joined(parts: list[ReloadScope]) -> ReloadScope:
    return ReloadScope(
        sorted(tensor for part in parts for tensor in part.tensors),
        set().union(*(part.places for part in parts)),
        set().union(*(part.modules for part in parts)),
        parts[0].reason,
    )


def live_tensors(model: Any, record: LoadRecord | None) -> dict[Place, torch.Tensor]:
    """Place as loaded → the tensor that is there now, which may be in another module."""
    found = {(path, name): tensor for path, name, tensor in walk(model)}
    if record is not None:
        there = {id(tensor) for tensor in found.values()}
        for at, reference in record.live.items():
            tensor = reference()
            if tensor is not None and id(tensor) in there:
                found[at] = tensor
    return found


def owners_in(model: Any) -> dict[int, list[tuple[torch.nn.Module, str]]]:
    """Storage → the (module, attribute) pairs that have it."""
    found: dict[int, list[tuple[torch.nn.Module, str]]] = defaultdict(list)
    for path, name, tensor in walk(model):
        module = model.get_submodule(path)
        if is_plain(tensor) and getattr(module, name, None) is tensor:
            found[tensor.untyped_storage()._cdata].append((module, name))
    return found


Shadows = Callable[[list[int]], dict[int, Bits]]
"""Tensor ids → (numel,) bits of what the model was loaded with, each an array that may be kept."""
NO_TENSOR = -1
"""In the place of a tensor's id, in patches of what no single tensor leads to."""


@dataclass
class Output:
    """Memory of the model that a part leads to.

    Attributes:
        places: where it lies, and how its elements lie in what is loaded again, which must be the same at all of them.
        route: leads to it.
    """

    places: dict[Place, Region]
    route: Route


@dataclass
class ReloadUnit:
    """A part whose loading again has been shown to give what the model holds.

    Attributes:
        shadows: tensor id → destination of its shadow.
        numbers: those that loading again gives as the model has them. They cannot be exchanged.
    """

    part: ReloadScope
    shadows: dict[int, int]
    outputs: list[Output]
    numbers: dict[Place, float]


@dataclass
class ReloadUnits:
    """All units of one rank's routes."""

    replayer: LoaderReplay
    units: list[ReloadUnit]

    @classmethod
    def prove(
        cls,
        routes: RouteMap,
        replayer: LoaderReplay,
        parts: Sequence[ReloadScope],
        shadows: Shadows,
    ) -> "ReloadUnits":
        """Make units of parts, with routes to their shadows.

        Raises:
            ModelError: loading the shadows again does not give what the model holds. Else what ``shadows`` raises.
        """
        try:
            bits = shadows(sorted(tensor for part in parts for tensor in part.tensors))
        except ModelError as error:
            raise ModelError(f"{error.message}. It is not patched by address: {parts[0].reason}") from error
        found = cls(replayer, [])
        for part in parts:
            unit = ReloadUnit(part, {}, [], {})
            for tensor in part.tensors:
                spec = routes.table[tensor]
                flat = torch.from_numpy(bits[tensor].view(f"<i{spec.element.itemsize}"))
                unit.shadows[tensor] = len(routes.destinations)
                shadow = flat.view(SIGNED[spec.element.itemsize])
                routes.destinations.append(Destination(f"shadow of {spec.name}", TORCH_DTYPES[spec.dtype], shadow))
                whole = _line(spec.numel)
                routes.routes[tensor] = [Route(unit.shadows[tensor], whole, whole)] if spec.numel else []
                routes.loaded[tensor], routes.groups[tensor] = bool(spec.numel), [0] * len(routes.routes[tensor])
            found.units.append(unit)
        for unit, (_, again) in zip(found.units, replayer.load(parts, bits), strict=True):
            unit.outputs = _outputs(unit, replayer, routes, again.tensors)
            held = replayer.numbers
            unit.numbers = {
                at: value for at, value in again.numbers.items() if at in held and _is_same(held[at], value)
            }
        return found

    @property
    def tensors(self) -> list[int]:
        """Ids of the tensors that are loaded again."""
        return sorted(tensor for unit in self.units for tensor in unit.shadows)

    def add_to(self, patch: StagedPatch, routes: RouteMap, everything: bool = False) -> None:
        """Add to a patch what its changes of shadows lead to.

        Args:
            everything: also of units whose shadows do not change, where the model holds something else.

        Raises:
            ModelError: what was loaded again does not fit the model any more.
        """
        bits: dict[int, Bits] = {}
        touched: list[ReloadUnit] = []
        changes = _by_destination(patch)
        for unit in self.units:
            after = {tensor: _after(changes[number], number, routes) for tensor, number in unit.shadows.items()}
            if everything or any(value is not None for value in after.values()):
                touched.append(unit)
                for tensor, value in after.items():
                    bits[tensor] = _shadow(routes, unit.shadows[tensor]) if value is None else value
        found = self._exchanges(touched, bits, routes)
        patch.dense += [DensePatch(NO_TENSOR, parts) for parts in found if parts]

    def held(self, tensors: Iterable[int], routes: RouteMap) -> set[int]:
        """Those of some tensors of which the model holds what their shadows lead to."""
        wanted = set(tensors)
        touched = [unit for unit in self.units if wanted & set(unit.shadows)]
        bits = {tensor: _shadow(routes, number) for unit in touched for tensor, number in unit.shadows.items()}
        held: set[int] = set()
        for unit, parts in zip(touched, self._exchanges(touched, bits, routes), strict=True):
            if not parts:
                held |= wanted & set(unit.shadows)
        return held

    def _exchanges(
        self, units: list[ReloadUnit], bits: dict[int, Bits], routes: RouteMap
    ) -> Iterator[list[tuple[Route, torch.Tensor]]]:
        """Per unit: where the model holds something else than what these bits lead to, and what to put there."""
        loaded = self.replayer.load([unit.part for unit in units], bits)
        for unit, (_, found) in zip(units, loaded, strict=True):
            yield _exchanges(unit, found, routes)

    def is_live(self, tensor: int, routes: RouteMap) -> bool:
        """Whether a tensor's memory is still what the model computes with."""
        unit = next((unit for unit in self.units if tensor in unit.shadows), None)
        return unit is None or all(routes.destinations[output.route.destination].is_live for output in unit.outputs)


def _line(numel: int) -> Region:
    return Region(0, (numel,) if numel != 1 else (), (1,) if numel != 1 else ())


def _shadow(routes: RouteMap, number: int) -> Bits:
    return routes.destinations[number].bits


Change = SparsePatch | tuple[Route, torch.Tensor]


def _by_destination(patch: StagedPatch) -> dict[int, list[Change]]:
    """What a patch does to each destination, in its order."""
    found: dict[int, list[Change]] = defaultdict(list)
    for sparse in patch.sparse:
        found[sparse.destination].append(sparse)
    for dense in patch.dense:
        for route, buffer in dense.parts:
            found[route.destination].append((route, buffer))
    return found


def _after(changes: list[Change], number: int, routes: RouteMap) -> Bits | None:
    """The bits that a shadow will have; None if they stay."""
    if not changes:
        return None
    bits = _shadow(routes, number).copy()
    for change in changes:
        if not isinstance(change, SparsePatch):
            signed = torch.from_numpy(bits.view(f"<i{bits.itemsize}")).view(SIGNED[bits.itemsize])
            region_view(signed, change[0].target).copy_(change[1])
        elif change.relative:
            apply_distances(change.element, bits, change.positions.astype(np.int64), change.data)
        else:
            bits[change.positions] = change.data
    return bits


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(SIGNED[tensor.element_size()])


def _different(output: Output, found: dict[Place, torch.Tensor], routes: RouteMap) -> tuple[Route, torch.Tensor] | None:
    """A route and what to exchange through it, in host memory; None if the model holds that."""
    made = [
        _bits_of(found[at]).as_strided(lies.sizes, lies.strides, found[at].storage_offset())
        for at, lies in output.places.items()
        if at in found
    ]
    if len(made) != len(output.places) or not all(torch.equal(made[0], other) for other in made[1:]):
        first = spelled(next(iter(output.places)))
        raise ModelError(f"{first} came out otherwise than at the start; start the server again")
    route, shaped = output.route, made[0]
    held = region_view(routes.destinations[route.destination].flat, route.target)
    with routes.memory.reading():
        if torch.equal(shaped, held):
            return None
    return route, shaped.to("cpu", copy=True).contiguous()


def _is_same(first: float, second: float) -> bool:
    return first == second or (first != first and second != second)


def _exchanges(unit: ReloadUnit, found: ReplayedLoad, routes: RouteMap) -> list[tuple[Route, torch.Tensor]]:
    """Where the model holds something else than what was loaded again, and what to put there."""
    for at, value in unit.numbers.items():
        if at not in found.numbers or not _is_same(found.numbers[at], value):
            raise ModelError(
                f"{spelled(at)} is {value}, a number that is computed from weights and would become "
                f"{found.numbers.get(at)}: it cannot be exchanged while the model runs; start the server again"
            )
    pairs = (_different(output, found.tensors, routes) for output in unit.outputs)
    return [pair for pair in pairs if pair is not None]


def _outputs(
    unit: ReloadUnit, replayer: LoaderReplay, routes: RouteMap, found: dict[Place, torch.Tensor]
) -> list[Output]:
    """Find in the model, bit for bit, what came out of loading a part again from what the model was loaded with."""
    first = routes.table[unit.part.tensors[0]].name
    outputs: dict[tuple[int, Region], Output] = {}
    numbers: dict[int, int] = {}
    for where, made in found.items():
        held = replayer.live.get(where)
        if held is None or not is_plain(held) or not made.numel():
            # The model has let go of it, or filled it later, as it does with caches.
            continue
        with routes.memory.reading():
            reason = _unlike(made, held)
        if reason is not None:
            raise ModelError(
                f"tensor {first!r} is not patched by address ({unit.part.reason}), and loading it again beside the "
                f"model gives {spelled(where)} {reason}"
            )
        storage = held.untyped_storage()._cdata
        source, target = coalesce(held.shape, (0, made.stride()), (int(held.storage_offset()), held.stride()))
        if (storage, target) in outputs:
            outputs[storage, target].places[where] = source
            continue
        if storage not in numbers:
            numbers[storage] = len(routes.destinations)
            routes.destinations.append(destination_of(spelled(where), held, replayer.owners.get(storage, [])))
        outputs[storage, target] = Output({where: source}, Route(numbers[storage], source, target))
    return list(outputs.values())


def destination_of(name: str, tensor: torch.Tensor, owners: list[tuple[torch.nn.Module, str]]) -> Destination:
    """All of the memory that a tensor lies in."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    flat.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
    return Destination(name, tensor.dtype, flat.view(SIGNED[tensor.element_size()]), owners)


def _unlike(made: torch.Tensor, held: torch.Tensor) -> str | None:
    if (made.dtype, made.shape, made.device) != (held.dtype, held.shape, held.device):
        return f"as {made.dtype} {tuple(made.shape)}, and the model has {held.dtype} {tuple(held.shape)}"
    if not torch.equal(_bits_of(made), _bits_of(held)):
        return "other bits than the model has"
    return None
