"""``bits_of`` and ``tensor_from_bits`` convert between torch tensors and bit patterns, without copies."""

import numpy as np
import torch

from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.table import DTYPES, TensorSpec
from vllm_delta_sync.tensors.changes import Bits

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Signed integer dtype by element width; torch lacks many operations for unsigned ones."""


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """Return the safetensors name of a torch dtype; raises ModelError if there is none."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ModelError(f"tensor {tensor!r} has dtype {dtype}, which cannot be published; cast it first") from None


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return a flat (numel,) unsigned view of a contiguous CPU tensor, which shares its memory."""
    # Few calls into torch: publishers run this for every tensor of every version.
    plain = tensor.detach() if tensor.requires_grad else tensor
    bits: np.ndarray = plain.view(_UNSIGNED[plain.element_size()]).numpy()
    return bits.reshape(-1)


def tensor_from_bits(bits: Bits, spec: TensorSpec) -> torch.Tensor:
    """Make a CPU tensor of the spec's dtype and shape that shares the memory of ``bits``."""
    signed = torch.from_numpy(bits.view(f"<i{DTYPES[spec.dtype].itemsize}"))
    return signed.view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)
