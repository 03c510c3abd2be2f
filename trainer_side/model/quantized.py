"""``quantized``: live weights in full precision, as the quantized tensors of the base that a run serves.

The recipe is the ``quantization_config`` of the base's config.json, and the library that wrote the base carries it out:
``compressed-tensors`` for its own formats, ``transformers`` for ``quant_method: fp8``. Which weights are quantized is
what the base's tensors say. One weight is quantized at a time, on the device where it lives.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from trainer_side.model.live_tensors import CheckpointTensor, LiveTensors, NamedTensors
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.canonical_json import load_json
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[torch.Tensor], Tensors]
"""(rows, columns) weight → suffix of its name in the checkpoint, such as ``weight_scale`` → tensor."""

RECIPE_NAME = "recipe.yaml"
"""File in which LLM Compressor records how it made a checkpoint."""
FORMATS = ("int-quantized", "float-quantized", "naive-quantized")
OBSERVERS = ("memoryless_minmax", "static_minmax", "minmax")
"""Observers of LLM Compressor that take the extremes of a weight; they differ for activations only."""
STRATEGIES = ("tensor", "channel", "block")

_INSTEAD = (
    "give a base that was quantized from its weights alone (docs/trainer.md), or publish an iterable of (checkpoint "
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
    document = load_json(config, "config.json")
    recipe = document.get("quantization_config") if isinstance(document, dict) else None
    if not isinstance(recipe, dict):
        return live
    _check_tensors(live, names, specs)
    if folder is not None:
        _check_modifiers(folder / RECIPE_NAME)
    method = recipe.get("quant_method")
    if method == "compressed-tensors":
        found = _compressed_tensors(recipe, names, specs)
    elif method == "fp8":
        found = _fine_grained_fp8(recipe, names, specs, _dtype_of(document))
    else:
        _refuse("quant_method", method, "and only 'compressed-tensors' and 'fp8' can be repeated")
    return QuantizedTensors(live, specs, found)


def to_quantize(live: LiveTensors, specs: Mapping[str, TensorSpec]) -> list[str]:
    """Return the live weights in full precision that a run holds quantized."""
    return [name for name, tensor in live.tensors.items() if _is_wide(tensor.dtype) and _is_quantized(name, specs)]


class QuantizedTensors(LiveTensors):
    """The tensors of ``source``, some of them quantized when they are read.

    Args:
        specs: of the checkpoint; quantized tensors must have these dtypes and shapes.
        recipes: name of a weight → how it is quantized.
    """

    def __init__(
        self, source: LiveTensors, specs: Mapping[str, TensorSpec], recipes: Mapping[str, "WeightRecipe"]
    ) -> None:
        self._source, self._specs, self._recipes = source, specs, recipes
        self.aliases, self.has_values, self.excluded = source.aliases, source.has_values, source.excluded
        self.tensors = {}
        for name, tensor in source.tensors.items():
            self.tensors[name] = tensor
            for target in () if name not in recipes else (name, recipes[name].scale):
                spec = specs[target]
                self.tensors[target] = CheckpointTensor(
                    target, spec.shape, TORCH_DTYPES[spec.dtype], device=tensor.device
                )

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._quantize(self._source.read())

    def convert(self, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        return self._quantize(self._source.convert(weights))

    def _quantize(self, tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            recipe = self._recipes.get(name)
            if recipe is None or not _is_wide(tensor.dtype):
                yield name, tensor
                continue
            if tensor.shape != self._specs[name].shape:
                yield name, tensor  # refused by the comparison, with both shapes
                continue
            yield from self._checked(recipe.quantize(tensor))

    def _checked(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            spec = self._specs[name]
            if (tensor.dtype, tuple(tensor.shape)) != (TORCH_DTYPES[spec.dtype], spec.shape):
                raise ModelError(
                    f"tensor {name!r} is {TORCH_DTYPES[spec.dtype]} {list(spec.shape)} in the run, but its "
                    f"quantization_config gives {tensor.dtype} {list(tensor.shape)}; give the base that this "
                    "configuration belongs to"
                )
            yield name, tensor


class WeightRecipe:
    """How one weight is quantized.

    Args:
        name: of the weight. scale: of its scales.
        dtype: that the weight is rounded to first, as it was in the checkpoint that was quantized; None: its own.
        function: quantizes it.
    """

    def __init__(self, name: str, scale: str, dtype: torch.dtype | None, function: Quantize) -> None:
        self.name, self.scale = name, scale
        self._dtype, self._function = dtype, function

    @torch.no_grad()
    def quantize(self, weight: torch.Tensor) -> Tensors:
        """Return name → tensor: the quantized weight and its scales."""
        # A copy: scales and bits are of the same values, even if another thread trains meanwhile.
        copied = weight.detach().to(self._dtype or weight.dtype, copy=True)
        stem = self.name.removesuffix("weight")
        return {stem + suffix: tensor for suffix, tensor in self._function(copied).items()}


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _is_quantized(name: str, specs: Mapping[str, TensorSpec]) -> bool:
    """Return whether a checkpoint holds a weight in eight bits, or packed under another name."""
    spec = specs.get(name)
    if spec is not None:
        return spec.element.itemsize == 1
    stem = name.removesuffix("weight")
    return any(stem + suffix in specs for suffix in ("weight_packed", "qweight"))


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


def _scale(name: str, suffix: str, specs: Mapping[str, TensorSpec]) -> str:
    """Return the name of a weight's scales; ModelError: the base lacks them."""
    if name + suffix not in specs:
        raise ModelError(f"tensor {name!r} is quantized in the base, which has no {name + suffix!r}; {_INSTEAD}")
    return name + suffix


def _refuse(field: str, value: object, reason: str) -> NoReturn:
    raise ModelError(f"the base's quantization_config has {field} {value!r}, {reason}; {_INSTEAD}")


def _check_modifiers(path: Path) -> None:
    """Refuse a checkpoint that LLM Compressor made with more than a rounding of its weights."""
    if not path.is_file():
        return
    for modifier in re.findall(r"^\s*(\w+Modifier):", path.read_text(errors="replace"), re.MULTILINE):
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
    document: Mapping[str, Any], names: list[str], specs: Mapping[str, TensorSpec]
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
    function = _compressor(group, scheme, scheme.format or config.format)
    scales = {name: _scale(name, "_scale", specs) for name in names}
    # The library makes scales in the dtype that the weights had.
    return {
        name: WeightRecipe(name, scale, TORCH_DTYPES[specs[scale].dtype], function) for name, scale in scales.items()
    }


def _compressor(group: str, scheme: Any, compression: str) -> Quantize:
    """Return the function of a group; refuse what is not a function of the weights alone."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, maybe_pad_tensor_for_block_quant

    args, where = scheme.weights, f"config_groups.{group}"
    for part in ("input_activations", "output_activations"):
        activations = getattr(scheme, part)
        if activations is not None and activations.dynamic is not True:
            reason = "so that its scales are fixed, come from calibration data and go stale as the weights train"
            _refuse(f"{where}.{part}.dynamic", activations.dynamic, reason)
    compression = getattr(compression, "value", compression)
    if compression not in FORMATS:
        _refuse(f"{where}.format", compression, f"and only {', '.join(FORMATS)} can be repeated")
    for field, allowed in (
        ("num_bits", (8,)),
        ("symmetric", (True,)),
        ("strategy", STRATEGIES),
        ("dynamic", (False,)),
        ("actorder", (None,)),
        ("observer", OBSERVERS),
    ):
        value = getattr(args, field)
        if value not in allowed:
            _refuse(f"{where}.weights.{field}", value, f"and only {', '.join(map(str, allowed))} can be repeated")
    library = BaseCompressor.get_value_from_registry(compression)

    def compress(weight: torch.Tensor) -> Tensors:
        # The library leaves the smallest and largest values to an observer; this is what MinMaxObserver of LLM
        # Compressor (llmcompressor/observers) takes of a weight.
        if args.strategy == "channel":
            pieces = weight.unsqueeze(1)
        elif args.strategy == "tensor":
            pieces = weight.reshape(1, -1)
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

    def quantize(weight: torch.Tensor) -> Tensors:
        rows, columns = weight.shape
        # The library takes whole blocks only. Zeros do not change the largest value of a block.
        padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
        found: Tensors = library.convert({"weight": padded})
        return found | {"weight": found["weight"][:rows, :columns]}

    return {name: WeightRecipe(name, _scale(name, "_scale_inv", specs), dtype, quantize) for name in names}
