"""The element hash of fingerprints in torch operations, for devices without Triton.

docs/FORMAT.md fixes it. int64 arithmetic wraps as the unsigned definition does.
"""

import numpy as np
import torch


def premix(seed: int, index: torch.Tensor) -> torch.Tensor:
    """Return (n,) int64: the position half of hashes. Args: index: (n,) int64, flat in the tensor with this seed."""
    words = index.clone()
    premix_in_place(seed, words, torch.empty_like(words))
    return words


def premix_in_place(seed: int, words: torch.Tensor, shifted: torch.Tensor) -> None:
    """Turn flat indices into what ``premix`` returns, without allocating. Args: both (n,) int64; shifted: scratch."""
    from vllm_delta_sync.format import kernels

    words.mul_(_signed(kernels.GOLDEN)).add_(_signed(np.uint64(seed)))
    _fold(_fold(words, 32, shifted).mul_(_signed(kernels.PREMIX)), 32, shifted)


def write_lanes(
    premixed: torch.Tensor, bits: torch.Tensor, low: torch.Tensor, high: torch.Tensor, shifted: torch.Tensor
) -> None:
    """Write both lanes of (n,) element hashes, without allocating.

    Args:
        premixed: (n,) int64. bits: (n,) signed integers of the element's width. low, high: (n,) int64, written.
        shifted: (n,) int64 scratch.
    """
    from vllm_delta_sync.format import kernels

    low.copy_(bits)
    if bits.element_size() < 8:
        low.bitwise_and_((1 << (8 * bits.element_size())) - 1)
    low.mul_(_signed(kernels.BITS)).add_(premixed)
    _fold(low, 29, shifted).mul_(_signed(kernels.FINAL))
    _fold(low, 32, shifted)
    torch.mul(low, _signed(kernels.LANE), out=high)
    _fold(high, 29, shifted)


def _signed(factor: np.uint64) -> int:
    return int(factor.view(np.int64))


def _fold(words: torch.Tensor, count: int, shifted: torch.Tensor) -> torch.Tensor:
    """Do words ^= words >> count in place, with zeros shifted in."""
    torch.bitwise_right_shift(words, count, out=shifted).bitwise_and_((1 << (64 - count)) - 1)
    return words.bitwise_xor_(shifted)
