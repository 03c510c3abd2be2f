"""One small real model per way that transformers holds weights, and ways to train and to look at them."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from vllm_delta_sync.tensors.torch_views import bits_of

VOCABULARY = 64
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


def qwen3(tied: bool = True, **options: object) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**_COMMON, head_dim=8, tie_word_embeddings=tied, **options))


def qwen3_moe(**options: object) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_COMMON, **_MOE, head_dim=8, num_experts=6, **options))


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**_COMMON, head_dim=8))


def gemma3() -> Gemma3ForCausalLM:
    return Gemma3ForCausalLM(Gemma3TextConfig(**_COMMON, head_dim=8))


def mixtral() -> MixtralForCausalLM:
    return MixtralForCausalLM(MixtralConfig(**_COMMON, head_dim=8, num_local_experts=4))


def deepseek() -> DeepseekV3ForCausalLM:
    routed = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    sizes = {**_COMMON, "num_key_value_heads": _COMMON["num_attention_heads"]}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **_MOE, **_LATENT, **routed))


TRANSFORMERS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3 tied": qwen3,
    "qwen3 untied": lambda: qwen3(tied=False),
    "llama": llama,
    "gemma3": gemma3,
    "qwen3 moe": qwen3_moe,
    "mixtral": mixtral,
    "deepseek v3": deepseek,
}


class Plain(nn.Module):
    """No transformers: a tied pair, a buffer, a scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.embed(tokens).flatten(0, 1)) * self.scale
        return self.head(hidden)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    tokens = torch.randint(3, VOCABULARY, (2, 12))
    output = model(tokens)
    logits = (output if isinstance(output, torch.Tensor) else output.logits).reshape(-1, VOCABULARY)
    nn.functional.cross_entropy(logits.float(), tokens.roll(-1, 1).reshape(-1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: nn.Module, lr: float = 1e-4) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def saved(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool((bits_of(left.contiguous()) == bits_of(right.contiguous())).all())
