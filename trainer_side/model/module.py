"""``ModuleTensors``: checkpoint tensors of a torch module, as ``save_pretrained`` would write them, as live views.

All knowledge of transformers is here. It is imported only if the caller's program has imported it. ``live_tensors``
takes whatever a user passes as the model.
"""

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import distributed, nn

from trainer_side.model.conversion_trace import Route, View, trace
from trainer_side.model.live_tensors import (
    CheckpointTensor,
    IterableTensors,
    LiveTensors,
    NamedTensors,
    Selection,
    changed,
    check_readable,
    note_renamed,
    storage_key,
    storages_of,
)
from trainer_side.model.lora import LoraLayers, MergedState, has_adapters
from vllm_delta_sync.errors import ModelError, TensorMismatchError, UsageError
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.tensors.torch_sharding import is_sharded, layout, local_boxes, whole_shape

logger = guarded_logger(__name__)

# Wrappers that only add a level to every name, by class name so that none of them needs to be imported.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    # Those of PEFT: a PeftModel around a tuner, such as LoraModel, around the model.
    "PeftModel": "base_model",
    "BaseTuner": "model",
}

State = dict[str, torch.Tensor]


class ModuleForm:
    """How the tensors of a module, sharded ones included, become those of its checkpoint.

    Attributes:
        routes: checkpoint name → where its elements are; in a sharded source as if that were complete and contiguous.
        tensors: checkpoint name → description, in the model's order; the same on every rank.
        aliases: checkpoint name of a tied duplicate → checkpoint name of the tensor that is published.
        excluded: names in ``tensors`` that the selection leaves out.
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection | None = None,
        *,
        described: bool = False,
        merges_adapters: bool = False,
    ) -> None:
        """Find how the module's tensors map to its checkpoint.

        Args:
            selection: leaves tensors out, and renames them; by default nothing. With ``rename``, tensors of
                transformers models inside the module are converted too.
            described: the module only describes the model, and its tensors may be on the meta device.
            merges_adapters: the caller merges LoRA adapters (``LoraLayers``); otherwise they are refused.
        """
        self._model = unwrap(model)
        self._selection = selection or Selection()
        self._merges_adapters = merges_adapters
        _refuse_unpublishable(self._model, merges_adapters)
        self._described = described
        self._names: dict[str, str | None] = {}
        self._has_adapters = False
        state, _ = self._read_state()
        self._ties = _find_ties(self._model, state)
        self._sources = frozenset(state)
        self._geometry = _geometry(state)
        self._pretrained = _pretrained_parts(self._model, inside=self._selection.renames)
        # Of tied sources, the selection must leave out all names.
        kept = {self._ties.get(name, name) for name in state if self._selection.keeps(name)}
        self._left_out = {name for name in state if self._ties.get(name, name) not in kept}
        self.routes = self._trace(state)
        self.excluded = {name for name, route in self.routes.items() if self._is_left_out(route)}
        self.aliases = self._checkpoint_aliases(state)
        self._selection.check_used(list(state))
        configured = _configured_dtypes(self._model, state)
        self.tensors: dict[str, CheckpointTensor] = {}
        for name, route in self.routes.items():
            source = route.sources[0]
            self.tensors[name] = CheckpointTensor(
                name, route.shape, _dtype(state[source]), configured.get(source), state[source].device
            )
        if self.tensors.keys() <= self.excluded:
            left = " that include= and exclude= leave" if self.tensors else ""
            raise ModelError(f"{type(model).__name__} has no tensor to publish{left}")

    def state(self) -> tuple[State, LoraLayers | None]:
        """Return the module's current tensors, sharded ones unchanged, all others detached.

        What the selection leaves out is there only if it can be read, and could be when this was made. With LoRA
        layers, if the caller merges them, also these; the tensors are those of the base, before they are merged. Raises
        ModelError, see ``LoraLayers``.
        """
        state, lora = self._read_state()
        for name in [name for name in state.keys() - self._sources if not self._selection.keeps(name)]:
            del state[name]
        self._check_unchanged(state)
        if lora is not None:
            lora.check_ties(self._ties)
        return state, lora

    def _read_state(self) -> tuple[State, LoraLayers | None]:
        tensors = self._model.state_dict(keep_vars=True)
        if tensors.keys() != self._names.keys():
            # Wrappers and adapters add names, or change them: what follows holds while the names stay the same.
            self._names = _names_without_wrappers(self._model, tensors)
            self._has_adapters = self._merges_adapters and has_adapters(self._model)
        state: State = {}
        for key, value in tensors.items():
            name = self._names[key]
            if name is None:
                continue
            if not isinstance(value, torch.Tensor) and name.endswith("_extra_state"):
                logger.debug("%s is not a tensor and is not published", name)
            elif self._described and isinstance(value, torch.Tensor) and value.is_meta:
                state[name] = value.detach()
            else:
                try:
                    state[name] = value if is_sharded(value) else check_readable(name, value)
                except ModelError:
                    if self._selection.keeps(name):
                        raise
        if not self._has_adapters:
            return state, None
        lora = LoraLayers(self._model, partial(without_wrappers, wrapped=wrapper_prefixes(self._model)))
        named = ((lora.base_name(name), tensor) for name, tensor in state.items())
        return {name: tensor for name, tensor in named if name is not None}, lora

    def _trace(self, state: State) -> dict[str, Route]:
        untied = {name: tensor for name, tensor in state.items() if name not in self._ties}
        return self._convert(untied)

    def _convert(self, state: State) -> dict[str, Route]:
        """Return name in the run → where its elements are in the state."""
        routes: dict[str, Route] = {}
        given: dict[str, str] = {}
        converted = _follow_conversion(self._model, self._pretrained, state)
        names = {name: self._selection.renamed(name) for name in converted}
        published = {names[name] for name, route in converted.items() if not self._is_left_out(route)}
        for name, route in converted.items():
            if self._is_left_out(route) and names[name] in published:
                continue  # as the layers of a critic, once rename has taken the prefixes away
            note_renamed(given, name, names[name])
            routes[names[name]] = route
        return routes

    def _is_left_out(self, route: Route) -> bool:
        """Return whether the selection leaves out a tensor, because it leaves out one of its sources."""
        return not self._left_out.isdisjoint(route.sources)

    def _check_unchanged(self, state: State) -> None:
        geometry = _geometry(state)
        # What is left out may change, vanish and come back; what is read of it must still fit the run.
        for name in (geometry.keys() ^ self._geometry.keys()) - self._left_out:
            change, remedy = ("appeared", "remove it") if name in geometry else ("is gone", "put it back")
            shape, dtype, _ = geometry.get(name) or self._geometry[name]
            raise TensorMismatchError(
                f"tensor {name!r} {change} since the publisher was made ({dtype} {list(shape)}), and the tensors of a "
                f"run are fixed; {remedy}, or start a new run under a new URL"
            )
        for name, (shape, dtype, memory) in geometry.items():
            if name in self._left_out:
                continue
            old_shape, old_dtype, old_memory = self._geometry[name]
            if (shape, dtype) != (old_shape, old_dtype):
                raise changed(name, (shape, dtype), (old_shape, old_dtype))
            if memory != old_memory and is_sharded(state[name]):
                raise TensorMismatchError(
                    f"tensor {name!r} is sharded in another way than when the publisher was made; close that publisher "
                    "and make one for the model in its present state"
                )
        for alias, owner in self._ties.items():
            if alias not in self._left_out and _identity(state[alias]) != _identity(state[owner]):
                raise TensorMismatchError(
                    f"tensor {alias!r} is no longer tied to {owner!r} as it was when the publisher was made; "
                    "tie the weights again, or start a new run"
                )
        if geometry != self._geometry:
            self._geometry = geometry
            self.routes = self._trace(state)

    def _checkpoint_aliases(self, state: State) -> dict[str, str]:
        published = {
            (route.source, route.shape, route.strides, route.offset): name
            for name, route in self.routes.items()
            if isinstance(route, View)
        }
        duplicates = {name: state[name] for name in self._ties}
        aliases = {}
        for name, route in self._convert(duplicates).items() if duplicates else ():
            if isinstance(route, View):
                owner = published.get((self._ties[route.source], route.shape, route.strides, route.offset))
                if owner is not None and name not in self.routes:
                    aliases[name] = owner
        return aliases


class ModuleTensors(LiveTensors):
    """Tensors of a module that this process holds alone, under the names and shapes of its checkpoint.

    Of a PEFT model those of its base, with the active LoRA adapters merged; see ``LoraLayers``.
    """

    def __init__(self, model: nn.Module, selection: Selection | None = None) -> None:
        self._form = ModuleForm(model, selection, merges_adapters=True)
        self.tensors, self.aliases, self.excluded = self._form.tensors, self._form.aliases, self._form.excluded
        for _ in self.read():
            pass

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        held, lora = self._form.state()
        state: Mapping[str, torch.Tensor] = {name: _held_whole(name, tensor) for name, tensor in held.items()}
        self.storages = storages_of(state.values())
        if lora is not None:
            state = MergedState(state, lora.merges)
        for name, route in self._form.routes.items():
            if name not in self.unused:
                yield name, route.read(state)


ModelLike = nn.Module | Mapping[str, torch.Tensor] | NamedTensors | Callable[[], NamedTensors] | LiveTensors


def live_tensors(model: ModelLike, selection: Selection | None = None) -> LiveTensors:
    """Return the tensors of what a user passed as the model.

    Args:
        model: a module, an iterable of (checkpoint name, tensor) that can be read repeatedly, or a function without
            arguments that returns one. Names are those of a Hugging Face checkpoint.
        selection: of a module, or of streamed weights.
    """
    if isinstance(model, nn.Module):
        return ModuleTensors(model, selection)
    if isinstance(model, Iterator):
        raise UsageError(
            "the model is an iterator, which can be read only once; pass a list of (name, tensor), or a "
            "function that returns a fresh iterator each time, such as model.named_parameters without the "
            "parentheses"
        )
    if isinstance(model, LiveTensors):
        live = model
    elif isinstance(model, Iterable):
        live = IterableTensors(lambda: model)
    elif callable(model):
        live = IterableTensors(model)
    else:
        raise UsageError(
            f"the model is a {type(model).__name__}; pass a torch.nn.Module, an iterable of (name, tensor), or a "
            "function without arguments that returns one"
        )
    if selection is not None and not selection.is_everything:
        live.select(selection, model)
    return live


def _held_whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself; of a sharded one this process's piece if that is everything, as in a world of one."""
    if not is_sharded(tensor):
        return tensor
    pieces = local_boxes(tensor, name)
    if len(pieces) == 1 and pieces[0][0].is_whole:
        return check_readable(name, pieces[0][1])
    return check_readable(name, tensor)


def unwrap(model: nn.Module, until: tuple[type, ...] = ()) -> nn.Module:
    """Return the module inside frameworks' wrappers, such as DistributedDataParallel; itself without one.

    Args:
        until: wrappers of these classes stay on.
    """
    while not isinstance(model, until) and (attribute := _wrapper_attribute(model)) is not None:
        model = getattr(model, attribute)
    return model


def _wrapper_attribute(module: nn.Module) -> str | None:
    """Return the attribute that holds the wrapped module; None if the module is not a wrapper."""
    for cls in type(module).__mro__:
        attribute = _WRAPPERS.get(cls.__name__)
        if attribute is not None and isinstance(getattr(module, attribute, None), nn.Module):
            return attribute
    return None


def _refuse_unpublishable(model: nn.Module, merges_adapters: bool) -> None:
    for name, module in model.named_modules():
        if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__):
            raise ModelError(
                f"module {name or type(module).__name__!r} is sharded by FullyShardedDataParallel; shard it with "
                "fully_shard (FSDP2), or publish from one rank through a function that yields (checkpoint name, full "
                "tensor)"
            )
        if getattr(module, "peft_config", None) and not merges_adapters:
            raise ModelError(
                f"module {name or type(module).__name__!r} carries PEFT adapters and is published by several ranks "
                "together; merge them into a copy of "
                "the weights (merge_and_unload) and publish that, or pass an iterable of (checkpoint name, "
                "merged tensor)"
            )
        if getattr(module, "hf_quantizer", None) is not None:
            raise ModelError(
                f"module {name or type(module).__name__!r} was loaded quantized; load it with its "
                "full-precision weights to publish it"
            )
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        _refuse_unnamed_parts(model)


def _refuse_unnamed_parts(model: nn.Module) -> None:
    """Refuse parameters that are parts of tensors and do not say which: each rank would take its part for the whole."""
    for name, parameter in model.named_parameters():
        # As DeepSpeed and Megatron-core mark them. DeepSpeed also marks experts that all ranks hold, in groups of one.
        kind = "tensor" if getattr(parameter, "tensor_model_parallel", False) else None
        if getattr(parameter, "allreduce", True) is False and getattr(parameter, "group_name", "") != "ep_size_1":
            kind = "expert"
        if kind is not None:
            raise ModelError(
                f"parameter {name!r} is this rank's part of a tensor, by {kind} parallelism, and does not say which "
                "part; give parts= on every rank, or publish from one rank a function that yields (checkpoint name, "
                "whole tensor) (docs/sharded.md)"
            )


def _names_without_wrappers(model: nn.Module, keys: Iterable[str]) -> dict[str, str | None]:
    """Return key of the state dict → name without the levels that wrappers add; None if checkpoints do not have it."""
    wrapped = wrapper_prefixes(model)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    names: dict[str, str | None] = {}
    seen: set[str] = set()
    for key in keys:
        name = without_wrappers(key, wrapped)
        if name in seen:
            raise ModelError(f"two tensors are named {name!r} once the wrappers' prefixes are stripped; rename one")
        names[key] = None if name in ignored else name
        if name not in ignored:
            seen.add(name)
    return names


def wrapper_prefixes(model: nn.Module) -> list[tuple[str, str]]:
    """Return the prefixes that wrappers inside a module add to names, with what they are without."""
    return [
        (f"{name}.{attribute}.", f"{name}.")
        for name, module in model.named_modules(remove_duplicate=False)
        if name and (attribute := _wrapper_attribute(module)) is not None
    ]


def without_wrappers(name: str, wrapped: list[tuple[str, str]]) -> str:
    """Return a name without prefixes. Args: wrapped: as ``wrapper_prefixes`` returns them."""
    # Innermost first, since the longer prefixes contain the shorter ones.
    for prefix, stripped in reversed(wrapped):
        name = stripped + name.removeprefix(prefix) if name.startswith(prefix) else name
    return name


def _geometry(
    state: Mapping[str, torch.Tensor],
) -> dict[str, tuple[tuple[int, ...], torch.dtype, tuple[object, ...]]]:
    """Return name → shape and dtype of the whole tensor, and where this process has its elements."""
    return {
        name: (whole_shape(tensor), _dtype(tensor), layout(tensor) if is_sharded(tensor) else tensor.stride())
        for name, tensor in state.items()
    }


def _dtype(tensor: torch.Tensor) -> torch.dtype:
    partition = getattr(tensor, "ds_tensor", None)
    return tensor.dtype if partition is None else partition.dtype


def _identity(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return a key that two names of one tensor share, even on ranks that hold nothing of a sharded tensor."""
    if is_sharded(tensor):
        return ("sharded", id(tensor)) if math.prod(whole_shape(tensor)) else None
    return storage_key(tensor)


def _find_ties(model: nn.Module, state: State) -> dict[str, str]:
    """Return duplicate → published name, chosen as transformers' ``save_pretrained`` does."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in state.items():
        key = _identity(tensor)
        if key is not None:
            groups.setdefault(key, []).append(name)
    declared = [
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]
    ties = {}
    for names in groups.values():
        if len(names) > 1:
            free = [name for name in names if not any(re.search(pattern, name) for pattern in declared)]
            owner = free[0] if free else max(names)
            ties.update({name: owner for name in names if name != owner})
    return ties


def transformers_model(model: nn.Module) -> Any:
    """Return the module itself if it is a transformers model, else None."""
    transformers = sys.modules.get("transformers")
    return model if transformers is not None and isinstance(model, transformers.PreTrainedModel) else None


def _pretrained_parts(model: nn.Module, inside: bool) -> dict[str, Any]:
    """Return prefix of names → transformers model: the module itself, or if ``inside`` the outermost ones in it."""
    if (whole := transformers_model(model)) is not None:
        return {"": whole}
    found: dict[str, Any] = {}
    wrapped = wrapper_prefixes(model)
    for path, module in model.named_modules() if inside else ():
        name = without_wrappers(f"{path}.", wrapped)
        if transformers_model(module) is not None and not name.startswith(tuple(found)):
            found[name] = module
    return found


def _follow_conversion(model: nn.Module, pretrained: Mapping[str, Any], state: State) -> dict[str, Route]:
    """Find how each checkpoint tensor is read from ``state``, where sharded ones count as complete and contiguous."""
    state = {
        name: torch.empty(whole_shape(tensor), dtype=_dtype(tensor), device="meta") if is_sharded(tensor) else tensor
        for name, tensor in state.items()
    }
    if not pretrained:
        return trace(state, dict)
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        # Before transformers 5, modules held weights in the form of their checkpoints.
        return trace(state, dict)

    def revert(stand_ins: State) -> State:
        found: State = {}
        for prefix, part in pretrained.items():
            own = [name for name in stand_ins if name.startswith(prefix)]
            given = {name.removeprefix(prefix): stand_ins.pop(name) for name in own}
            found |= {prefix + name: tensor for name, tensor in revert_weight_conversion(part, given).items()}
        return found | stand_ins

    try:
        return trace(state, revert)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelError(
            f"transformers cannot convert {type(model).__name__} back to its checkpoint form ({error}); pass "
            "an iterable of (checkpoint name, tensor) instead"
        ) from error


def assume_loaded_from(model: nn.Module, names: Iterable[str]) -> None:
    """Give a transformers model the conversions that loading a checkpoint with tensors of these names would use.

    A model that was loaded has them from ``from_pretrained``, which reads all weights; one that was only made from a
    configuration has those of its class, which may be for other names.
    """
    pretrained = transformers_model(model)
    if pretrained is None:
        return
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        conversions = get_model_conversion_mapping(pretrained)
        kinds = [[each for each in conversions if isinstance(each, kind)] for kind in (WeightRenaming, WeightConverter)]
        state = pretrained.state_dict()
        for name in names:
            rename_source_key(name, *kinds, pretrained.base_model_prefix, state)
        pretrained._weight_conversions = [each for each in conversions if each.was_used()]
    except (ImportError, TypeError, AttributeError) as error:
        # Early releases of transformers 5 do not record which conversions were used; then those of the class stay.
        logger.debug("the conversions of %s's class are used: %r", type(pretrained).__name__, error)


def _configured_dtypes(model: nn.Module, state: State) -> dict[str, torch.dtype]:
    """Return name → dtype that the model's configuration gives to checkpoints, for the tensors that it applies to.

    It applies to floating-point parameters only: buffers, and modules that transformers keeps in fp32, keep theirs.
    """
    dtype = getattr(getattr(model, "config", None), "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        return {}
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    buffers = {_identity(buffer) for buffer in model.buffers()}
    return {
        name: dtype
        for name, tensor in state.items()
        if tensor.is_floating_point()
        and _identity(tensor) not in buffers
        and not (tensor.dtype == torch.float32 and any(re.search(pattern, name) for pattern in kept))
    }
