"""Small real models, made from transformers configs with a tokenizer trained on the spot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY = 300
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def _without_head_dim() -> dict[str, Any]:
    return {name: value for name, value in SIZES.items() if name != "head_dim"}


_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
_WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
_LATENT = {
    **_without_head_dim(),
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 1,
}
_OPT = {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 256, "num_hidden_layers": 2}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama_one_kv_head": lambda: LlamaConfig(**{**SIZES, "num_key_value_heads": 1}, tie_word_embeddings=False),
    # So large that codec tiled cuts its matrices where two ranks do.
    "llama_wide": lambda: LlamaConfig(**{**SIZES, **_WIDE}, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**_without_head_dim(), tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**SIZES),
    "gemma2": lambda: Gemma2Config(**SIZES),
    "gemma3": lambda: Gemma3TextConfig(**SIZES),
    "phi3": lambda: Phi3Config(**_without_head_dim()),
    "opt": lambda: OPTConfig(vocab_size=VOCABULARY, num_attention_heads=4, max_position_embeddings=512, **_OPT),
    "gpt2": lambda: GPT2Config(vocab_size=VOCABULARY, n_embd=128, n_layer=2, n_head=4, n_positions=512),
    "deepseek_v2": lambda: DeepseekV2Config(**_LATENT, topk_method="greedy"),
    "deepseek_v3": lambda: DeepseekV3Config(**_LATENT, topk_method="noaux_tc"),
    "gpt_oss": lambda: GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=64),
    "llama4": lambda: Llama4TextConfig(
        **SIZES, intermediate_size_mlp=256, num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=1
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **_EXPERTS, norm_topk_prob=True),
}


def make_model(family: str, seed: int = 0, **sizes: int) -> PreTrainedModel:
    """A model with random weights in float32, as a trainer holds them.

    Args:
        sizes: fields of its config that are to be others.
    """
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    config.update(sizes)
    config.dtype = torch.float32
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.float()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer, trained on a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<s>", "</s>", "<pad>", "<unk>"])
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 8, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return fast


def save_checkpoint(model: PreTrainedModel, path: Path) -> Path:
    """Write what a server would be started from: bfloat16 safetensors, config, tokenizer."""
    copy = make_model_like(model)
    copy.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def make_model_like(model: PreTrainedModel) -> PreTrainedModel:
    """A bfloat16 copy; the original keeps its dtype."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.dtype = torch.bfloat16
    copy: PreTrainedModel = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    copy.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()})
    return copy


def train_steps(model: PreTrainedModel, lr: float):  # type: ignore[no-untyped-def]
    """Yield after each real AdamW step on random token sequences; endless."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(3, VOCABULARY, (4, 24), generator=generator).to(model.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield float(loss.detach())
