"""Find a model's routes by watching its own loader.

``load_weights`` runs once with data-less (meta) tensors while every write into parameter storage is recorded and
not executed. Each recorded copy is an affine map from flat source indices to destination elements; slices, fused
projections, transposes and tied weights come out by themselves. What is not a plain copy is refused by name: a
loader that computes would need its values, and guessing them would serve weights that no one published.

Works on any torch module with a ``load_weights(iterable of (name, tensor))`` method; knows nothing of vLLM.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_delta_sync.engine.regions import Region, coalesce, find_overlap
from vllm_delta_sync.engine.routes import Destination, Route, RouteMap
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.torch_bits import SIGNED, TORCH_DTYPES
from vllm_delta_sync.wire.table import TensorTable

aten = torch.ops.aten


class LoadableModel(Protocol):
    """What tracing needs of a model; vLLM's models have it."""

    def load_weights(self, weights: Any) -> Any: ...
    def named_parameters(self, prefix: str = ..., recurse: bool = ..., remove_duplicate: bool = ...) -> Any: ...
    def named_buffers(self, prefix: str = ..., recurse: bool = ..., remove_duplicate: bool = ...) -> Any: ...
    def get_submodule(self, target: str) -> torch.nn.Module: ...


@dataclass
class _Copy:
    tensor: int
    destination: int
    source: Region
    target: Region


class _Recorder(TorchDispatchMode):
    """Records writes into known storages; lets everything else run."""

    def __init__(self, table: TensorTable, model: LoadableModel) -> None:
        super().__init__()
        self.table = table
        self.current = "(before the first tensor)"
        self.problems: list[str] = []
        self.copies: list[_Copy] = []
        self.paddings: list[tuple[int, Region]] = []
        self.destinations: list[Destination] = []
        self._by_storage: dict[int, int] = {}
        self._sources: dict[int, int] = {}
        # Storages are told apart by address of their implementation, which may be reused once one is freed.
        self._alive: list[torch.Tensor] = []
        self.parameters: set[int] = set()
        for name, tensor in model.named_parameters(remove_duplicate=False):
            destination = self._add_destination(model, name, tensor)
            if destination is not None:
                self.parameters.add(destination)
        for name, tensor in model.named_buffers(remove_duplicate=False):
            self._add_destination(model, name, tensor)

    def _add_destination(self, model: LoadableModel, name: str, tensor: torch.Tensor) -> int | None:
        storage = tensor.untyped_storage()
        if storage.size() == 0 or tensor.element_size() not in SIGNED:
            return None
        path, _, attribute = name.rpartition(".")
        owner = (model.get_submodule(path), attribute)
        known = self._by_storage.get(storage._cdata)
        if known is not None:
            self.destinations[known].owners.append(owner)
            return known
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        flat.set_(storage, 0, (storage.size() // tensor.element_size(),), (1,))
        self._by_storage[storage._cdata] = len(self.destinations)
        self.destinations.append(Destination(name, tensor.dtype, flat.view(SIGNED[tensor.element_size()]), [owner]))
        return len(self.destinations) - 1

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The run's tensors without data, as a loader would get them."""
        for position, spec in enumerate(self.table):
            tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
            self._alive.append(tensor)
            self._sources[tensor.untyped_storage()._cdata] = position
            self.current = spec.name
            yield spec.name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            target = args[position] if position < len(args) else kwargs.get(argument.name)
            destination = self._destination(target)
            if destination is not None and isinstance(target, torch.Tensor):
                self._record(func, destination, target, args)
                return target
        return func(*args, **kwargs)

    def _destination(self, tensor: object) -> int | None:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
            return None
        return self._by_storage.get(tensor.untyped_storage()._cdata)

    def _record(self, func: Any, destination: int, target: torch.Tensor, args: Any) -> None:
        where = f"{self.destinations[destination].name} (while loading {self.current})"
        if target.dtype != self.destinations[destination].dtype:
            self.problems.append(f"{where} is written through a view of another dtype")
        elif func in (aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default):
            self.paddings.append((destination, _region(target)))
        elif func is not aten.copy_.default:
            self.problems.append(f"{where} is written by {func}, which is not a copy")
        else:
            self._record_copy(destination, target, args[1], where)

    def _record_copy(self, destination: int, target: torch.Tensor, source: torch.Tensor, where: str) -> None:
        tensor = self._sources.get(source.untyped_storage()._cdata)
        if tensor is None:
            self.problems.append(f"{where} receives computed values, not elements of the checkpoint")
        elif source.dtype != target.dtype:
            name = self.table[tensor].name
            self.problems.append(
                f"{where} casts {name} from {source.dtype} to {target.dtype}; publish what is served: give the "
                "Publisher base= with the served checkpoint, or a model whose config has that dtype"
            )
        elif source.shape != target.shape:
            self.problems.append(f"{where} copies {tuple(source.shape)} into {tuple(target.shape)} by broadcasting")
        elif source.numel():
            first, second = coalesce(
                source.shape,
                (int(source.storage_offset()), source.stride()),
                (int(target.storage_offset()), target.stride()),
            )
            self.copies.append(_Copy(tensor, destination, first, second))


def _region(tensor: torch.Tensor) -> Region:
    return coalesce(tensor.shape, (int(tensor.storage_offset()), tensor.stride()), (0, tensor.stride()))[0]


def trace_routes(model: LoadableModel, table: TensorTable) -> RouteMap:
    """Trace and prove the routes of a run's tensors in a model. No weight is touched.

    Raises:
        ModelError: a tensor is computed rather than copied, is covered in part or twice, two tensors share memory,
            or the loader fails; the message names tensor and reason.
    """
    recorder = _Recorder(table, model)
    try:
        with torch.no_grad(), recorder:
            model.load_weights(recorder.weights())
    except Exception as error:  # the loader is foreign code and may raise anything
        raise ModelError(
            f"tensor {recorder.current!r} cannot be routed: the model's loader raised {type(error).__name__}: {error}"
        ) from error
    if recorder.problems:
        more = f" (and {len(recorder.problems) - 1} more)" if len(recorder.problems) > 1 else ""
        raise ModelError(f"this model cannot be patched in place: {recorder.problems[0]}{more}")
    _prove_sources(recorder)
    _prove_destinations(recorder)
    routes: list[list[Route]] = [[] for _ in table]
    for copy in recorder.copies:
        routes[copy.tensor].append(Route(copy.destination, copy.source, copy.target))
    return RouteMap(table, recorder.destinations, routes)


def _prove_sources(recorder: _Recorder) -> None:
    """Each element is loaded at most once on this rank; ``ownership.py`` proves that all ranks together load it."""
    by_tensor: dict[int, list[Region]] = defaultdict(list)
    for copy in recorder.copies:
        name = recorder.table[copy.tensor].name
        if not copy.source.is_injective or not copy.target.is_injective:
            raise ModelError(f"tensor {name!r} is loaded with repeated elements (an expanded view)")
        by_tensor[copy.tensor].append(copy.source)
    for tensor, regions in by_tensor.items():
        spec = recorder.table[tensor]
        if find_overlap(regions, spec.numel) is not None:
            raise ModelError(f"an element of tensor {spec.name!r} is loaded to two places")


def _prove_destinations(recorder: _Recorder) -> None:
    """No two tensors share a destination element, none is padding, and no parameter is left out.

    A parameter that no tensor reaches may be derived from one that is (absorbed projections, packed copies): it would
    go stale without anybody noticing.
    """
    by_destination: dict[int, list[tuple[str, Region]]] = defaultdict(list)
    for copy in recorder.copies:
        by_destination[copy.destination].append((recorder.table[copy.tensor].name, copy.target))
    for destination, region in recorder.paddings:
        if region.numel:
            by_destination[destination].append(("padding", region))
    for destination, owned in by_destination.items():
        found = recorder.destinations[destination]
        pair = find_overlap([region for _, region in owned], found.flat.numel())
        if pair is not None:
            first, second = (owned[position][0] for position in pair)
            raise ModelError(f"tensors {first!r} and {second!r} are loaded to the same memory of {found.name!r}")
    for destination in sorted(recorder.parameters):
        found = recorder.destinations[destination]
        covered = sum(region.numel for _, region in by_destination[destination])
        if covered != found.flat.numel():
            raise ModelError(
                f"parameter {found.name!r} gets {covered} of its {found.flat.numel()} elements from the checkpoint: "
                "the rest may be derived from other weights and would go stale, so this model is refused"
            )
