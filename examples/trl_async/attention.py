"""What lets ``AsyncGRPOTrainer`` train on a CPU: its tree attention in plain PyTorch.

TRL packs the samples of a step into a tree, in which a shared prefix is computed once, and attends along its paths
with FlashAttention 3, on GPUs only. This computes the same with ``scaled_dot_product_attention``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION


@contextmanager
def on_cpu() -> Iterator[None]:
    """Make an ``AsyncGRPOTrainer`` inside of this where there is no GPU.

    TRL asks CUDA for the GPU's name, to know its peak FLOPs; here they are unknown, as those of a GPU that TRL does not
    list: utilization is not reported. The attention is registered on leaving.
    """
    with patch.object(async_grpo_trainer, "get_peak_flops_per_device", lambda accelerator, dtype: None):
        yield
    register_reference_attention()


def register_reference_attention() -> None:
    """Take the place of TRL's kernel; call it after the trainer is made, which registers its own."""
    AttentionInterface.register(TREE_ATTENTION, tree_attention)


def tree_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    tree_max_seqlen_q: int,
    tree_max_seqlen_k: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of each segment of the tree to the path from the root to its end.

    Args:
        query, key, value: (1, heads, tokens, width); keys and values may have fewer heads.
        tree_kv_index: (rows,) token of each row of all paths, laid end to end.
        tree_cu_seqlens_q, tree_cu_seqlens_k: (segments + 1,) where segments begin among the tokens, paths among rows.
        tree_max_seqlen_q, tree_max_seqlen_k: longest segment, longest path.

    Returns:
        (1, tokens, heads, width), and no weights.

    Raises:
        ValueError: scores are to be capped, which is not implemented here.
    """
    if softcap:
        raise ValueError(f"softcap is {softcap}, and this attention knows none; train a model without it")
    device = query.device
    row, column = torch.arange(tree_max_seqlen_q, device=device), torch.arange(tree_max_seqlen_k, device=device)
    lengths, paths = tree_cu_seqlens_q.diff()[:, None], tree_cu_seqlens_k.diff()[:, None]
    # Segments are padded to the longest: there are many short ones, for which a mask over all tokens would be wasted.
    asks, answers = row < lengths, column < paths
    tokens = torch.where(asks, tree_cu_seqlens_q[:-1, None] + row, 0)
    rows = tree_kv_index[torch.where(answers, tree_cu_seqlens_k[:-1, None] + column, 0)]
    depth = (paths - lengths + row)[:, :, None]
    seen = answers[:, None, :] & (column <= depth)
    if sliding_window:
        seen &= column > depth - sliding_window
    # A padded query has to see something, or its softmax is not a number, and so are the gradients of all keys.
    seen[:, :, 0] |= ~asks
    outputs = scaled_dot_product_attention(
        query[0][:, tokens].transpose(0, 1),
        key[0][:, rows].transpose(0, 1),
        value[0][:, rows].transpose(0, 1),
        attn_mask=seen[:, None],
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return outputs.transpose(1, 2)[asks].unsqueeze(0), None
