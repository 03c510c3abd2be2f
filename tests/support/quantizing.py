"""Quantized checkpoints of small models, as the library ``compressed-tensors`` writes them."""

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from tests.support.tiny import make_model_like, make_tokenizer

Tensors = dict[str, torch.Tensor]

INT8 = {"num_bits": 8, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
PER_TOKEN = {"strategy": "token", "dynamic": True}
SCHEMES: dict[str, dict[str, Any]] = {
    "int8 channel": {"weights": {**INT8, "strategy": "channel"}, "input_activations": {**INT8, **PER_TOKEN}},
    "int8 tensor": {"weights": {**INT8, "strategy": "tensor"}, "input_activations": {**INT8, **PER_TOKEN}},
    "fp8 channel": {"weights": {**FP8, "strategy": "channel"}, "input_activations": {**FP8, **PER_TOKEN}},
    "fp8 tensor": {"weights": {**FP8, "strategy": "tensor"}, "input_activations": {**FP8, **PER_TOKEN}},
    "fp8 block": {
        "weights": {**FP8, "strategy": "block", "block_structure": [64, 64]},
        "input_activations": {**FP8, "strategy": "group", "group_size": 64, "dynamic": True},
    },
}
"""Recipes that need no calibration data. All leave the head out."""
FP4 = {"num_bits": 4, "type": "float"}
NVFP4 = {**FP4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
MXFP4 = {**FP4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
SMALL_FLOATS: dict[str, dict[str, Any]] = {
    "nvfp4": {"weights": NVFP4, "input_activations": {**NVFP4, "dynamic": "local"}},
    "nvfp4 a16": {"weights": NVFP4},
    "mxfp4": {"weights": MXFP4, "input_activations": {**MXFP4, "dynamic": True}},
    "mxfp8": {"weights": {**MXFP4, "num_bits": 8}, "input_activations": {**MXFP4, "num_bits": 8, "dynamic": True}},
}
"""Recipes with scales of groups. Scales of inputs of ``nvfp4`` are from calibration data."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
INPUT_SCALE = 297.5


def save_quantized(model: PreTrainedModel, path: Path, scheme: str = "int8 channel") -> Path:
    """Write what a server of a quantized model is started from: the bfloat16 weights, compressed by the library."""
    copy = make_model_like(model)
    group = {"targets": ["Linear"], **(SCHEMES | SMALL_FLOATS)[scheme]}
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
    apply_quantization_config(copy, config)
    for parent in copy.modules():
        for names in FUSED:
            share_global_scale([getattr(parent, name) for name in names if hasattr(parent, name)])
    for module in copy.modules():
        found = getattr(module, "quantization_scheme", None)
        if found is not None:
            weight, args = module.weight.detach(), found.weights
            if hasattr(module, "weight_global_scale") and not hasattr(module, "is_shared"):
                share_global_scale([module])
            low, high = extremes(weight, module.weight_scale, args.block_structure, args.group_size)
            global_scale = getattr(module, "weight_global_scale", None)
            scales, _ = calculate_qparams(low, high, args, global_scale)
            module.weight_scale.data.copy_(scales)
            if hasattr(module, "input_global_scale"):
                module.input_global_scale.data.fill_(INPUT_SCALE)
    compressor = ModelCompressor.from_pretrained_model(copy)
    with torch.compiler.set_stance("force_eager"):  # the library compiles its rounding, which takes long
        compressor.compress_model(copy)
    copy.save_pretrained(path)
    compressor.update_config(str(path))
    make_tokenizer().save_pretrained(path)
    return path


def share_global_scale(modules: list[Any]) -> None:
    """Give modules the global scale of the largest magnitude in any of them, as LLM Compressor does to fused ones."""
    if all(hasattr(module, "weight_global_scale") for module in modules):
        for module in modules:
            largest = torch.stack([other.weight.detach().abs().max() for other in modules]).max().reshape(1)
            module.weight_global_scale.data.copy_(generate_gparam(-largest, largest))
            module.is_shared = True


def extremes(
    weight: torch.Tensor, scales: torch.Tensor, block: list[int] | None, size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and largest value of the part of a weight that shares each scale, part by part."""
    if size is not None:
        groups = weight.unflatten(-1, (-1, size))
        return groups.amin(-1), groups.amax(-1)
    parts = [weight]
    if block is not None:
        parts = [piece for rows in weight.split(block[0]) for piece in rows.split(block[1], dim=1)]
    elif scales.dim() == 2:
        parts = list(weight)
    low, high = (torch.stack(list(map(take, parts))).view(scales.shape) for take in (torch.min, torch.max))
    return low, high


def library_tensors(model: PreTrainedModel, path: Path, scheme: str = "int8 channel") -> Tensors:
    """The tensors that the library writes of a model's weights of this moment."""
    return load_file(save_quantized(model, path, scheme) / "model.safetensors")


def edit_recipe(base: Path, **fields: Any) -> Path:
    """Change fields of a checkpoint's quantization_config.

    Args:
        fields: ``group__NAME`` is a field of its group, ``weights__NAME`` one of the group's weights.
    """
    file = base / "config.json"
    config = json.loads(file.read_text())
    recipe = config["quantization_config"]
    group = recipe.get("config_groups", {}).get("group_0", {})
    for name, value in fields.items():
        part, _, field = name.rpartition("__")
        {"": recipe, "group": group, "weights": group.get("weights", {})}[part][field] = value
    file.write_text(json.dumps(config))
    return base


@torch.no_grad()
def fill_evenly(model: nn.Module) -> None:
    """Give a model weights that are the same with every release of torch."""
    for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
        steps = (torch.arange(parameter.numel()) * 7919 + number * 104729) % 4001 - 2000
        parameter.copy_((steps / 2**15).view(parameter.shape))
