"""Megatron-core: publish a GPTModel from all ranks, each what it holds; nothing is gathered.

Written against megatron-core 0.16.1, for the layer specs of ``megatron/core/models/gpt/gpt_layer_specs.py`` (local and
Transformer Engine's, dense, ``SequentialMLP`` and ``TEGroupedMLP``), and for checkpoints of Llama, Qwen3 and
Qwen3-MoE. Tensor, pipeline and expert parallel, with any data parallel replicas::

    publisher = Publisher(parts=partial(megatron_parts, model, vocabulary=151936), bucket=URL, base="Qwen/Qwen3-8B")
    ...
    publisher.publish(step)  # on every rank, after each optimizer step
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state

from trainer_side import Part

_NORMS = {
    # Transformer Engine fuses a norm with the linear layer after it.
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


def megatron_parts(model: Any, vocabulary: int) -> Iterator[Part]:
    """Yield what this rank holds of a GPTModel (unwrapped), as parts of a Hugging Face checkpoint.

    Args:
        vocabulary: rows of the checkpoint's embedding; Megatron pads them.

    Raises:
        ValueError: the model has a weight that this recipe does not know.
    """
    tensor_parallel = parallel_state.get_tensor_model_parallel_rank()
    tensor_parallel_size = parallel_state.get_tensor_model_parallel_world_size()
    for name, weight in model.named_parameters():
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            first = tensor_parallel * weight.shape[0]
            rows = max(0, min(weight.shape[0], vocabulary - first))
            tied = name.startswith("embedding.") or model.share_embeddings_and_output_weights
            target = "model.embed_tokens.weight" if tied else "lm_head.weight"
            yield Part(target, (vocabulary, weight.shape[1]), (min(first, vocabulary), 0), weight[:rows])
        elif name == "decoder.final_layernorm.weight":
            yield _whole("model.norm.weight", weight)
        elif name.startswith("decoder.layers."):
            number, _, inner = name.removeprefix("decoder.layers.").partition(".")
            layer = f"model.layers.{model.decoder.layers[int(number)].layer_number - 1}"  # counts all stages from 1
            if inner in _NORMS:
                yield _whole(f"{layer}.{_NORMS[inner]}", weight)
            elif inner == "self_attention.linear_qkv.weight":
                yield from _query_key_value(model.config, f"{layer}.self_attn", weight, tensor_parallel)
            elif inner == "self_attention.linear_proj.weight":
                yield _columns(f"{layer}.self_attn.o_proj.weight", weight, tensor_parallel, tensor_parallel_size)
            elif inner.startswith("mlp.experts."):
                yield from _expert(model.config, f"{layer}.mlp.experts", inner, weight)
            elif inner in ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight"):
                yield from _feed_forward(f"{layer}.mlp", inner, weight, tensor_parallel, tensor_parallel_size)
            else:
                raise ValueError(f"{name}: this recipe does not know that weight; add its name in a checkpoint")
        else:
            raise ValueError(f"{name}: this recipe does not know that weight; add its name in a checkpoint")


def _whole(name: str, weight: torch.Tensor) -> Part:
    """Replicated over tensor parallel ranks: all of them yield it, one publishes it."""
    return Part(name, tuple(weight.shape), (0,) * weight.dim(), weight)


def _columns(name: str, weight: torch.Tensor, rank: int, size: int) -> Part:
    """Row-parallel in Megatron's words: each rank has some of the input columns."""
    rows, columns = weight.shape
    return Part(name, (rows, size * columns), (0, rank * columns), weight)


def _query_key_value(config: Any, attention: str, weight: torch.Tensor, rank: int) -> Iterator[Part]:
    """Megatron stores each query group's queries, key and value one after another; a rank may hold part of a group."""
    groups, head = config.num_query_groups, config.kv_channels
    queries = config.num_attention_heads // groups * head
    first, start = rank * weight.shape[0], 0
    for group in range(groups):
        for kind, rows in (("q", queries), ("k", head), ("v", head)):
            own = weight[max(0, start - first) : max(0, start + rows - first)]
            if own.shape[0]:
                at = group * rows + max(0, first - start)
                yield Part(f"{attention}.{kind}_proj.weight", (groups * rows, weight.shape[1]), (at, 0), own)
            start += rows


def _feed_forward(mlp: str, name: str, weight: torch.Tensor, rank: int, size: int) -> Iterator[Part]:
    if "linear_fc2" in name:
        yield _columns(f"{mlp}.down_proj.weight", weight, rank, size)
        return
    for kind, half in zip(("gate", "up"), weight.chunk(2), strict=True):
        rows, columns = half.shape
        yield Part(f"{mlp}.{kind}_proj.weight", (size * rows, columns), (rank * rows, 0), half)


def _expert(config: Any, experts: str, name: str, weight: torch.Tensor) -> Iterator[Part]:
    """``experts.local_experts.J.linear_fc1.weight`` or, of grouped experts, ``experts.linear_fc1.weightJ``."""
    number = name.split(".")[3] if ".local_experts." in name else name.rpartition(".weight")[2]
    parallel = parallel_state.get_expert_model_parallel_rank()
    local = config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    rank = parallel_state.get_expert_tensor_parallel_rank()
    size = parallel_state.get_expert_tensor_parallel_world_size()
    yield from _feed_forward(f"{experts}.{parallel * local + int(number)}", name, weight, rank, size)
