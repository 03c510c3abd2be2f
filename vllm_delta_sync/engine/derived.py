"""Weights that a model computes from the checkpoint: loaded again, beside the model, whenever they change.

Each rank keeps a shadow, in host memory, of just those checkpoint tensors, and patches it like a weight. While a
version is staged, the model's own loader (and what is done after loading) runs once more on a replica that has memory
for the touched modules only, from the shadows as they will be. What comes out is exchanged with what the model holds
when the version is committed, and lies in the patch for the way back. It is shown at the start that this gives, from
the shadows as they are, what the model holds, bit for bit; otherwise the model is refused.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_delta_sync.engine.load_watch import Place, Record
from vllm_delta_sync.engine.patch import DensePatch, StagedPatch, dense_view
from vllm_delta_sync.engine.regions import Region, coalesce
from vllm_delta_sync.engine.replica import MetaLeaf, is_plain, place, replicate, walk, walk_numbers
from vllm_delta_sync.engine.routes import Destination, Route, RouteMap
from vllm_delta_sync.engine.trace import written_by
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.torch_bits import SIGNED, TORCH_DTYPES, tensor_from_bits
from vllm_delta_sync.wire.bits import Bits, apply_distances
from vllm_delta_sync.wire.table import TensorTable

Shadows = Callable[[list[int]], dict[int, Bits]]
"""Tensor ids → (numel,) bits of what the model was loaded with, each an array that may be kept."""
NO_TENSOR = -1
"""In the place of a tensor's id, in patches of what no single tensor leads to."""


@dataclass(frozen=True)
class Part:
    """What has to be loaded again together.

    Attributes:
        tensors: ids, ascending. places: memory that they are loaded to.
        modules: paths of those worked on after loading. reason: why they are not patched by address.
    """

    tensors: list[int]
    places: set[Place]
    modules: set[str]
    reason: str


class _Guard(TorchDispatchMode):
    """Lets nothing be written to the memory of a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._storages = {t.untyped_storage()._cdata for _, _, t in walk(model) if is_plain(t)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            if is_plain(tensor) and tensor.untyped_storage()._cdata in self._storages:
                raise ModelError(f"loading it again beside the model would write to the model itself, by {func}")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Loaded:
    """What loading a part again made: tensors, and numbers that worked-on modules keep beside them."""

    tensors: dict[Place, torch.Tensor]
    numbers: dict[Place, float]


def numbers_in(model: Any, part: Part) -> dict[Place, float]:
    """Numbers in the modules of a part that are worked on after loading, by where they are."""
    if not part.modules:
        return {}
    return {(path, name): value for path, name, value in walk_numbers(model) if _is_under(path, part.modules)}


class Replayer:
    """Loads parts of a model again, into memory of their own."""

    def __init__(self, model: Any, skeleton: Any, table: TensorTable, record: Record | None) -> None:
        self.model, self.record = model, record
        self._skeleton, self._table = skeleton, table
        self._device = next((t.device for _, _, t in walk(model) if is_plain(t)), torch.device("cpu"))

    def load(self, part: Part, bits: dict[int, Bits]) -> "Loaded":
        """What the loader makes of these bits, by where it lies in the model.

        Raises:
            ModelError: it cannot be done beside the model.
        """
        replica = replicate(self._skeleton, self._leaf(part))
        weights = ((self._table[i].name, tensor_from_bits(bits[i].copy(), self._table[i])) for i in part.tensors)
        name = self._table[part.tensors[0]].name
        try:
            with torch.no_grad(), _Guard(self.model):
                replica.load_weights(weights)
                if part.modules and self.record is not None:
                    self.record.process(replica, self._under(part.modules))
        except ModelError as error:
            raise ModelError(f"tensor {name!r} is not patched by address ({part.reason}); {error.message}") from error
        except Exception as error:  # loader and kernels are foreign code and may raise anything
            raise ModelError(
                f"tensor {name!r} is not patched by address ({part.reason}), and cannot be loaded again beside the "
                f"model: {type(error).__name__}: {error}"
            ) from error
        tensors = {
            (path, attribute): tensor
            for path, attribute, tensor in walk(replica)
            if is_plain(tensor)
            and tensor.device.type != "meta"
            and ((path, attribute) in part.places or _is_under(path, part.modules))
        }
        return Loaded(tensors, numbers_in(replica, part))

    def _under(self, modules: set[str]) -> list[str]:
        return [path for path, _ in self._skeleton.named_modules() if _is_under(path, modules)]

    def _leaf(self, part: Part) -> Callable[[torch.Tensor], torch.Tensor]:
        """Memory for a part's tensors, filled as before loading where that is known; none for all others."""
        bare = MetaLeaf()
        wanted: dict[int, torch.UntypedStorage] = {}
        fillings: list[tuple[torch.Tensor, torch.Tensor]] = []
        for path, name, tensor in walk(self._skeleton):
            if not is_plain(tensor) or not ((path, name) in part.places or _is_under(path, part.modules)):
                continue
            known = tensor.untyped_storage()
            if known._cdata not in wanted:
                zeros = torch.zeros(known.nbytes(), dtype=torch.uint8, device=self._device)
                wanted[known._cdata] = zeros.untyped_storage()
            initial = None if self.record is None else self.record.initial.get((path, name))
            if initial is not None:
                fillings.append((place(tensor, wanted[known._cdata]), initial))
        for there, initial in fillings:
            there.copy_(initial)

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            found = wanted.get(tensor.untyped_storage()._cdata)
            return bare(tensor) if found is None else place(tensor, found)

        return leaf


def _is_under(path: str, modules: set[str]) -> bool:
    return any(not module or path == module or path.startswith(module + ".") for module in modules)


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
class Unit:
    """A part whose loading again has been shown to give what the model holds.

    Attributes:
        shadows: tensor id → destination of its shadow.
        numbers: those that loading again gives as the model has them. They cannot be exchanged.
    """

    part: Part
    shadows: dict[int, int]
    outputs: list[Output]
    numbers: dict[Place, float]


@dataclass
class Derived:
    """All units of one rank's routes."""

    replayer: Replayer
    units: list[Unit]

    @classmethod
    def prove(
        cls,
        routes: RouteMap,
        replayer: Replayer,
        parts: Sequence[Part],
        shadows: Callable[[list[int]], dict[int, Bits]],
    ) -> "Derived":
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
            unit = Unit(part, {}, [], {})
            for tensor in part.tensors:
                spec = routes.table[tensor]
                flat = torch.from_numpy(bits[tensor].view(f"<i{spec.element.itemsize}"))
                unit.shadows[tensor] = len(routes.destinations)
                shadow = flat.view(SIGNED[spec.element.itemsize])
                routes.destinations.append(Destination(f"shadow of {spec.name}", TORCH_DTYPES[spec.dtype], shadow))
                whole = _line(spec.numel)
                routes.routes[tensor] = [Route(unit.shadows[tensor], whole, whole)] if spec.numel else []
                routes.loaded[tensor], routes.groups[tensor] = bool(spec.numel), [0] * len(routes.routes[tensor])
            again = replayer.load(part, {tensor: bits[tensor] for tensor in part.tensors})
            unit.outputs = _outputs(unit, replayer, routes, again.tensors)
            held = numbers_in(replayer.model, part)
            unit.numbers = {
                at: value for at, value in again.numbers.items() if at in held and _is_same(held[at], value)
            }
            found.units.append(unit)
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
        for unit in self.units:
            bits = {tensor: _after(patch, number, routes) for tensor, number in unit.shadows.items()}
            if not everything and all(value is None for value in bits.values()):
                continue
            after = {}
            for tensor, number in unit.shadows.items():
                changed = bits[tensor]
                after[tensor] = _shadow(routes, number) if changed is None else changed
            parts = _exchanges(unit, self.replayer.load(unit.part, after), routes)
            if parts:
                patch.dense.append(DensePatch(NO_TENSOR, parts))

    def held(self, tensors: Iterable[int], routes: RouteMap) -> set[int]:
        """Those of some tensors of which the model holds what their shadows lead to."""
        wanted = set(tensors)
        held: set[int] = set()
        for unit in self.units:
            mine = wanted & set(unit.shadows)
            if not mine:
                continue
            found = self.replayer.load(unit.part, {t: _shadow(routes, n) for t, n in unit.shadows.items()})
            if not _exchanges(unit, found, routes):
                held |= mine
        return held

    def is_live(self, tensor: int, routes: RouteMap) -> bool:
        """Whether a tensor's memory is still what the model computes with."""
        unit = next((unit for unit in self.units if tensor in unit.shadows), None)
        return unit is None or all(routes.destinations[output.route.destination].is_live for output in unit.outputs)


def _line(numel: int) -> Region:
    return Region(0, (numel,) if numel != 1 else (), (1,) if numel != 1 else ())


def _shadow(routes: RouteMap, number: int) -> Bits:
    return routes.destinations[number].bits


def _after(patch: StagedPatch, number: int, routes: RouteMap) -> Bits | None:
    """The bits that a shadow will have; None if they stay."""
    bits: Bits | None = None
    for sparse in patch.sparse:
        if sparse.destination == number:
            bits = _shadow(routes, number).copy() if bits is None else bits
            if sparse.relative:
                apply_distances(sparse.element, bits, sparse.positions.astype(np.int64), sparse.data)
            else:
                bits[sparse.positions] = sparse.data
    for dense in patch.dense:
        for route, buffer in dense.parts:
            if route.destination == number:
                bits = _shadow(routes, number).copy() if bits is None else bits
                signed = torch.from_numpy(bits.view(f"<i{bits.itemsize}")).view(SIGNED[bits.itemsize])
                dense_view(signed, route).copy_(buffer)
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
        first = _spelled(next(iter(output.places)))
        raise ModelError(f"{first} came out otherwise than at the start; start the server again")
    route, shaped = output.route, made[0]
    held = dense_view(routes.destinations[route.destination].flat, route)
    if torch.equal(shaped, held):
        return None
    return route, shaped.to("cpu", copy=True).contiguous()


def _is_same(first: float, second: float) -> bool:
    return first == second or (first != first and second != second)


def _exchanges(unit: Unit, found: Loaded, routes: RouteMap) -> list[tuple[Route, torch.Tensor]]:
    """Where the model holds something else than what was loaded again, and what to put there."""
    for at, value in unit.numbers.items():
        if at not in found.numbers or not _is_same(found.numbers[at], value):
            raise ModelError(
                f"{_spelled(at)} is {value}, a number that is computed from weights and would become "
                f"{found.numbers.get(at)}: it cannot be exchanged while the model runs; start the server again"
            )
    pairs = (_different(output, found.tensors, routes) for output in unit.outputs)
    return [pair for pair in pairs if pair is not None]


def _outputs(unit: Unit, replayer: Replayer, routes: RouteMap, found: dict[Place, torch.Tensor]) -> list[Output]:
    """Find in the model, bit for bit, what came out of loading a part again from what the model was loaded with."""
    from vllm_delta_sync.engine.compiling import destination_of, live_tensors

    live = live_tensors(replayer.model, replayer.record)
    owners: dict[int, list[tuple[torch.nn.Module, str]]] = defaultdict(list)
    for path, name, tensor in walk(replayer.model):
        module = replayer.model.get_submodule(path)
        if is_plain(tensor) and getattr(module, name, None) is tensor:
            owners[tensor.untyped_storage()._cdata].append((module, name))
    first = routes.table[unit.part.tensors[0]].name
    outputs: dict[tuple[int, Region], Output] = {}
    numbers: dict[int, int] = {}
    for where, made in found.items():
        held = live.get(where)
        if held is None or not is_plain(held) or not made.numel():
            # The model has let go of it, or filled it later, as it does with caches.
            continue
        reason = _unlike(made, held)
        if reason is not None:
            raise ModelError(
                f"tensor {first!r} is not patched by address ({unit.part.reason}), and loading it again beside the "
                f"model gives {_spelled(where)} {reason}"
            )
        storage = held.untyped_storage()._cdata
        source, target = coalesce(held.shape, (0, made.stride()), (int(held.storage_offset()), held.stride()))
        if (storage, target) in outputs:
            outputs[storage, target].places[where] = source
            continue
        if storage not in numbers:
            numbers[storage] = len(routes.destinations)
            routes.destinations.append(destination_of(_spelled(where), held, owners[storage]))
        outputs[storage, target] = Output({where: source}, Route(numbers[storage], source, target))
    return list(outputs.values())


def _unlike(made: torch.Tensor, held: torch.Tensor) -> str | None:
    if (made.dtype, made.shape, made.device) != (held.dtype, held.shape, held.device):
        return f"as {made.dtype} {tuple(made.shape)}, and the model has {held.dtype} {tuple(held.shape)}"
    if not torch.equal(_bits_of(made), _bits_of(held)):
        return "other bits than the model has"
    return None


def _spelled(where: Place) -> str:
    return ".".join(part for part in where if part)
