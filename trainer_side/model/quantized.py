"""``quantized``: live weights in full precision, as the quantized tensors of the base that a run serves.

The recipe is the ``quantization_config`` of the base's config.json, and the library that wrote the base carries it out:
``compressed-tensors`` for its own formats, ``transformers`` for ``quant_method: fp8``; ``four_bit`` has the formats of
four bits. Which weights are quantized is what the base's tensors say. One weight is quantized at a time, on the device
where it lives, or those at once that share a scale.

A recipe that the configuration does not fully determine is proven on the weights that it sees first: they must give
the bits of the base, or, where scales are powers of two, bits of the same values.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch

from trainer_side.model import four_bit
from trainer_side.model.four_bit import Tensors
from trainer_side.model.live_tensors import CheckpointTensor, LiveTensors, NamedTensors, changed, is_packed
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.base_document import load_json
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.checkpoint import Checkpoint, read_small_file
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES, bits_of, tensor_from_bits

Quantize = Callable[[torch.Tensor, torch.Tensor], Tensors]
"""(rows, columns) weight, and (1,) the largest magnitude of all weights that share its global scale → suffix of its
name in the checkpoint, such as ``weight_scale`` → tensor."""
Values = Callable[[Tensors], torch.Tensor]
"""Suffix of a weight's name → tensor: what they stand for, in float32."""

RECIPE_NAME = "recipe.yaml"
"""File in which LLM Compressor records how it made a checkpoint."""
_Rules = dict[str, tuple[object, ...]]
"""Field of the weights → values that can be repeated."""


def _in_groups(bits: int, strategy: str, size: int, scale: torch.dtype) -> _Rules:
    return {"num_bits": (bits,), "strategy": (strategy,), "group_size": (size,), "scale_dtype": (scale,)}


_EIGHT_BITS: _Rules = {"num_bits": (8,), "strategy": ("tensor", "channel", "block")}
FORMATS: dict[str, _Rules] = {
    "int-quantized": _EIGHT_BITS,
    "float-quantized": _EIGHT_BITS,
    "naive-quantized": _EIGHT_BITS,
    "mxfp8-quantized": _in_groups(8, "group", 32, torch.uint8),
    "mxfp4-pack-quantized": _in_groups(4, "group", 32, torch.uint8),
    "nvfp4-pack-quantized": _in_groups(4, "tensor_group", 16, torch.float8_e4m3fn),
}
"""Format of compressed-tensors → rules."""
OBSERVERS = ("memoryless_minmax", "static_minmax", "minmax")
"""Observers of LLM Compressor that take the extremes of a weight; they differ for activations only."""

_INSTEAD = (
    "give a base that was quantized from its weights alone (docs/quantized.md), or publish an iterable of (checkpoint "
    "name, tensor) that you have quantized"
)


def quantized(
    live: LiveTensors, specs: Mapping[str, TensorSpec], config: bytes, folder: Path | None = None
) -> LiveTensors:
    """Return live tensors that yield what a run holds: ``live`` itself, or its weights quantized as ``specs`` say.

    Args:
        specs: tensors of the base, or of the run.
        config: content of their config.json.
        folder: the base's checkpoint directory, if it is at hand.

    Raises:
        ModelError: the recipe cannot be repeated; the message names the field of ``quantization_config``.
        FormatError, LimitError: config.json is malformed.
    """
    names = to_quantize(live, specs)
    if not names or b'"quantization_config"' not in config:
        return live
    document = load_json(config, "config.json", finite=False)
    recipe = document.get("quantization_config") if isinstance(document, dict) else None
    if not isinstance(recipe, dict):
        return live
    _check_tensors(live, names, specs)
    if folder is not None:
        _check_modifiers(folder / RECIPE_NAME)
    methods = {
        "compressed-tensors": _compressed_tensors,
        "fp8": _fine_grained_fp8,
        "modelopt": _modelopt,
        "mxfp4": _stacked_mxfp4,
    }
    method = recipe.get("quant_method")
    if str(method) not in methods:
        _refuse("quant_method", method, f"and only {', '.join(map(repr, methods))} can be repeated")
    found = methods[str(method)](recipe, names, specs, _dtype_of(document))
    return QuantizedTensors(live, specs, found, None if folder is None else Checkpoint(folder))


def to_quantize(live: LiveTensors, specs: Mapping[str, TensorSpec]) -> list[str]:
    """Return the live weights in full precision that a run holds quantized."""
    return [name for name, tensor in live.tensors.items() if _is_wide(tensor.dtype) and _is_quantized(name, specs)]


class QuantizedTensors(LiveTensors):
    """The tensors of ``source``, some of them quantized when they are read.

    Weights that share a scale are kept until the last of them is read.

    Args:
        specs: of the checkpoint; quantized tensors must have these dtypes and shapes.
        recipes: name of a weight → how it is quantized.
        base: what recipes are proven on; None if they were, for the run that is taken over.
    """

    def __init__(
        self,
        source: LiveTensors,
        specs: Mapping[str, TensorSpec],
        recipes: Mapping[str, "WeightRecipe"],
        base: Checkpoint | None = None,
    ) -> None:
        self._source, self._specs, self._recipes, self._base = source, specs, recipes, base
        self.aliases, self.has_values = source.aliases, source.has_values
        self._exclude()
        self._unproven = {name for name, recipe in recipes.items() if recipe.is_proven and base is not None}
        self.tensors = {}
        for name, tensor in source.tensors.items():
            if name not in recipes:
                self.tensors[name] = tensor
                continue
            for target in recipes[name].targets:
                spec = specs[target]
                self.tensors[target] = CheckpointTensor(
                    target, spec.shape, TORCH_DTYPES[spec.dtype], device=tensor.device
                )

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._quantize(self._source.read())

    def convert(self, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        return self._quantize(self._source.convert(weights))

    def _quantize(self, tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        waiting: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            recipe = self._recipes.get(name)
            if recipe is None or not _is_wide(tensor.dtype):
                yield name, tensor
                continue
            known = self._source.tensors[name]
            if tensor.shape != known.shape:
                raise changed(name, (tuple(tensor.shape), tensor.dtype), (known.shape, known.dtype))
            waiting[name] = recipe.rounded(tensor)
            if all(other in waiting for other in recipe.fused):
                yield from self._read_together([self._recipes[other] for other in recipe.fused], waiting)
        if waiting:
            first = next(iter(waiting))
            missing = [other for other in self._recipes[first].fused if other not in waiting]
            raise ModelError(
                f"tensors {', '.join(map(repr, self._recipes[first].fused))} share a scale, and {missing[0]!r} was not "
                "yielded; yield all of them, or none"
            )
        self._exclude()  # of weights that come with a call, the source knows now which are left out

    def _exclude(self) -> None:
        """Leave out all tensors that a weight gives which ``source`` leaves out."""
        kept = {name: recipe.targets for name, recipe in self._recipes.items()}
        self.excluded = {target for name in self._source.excluded for target in kept.get(name, [name])}

    def _read_together(
        self, recipes: list["WeightRecipe"], waiting: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Quantize weights that share a scale, and take them out of ``waiting``."""
        largest = torch.empty(0, device="cpu")
        if recipes[0].needs_largest:
            # They may be on several devices.
            each = [four_bit.largest_of(recipe.name, waiting[recipe.name]) for recipe in recipes]
            largest = torch.cat([one.to(each[0].device) for one in each]).amax(0, keepdim=True)
        for recipe in recipes:
            weight = waiting.pop(recipe.name)
            found = recipe.quantize(weight, largest.to(weight.device))
            self._check(found)
            if recipe.name in self._unproven and self._base is not None:
                recipe.prove(found, self._base)
                self._unproven.discard(recipe.name)
            yield from found.items()

    def _check(self, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            spec = self._specs[name]
            if (tensor.dtype, tuple(tensor.shape)) != (TORCH_DTYPES[spec.dtype], spec.shape):
                raise ModelError(
                    f"tensor {name!r} is {TORCH_DTYPES[spec.dtype]} {list(spec.shape)} in the run, but its "
                    f"quantization_config gives {tensor.dtype} {list(tensor.shape)}; give the base that this "
                    "configuration belongs to"
                )


class WeightRecipe:
    """How one weight is quantized.

    Args:
        name: of the weight.
        suffixes: of the tensors that it gives; their names begin as that of the weight, without ``weight``.
        dtype: that the weight is rounded to first, as it was in the checkpoint that was quantized; None: its own.
        function: quantizes it.
        fused: weights that share its global scale, itself included; empty: it has none of its own either.
        is_proven: whether the first tensors must be those of the base.
        values: what its tensors stand for: bits of the same values are enough; None: the bits must be equal.
    """

    def __init__(
        self,
        name: str,
        suffixes: tuple[str, ...],
        dtype: torch.dtype | None,
        function: Quantize,
        fused: tuple[str, ...] = (),
        is_proven: bool = False,
        values: Values | None = None,
    ) -> None:
        self.name, self.is_proven, self.needs_largest = name, is_proven, bool(fused)
        self.fused = fused or (name,)
        self._stem = name.removesuffix("weight")
        self.targets = [self._stem + suffix for suffix in suffixes]
        self._dtype, self._function, self._values = dtype, function, values

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a copy: scales and bits are of the same values, even if another thread trains meanwhile."""
        return weight.detach().to(self._dtype or weight.dtype, copy=True)

    @torch.no_grad()
    def quantize(self, weight: torch.Tensor, largest: torch.Tensor) -> Tensors:
        """Return name → tensor: the quantized weight and its scales."""
        return {self._stem + suffix: tensor for suffix, tensor in self._function(weight, largest).items()}

    def prove(self, found: Tensors, base: Checkpoint) -> None:
        """Raise ModelError unless the tensors of a weight are those of the base, or stand for the same values."""
        mine = {name: tensor.cpu() for name, tensor in found.items()}
        theirs = {name: tensor_from_bits(np.array(base.bits(name)), base.specs[name]) for name in mine}
        # A global scale first: what depends on it differs as well.
        for name in sorted(mine, key=lambda name: mine[name].numel()):
            different = bits_of(mine[name].contiguous()) != bits_of(theirs[name])
            if not different.any():
                continue
            if self._values is not None and torch.equal(*map(self._values, map(self._by_suffix, (mine, theirs)))):
                return
            raise ModelError(
                f"the trainer's {self.name!r}, quantized as the base's quantization_config says, is not what the base "
                f"has: {different.mean():.2%} of {name!r} differ. The base was made of other weights, or with scales "
                "from calibration data, or it was rounded in another way. Start the trainer from the checkpoint that "
                f"the base was quantized from, on the kind of device that quantized it; or {_INSTEAD}"
            )

    def _by_suffix(self, tensors: Tensors) -> Tensors:
        return {name.removeprefix(self._stem): tensor for name, tensor in tensors.items()}


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _is_quantized(name: str, specs: Mapping[str, TensorSpec]) -> bool:
    """Return whether a checkpoint holds a weight in eight bits, or packed, perhaps under another name."""
    spec = specs.get(name)
    if spec is not None:
        return spec.element.itemsize == 1
    return is_packed(name, specs)


def _check_tensors(live: LiveTensors, names: list[str], specs: Mapping[str, TensorSpec]) -> None:
    for alias, owner in live.aliases.items():
        if owner in names or _is_quantized(alias, specs):
            raise ModelError(f"tensors {owner!r} and {alias!r} are tied, and quantized in the base; untie them")
    for name in names:
        if name in specs and len(specs[name].shape) != 2:
            raise ModelError(
                f"tensor {name!r} is quantized in the base and has the shape {list(specs[name].shape)}, and only "
                f"matrices can be quantized; {_INSTEAD}"
            )


def _check_present(names: list[str], suffixes: tuple[str, ...], specs: Mapping[str, TensorSpec]) -> None:
    """Raise ModelError if the base lacks a tensor that a weight gives."""
    for name, suffix in product(names, suffixes):
        target = name.removesuffix("weight") + suffix
        if target not in specs:
            raise ModelError(f"tensor {name!r} is quantized in the base, which has no {target!r}; {_INSTEAD}")


def _refuse(field: str, value: object, reason: str) -> NoReturn:
    raise ModelError(f"the base's quantization_config has {field} {value!r}, {reason}; {_INSTEAD}")


def _check_modifiers(path: Path) -> None:
    """Refuse a checkpoint that LLM Compressor made with more than a rounding of its weights."""
    if not os.path.lexists(path):
        return
    for modifier in re.findall(r"^\s*(\w+Modifier):", read_small_file(path).decode(errors="replace"), re.MULTILINE):
        if modifier != "QuantizationModifier":
            raise ModelError(
                f"the base's {RECIPE_NAME} has {modifier}, which chooses weights with calibration data, or changes "
                f"them before they are quantized; {_INSTEAD}"
            )


def _dtype_of(document: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that config.json gives to weights that are not quantized."""
    for part in (document, document.get("text_config") or {}):
        found = getattr(torch, str(part.get("dtype") or part.get("torch_dtype")).removeprefix("torch."), None)
        if isinstance(found, torch.dtype):
            return found
    return None


# compressed-tensors


def _compressed_tensors(
    document: Mapping[str, Any], names: list[str], specs: Mapping[str, TensorSpec], dtype: torch.dtype | None
) -> dict[str, WeightRecipe]:
    try:
        from compressed_tensors.quantization import QuantizationConfig
    except ImportError as error:
        raise ModelError(
            "the base's quantization_config has quant_method 'compressed-tensors', and that library is not installed; "
            "install it: pip install compressed-tensors"
        ) from error
    for field in ("sparsity_config", "transform_config"):
        value = document.get(field)
        if value and not (field == "sparsity_config" and value.get("format") == "dense"):
            _refuse(field, value, "which changes weights before they are quantized")
    try:
        config = QuantizationConfig.model_validate(document)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ModelError(
            f"the base's quantization_config cannot be read by the installed compressed-tensors: {error}; install the "
            "version that wrote it"
        ) from error
    if config.kv_cache_scheme is not None:
        _refuse("kv_cache_scheme", document["kv_cache_scheme"], "which needs calibration data")
    if config.quantization_status != "compressed":
        _refuse("quantization_status", config.quantization_status.value, "and only 'compressed' has quantized weights")
    groups = {group: scheme for group, scheme in config.config_groups.items() if scheme.weights is not None}
    if len(groups) != 1:
        _refuse("config_groups", sorted(groups), "and only one group that quantizes weights can be repeated")
    [(group, scheme)] = groups.items()
    compression = getattr(scheme.format or config.format, "value", scheme.format or config.format)
    function = _compressor(group, scheme, compression)
    packed = ("weight_packed", "weight_scale")
    if compression == "nvfp4-pack-quantized":
        return _with_global_scale(names, (*packed, "weight_global_scale"), specs, dtype, function)
    suffixes = packed if scheme.weights.num_bits == 4 else ("weight", "weight_scale")
    _check_present(names, suffixes, specs)
    values = {"mxfp4-pack-quantized": _packed_values, "mxfp8-quantized": _mxfp8_values}.get(compression)
    if values is not None:
        return {name: WeightRecipe(name, suffixes, dtype, function, (name,), True, values) for name in names}
    # The library makes scales in the dtype that the weights had.
    dtypes = {name: TORCH_DTYPES[specs[f"{name}_scale"].dtype] for name in names}
    return {name: WeightRecipe(name, suffixes, dtypes[name], function) for name in names}


def _with_global_scale(
    names: list[str],
    suffixes: tuple[str, ...],
    specs: Mapping[str, TensorSpec],
    dtype: torch.dtype | None,
    function: Quantize,
) -> dict[str, WeightRecipe]:
    """Return recipes of NVFP4, where weights that engines fuse share a global scale."""
    _check_present(names, suffixes, specs)
    every = set(names)
    fused = {name: four_bit.fused_with(name, every) for name in names}
    return {name: WeightRecipe(name, suffixes, dtype, function, fused[name], is_proven=True) for name in names}


def _packed_values(tensors: Tensors) -> torch.Tensor:
    return four_bit.mxfp4_values(tensors["weight_packed"], tensors["weight_scale"])


def _mxfp8_values(tensors: Tensors) -> torch.Tensor:
    groups = tensors["weight"].float().unflatten(-1, (-1, 32))
    return torch.ldexp(groups, tensors["weight_scale"].int().unsqueeze(-1) - 127)


def _compressor(group: str, scheme: Any, compression: str) -> Quantize:
    """Return the function of a group; refuse what is not a function of the weights alone."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, maybe_pad_tensor_for_block_quant

    args, where = scheme.weights, f"config_groups.{group}"
    for part in ("input_activations", "output_activations"):
        activations = getattr(scheme, part)
        # "local": scales of groups are dynamic. The global scale of inputs is a tensor that the model does not have,
        # and keeps the base's bits.
        allowed = (True, "local") if compression == "nvfp4-pack-quantized" and part == "input_activations" else (True,)
        if activations is not None and activations.dynamic not in allowed:
            reason = "so that its scales are fixed, come from calibration data and go stale as the weights train"
            _refuse(f"{where}.{part}.dynamic", activations.dynamic, reason)
    if compression not in FORMATS:
        _refuse(f"{where}.format", compression, f"and only {', '.join(FORMATS)} can be repeated")
    rules = {"symmetric": (True,), "dynamic": (False,), "actorder": (None,), "observer": OBSERVERS}
    for field, values in (FORMATS[compression] | rules).items():
        value = getattr(args, field)
        if value not in values:
            _refuse(f"{where}.weights.{field}", value, f"and only {', '.join(map(str, values))} can be repeated")
    if args.num_bits == 4:
        return four_bit.compressed_tensors_fp4(args)
    library = BaseCompressor.get_value_from_registry(compression)

    def compress(weight: torch.Tensor, largest: torch.Tensor) -> Tensors:
        # The library leaves the smallest and largest values to an observer; this is what MinMaxObserver of LLM
        # Compressor (llmcompressor/observers) takes of a weight.
        if args.strategy == "channel":
            pieces = weight.unsqueeze(1)
        elif args.strategy == "tensor":
            pieces = weight.reshape(1, -1)
        elif args.strategy == "group":
            pieces = weight.unflatten(-1, (-1, args.group_size))
        else:
            height, width = args.block_structure
            padded = maybe_pad_tensor_for_block_quant(weight, args.block_structure)
            blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
            pieces = blocks.transpose(1, 2).flatten(-2)
        scale, zero_point = calculate_qparams(pieces.amin(-1), pieces.amax(-1), args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
        found: Tensors = library.compress(state, scheme)
        return found

    return compress


# quant_method fp8


def _fine_grained_fp8(
    document: Mapping[str, Any], names: list[str], specs: Mapping[str, TensorSpec], dtype: torch.dtype | None
) -> dict[str, WeightRecipe]:
    block = document.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)):
        _refuse("weight_block_size", block, "and only scales of blocks, such as [128, 128], can be repeated")
    if document.get("activation_scheme", "dynamic") != "dynamic":
        reason = "so that scales of activations are fixed, come from calibration data and go stale as the weights train"
        _refuse("activation_scheme", document["activation_scheme"], reason)
    if document.get("fmt", "e4m3") != "e4m3":
        _refuse("fmt", document["fmt"], "and only 'e4m3' can be repeated")
    try:
        from transformers import FineGrainedFP8Config
        from transformers.integrations.finegrained_fp8 import Fp8Quantize
    except ImportError as error:
        raise ModelError(
            "the base's quantization_config has quant_method 'fp8', and transformers 5 is not installed; install it: "
            "pip install 'transformers>=5'"
        ) from error
    library = Fp8Quantize(SimpleNamespace(quantization_config=FineGrainedFP8Config(**document)))
    height, width = block
    in_powers = document.get("scale_fmt") == "ue8m0"

    def quantize(weight: torch.Tensor, largest: torch.Tensor) -> Tensors:
        rows, columns = weight.shape
        # The library takes whole blocks only. Zeros do not change the largest value of a block.
        padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
        found: Tensors = library.convert({"weight": padded})
        return found | {"weight": found["weight"][:rows, :columns]}

    def values(tensors: Tensors) -> torch.Tensor:
        scales = tensors["weight_scale_inv"].float().repeat_interleave(height, 0).repeat_interleave(width, 1)
        rows, columns = tensors["weight"].shape
        return tensors["weight"].float() * scales[:rows, :columns]

    def with_wide_scales(weight: torch.Tensor, largest: torch.Tensor) -> Tensors:
        """Powers of two are exact in float32 too, in which some checkpoints have them."""
        found = quantize(weight, largest)
        return found | {"weight_scale_inv": found["weight_scale_inv"].float()}

    suffixes = ("weight", "weight_scale_inv")
    _check_present(names, suffixes, specs)
    recipes: dict[str, WeightRecipe] = {}
    for name in names:
        is_wide = in_powers and specs[f"{name}_scale_inv"].dtype == "F32"
        function = with_wide_scales if is_wide else quantize
        recipes[name] = WeightRecipe(name, suffixes, dtype, function, is_proven=in_powers, values=values)
    return recipes


# quant_method modelopt


def _modelopt(
    document: Mapping[str, Any], names: list[str], specs: Mapping[str, TensorSpec], dtype: torch.dtype | None
) -> dict[str, WeightRecipe]:
    algorithms = ("NVFP4", "W4A16_NVFP4")
    if document.get("quant_algo") not in algorithms:
        _refuse("quant_algo", document.get("quant_algo"), f"and only {', '.join(algorithms)} can be repeated")
    # Scales of inputs are tensors that the model does not have, and keep the base's bits.
    cache = document.get("kv_cache_scheme") or document.get("kv_cache_quant_algo")
    if cache:
        _refuse("kv_cache_scheme", cache, "which needs calibration data")
    suffixes = ("weight", "weight_scale", "weight_scale_2")
    return _with_global_scale(names, suffixes, specs, dtype, four_bit.modelopt_nvfp4)


# quant_method mxfp4, of checkpoints with stacked experts


def _stacked_mxfp4(
    document: Mapping[str, Any], names: list[str], specs: Mapping[str, TensorSpec], dtype: torch.dtype | None
) -> dict[str, WeightRecipe]:
    suffixes = ("_blocks", "_scales")

    def values(tensors: Tensors) -> torch.Tensor:
        return four_bit.mxfp4_values(tensors["_blocks"], tensors["_scales"])

    _check_present(names, suffixes, specs)
    function = four_bit.stacked_mxfp4
    return {name: WeightRecipe(name, suffixes, dtype, function, (name,), True, values) for name in names}
