"""Weights in four bits (E2M1), two in a byte, with a scale for each group of a row: the arithmetic of each format.

``NVFP4`` has groups of 16, scales in E4M3 and one global scale for each weight; ``MXFP4`` has groups of 32 and scales
that are powers of two (E8M0). Formats of one name differ in what they do with ties, with groups of zeros and with the
sign of what rounds to zero, so there is one function for each tool.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_delta_sync.errors import ModelError

Tensors = dict[str, torch.Tensor]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway from each value to the next."""
E4M3_MAX, E2M1_MAX = 448.0, 6.0
CHUNK = 1 << 22
"""Elements that are quantized at a time: in float32 they take several times the memory of the weight."""
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)
"""Modules of one parent that engines fuse, so that tools give their weights one global scale."""


def fused_with(name: str, quantized: set[str]) -> tuple[str, ...]:
    """Return the weights that share a global scale with a weight, itself included, in the order of ``FUSED``.

    Args:
        quantized: names of all weights that are quantized; a group that is not among them as a whole is not fused.
    """
    parent, _, module = name.removesuffix(".weight").rpartition(".")
    for modules in FUSED:
        group = tuple(f"{parent}.{other}.weight".lstrip(".") for other in modules)
        if module in modules and quantized.issuperset(group):
            return group
    return (name,)


def compressed_tensors_fp4(args: Any) -> Callable[[torch.Tensor, torch.Tensor], Tensors]:
    """Return the function for formats ``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized``.

    The library computes the scales. Its rounding and packing are repeated here: they need a compiler at run time, and
    many times the memory of the weight.

    Args:
        args: ``QuantizationArgs`` of the weights.
    """
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    is_nvfp4 = args.strategy == "tensor_group"

    def quantize(weight: torch.Tensor, largest: torch.Tensor) -> Tensors:
        groups = weight.unflatten(-1, (-1, args.group_size))
        global_scale = generate_gparam(-largest, largest) if is_nvfp4 else None
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale)
        scale = scale.to(weight.dtype)  # the library keeps it in a parameter of the weight's dtype
        steps = scale if global_scale is None else scale / global_scale
        found = {"weight_packed": _pack(groups, steps)}
        if global_scale is None:
            return found | {"weight_scale": compress_mx_scale(scale, torch.uint8)}
        return found | {"weight_scale": scale.to(torch.float8_e4m3fn), "weight_global_scale": global_scale}

    return quantize


def modelopt_nvfp4(weight: torch.Tensor, largest: torch.Tensor) -> Tensors:
    """Quantize as ModelOpt exports NVFP4 (``modelopt/torch/quantization/qtensor/nvfp4_tensor.py``)."""
    groups = weight.unflatten(-1, (-1, 16))
    global_scale = largest.float() / (E2M1_MAX * E4M3_MAX)
    scale = groups.abs().amax(-1).float() / (E2M1_MAX * global_scale)
    scale = torch.where(scale == 0, 1.0, scale).clamp(2**-9, E4M3_MAX).to(torch.float8_e4m3fn)
    packed = _pack(groups, scale.float() * global_scale)
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": global_scale.reshape(())}


def stacked_mxfp4(weight: torch.Tensor, largest: torch.Tensor) -> Tensors:
    """Quantize (experts, columns, rows) as ``downcast_to_mxfp`` of triton_kernels does, which transformers calls.

    A scale is the least power of two that brings a group to at most 6; ties round away from zero.
    """
    blocks, scales = [], []
    for expert in weight.transpose(1, 2):
        groups = expert.float().unflatten(-1, (-1, 32))
        bits = (groups.abs().amax(-1) / E2M1_MAX).view(torch.int32)
        exponent = ((bits + 0x7FFFFF) >> 23) & 0xFF
        step = (exponent << 23).view(torch.float32)
        # A group of zeros has the step 0.
        packed = _pack(groups, torch.where(exponent == 0, 1.0, step), ties_to_even=False)
        blocks.append(packed.unflatten(-1, (-1, 16)))
        scales.append(exponent.to(torch.uint8))
    return {"_blocks": torch.stack(blocks), "_scales": torch.stack(scales)}


def mxfp4_values(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return what MXFP4 stands for, in float32.

    Args:
        packed: uint8, 16 bytes for each group. scales: uint8, the exponent of each group plus 127.
    """
    codes = torch.stack((packed & 15, packed >> 4), -1).reshape(*scales.shape, 32).long()
    table = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=torch.float32, device=packed.device)
    return torch.ldexp(table[codes], scales.int().unsqueeze(-1) - 127)


def largest_of(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, (1,) in the weight's dtype.

    Raises:
        ModelError: a value is NaN or infinite, which would not show in four bits.
    """
    largest = torch.maximum(-weight.min(), weight.max()).reshape(1)
    if not bool(torch.isfinite(largest)):
        raise ModelError(
            f"tensor {name!r} has NaN or infinite values, which its format of the base cannot hold; find the step "
            "that made them, and publish weights from before it"
        )
    return largest


def _pack(groups: torch.Tensor, steps: torch.Tensor, ties_to_even: bool = True) -> torch.Tensor:
    """Return (rows, columns / 2) bytes of (rows, groups, size) weights, divided by the (rows, groups) steps.

    The first of two values is in the low half of its byte. A negative value that rounds to zero keeps its sign; a zero
    has none, unless ties are rounded away from zero: then -0.0 keeps it too.
    """
    # A value goes up to the next one if it is above a threshold; where a tie goes up, just below halfway is enough.
    # In float32, whatever torch's default dtype is.
    limits = [
        value if ties_to_even and not number % 2 else float(np.nextafter(np.float32(value), np.float32(0)))
        for number, value in enumerate(BETWEEN)
    ]
    rows = max(1, CHUNK // max(1, groups[0].numel()))
    packed = []
    for some, step in zip(groups.split(rows), steps.split(rows), strict=True):
        scaled = (some / step.unsqueeze(-1)).flatten(-2)
        magnitude = scaled.abs().float()
        negative = scaled < 0 if ties_to_even else torch.signbit(scaled)
        codes = negative.to(torch.uint8) << 3
        for limit in limits:
            codes += magnitude > limit
        packed.append(codes[:, 0::2] | codes[:, 1::2] << 4)
    return torch.cat(packed)
