"""``LoraLayers``: read the weights of a PEFT model with its active LoRA adapters merged, and leave the model as it is.

The values are those of PEFT's ``merge_and_unload``, bit for bit: the adapter's own ``get_delta_weight``, added in the
order and dtype of its ``merge``. PEFT is used only if the caller's program has imported it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from trainer_side.model.live_tensors import check_readable
from vllm_delta_sync.errors import ModelError

_REMEDY = (
    "merge the adapters into a copy of the weights (merge_and_unload) and publish that, or pass an iterable of "
    "(checkpoint name, merged tensor)"
)


class LoraLayers:
    """The layers that PEFT put into a module, as they are now: which adapters are active may change at any time.

    Attributes:
        merges: name of a weight in the base → the (layer, adapter) pairs that are merged into it, in PEFT's order.
    """

    def __init__(self, model: nn.Module, without_wrappers: Callable[[str], str]) -> None:
        """Find them.

        Args:
            without_wrappers: takes the levels of other wrappers, such as those of torch.compile, out of a name.

        Raises:
            ModelError: PEFT changes the module in a way that is not plain LoRA on linear layers, embeddings or
                parameters, or ``modules_to_save``; or a weight with an adapter is tied to another.
        """
        self.merges: dict[str, list[tuple[Any, str]]] = {}
        self._children: dict[str, str] = {}
        """Name of a wrapper → name of the one module below it that the base has in its place."""
        _check_methods(model)
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        found: list[tuple[str, Any]] = []
        for path, module in model.named_modules(remove_duplicate=False):
            name = without_wrappers(f"{path}.").removesuffix(".")
            if isinstance(module, BaseTunerLayer):
                self._children[name] = f"{name}.base_layer"
                found.append((name, module))
            elif isinstance(module, AuxiliaryTrainingWrapper):
                self._children[name] = f"{name}.{_kept_child(name, module)}"
        for name, layer in found:
            # Layers of a copy that the base does not have are not merged either.
            if (weight := self.base_name(f"{name}.{_weight_path(name, layer)}")) is not None:
                merged = self.merges.setdefault(weight, [])
                merged += [(layer, adapter) for adapter in _adapters_to_merge(name, layer)]

    def base_name(self, name: str) -> str | None:
        """Return the name in the base of a tensor of the module; None if the base has no such tensor."""
        kept: list[str] = []
        path, rest = "", name
        while rest:
            part, _, rest = rest.partition(".")
            kept.append(part)
            path = f"{path}.{part}" if path else part
            while (child := self._children.get(path)) is not None:
                if not name.startswith(f"{child}."):
                    return None
                path, rest = child, name[len(child) + 1 :]
        return ".".join(kept)

    def check_ties(self, ties: Mapping[str, str]) -> None:
        """Raise ModelError if a weight with an adapter is tied: name of a duplicate → published name."""
        for duplicate, owner in ties.items():
            for name, other in ((duplicate, owner), (owner, duplicate)):
                if self.merges.get(name):
                    raise ModelError(
                        f"tensor {name!r} has a LoRA adapter and is tied to {other!r}, which would change with it; "
                        f"untie them, or {_REMEDY}"
                    )


class MergedState(Mapping[str, torch.Tensor]):
    """Tensors by name, merged when they are read. It holds the last merged one, which several routes may read."""

    def __init__(self, state: Mapping[str, torch.Tensor], merges: Mapping[str, list[tuple[Any, str]]]) -> None:
        self._state = state
        self._merges = merges
        self._last: tuple[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        weight, layers = self._state[name], self._merges.get(name)
        if not layers:
            return weight
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, _merge(name, weight, layers)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


@torch.no_grad()
def _merge(name: str, weight: torch.Tensor, layers: list[tuple[Any, str]]) -> torch.Tensor:
    """Return a copy of a weight, in its layout, with adapters merged one after the other."""
    from peft.tuners.lora import Embedding

    merged = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)
    merged.copy_(weight)
    for layer, adapter in layers:
        delta = check_readable(f"{name} of adapter {adapter}", layer.get_delta_weight(adapter))
        # PEFT adds in the wider of both dtypes, except here.
        merged += delta.to(merged.dtype) if isinstance(layer, Embedding) else delta
    return merged


def has_adapters(model: nn.Module) -> bool:
    """Return whether PEFT has put adapters into a module."""
    return any(getattr(module, "peft_config", None) for module in model.modules())


def _check_methods(model: nn.Module) -> None:
    """Raise ModelError unless every adapter of the module is one of LoRA."""
    for name, module in model.named_modules():
        configs = getattr(module, "peft_config", None) or {}
        for adapter, config in configs.items():
            method = getattr(config, "peft_type", None)
            method = getattr(method, "value", method)
            if method != "LORA" or "peft" not in sys.modules:
                raise ModelError(
                    f"module {name or type(module).__name__!r} carries PEFT adapters, of which {adapter!r} is "
                    f"{method or type(config).__name__}, not LORA; {_REMEDY}"
                )


def _kept_child(name: str, wrapper: Any) -> str:
    """Return the attribute path of the module that ``merge_and_unload`` puts in the place of a wrapper."""
    from peft.utils.other import ModulesToSaveWrapper

    if type(wrapper) is not ModulesToSaveWrapper:
        raise ModelError(f"module {name!r} is PEFT's {type(wrapper).__name__}, which is not merged here; {_REMEDY}")
    active = wrapper.active_adapters
    return f"modules_to_save.{active[0]}" if active else "original_module"


def _weight_path(name: str, layer: Any) -> str:
    """Return the path from a layer of LoRA to the one weight of its base that it changes."""
    from peft.tuners.lora import Embedding, Linear, ParamWrapper

    # Exactly these: a class derived from them, such as that of a quantized layer, may merge in another way.
    if type(layer) not in (Linear, Embedding, ParamWrapper):
        raise ModelError(f"module {name!r} is PEFT's {type(layer).__name__}, which is not merged here; {_REMEDY}")
    parameter = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
    depth = 0
    inner: Any = layer
    while hasattr(inner, "base_layer"):
        inner, depth = inner.base_layer, depth + 1
    return ".".join([*["base_layer"] * depth, parameter])


def _adapters_to_merge(name: str, layer: Any) -> list[str]:
    """Return the active adapters that a layer has and that are not in its weight already."""
    from peft.tuners.lora import Embedding

    own = layer.lora_embedding_A if isinstance(layer, Embedding) else layer.lora_A
    adapters = [adapter for adapter in layer.active_adapters if adapter in own and adapter not in layer.merged_adapters]
    for adapter in adapters:
        variant = layer.lora_variant.get(adapter)
        if variant is not None:
            what = f"a variant of LoRA ({type(variant).__name__})"
        elif layer.lora_bias.get(adapter):
            what = "LoRA with a bias (lora_bias)"
        else:
            continue
        raise ModelError(f"module {name!r} has adapter {adapter!r}, {what}, which is not merged here; {_REMEDY}")
    return adapters
