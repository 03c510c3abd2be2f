"""One small real model per way that transformers holds weights, and ways to train and to look at them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny import FAMILIES
from vllm_delta_sync.tensors.torch_views import bits_of

VOCABULARY = 64
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
_EXPERTS = {"num_experts": 6, "moe_intermediate_size": 16}


def small(family: str, **options: object) -> Any:
    """A model of ``tests.support.tiny`` with other fields of its config, whose dtype no config names."""
    config = FAMILIES[family]()
    config.update(options)
    return AutoModelForCausalLM.from_config(config)


def qwen3(tied: bool = True, **options: object) -> Any:
    return small("qwen3", **_SIZES, tie_word_embeddings=tied, **options)


def qwen3_moe(**options: object) -> Any:
    return small("qwen3_moe", **_SIZES, **_EXPERTS, **options)


TRANSFORMERS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3 tied": qwen3,
    "qwen3 untied": lambda: qwen3(tied=False),
    "llama": lambda: small("llama", **_SIZES),
    "gemma3": lambda: small("gemma3", **_SIZES),
    "qwen3 moe": qwen3_moe,
    "mixtral": lambda: small("mixtral", **_SIZES),
    "deepseek v3": lambda: small("deepseek_v3", vocab_size=VOCABULARY),
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
