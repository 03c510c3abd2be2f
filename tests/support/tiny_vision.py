"""A small real model that sees: BLIP-2, with a vision tower of two layers. vLLM's class of it needs no torchvision."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    OPTConfig,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

from tests.support.tiny import VOCABULARY, make_tokenizer

SIDE, PATCH, QUERIES = 28, 14, 4
"""Pixels of an image's side and of a patch's; tokens that stand for an image."""
WIDTH = 128


def make_vision_model(seed: int = 0) -> Any:
    """A model with random weights in float32, as a trainer holds them."""
    torch.manual_seed(seed)
    tower = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Blip2Config(
        vision_config=Blip2VisionConfig(**tower, image_size=SIDE, patch_size=PATCH),
        qformer_config=Blip2QFormerConfig(**tower, encoder_hidden_size=64, vocab_size=VOCABULARY),
        text_config=OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            word_embed_proj_dim=WIDTH,
            ffn_dim=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
        ),
        num_query_tokens=QUERIES,
        image_token_index=_processor().tokenizer.get_vocab()["<image>"],
    )
    model = Blip2ForConditionalGeneration(config).float()
    with torch.no_grad():
        model.query_tokens.normal_()
        for name, parameter in model.named_parameters():
            if is_vision(name):
                # As initialized it hardly tells images apart.
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def save_vision_model(model: Any, path: Path) -> Path:
    """Write what a server would be started from: bfloat16 safetensors, config, tokenizer, image processor."""
    config = type(model.config).from_dict(model.config.to_dict())
    copy = Blip2ForConditionalGeneration(config).to(torch.bfloat16)
    copy.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()})
    copy.save_pretrained(path)
    _processor().save_pretrained(path)
    return path


def is_vision(name: str) -> bool:
    """Whether a parameter belongs to what looks at images."""
    return name.startswith(("vision_model", "qformer", "query_tokens", "language_projection"))


def _processor() -> Any:
    images = BlipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return Blip2Processor(image_processor=images, tokenizer=make_tokenizer(), num_query_tokens=QUERIES)
