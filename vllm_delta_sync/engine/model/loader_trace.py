"""``trace_loader`` records what a model's own loader does: where it copies checkpoint elements, and what it computes.

``load_weights`` runs once on a replica without data, with data-less (meta) tensors, while a dispatch mode sees every
operation. Each plain copy is an affine map from flat source indices to destination elements, which covers slices, fused
projections, transposes and tied weights. Everything else that writes to a parameter (casts, transforms, sums) is
recorded with the checkpoint tensors it used; ``route_compiler.py`` decides how to handle it.

Works on any torch module with a ``load_weights(iterable of (name, tensor))`` method; does not depend on vLLM.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_delta_sync.engine.model.model_replica import walk_tensors
from vllm_delta_sync.engine.model.model_with_draft import ModelWithDraft, load_weights
from vllm_delta_sync.engine.model.route import Region, coalesce
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.torch_views import SIGNED, TORCH_DTYPES

aten = torch.ops.aten
NO_TENSORS: frozenset[int] = frozenset()
OVERWRITES = (aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)
"""Operations after which the old content of the target plays no part."""


@dataclass
class Target:
    """Memory that a loader may write: one storage of the replica.

    Attributes:
        names: every parameter or buffer in the storage.
        numel: size of the storage, in elements of ``dtype``.
        is_parameter: whether one of them is a parameter.
    """

    names: list[str]
    dtype: torch.dtype
    numel: int
    is_parameter: bool


@dataclass(frozen=True)
class Copy:
    """The loader copies elements of a checkpoint tensor to elements of a target."""

    tensor: int
    target: int
    source: Region
    target_region: Region


@dataclass(frozen=True)
class Computed:
    """A target holds something other than checkpoint elements: made of ``tensors``, for the given ``reason``."""

    target: int
    tensors: frozenset[int]
    reason: str


@dataclass
class Trace:
    """What a loader does with the tensors of a run.

    Attributes:
        paddings: (target, region, number of copies before it) of each region set to a constant.
        kept: tensors that the loader left on the model outside its targets: (module path, path within the module) →
            ids of the checkpoint tensors they were made of.
        shared: ids of the tensors that a draft's loader writes to memory which it shares with the served model since.
    """

    table: TensorTable
    targets: list[Target] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    paddings: list[tuple[int, Region, int]] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)
    kept: dict[tuple[str, str], frozenset[int]] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)

    @property
    def loaded(self) -> set[int]:
        """Ids of the tensors that the loader uses."""
        computed = (found.tensors for found in self.computed)
        return {copy.tensor for copy in self.copies}.union(*computed, *self.kept.values())


class _LoadRecorder(TorchDispatchMode):
    """Tracks checkpoint tensors through all operations. The replica's memory is meta, so nothing is computed."""

    def __init__(self, table: TensorTable, replica: torch.nn.Module) -> None:
        super().__init__()
        self.trace = Trace(table)
        self.current = "(before the first tensor)"
        self._targets: dict[int, int] = {}
        self._sources: dict[int, int] = {}
        # Storage that is neither target nor source → ids of the checkpoint tensors it was made of.
        self._derived_from: dict[int, frozenset[int]] = {}
        # Storages are identified by address, which may be reused once one is freed.
        self._alive: list[torch.Tensor] = []
        # (module path, name), and storages, of what a draft's loader fills in vain; see ``ModelWithDraft``.
        self._shared = replica.shared if isinstance(replica, ModelWithDraft) else frozenset()
        self._shared_storages: set[int] = set()
        for name, tensor in replica.named_parameters(remove_duplicate=False):
            self._add_target(name, tensor, True)
        for name, buffer in replica.named_buffers(remove_duplicate=False):
            self._add_target(name, buffer, False)

    def _add_target(self, name: str, tensor: torch.Tensor, is_parameter: bool) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type != "meta" or storage.nbytes() == 0 or tensor.element_size() not in SIGNED:
            return
        path, _, attribute = name.rpartition(".")
        if (path, attribute) in self._shared:
            self._alive.append(tensor)
            self._shared_storages.add(storage._cdata)
            return
        known = self._targets.get(storage._cdata)
        if known is not None:
            self.trace.targets[known].names.append(name)
            self.trace.targets[known].is_parameter |= is_parameter
            return
        self._alive.append(tensor)
        self._targets[storage._cdata] = len(self.trace.targets)
        numel = storage.nbytes() // tensor.element_size()
        self.trace.targets.append(Target([name], tensor.dtype, numel, is_parameter))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the run's tensors without data, as a loader receives them."""
        for position, spec in enumerate(self.trace.table):
            tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
            self._alive.append(tensor)
            self._sources[tensor.untyped_storage()._cdata] = position
            self.current = spec.name
            yield spec.name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = NO_TENSORS.union(*(self._sources_of(tensor) for tensor in tensors_in([args, kwargs])))
        written = list(written_by(func, args, kwargs))
        found = func(*args, **kwargs)
        if tensors:
            for tensor in tensors_in(found):
                self._add_sources(tensor, tensors)
        for tensor in written:
            self._record(func, tensor, tensors, args)
        return found

    def _sources_of(self, tensor: torch.Tensor) -> frozenset[int]:
        key = tensor.untyped_storage()._cdata
        source = self._sources.get(key)
        return self._derived_from.get(key, NO_TENSORS) if source is None else frozenset((source,))

    def _add_sources(self, tensor: torch.Tensor, tensors: frozenset[int]) -> None:
        key = tensor.untyped_storage()._cdata
        if key not in self._sources:
            if key not in self._derived_from:
                self._alive.append(tensor)
            self._derived_from[key] = self._derived_from.get(key, NO_TENSORS) | tensors

    def _record(self, func: Any, tensor: torch.Tensor, tensors: frozenset[int], args: Any) -> None:
        """Record a write to a tensor."""
        target = self._targets.get(tensor.untyped_storage()._cdata)
        if target is None:
            if tensors:
                # A tensor of the checkpoint that the loader changes before it copies it is no longer that tensor.
                self._sources.pop(tensor.untyped_storage()._cdata, None)
                self._add_sources(tensor, tensors)
            if tensor.untyped_storage()._cdata in self._shared_storages:
                self.trace.shared |= tensors
            return
        memory = self.trace.targets[target]
        where = f"{memory.names[0]} (while loading {self.current})"
        sources = tensors
        if func in OVERWRITES:
            sources = NO_TENSORS.union(*(self._sources_of(source) for source in tensors_in(args[1:])))
        self._add_sources(tensor, sources)
        place = int(tensor.storage_offset()), tensor.stride()
        if tensor.dtype != memory.dtype:
            reason = f"{where} is written through a view of another dtype"
        elif not sources:
            self.trace.paddings.append((target, coalesce(tensor.shape, place, place)[0], len(self.trace.copies)))
            return
        elif func is not aten.copy_.default:
            reason = f"{where} is written by {func}, which is not a copy"
        else:
            source = args[1]
            position = self._sources.get(source.untyped_storage()._cdata)
            if position is None:
                reason = f"{where} receives computed values, not elements of the checkpoint"
            elif source.dtype != tensor.dtype:
                reason = (
                    f"{where} casts {self.trace.table[position].name} from {source.dtype} to {tensor.dtype}; publish "
                    "what is served: give the Publisher base= with the served checkpoint, or a model whose config has "
                    "that dtype"
                )
            elif source.shape != tensor.shape:
                reason = f"{where} copies {tuple(source.shape)} into {tuple(tensor.shape)} by broadcasting"
            else:
                if source.numel():
                    regions = coalesce(source.shape, (int(source.storage_offset()), source.stride()), place)
                    self.trace.copies.append(Copy(position, target, *regions))
                return
        self.trace.computed.append(Computed(target, sources, reason))

    def record_kept(self, replica: Any) -> None:
        """Record tensors that the loader left on the model outside its targets."""
        for path, name, tensor in walk_tensors(replica):
            tensors, storage = self._sources_of(tensor), tensor.untyped_storage()._cdata
            if tensors and storage not in self._targets and storage not in self._shared_storages:
                self.trace.kept[path, name] = tensors


IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class _HideMeta(TorchFunctionMode):
    """Lets no tensor say that it has no data: some loaders fill less memory then than they fill in a real load."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return False if func == IS_META else func(*args, **(kwargs or {}))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def written_by(func: Any, args: Any, kwargs: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors that an operation writes to, according to its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))


def trace_loader(replica: torch.nn.Module, table: TensorTable) -> Trace:
    """Let a replica load the tensors of a run, and record what its loader does. The replica is useless afterwards.

    Args:
        replica: a module with ``load_weights``, or a ``ModelWithDraft``; all memory that the loader may write is on the
            meta device.

    Raises:
        ModelError: the loader fails, or reads the data of a tensor; the message names the tensor and the reason.
    """
    recorder = _LoadRecorder(table, replica)
    try:
        with torch.no_grad(), _HideMeta(), recorder:
            load_weights(replica, recorder.weights)
    except Exception as error:  # the loader is code of the model and may raise anything
        # torch's errors about tensors without data mention the meta device, and have no class of their own.
        fix = (
            "this loader reads the data of a tensor to decide where others go, which cannot be traced; serve the model "
            "in another layout, such as without --enable-expert-parallel"
            if "meta" in str(error)
            else "if the run is of another model, check the setting bucket, or start vLLM from the run's checkpoint"
        )
        # Loaders assert that shapes fit, mostly without a message.
        shape = next((f"; it is {list(spec.shape)} in the run" for spec in table if spec.name == recorder.current), "")
        raise ModelError(
            f"tensor {recorder.current!r} cannot be routed: the model's loader raised {type(error).__name__}"
            f"{': ' if str(error) else ''}{error}{shape}; {fix}"
        ) from error
    recorder.record_kept(replica)
    return recorder.trace
