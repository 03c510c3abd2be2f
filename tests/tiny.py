"""Small real models, made from transformers configs with a tokenizer trained on the spot."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

VOCABULARY = 300
_SIZES = {
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


def config_of(family: str) -> PretrainedConfig:
    """``qwen3`` (tied head, query and key norms) or ``llama`` (untied head)."""
    if family == "qwen3":
        return Qwen3Config(**_SIZES, tie_word_embeddings=True)
    if family == "llama":
        return LlamaConfig(**_SIZES, tie_word_embeddings=False)
    raise ValueError(f"family {family!r} is none of qwen3, llama")


def make_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A model with random weights in float32, as a trainer holds them."""
    torch.manual_seed(seed)
    config = config_of(family)
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
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


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


def train_steps(model: PreTrainedModel, lr: float = 1e-5, seed: int = 1):  # type: ignore[no-untyped-def]
    """Yield after each real AdamW step on random token sequences; endless."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(3, VOCABULARY, (4, 24), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield float(loss.detach())
