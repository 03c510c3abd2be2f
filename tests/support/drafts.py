"""Small language models with heads for speculative decoding, which learn on the spot; see ``Drafted``.

The text is a cycle of tokens, which a model of this size learns in seconds: so the heads draft well, and a model that
is trained on another cycle leaves a head behind that is not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from tests.support.tiny import make_model, make_tokenizer
from vllm_delta_sync.tensors.checkpoint import DRAFT_FOLDER

CYCLE = 23
"""Tokens of a text before it repeats."""
WINDOW = 32


def text(stride: int, start: int = 0, length: int = WINDOW) -> list[int]:
    """Part of an endless text; a model learns one stride at a time."""
    return [3 + (start + position) * stride % CYCLE for position in range(length)]


def _batch(stride: int, generator: torch.Generator, rows: int = 8) -> torch.Tensor:
    starts = torch.randint(0, CYCLE, (rows,), generator=generator).tolist()
    return torch.tensor([text(stride, start) for start in starts])


class MimoLayer(Qwen2DecoderLayer):
    """The layer of MiMo that predicts the token after the next one, under the names of MiMo's checkpoints."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config, layer_idx=0)
        self.token_layernorm = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_layernorm = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.final_layernorm = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Qwen2RotaryEmbedding(config)
        self.config = config

    def draft(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states that the output head turns into tokens: (rows, T, hidden) of the tokens after ``T``."""
        positions = torch.arange(hidden.shape[1])[None]
        embedded = torch.where(positions[..., None] == 0, 0.0, embedded)
        joined = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedded)], dim=-1)
        states = self.input_proj(joined)
        mask = create_causal_mask(self.config, states, None, None, position_ids=positions)
        states = self(states, attention_mask=mask, position_embeddings=self.rotary(states, positions))
        return self.final_layernorm(states)


class EagleHead(nn.Module):
    """EAGLE's head for a Llama, under the names of its own checkpoint."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, layer_idx=0)])
        self.layers[0].input_layernorm = nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)
        self.config = config

    def draft(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """See ``MimoLayer.draft``."""
        positions = torch.arange(hidden.shape[1])[None]
        states = self.fc(torch.cat([embedded, hidden], dim=-1))
        mask = create_causal_mask(self.config, states, None, None, position_ids=positions)
        drafted: torch.Tensor = self.layers[0](
            states, attention_mask=mask, position_embeddings=self.rotary(states, positions)
        )
        return drafted


@dataclass
class Drafted:
    """A model and its head, in float32, as a trainer holds them.

    Attributes:
        published: what a publisher takes; its names are those of a run once ``rename`` is applied.
        own_checkpoint: whether the head has a checkpoint of its own; otherwise it is part of the model's.
    """

    model: PreTrainedModel
    head: MimoLayer | EagleHead
    published: nn.Module
    rename: dict[str, str] | None
    own_checkpoint: bool
    seed: int = 0

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)
        own = list(self.head.parameters())
        known = {id(parameter) for parameter in own}
        body = [parameter for parameter in self.model.parameters() if id(parameter) not in known]
        self._of_model = torch.optim.AdamW(body, lr=2e-3, weight_decay=0.0)
        self._of_head = torch.optim.AdamW(own, lr=4e-3, weight_decay=0.0)

    def train(self, stride: int, steps: int, *, head: bool = True) -> tuple[float, float]:
        """Train on one text; return the last losses of the model and of the head, which may be left as it is."""
        loss = loss_of_head = torch.zeros(())
        for _ in range(steps):
            tokens = _batch(stride, self._generator)
            found = self.model(input_ids=tokens, labels=tokens, output_hidden_states=True)
            loss = found.loss
            self._of_model.zero_grad()
            loss.backward()
            self._of_model.step()
            if head:
                hidden = found.hidden_states[-1].detach()[:, :-2]
                embedded = self.model.get_input_embeddings()(tokens[:, 1:-1]).detach()
                logits = self.model.get_output_embeddings()(self.head.draft(embedded, hidden))
                loss_of_head = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten())
                self._of_head.zero_grad()
                loss_of_head.backward()
                self._of_head.step()
        return float(loss.detach()), float(loss_of_head.detach())

    def save(self, folder: Path) -> Path:
        """Write what a server is started from: the model in bfloat16, and a head of its own in its subfolder."""
        config = type(self.model.config).from_dict(self.model.config.to_dict())
        state = {name: tensor.to(torch.bfloat16) for name, tensor in self.model.state_dict().items()}
        self.model.save_pretrained(folder, state_dict=state)
        config.dtype = torch.bfloat16
        if isinstance(self.head, MimoLayer):
            config.architectures = ["MiMoForCausalLM"]
        config.save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        if self.own_checkpoint:
            self._save_head(folder / DRAFT_FOLDER, config)
        return folder

    def _save_head(self, folder: Path, config: LlamaConfig) -> None:
        from safetensors.torch import save_file

        own = type(config).from_dict({**config.to_dict(), "num_hidden_layers": len(self.head.layers)})
        own.architectures = ["LlamaForCausalLM"]
        own.save_pretrained(folder)
        state = {name: tensor.detach().to(torch.bfloat16) for name, tensor in self.head.named_parameters()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    def speculation(self, folder: Path) -> dict[str, object]:
        """vLLM's ``speculative_config`` for what ``save`` has written."""
        if self.own_checkpoint:
            return {"method": "eagle", "model": str(folder / DRAFT_FOLDER), "num_speculative_tokens": 1}
        return {"method": "mtp", "num_speculative_tokens": 1}


def mimo(seed: int = 0) -> Drafted:
    """A model whose head belongs to its checkpoint (multi-token prediction)."""
    model = make_model("qwen2", seed=seed, tie_word_embeddings=False)
    model.config.num_nextn_predict_layers = 1
    head = MimoLayer(model.config)
    model.model.mtp_layers = nn.ModuleList([head])
    return Drafted(model, head, model, None, own_checkpoint=False)


def eagle(seed: int = 0) -> Drafted:
    """A model with a head of its own checkpoint, which shares the model's embedding and output head."""
    model = make_model("llama", seed=seed)
    head = EagleHead(model.config)
    both = nn.ModuleDict({"policy": model, "draft": head})
    return Drafted(model, head, both, {"policy.": ""}, own_checkpoint=True)


HEADS: dict[str, Callable[[], Drafted]] = {"mtp": mimo, "eagle": eagle}
