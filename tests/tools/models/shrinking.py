"""A small config of any architecture that transformers knows: its own defaults, with the sizes made small.

Sizes go by the names of fields, which configs share. Lists with one entry per layer are cut so that every kind of layer
occurs; ``EXCEPTIONS`` has what the names do not tell.
"""

from typing import Any

import transformers

VOCABULARY = 331
"""No multiple of what vLLM pads a vocabulary to."""
HIDDEN, INNER, HEADS, KV_HEADS, HEAD, LAYERS, EXPERTS = 128, 192, 4, 2, 32, 2, 4
MOST_LAYERS = 8

_GROUPS: list[tuple[int, str]] = [
    (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    (HIDDEN, "hidden_size n_embd d_model word_embed_proj_dim dim mamba_d_ssm attention_hidden_size out_hidden_size"),
    (INNER, "intermediate_size ffn_dim ffn_hidden_size shared_intermediate_size intermediate_size_mlp n_inner"),
    (INNER, "encoder_ffn_dim decoder_ffn_dim prefix_dense_intermediate_size"),
    (64, "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size expert_intermediate_size"),
    (64, "moe_shared_expert_intermediate_size hidden_size_per_layer_input q_lora_rank o_lora_rank index_head_dim"),
    (HEADS, "num_attention_heads n_head n_heads num_heads linear_num_heads linear_num_value_heads"),
    (HEADS, "swa_num_attention_heads index_n_heads encoder_attention_heads decoder_attention_heads attention_heads"),
    (8, "mamba_n_heads mamba_num_heads n_mamba_heads"),
    (KV_HEADS, "num_key_value_heads num_kv_heads num_query_groups linear_num_key_heads swa_num_key_value_heads"),
    (KV_HEADS, "num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts num_global_key_value_heads"),
    (2, "n_groups mamba_n_groups mamba_ngroups o_groups hc_mult hc_count"),
    (HEAD, "head_dim swa_head_dim v_head_dim qk_nope_head_dim linear_head_dim linear_key_head_dim"),
    (HEAD, "linear_value_head_dim kv_channels global_head_dim mamba_d_head mamba_head_dim mamba_headdim"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers num_layers_per_stack encoder_layers decoder_layers depth"),
    (EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "zero_expert_num"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers n_group"),
    (1, "topk_group"),
    (
        16,
        "qk_rope_head_dim mamba_d_state ssm_state_size state_size rotary_dim laurel_rank adapter_rank d_rel index_topk",
    ),
    (16, "mamba_dt_rank time_step_rank hc_lowrank"),
    (512, "max_position_embeddings n_positions max_seq_len kv_lora_rank model_max_length rel_extent"),
    (512, "original_max_position_embeddings"),
    (32, "chunk_size mamba_chunk_size sliding_window sliding_window_size attention_chunk_size"),
]
SIZES = {name: value for value, names in _GROUPS for name in names.split()}
_PER_LAYER = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "indexer_types",
    "no_rope_layers",
    "layer_rope_theta",
    "attn_type_list",
    "num_attention_heads_per_layer",
    "activation_sparsity_pattern",
    "attention_layer_types",
)
"""Lists with one entry per layer."""
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "DeepseekV3ForCausalLM": {"topk_method": "noaux_tc"},
    "FalconForCausalLM": {"new_decoder_architecture": True, "num_kv_heads": KV_HEADS, "ffn_hidden_size": 4 * HIDDEN},
    "FalconH1ForCausalLM": {"mamba_d_head": 16},
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "intermediate_size": [INNER] * 4,
    },
    "Glm4MoeForCausalLM": {"head_dim": HEAD},
    "Glm4vMoeForConditionalGeneration": {"text_config": {"head_dim": HEAD}},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "HYV3ForCausalLM": {"first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True, "qk_norm": True},
    "Lfm2ForCausalLM": {"block_dim": HIDDEN, "block_ff_dim": INNER},
    "Lfm2VlForConditionalGeneration": {"text_config": {"block_dim": HIDDEN, "block_ff_dim": INNER}},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "LongcatFlashForCausalLM": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 32},
    "MiMoV2FlashForCausalLM": {
        "hybrid_layer_pattern": [0, 1, 0],
        "moe_layer_freq": [0, 1, 1],
        "layernorm_epsilon": 1e-5,
        "sliding_window_size": 32,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS,
        "swa_head_dim": HEAD,
        "v_head_dim": HEAD,
        "swa_v_head_dim": HEAD,
    },
    "MiniMaxM2ForCausalLM": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "NemotronForCausalLM": {"num_key_value_heads": KV_HEADS, "head_dim": HEAD},
    # Experts without a gate are not for CPUs in vLLM.
    "NemotronHForCausalLM": {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    "Zamba2ForCausalLM": {
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HIDDEN // HEADS,
        "num_key_value_heads": HEADS,
    },
}


def small(cls: type[transformers.PretrainedConfig], **others: Any) -> transformers.PretrainedConfig:
    """A small config of a class; ``others`` are fields that are to be as given.

    Raises:
        whatever the class does, of sizes that do not go together.
    """
    fields = shrunk(cls().to_dict())
    for name, value in others.items():
        fields[name] = {**fields.get(name, {}), **value} if isinstance(value, dict) else value
    return cls(**fields)


def shrunk(defaults: dict[str, Any]) -> dict[str, Any]:
    """What to give a config class, by what its instance has by default."""
    fields: dict[str, Any] = {}
    for name, value in defaults.items():
        if name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            fields[name] = SIZES[name]
        elif name in _TOKENS:
            fields[name] = _TOKENS[name]
        elif name == "rope_parameters" and isinstance(value, dict) and "mrope_section" in value:
            fields[name] = {**value, "mrope_section": [HEAD // 4, HEAD // 8, HEAD // 8]}
        elif isinstance(value, dict) and "model_type" in value and name.endswith("_config"):
            fields[name] = {"model_type": value["model_type"], **shrunk(value)}
    lists = {name: defaults[name] for name in _PER_LAYER if isinstance(defaults.get(name), list)}
    if lists:
        kept = _one_of_each_kind(lists)
        fields.update({name: [value[layer] for layer in kept] for name, value in lists.items()})
        fields.update({name: len(kept) for name in _COUNTS if name in fields})
        if "num_attention_heads_per_layer" in lists:
            fields["num_attention_heads_per_layer"] = [HEADS] * len(kept)
    return fields


def _one_of_each_kind(lists: dict[str, list[Any]]) -> list[int]:
    """Layers such that each combination of entries occurs; two at least."""
    count = min(len(value) for value in lists.values())
    first: dict[str, int] = {}
    for layer in range(count):
        first.setdefault(str([value[layer] for value in lists.values()]), layer)
    kept = sorted(first.values())[:MOST_LAYERS]
    return kept if len(kept) > 1 else list(range(min(LAYERS, count)))
