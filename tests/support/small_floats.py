"""Checkpoints with small floats in the formats of ModelOpt, DeepSeek and OpenAI, written by formulas of their own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests.support.quantizing import FUSED, INPUT_SCALE, Tensors
from tests.support.tiny import make_model_like, make_tokenizer

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def save(model: PreTrainedModel, path: Path, tensors: Tensors, **recipe: Any) -> Path:
    """Write a checkpoint with these tensors and this ``quantization_config``."""
    copy = make_model_like(model)
    copy.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = recipe
    (path / "config.json").write_text(json.dumps(config))
    return path


def nearest(scaled: torch.Tensor, to_even: bool = True) -> torch.Tensor:
    """Codes of the nearest values in E2M1, by distance; of two equally near ones the even code, or the larger one."""
    distance = (scaled.abs().double().unsqueeze(-1) - E2M1.double()).abs()
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7] if to_even else [7, 6, 5, 4, 3, 2, 1, 0])
    codes = order[distance[..., order].argmin(-1)]
    # Where ties are not even, -0.0 keeps its sign too.
    negative = scaled < 0 if to_even else torch.signbit(scaled)
    return (codes | negative.long() << 3).to(torch.uint8)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """(…, size) codes in pairs, the first in the low half of a byte."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def save_modelopt(model: PreTrainedModel, path: Path) -> Path:
    """NVFP4 as ModelOpt exports it; scales of inputs are made up."""
    found: Tensors = {}
    state = make_model_like(model).state_dict()
    for name, tensor in state.items():
        if not name.endswith("_proj.weight"):
            found[name] = tensor
            continue
        stem = name.removesuffix("weight")
        module = stem.split(".")[-2]
        group = next((group for group in FUSED if module in group), (module,))
        largest = max(state[name.replace(module, other)].abs().max() for other in group)
        scale_2 = largest.float() / (6 * 448)
        groups = tensor.float().unflatten(-1, (-1, 16))
        scale = groups.abs().amax(-1) / (6 * scale_2)
        scale[scale == 0] = 1.0
        scale = scale.clamp(2**-9, 448).to(torch.float8_e4m3fn)
        scaled = groups / (scale.float() * scale_2).unsqueeze(-1)
        found |= {
            name: packed(nearest(scaled).flatten(-2)),
            f"{stem}weight_scale": scale,
            f"{stem}weight_scale_2": scale_2,
            f"{stem}input_scale": torch.tensor(1 / INPUT_SCALE),
        }
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    groups_of = {"group_0": {"input_activations": weights, "weights": weights, "targets": ["Linear"]}}
    recipe = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": groups_of, "ignore": ["lm_head"]}
    return save(model, path, found, **recipe)


def save_blocks(model: PreTrainedModel, path: Path) -> Path:
    """fp8 with block scales in float32, by the formula of ``Fp8Quantize`` in transformers, block by block."""

    def quantize(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = block.abs().max().reciprocal() * 448  # as torch divides a number by a tensor
        return (block * scale).clamp(-448, 448), scale.reciprocal()

    return save_fp8(model, path, 64, quantize)


def save_powers(model: PreTrainedModel, path: Path, size: int = 64, dtype: torch.dtype = torch.float32) -> Path:
    """fp8 with block scales that are powers of two, as DeepSeek publishes them: the least that reaches 448."""

    def quantize(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = 2.0 ** torch.ceil(torch.log2(block.abs().max() / 448))
        return block / scale, scale

    return save_fp8(model, path, size, quantize, dtype, scale_fmt="ue8m0")


def save_fp8(
    model: PreTrainedModel,
    path: Path,
    size: int,
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype = torch.float32,
    **recipe: str,
) -> Path:
    """DeepSeek's format. ``quantize``: a block → its scaled values, and what they are to be multiplied by."""
    found: Tensors = {}
    for name, tensor in make_model_like(model).state_dict().items():
        if not name.endswith("_proj.weight"):
            found[name] = tensor
            continue
        rows, scales = [], []
        for row in tensor.float().split(size):
            blocks = [quantize(block) for block in row.split(size, dim=1)]
            rows.append(torch.cat([values.to(torch.float8_e4m3fn).view(torch.uint8) for values, _ in blocks], 1))
            scales.append(torch.stack([scale for _, scale in blocks]))
        found[name] = torch.cat(rows).view(torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = torch.stack(scales).to(dtype)
    recipe |= {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return save(model, path, found, weight_block_size=[size, size], **recipe)


def save_stacked(model: PreTrainedModel, path: Path) -> Path:
    """Stacked experts in MXFP4, as OpenAI publishes them: the least power of two that reaches 6."""
    found: Tensors = {}
    for name, tensor in make_model_like(model).state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = tensor
            continue
        groups = tensor.float().transpose(1, 2).unflatten(-1, (-1, 32))
        exponent = torch.ceil(torch.log2(groups.abs().amax(-1) / 6))
        codes = nearest(torch.ldexp(groups, -exponent.unsqueeze(-1)), to_even=False)
        found[f"{name}_blocks"] = packed(codes)
        found[f"{name}_scales"] = (exponent + 127).to(torch.uint8)
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return save(model, path, found, quant_method="mxfp4", modules_to_not_convert=left_out)
