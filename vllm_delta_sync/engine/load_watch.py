"""What a model looked like when its loader had filled it, and which modules were changed after that.

Engines rework weights once they are loaded: they pack them for a kernel, quantize them, multiply some in advance.
``watched`` stands around that step. It keeps a replica without data of the model as its loader knows it, which can be
loaded again, and says where the step left something else. Knows nothing of vLLM; ``compat.py`` puts it in place.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_delta_sync.engine.replica import MetaLeaf, is_plain, replicate, walk, walk_numbers
from vllm_delta_sync.engine.trace import written_by

Place = tuple[str, str]
"""(path of a module, path of a tensor from there)."""
Process = Callable[[Any, "Iterable[str] | None"], None]
"""(model, paths of modules, None for all): do what is done after loading."""
INITIAL_ELEMENTS = 4096
"""Tensors up to this size are kept as they were before the step: scales and the like that no checkpoint fills."""


@dataclass
class Record:
    """How a model was loaded.

    Attributes:
        skeleton: the model as its loader knows it, on the meta device.
        changed: paths of the modules that the step left otherwise, in its order.
        process: the step, for modules of a replica.
        initial: small tensors as they were before the step, copied.
        live: where each tensor of the skeleton's modules is now, for as long as it is.
    """

    skeleton: Any
    process: Process
    changed: list[str] = field(default_factory=list)
    initial: dict[Place, torch.Tensor] = field(default_factory=dict)
    live: dict[Place, "weakref.ref[torch.Tensor]"] = field(default_factory=dict)


_records: "weakref.WeakKeyDictionary[Any, Record]" = weakref.WeakKeyDictionary()


def record_of(model: Any) -> Record | None:
    """How a model was loaded, if that was watched."""
    return _records.get(model)


class _Writes(TorchDispatchMode):
    """Notes the storages that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            if is_plain(tensor):
                self.storages.add(tensor.untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Seen:
    """A tensor before the step; it may be gone after."""

    tensor: "weakref.ref[torch.Tensor]"
    storage: int
    layout: tuple[Any, ...]


def watched(model: Any, process: Process) -> Record:
    """Run the step that follows loading on a whole model, and note what it does."""
    before: dict[Place, _Seen] = {}
    record = Record(replicate(model, MetaLeaf()), process)
    for path, name, tensor in walk(model):
        if is_plain(tensor):
            before[path, name] = _Seen(weakref.ref(tensor), tensor.untyped_storage()._cdata, _layout(tensor))
            if tensor.numel() <= INITIAL_ELEMENTS:
                record.initial[path, name] = tensor.detach().clone()
    numbers = _floats(model)
    # The mode is left before anything else is done: what it sees counts as the step's.
    writes = _Writes()
    with writes:
        process(model, None)
    changed: set[str] = set()
    left = set(before)
    for path, name, tensor in walk(model):
        left.discard((path, name))
        if not is_plain(tensor):
            continue
        record.live[path, name] = weakref.ref(tensor)
        seen = before.get((path, name))
        if seen is None or _is_other(seen, tensor) or seen.storage in writes.storages:
            changed.add(path)
    changed.update(path for path, _ in left)
    changed.update(at[0] for at, value in _floats(model).items() if numbers.get(at) != value)
    record.changed = [path for path, _ in model.named_modules() if path in changed]
    _records[model] = record
    return record


def _floats(model: Any) -> dict[Place, float]:
    """Whole numbers are sizes and flags; a float may be a scale that was computed from weights."""
    return {(path, name): value for path, name, value in walk_numbers(model) if isinstance(value, float)}


def _is_other(seen: _Seen, tensor: torch.Tensor) -> bool:
    return (
        seen.tensor() is not tensor or seen.storage != tensor.untyped_storage()._cdata or seen.layout != _layout(tensor)
    )


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.size()), tensor.stride(), tensor.storage_offset(), tensor.device
