"""Small language models with heads for speculative decoding, which learn on the spot; see ``Drafted``.

The text is a cycle of tokens, which a model of this size learns in seconds: so the heads draft well, and a model that
is trained on another cycle leaves a head behind that is not.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from tests.support.tiny import VOCABULARY, make_model, make_tokenizer
from vllm_delta_sync.tensors.checkpoint import DRAFT_FOLDER

CYCLE = 23
"""Tokens of a text before it repeats."""
WINDOW = 32


def text(stride: int, start: int = 0, length: int = WINDOW) -> list[int]:
    """Part of an endless text; a model learns one stride at a time."""
    return [3 + (start + position) * stride % CYCLE for position in range(length)]


class Head(nn.Module):
    """A head for a model; each class is under the names of its checkpoints, as vLLM's loader reads them.

    Attributes:
        method: of speculative decoding, as vLLM calls it. own_checkpoint: whether it has one.
        configuration: what the config.json of that says beside the model's.
    """

    method: ClassVar[str]
    own_checkpoint: ClassVar[bool] = True
    configuration: ClassVar[dict[str, Any]] = {}

    def logits(self, model: Any, tokens: torch.Tensor, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Predict the tokens after the next ones.

        Args:
            tokens: (rows, T). states: the model's hidden states, (rows, T, hidden) after the embedding and each layer.

        Returns:
            (rows, T - 2, vocabulary): of tokens 2 to T, each from the token before it and the states before that.
        """
        raise NotImplementedError


def _embedded(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model.get_input_embeddings()(tokens[:, 1:-1])
    return found.detach()


class MimoLayer(Qwen2DecoderLayer, Head):
    """The layer of MiMo's checkpoints for multi-token prediction."""

    method = "mtp"
    own_checkpoint = False

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config, layer_idx=0)
        self.token_layernorm = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_layernorm = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.final_layernorm = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Qwen2RotaryEmbedding(config)
        self.config = config

    def logits(self, model: Any, tokens: torch.Tensor, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """See ``Head``."""
        hidden = states[-1][:, :-2]
        positions = torch.arange(hidden.shape[1])[None]
        embedded = torch.where(positions[..., None] == 0, 0.0, _embedded(model, tokens))
        joined = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedded)], dim=-1)
        inner = self.input_proj(joined)
        mask = create_causal_mask(self.config, inner, None, None, position_ids=positions)
        inner = self(inner, attention_mask=mask, position_embeddings=self.rotary(inner, positions))
        found: torch.Tensor = model.get_output_embeddings()(self.final_layernorm(inner))
        return found


class EagleHead(Head):
    """EAGLE's head for a Llama, which uses the model's embedding and output head."""

    method = "eagle"
    configuration: ClassVar[dict[str, Any]] = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, layer_idx=0)])
        self.layers[0].input_layernorm = nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)
        self.config = config

    def logits(self, model: Any, tokens: torch.Tensor, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """See ``Head``."""
        hidden = states[-1][:, :-2]
        positions = torch.arange(hidden.shape[1])[None]
        inner = self.fc(torch.cat([_embedded(model, tokens), hidden], dim=-1))
        mask = create_causal_mask(self.config, inner, None, None, position_ids=positions)
        inner = self.layers[0](inner, attention_mask=mask, position_embeddings=self.rotary(inner, positions))
        found: torch.Tensor = model.get_output_embeddings()(inner)
        return found


class Eagle3Head(Head):
    """EAGLE3's head for a Llama: it sees several layers of the model, and has an output head of its own."""

    method = "eagle3"
    LAYERS = (0, 1)
    """Whose inputs it sees."""
    configuration: ClassVar[dict[str, Any]] = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCABULARY,
        "num_aux_hidden_states": len(LAYERS),
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
    }

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.fc = nn.Linear(len(self.LAYERS) * size, size, bias=False)
        self.midlayer = LlamaDecoderLayer(config, layer_idx=0)
        attention = self.midlayer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * size, rows, bias=False))
        self.midlayer.hidden_norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.config = config

    def logits(self, model: Any, tokens: torch.Tensor, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """See ``Head``."""
        layer = self.midlayer
        hidden = self.fc(torch.cat([states[number][:, :-2] for number in self.LAYERS], dim=-1))
        positions = torch.arange(hidden.shape[1])[None]
        mask = create_causal_mask(self.config, hidden, None, None, position_ids=positions)
        joined = torch.cat([layer.input_layernorm(_embedded(model, tokens)), layer.hidden_norm(hidden)], dim=-1)
        found, _ = layer.self_attn(joined, attention_mask=mask, position_embeddings=self.rotary(hidden, positions))
        inner = hidden + found
        inner = inner + layer.mlp(layer.post_attention_layernorm(inner))
        logits: torch.Tensor = self.lm_head(self.norm(inner))
        return logits


class MedusaHead(Head):
    """Medusa with one head, which sees the last states alone and has an output head of its own."""

    method = "medusa"
    configuration: ClassVar[dict[str, Any]] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": 1,
        "num_hidden_layers": 1,
    }

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        block = nn.ModuleDict(
            {"layers": nn.ModuleList([nn.Linear(config.hidden_size, config.hidden_size, bias=False)])}
        )
        self.blocks = nn.ModuleList([block])
        self.lm_heads = nn.ModuleList([nn.Linear(config.hidden_size, config.vocab_size, bias=False)])

    def logits(self, model: Any, tokens: torch.Tensor, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """See ``Head``."""
        hidden = states[-1][:, :-2]
        layer = self.get_submodule("blocks.0.layers.0")
        found: torch.Tensor = self.lm_heads[0](hidden + functional.silu(layer(hidden)))
        return found


class Drafted:
    """A model and its head, in float32, as a trainer holds them.

    Attributes:
        published: what a publisher takes; its names are those of a run once ``rename`` is applied.
    """

    def __init__(self, model: PreTrainedModel, head: Any) -> None:
        self.model, self.head = model, head
        self.published: nn.Module = model
        self.rename: dict[str, str] | None = None
        if head.own_checkpoint:
            self.published, self.rename = nn.ModuleDict({"policy": model, "draft": head}), {"policy.": ""}
        self._generator = torch.Generator().manual_seed(0)
        own = list(head.parameters())
        known = {id(parameter) for parameter in own}
        body = [parameter for parameter in model.parameters() if id(parameter) not in known]
        self._of_model = torch.optim.AdamW(body, lr=2e-3, weight_decay=0.0)
        self._of_head = torch.optim.AdamW(own, lr=4e-3, weight_decay=0.0)

    def train(self, stride: int, steps: int) -> None:
        """Train both on one text."""
        for _ in range(steps):
            starts = torch.randint(0, CYCLE, (8,), generator=self._generator).tolist()
            tokens = torch.tensor([text(stride, start) for start in starts])
            found = self.model(input_ids=tokens, labels=tokens, output_hidden_states=True)
            self._of_model.zero_grad()
            found.loss.backward()
            self._of_model.step()
            logits = self.head.logits(self.model, tokens, tuple(each.detach() for each in found.hidden_states))
            self._of_head.zero_grad()
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten()).backward()
            self._of_head.step()

    def save(self, folder: Path) -> Path:
        """Write what a server is started from: the model in bfloat16, and a head of its own in its subfolder."""
        config = type(self.model.config).from_dict(self.model.config.to_dict())
        state = {name: tensor.to(torch.bfloat16) for name, tensor in self.model.state_dict().items()}
        self.model.save_pretrained(folder, state_dict=state)
        config.dtype = torch.bfloat16
        if not self.head.own_checkpoint:
            config.architectures = ["MiMoForCausalLM"]
        config.save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        if self.head.own_checkpoint:
            own = folder / DRAFT_FOLDER
            own.mkdir()
            told = json.loads((folder / "config.json").read_text()) | self.head.configuration
            (own / "config.json").write_text(json.dumps(told))
            weights = {name: tensor.detach().to(torch.bfloat16) for name, tensor in self.head.named_parameters()}
            save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
        return folder

    def speculation(self, folder: Path) -> dict[str, object]:
        """vLLM's ``speculative_config`` for what ``save`` has written."""
        own = {"model": str(folder / DRAFT_FOLDER)} if self.head.own_checkpoint else {}
        return {"method": self.head.method, "num_speculative_tokens": 1, **own}


def _mimo() -> Drafted:
    model = make_model("qwen2", tie_word_embeddings=False)
    model.config.num_nextn_predict_layers = 1
    head = MimoLayer(model.config)
    model.model.mtp_layers = nn.ModuleList([head])
    return Drafted(model, head)


def _with(head: Callable[[Any], Head]) -> Drafted:
    model = make_model("llama")
    return Drafted(model, head(model.config))


HEADS: dict[str, Callable[[], Drafted]] = {
    "mtp": _mimo,
    "eagle": partial(_with, EagleHead),
    "eagle3": partial(_with, Eagle3Head),
    "medusa": partial(_with, MedusaHead),
}
"""Method of speculative decoding → a model with such a head."""
