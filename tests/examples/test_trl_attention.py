"""The tree attention of ``examples/trl_async`` computes what attention to each sample by itself does."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from trl.experimental.async_grpo.packing import TREE_ATTENTION, TreeRow, register_tree_attention

from examples.trl_async.attention import register_reference_attention, tree_attention
from tests.support.tiny import VOCABULARY, make_model


def samples() -> list[np.ndarray]:
    """Token ids: three that share a prompt, two of them some words more, and two others."""
    generator = np.random.default_rng(5)
    prompt, words = generator.integers(3, VOCABULARY, 7), generator.integers(3, VOCABULARY, 4)
    ends = [generator.integers(3, VOCABULARY, length) for length in (6, 2, 9)]
    apart = [generator.integers(3, VOCABULARY, length) for length in (3, 12)]
    shared = [np.concatenate([prompt, words, ends[0]]), np.concatenate([prompt, words, ends[1]])]
    return [*shared, np.concatenate([prompt, ends[2]]), *apart]


def packed(rows: list[np.ndarray]) -> tuple[TreeRow, dict[str, Any]]:
    row = TreeRow()
    for group, ids in enumerate(rows):
        ones = np.ones(len(ids))
        row.add({"input_ids": ids, "completion_mask": ones, "old_log_probs": ones, "advantage": 1.0, "group_id": group})
    tree = row.pack()
    longest_q, longest_k = tree["tree_max_seqlens"].tolist()
    return row, {
        "input_ids": tree["input_ids"][None],
        "position_ids": tree["position_ids"][None],
        "tree_kv_index": tree["tree_kv_index"],
        "tree_cu_seqlens_q": tree["tree_cu_seqlens_q"],
        "tree_cu_seqlens_k": tree["tree_cu_seqlens_k"],
        "tree_max_seqlen_q": longest_q,
        "tree_max_seqlen_k": longest_k,
    }


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {name: tensor.grad.clone() for name, tensor in model.named_parameters() if tensor.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize(("family", "sizes"), [("qwen3", {}), ("gemma3", {"sliding_window": 4})])
def test_as_each_sample_by_itself(family: str, sizes: dict[str, int]) -> None:
    model, rows = make_model(family, **sizes), samples()
    alone = [model(input_ids=torch.tensor(ids)[None]).logits[0] for ids in rows]
    sum(logits.square().sum() for logits in alone).backward()  # type: ignore[union-attr]
    expected = gradients(model)
    register_tree_attention()
    register_reference_attention()
    model.set_attn_implementation(TREE_ATTENTION)
    row, tree = packed(rows)
    assert tree["input_ids"].numel() < sum(map(len, rows))
    together = model(**tree).logits[0]
    order = _places(row)
    picked = [together[places] for places in order]
    for own, of_tree in zip(alone, picked, strict=True):
        torch.testing.assert_close(of_tree, own, rtol=1e-4, atol=1e-5)
    sum(logits.square().sum() for logits in picked).backward()  # type: ignore[union-attr]
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4)


def test_capped_scores_are_refused() -> None:
    nothing = torch.zeros(1, 1, 1, 1)
    whole = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="softcap is 30"):
        tree_attention(
            torch.nn.Identity(), nothing, nothing, nothing, None,
            tree_kv_index=torch.tensor([0]), tree_cu_seqlens_q=whole, tree_cu_seqlens_k=whole,
            tree_max_seqlen_q=1, tree_max_seqlen_k=1, softcap=30.0,
        )  # fmt: skip


def _places(row: TreeRow) -> list[torch.Tensor]:
    """Where each sample's tokens are in the packed row: by marking each node with a number of its own."""
    tokens = list(row.tokens)
    row.tokens = list(range(len(tokens)))
    position = {node: place for place, node in enumerate(row.pack()["input_ids"].tolist())}
    row.tokens = tokens
    return [torch.tensor([position[node] for node in nodes]) for nodes in row.sample_nodes]
