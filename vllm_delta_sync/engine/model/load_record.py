"""``record_load`` records what an engine does to a model's weights after loading, so that it can be repeated.

After loading, engines pack weights for a kernel, quantize them or multiply some in advance. ``record_load`` wraps that
step: it keeps a data-less replica of the model as the loader left it, which can be loaded again, and records which
modules the step changed. ``compat/load_hook.py`` installs it.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_delta_sync.engine.model.loader_trace import OVERWRITES, tensors_in, written_by
from vllm_delta_sync.engine.model.model_replica import MetaLeaf, is_plain, replicate, walk_numbers, walk_tensors

TensorPath = tuple[str, str]
"""(path of a module, path of a tensor within the module)."""
Process = Callable[[Any, list[str] | None], None]
"""(model, paths of modules, None for all): run the step after loading."""
NO_STORAGES: frozenset[int] = frozenset()
UNKNOWN = -1
"""Stands for an unknown storage: anything within the module may have been used."""
INITIAL_ELEMENTS = 4096
"""Tensors up to this size are copied before the step: scales and similar tensors that no checkpoint fills."""


@dataclass
class LoadRecord:
    """How a model was loaded.

    Attributes:
        skeleton: the model as the loader left it, on the meta device.
        changed: path of each module in which the step left new tensors or numbers → the tensors they were made of.
        made: these new tensors.
        process: the step after loading, for modules of a replica.
        initial: copies of small tensors from before the step.
        live: weak references to where each tensor of the skeleton's modules is now; under its former path too, if the
            step left its memory as it was under another name.
        opaque_operations: operations that took weights and returned something other than tensors, such as a kernel's
            handle to a copy that nothing else can reach.
        numbers: every number that is not whole, as it was after the step.
    """

    skeleton: Any
    process: Process
    changed: dict[str, set[TensorPath]] = field(default_factory=dict)
    made: set[TensorPath] = field(default_factory=set)
    initial: dict[TensorPath, torch.Tensor] = field(default_factory=dict)
    live: dict[TensorPath, "weakref.ref[torch.Tensor]"] = field(default_factory=dict)
    opaque_operations: list[str] = field(default_factory=list)
    numbers: dict[TensorPath, float] = field(default_factory=dict)

    def added_since_load(self, model: Any) -> list[str]:
        """Return the names of tensors and numbers that appeared after loading and may have been computed from weights.

        Kernels and layers may combine weights, or read scales from them, at their first call. Such values would go
        stale unnoticed. Tensors that replaced others are not listed: if they were made of weights, the route compiler
        finds that the original is no longer in its place.
        """
        known = {
            tensor.untyped_storage()._cdata for tensor in (seen() for seen in self.live.values()) if tensor is not None
        }
        found = [
            dotted_path((path, name))
            for path, name, tensor in walk_tensors(model)
            if (path, name) not in self.live
            and is_plain(tensor)
            and tensor.is_floating_point()
            and tensor.numel()
            and tensor.untyped_storage()._cdata not in known
            and not is_runtime_state(name)
        ]
        values = set(self.numbers.values())
        found += [
            f"{dotted_path(at)} (now {value}, {self.numbers.get(at, 'absent')} after loading)"
            for at, value in _float_attributes(model).items()
            if value not in values and value == value and not value.is_integer()
        ]
        return list(dict.fromkeys(found))


_records: "weakref.WeakKeyDictionary[Any, LoadRecord]" = weakref.WeakKeyDictionary()


def keep_record(model: Any, record: LoadRecord) -> None:
    """Keep the record of a model's loading for as long as the model lives."""
    _records[model] = record


def load_record_of(model: Any) -> LoadRecord | None:
    """Return the record of a model's loading; None if ``record_load`` did not run for it."""
    return _records.get(model)


class _ProvenanceMode(TorchDispatchMode):
    """Tracks which storages each tensor was made of, and which storages were written.

    A kernel that is not called as an operator may fill uninitialized memory from anything, so such memory counts as
    made of UNKNOWN too.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.read_as_number: set[int] = set()
        self.opaque_operations: set[str] = set()
        storages = (tensor.untyped_storage()._cdata for _, _, tensor in walk_tensors(model) if is_plain(tensor))
        self.derived_from = {storage: frozenset((storage,)) for storage in storages}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and _is_same_view(args[0], args[1]):
            return func(*args, **kwargs)  # as vLLM does to experts that it does not pad
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in([args, kwargs]) if is_plain(tensor)}
        read = {tensor.untyped_storage()._cdata for tensor in tensors_in([args[1:], kwargs]) if is_plain(tensor)}
        targets = [tensor for tensor in written_by(func, args, kwargs) if is_plain(tensor)]
        written_storages = {tensor.untyped_storage()._cdata for tensor in targets}
        whole = {tensor.untyped_storage()._cdata for tensor in targets if _is_whole(tensor)}
        found = func(*args, **kwargs)
        # An operation that overwrites its target does not use the target's old content.
        sources = read if func in OVERWRITES else given
        derived_from = NO_STORAGES.union(*(self.derived_from.get(storage, NO_STORAGES) for storage in sources))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.read_as_number |= derived_from
        # Numbers that torch's own operators return can be compared later; other operators may return handles.
        if derived_from and func.namespace not in ("aten", "prim") and isinstance(found, int | torch.ScriptObject):
            self.opaque_operations.add(str(func))
        self.written |= written_storages
        fresh = {t.untyped_storage()._cdata for t in tensors_in(found) if is_plain(t)} - given
        unfilled = frozenset((UNKNOWN,)) if "empty" in func.__name__ else NO_STORAGES
        for storage in fresh:
            # The address may have belonged to memory that was freed.
            self.derived_from[storage] = derived_from | unfilled
        for storage in written_storages - fresh:
            before = (
                NO_STORAGES if func in OVERWRITES and storage in whole else self.derived_from.get(storage, NO_STORAGES)
            )
            self.derived_from[storage] = before | derived_from
        return found


def is_runtime_state(name: str) -> bool:
    """Return whether vLLM fills a tensor of that name from requests or adapters: KV caches, LoRA layers, and adapters
    that its manager, an attribute of the model, holds in host memory."""
    attributes = name.partition("[")[0].split(".")
    return attributes[-1] == "kv_cache" or "lora" in attributes[-1] or attributes[0] == "lora_manager"


def dotted_path(where: TensorPath) -> str:
    """Return a tensor path as one name."""
    return ".".join(part for part in where if part)


def is_under(path: str, modules: Iterable[str]) -> bool:
    """Return whether a module is one of ``modules``, or within one."""
    return any(not module or path == module or path.startswith(module + ".") for module in modules)


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _is_same_view(one: torch.Tensor, other: Any) -> bool:
    """Return whether a number or a tensor is a tensor with the same elements in the same order."""
    if not (isinstance(other, torch.Tensor) and is_plain(one) and is_plain(other)):
        return False
    first, second = (
        (each.untyped_storage()._cdata, each.storage_offset(), each.dtype, each.shape, each.stride())
        for each in (one, other)
    )
    return first == second


def record_load(model: Any, process: Process) -> LoadRecord:
    """Run the step after loading on a whole model, and record what it does."""
    # The step may free the memory of a tensor; a reference keeps its identity, ``cdata``, from being reused.
    before: dict[TensorPath, StorageWeakRef] = {}
    record = LoadRecord(replicate(model, MetaLeaf(model)), process)
    for path, name, tensor in walk_tensors(model):
        if is_plain(tensor):
            before[path, name] = StorageWeakRef(tensor.untyped_storage())
            # Parts of a model that are not served may have no data.
            if tensor.numel() <= INITIAL_ELEMENTS and tensor.device.type != "meta":
                # In host memory: device memory allocated now would be freed with the weights when the engine sleeps.
                record.initial[path, name] = tensor.detach().to("cpu", copy=True)
    numbers = _float_attributes(model)
    provenance = _ProvenanceMode(model)
    with provenance:
        process(model, None)
    # A new view of unchanged memory follows later writes, so it is not a change.
    kept = {seen.cdata for seen in before.values() if not seen.expired()} - provenance.written
    derived_from: dict[str, frozenset[int]] = {}
    found: dict[int, torch.Tensor] = {}
    for path, name, tensor in walk_tensors(model):
        if not is_plain(tensor):
            continue
        record.live[path, name] = weakref.ref(tensor)
        place = tensor.untyped_storage()._cdata
        found.setdefault(place, tensor)
        if place not in kept and provenance.derived_from.get(place):
            derived_from[path] = derived_from.get(path, NO_STORAGES) | provenance.derived_from[place]
            record.made.add((path, name))
    for at, seen in before.items():
        if seen.cdata in kept and seen.cdata in found:
            record.live.setdefault(at, weakref.ref(found[seen.cdata]))
    record.numbers = _float_attributes(model)
    for (path, name), value in record.numbers.items():
        if numbers.get((path, name)) != value:
            derived_from[path] = derived_from.get(path, NO_STORAGES) | {UNKNOWN}
    for path, storages in derived_from.items():
        record.changed[path] = {
            at
            for at, seen in before.items()
            if seen.cdata in storages
            or (UNKNOWN in storages and is_under(at[0], (path,)))
            # The step decides by it, so that it must have data when the step is repeated.
            or (seen.cdata in provenance.read_as_number and at[0] == path)
        }
    record.opaque_operations = sorted(provenance.opaque_operations)
    keep_record(model, record)
    return record


def _float_attributes(model: Any) -> dict[TensorPath, float]:
    """Return a model's float attributes, perhaps scales computed from weights; integers are sizes and flags."""
    return {(path, name): value for path, name, value in walk_numbers(model) if isinstance(value, float)}
