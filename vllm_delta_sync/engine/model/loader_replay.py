"""Load parts of a model again, beside it: by its own loader, on a replica that has memory for these parts only."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_delta_sync.engine.model.load_record import LoadRecord, Place, is_under
from vllm_delta_sync.engine.model.loader_trace import written_by
from vllm_delta_sync.engine.model.model_replica import MetaLeaf, is_plain, place, replicate, walk, walk_numbers
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.bits import Bits
from vllm_delta_sync.tensors.torch_views import SIGNED, tensor_from_bits

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
