"""LoRA adapters in training: PEFT models whose adapters change as if trained."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

TARGETS = ["q_proj", "v_proj", "down_proj"]


def adapted(model: PreTrainedModel, seed: int = 0, **options: Any) -> PeftModel:
    """A PEFT model whose adapter changes its targets."""
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | options)
    found: PeftModel = get_peft_model(model, config)
    randomize(found, seed)
    return found


def randomize(model: nn.Module, seed: int) -> None:
    """Give every adapter's weights other values: B begins as zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) / 8)


def lose_adapter_memory(model: Any) -> None:
    """Clear what belongs to adapters in the memory of vLLM's model, as its allocator leaves it after sleep at level 2.

    A CPU's worker keeps its memory while it sleeps.
    """
    manager = model.lora_manager
    for holder in [*manager.modules.values(), *manager.punica_wrapper_mapping.values()]:
        for value in vars(holder).values():
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor):
                    tensor.zero_()


def save_adapter(model: PeftModel, folder: Path) -> Path:
    """Write the adapter as PEFT does."""
    model.save_pretrained(folder)
    return folder
