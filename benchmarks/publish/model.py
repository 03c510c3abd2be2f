"""The trainings of ``benchmarks.publish``: Qwen3 in bfloat16 under AdamW, whole or sharded by FSDP2; the real model.

Weights of Qwen3 are as they are before the first step of a training, tokens are random: what counts is that each step
is a real one of the optimizer, which moves every weight by about its rate, and so changes the bits of those that are
small.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.common.noise import qwen3_config
from benchmarks.common.real_training import RoundedTraining
from vllm_delta_sync.tensors.changes import Bits
from vllm_delta_sync.tensors.torch_views import bits_of

RATE = 2e-6
"""Changes about 1 % of the weights in a step."""


@dataclass(frozen=True)
class Size:
    """A model, and its batch: so many sequences of so many tokens in each process."""

    hidden: int
    inner: int
    layers: int
    vocabulary: int
    sequences: int
    tokens: int

    def config(self) -> Qwen3Config:
        """Untied, so that a gathered copy has each tensor once without being sorted out first."""
        return qwen3_config(
            self.hidden, self.inner, self.layers, self.vocabulary, self.tokens, tie_word_embeddings=False
        )


SIZES = {
    "7 M": Size(hidden=256, inner=768, layers=6, vocabulary=4096, sequences=2, tokens=32),
    "0.1 B": Size(hidden=768, inner=2304, layers=12, vocabulary=16_384, sequences=2, tokens=128),
    "0.5 B": Size(hidden=1024, inner=3072, layers=28, vocabulary=65_536, sequences=1, tokens=16),
}


class Training:
    """A model and its optimizer; ``step`` moves it once.

    Attributes:
        model: what a publisher is given; sharded over all processes if there is a group of them.
    """

    def __init__(self, size: Size, rank: int, ranks: int) -> None:
        torch.manual_seed(0)
        self.model = Qwen3ForCausalLM(size.config()).to(torch.bfloat16)
        self._rank, self._sharded = rank, ranks > 1
        if self._sharded:
            mesh = init_device_mesh("cpu", (ranks,))
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
        self._generator = torch.Generator().manual_seed(rank)
        self._size = size

    def step(self) -> None:
        """Forward, backward, optimizer."""
        size = self._size
        tokens = torch.randint(size.vocabulary, (size.sequences, size.tokens), generator=self._generator)
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def held(self) -> Iterator[Bits]:
        """Bits of what this process holds of each parameter; they share its memory."""
        for parameter in self.model.parameters():
            yield bits_of(parameter.to_local() if self._sharded else parameter)

    def save(self, folder: Path) -> None:
        """A checkpoint as trainers write one: ``save_pretrained``, or gathered and written by the first process."""
        if not self._sharded:
            self.model.save_pretrained(folder)
            return
        from safetensors.torch import save_file

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        gathered = get_model_state_dict(self.model, options=options)
        if self._rank == 0:
            folder.mkdir()
            tensors = {name: value for name, value in gathered.items() if isinstance(value, torch.Tensor)}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class WholeRealTraining(RoundedTraining):
    """The real model under AdamW with float32 masters, with what ``Training`` has."""

    def held(self) -> Iterator[Bits]:
        """Bits of each parameter; they share its memory."""
        return map(bits_of, self.model.parameters())

    def save(self, folder: Path) -> None:
        """``save_pretrained``."""
        self.model.save_pretrained(folder)
