"""Trainers of the fleet: a model that Adam moves on noise, and the real one, well into a run on real text."""

from pathlib import Path
from typing import Any, Protocol

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.common.noise import NoisyModel, qwen3_config
from benchmarks.common.real_training import RoundedTraining
from benchmarks.fleet.replica import CONTEXT

IDS = {entry: number for number, entry in enumerate(["<pad>", "<eos>", "<unk>", *map(chr, range(32, 93))])}
SIZES = {
    "small": {"layers": 4, "hidden": 256, "inner": 768},
    "full": {"layers": 8, "hidden": 1024, "inner": 3072},
}
"""3.2 M and 100.7 M parameters; beside the small one round trips weigh more than all its bytes."""


class Trainer(Protocol):
    """A model in bfloat16; ``step`` moves it in place."""

    @property
    def model(self) -> PreTrainedModel: ...

    def step(self) -> None: ...

    def save(self, path: Path) -> None:
        """Write a checkpoint directory that vLLM loads, with its tokenizer."""

    def prompts(self) -> list[list[int]]:
        """Token ids that servers are asked to continue."""


class NoisyTrainer(NoisyModel):
    """Over characters, one token for each. Args: size: one of ``SIZES``."""

    def __init__(self, size: str) -> None:
        special: dict[str, Any] = {"pad_token_id": IDS["<pad>"], "eos_token_id": IDS["<eos>"], "bos_token_id": None}
        super().__init__(qwen3_config(**SIZES[size], vocabulary=len(IDS), positions=CONTEXT, **special))

    def save(self, path: Path) -> None:
        tokenizer = Tokenizer(WordLevel(IDS, unk_token="<unk>"))
        tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
        special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
        self.model.save_pretrained(path)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=CONTEXT, **special).save_pretrained(path)

    def prompts(self) -> list[list[int]]:
        return [[IDS[character] for character in text] for text in ("DELTA>", "A FLEET OF FOUR", "0123", "TRAINER")]


class RealTrainer(RoundedTraining):
    """The real model."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def save(self, path: Path) -> None:
        self.model.save_pretrained(path)
        self._tokenizer.save_pretrained(path)

    def prompts(self) -> list[list[int]]:
        texts = ("The capital of France is", "Water boils at", "def add(a, b):", "Once upon a time")
        return [self._tokenizer(text)["input_ids"] for text in texts]
