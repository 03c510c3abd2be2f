"""The real model as a trainer of the fleet: its own steps of AdamW, on real text, as well into a run."""

from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.common.real_training import RoundedTraining

PROMPTS = ("The capital of France is", "Water boils at", "def add(a, b):", "Once upon a time")


class RealTrainer:
    """``RoundedTraining``, and what servers need beside the weights: a folder with a tokenizer, and prompts."""

    def __init__(self, checkpoint: Path) -> None:
        training = RoundedTraining(checkpoint)
        self.model, self.step = training.model, training.step
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def save(self, path: Path) -> None:
        """Write a checkpoint directory that vLLM loads."""
        self.model.save_pretrained(path)
        self._tokenizer.save_pretrained(path)

    def prompts(self) -> list[list[int]]:
        """Token ids of some beginnings."""
        return [self._tokenizer(text)["input_ids"] for text in PROMPTS]
