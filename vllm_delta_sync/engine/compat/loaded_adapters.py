"""``differing_modules`` compares what vLLM computes an adapter with to what vLLM's own loader makes of its folder.

vLLM holds an adapter twice: in host memory, packed and scaled for its layers (``LoRAModel``), and, once a request has
asked for it, in one slot of every layer's buffers, cut for the rank. This module does not know these layouts. vLLM's
loader loads the folder again beside the model, and vLLM's ``activate_adapter`` writes the result into copies of the
layers, one layer at a time, whose buffers are empty and in host memory. An adapter that vLLM has dropped from its cache
differs nowhere: the next request for it loads the folder.
"""

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_delta_sync.engine.compat import lora, patches
from vllm_delta_sync.engine.model.loader_trace import written_by
from vllm_delta_sync.engine.model.model_replica import view_in_storage
from vllm_delta_sync.engine.model.route_map import READ_ELEMENTS
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.engine.protocol import Adapter
from vllm_delta_sync.errors import BusyError, EngineError

TRIES = 100
TRY_SECONDS = 0.05
"""How often, and after how many seconds, a layer is compared again if vLLM was filling it."""


class SlotChanges:
    """Counts, per adapter, how often vLLM began and finished to fill a slot with it.

    Cause: vLLM fills slots on its main thread when a request asks for an adapter, layer by layer, and marks the slot as
    taken first. Symptom: an adapter that is read beside generation at that moment is reported as changed from outside.
    Remove when: vLLM says which slots are complete.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    @classmethod
    def watch(cls, manager: Any) -> "SlotChanges":
        """Return the counts of vLLM's manager of adapters. The first call, on the main thread, begins to count."""
        found: SlotChanges | None = getattr(manager, "delta_sync_changes", None)
        if found is None:
            found = manager.delta_sync_changes = cls()
            patches.wrap_method(manager, "activate_adapter", partial(found._activate, manager))
        return found

    def _activate(self, manager: Any, original: Callable[..., Any], number: int) -> Any:
        # Called for every step of every request; a slot is filled only if the adapter has none yet.
        if number in manager.lora_index_to_id:
            return original(number)
        self._counts[number] += 1
        try:
            return original(number)
        finally:
            self._counts[number] += 1

    def slot(self, manager: Any, number: int) -> tuple[int | None, int]:
        """Return an adapter's slot, None if it has none, and a count that is odd while the slot is being filled."""
        slots = list(manager.lora_index_to_id)
        return (slots.index(number) if number in slots else None), self._counts[number]


def differing_modules(worker: Any, adapter: Adapter, memory: WeightMemory) -> set[str]:
    """Return the names of vLLM's layers that compute with something else than what the adapter's folder holds.

    Reads buffers in short pieces beside generation. Takes host memory for the adapter and one layer's slot.

    Raises:
        BusyError: the engine is asleep, or vLLM moves the adapter from slot to slot all the time. EngineError: vLLM
            does not load the folder.
    """
    manager = lora.manager_of(worker)
    held = lora.held_adapter(worker, adapter)
    if held is None:
        return set()
    try:
        loaded = worker.model_runner.lora_manager._load_adapter(lora.lora_request(adapter))
        # It shares vLLM's settings, and has no adapters and no slots in use.
        beside = copy.copy(manager)
        beside._registered_adapters = _empty(manager._registered_adapters)
        type(beside).add_adapter(beside, loaded)
    except Exception as error:  # vLLM raises what its loader raises
        reason = f"{type(error).__name__}: {error}"
        raise EngineError(f"vLLM does not load the files of adapter {adapter.name!r} again: {reason}") from error
    names = {*loaded.loras, *held.loras}
    found = {name for name in names if not _same_weights(loaded.loras.get(name), held.loras.get(name))}
    for name, layer in manager.modules.items():
        if name not in found and _differs_in_slot(manager, beside, name, layer, adapter, memory):
            found.add(name)
    return found


def _empty(cache: Any) -> Any:
    return type(cache)(1, lambda number: None)


def _same_weights(one: Any, other: Any) -> bool:
    """Return whether two ``LoRALayerWeights``, either of which may be None, hold the same bits."""
    if one is None or other is None:
        return one is other
    pairs = ((one.lora_a, other.lora_a), (one.lora_b, other.lora_b))
    return one.scaling == other.scaling and all(_same_tensors(*pair) for pair in pairs)


def _same_tensors(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same_tensors, one, other))
    return one is None and other is None


def _differs_in_slot(manager: Any, beside: Any, name: str, layer: Any, adapter: Adapter, memory: WeightMemory) -> bool:
    """Return whether a layer's buffers hold something else in the adapter's slot; False if it has no slot."""
    changes = SlotChanges.watch(manager)
    expected: Any = None
    for _ in range(TRIES):
        slot, count = changes.slot(manager, adapter.number)
        if slot is None:
            return False
        if expected is None:
            expected = _filled_copy(beside, name, layer, adapter.number)
        slots = len(manager.lora_index_to_id)
        if _same_in_slot(layer, expected, slots, slot, memory):
            return False
        # What was copied to the slot last may be under way on another stream.
        memory.synchronize()
        same = _same_in_slot(layer, expected, slots, slot, memory)
        if same or (count % 2 == 0 and changes.slot(manager, adapter.number) == (slot, count)):
            return not same
        time.sleep(TRY_SECONDS)
    raise BusyError(f"vLLM moves adapter {adapter.name!r} between slots all the time; raise --max-loras, or try again")


def _filled_copy(beside: Any, name: str, layer: Any, number: int) -> Any:
    """Return a copy of a layer with buffers in host memory, whose first slot vLLM has filled with the adapter."""
    filled = copy.copy(layer)
    storages: dict[int, torch.UntypedStorage] = {}
    for attribute, value in _held_tensors(layer):
        empty = [_empty_like(tensor, storages) for tensor in value]
        vars(filled)[attribute] = empty[0] if isinstance(vars(layer)[attribute], torch.Tensor) else type(value)(empty)
    beside.modules = {name: filled}
    beside.lora_index_to_id = [None] * len(beside.lora_index_to_id)
    beside._active_adapters = _empty(beside._active_adapters)
    with _WriteGuard({storage._cdata for storage in storages.values()}):
        # Not the method of the instance, which is that of the manager that was copied.
        type(beside).activate_adapter(beside, number)
    return filled


class _WriteGuard(TorchDispatchMode):
    """Forbids writes outside of some storages: a layer that kept a buffer in a way unknown here would write to it."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            if tensor.untyped_storage()._cdata not in self._storages:
                raise EngineError(
                    f"this vLLM's layers with LoRA would write to the model by {func} while an adapter is verified "
                    "beside it; use a release that was tested"
                )
        return func(*args, **(kwargs or {}))


def _held_tensors(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield (attribute, list or tuple) of the tensors that a layer with LoRA holds itself, beside its base layer."""
    for attribute, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            yield attribute, [value]
        elif isinstance(value, list | tuple) and value and all(isinstance(item, torch.Tensor) for item in value):
            yield attribute, value


def _empty_like(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return a tensor of zeros in host memory; views of one memory become views of one memory."""
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        # NumPy asks the system for zeroed pages: slots that nothing is written to take no memory.
        zeros = torch.from_numpy(np.zeros(storage.nbytes(), np.uint8))
        storages[storage._cdata] = zeros.untyped_storage()
    return view_in_storage(tensor, storages[storage._cdata])


def _same_in_slot(layer: Any, expected: Any, slots: int, slot: int, memory: WeightMemory) -> bool:
    for attribute, value in _held_tensors(layer):
        wanted = vars(expected)[attribute]
        for live, filled in zip(value, [wanted] if isinstance(wanted, torch.Tensor) else wanted, strict=True):
            if _has_slots(live, slots) and not _same_bits(live[slot], filled[0], memory):
                return False
    return True


def _has_slots(tensor: torch.Tensor, slots: int) -> bool:
    """Return whether a tensor is a buffer with a slot per adapter, or one more, along the first dimension.

    Views of buffers, such as those of single experts, and tables that all adapters share do not count.
    """
    whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return whole and tensor.dim() > 0 and tensor.shape[0] in (slots, slots + 1)


def _same_bits(live: torch.Tensor, wanted: torch.Tensor, memory: WeightMemory) -> bool:
    """Compare memory of the model with host memory, piece by piece. Raises BusyError: the engine is asleep."""
    pieces = (tensor.reshape(-1).split(READ_ELEMENTS) for tensor in (live, wanted))
    for piece, right in zip(*pieces, strict=True):
        with memory.reading():
            if not torch.equal(_bytes(piece.to("cpu")), _bytes(right)):
                return False
    return True


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
