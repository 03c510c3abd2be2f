"""Training of the real model: ``RealTraining``; ``RoundedTraining`` for what needs a bfloat16 model beside it.

AdamW (weight decay 0, gradients clipped to norm 1) moves float32 masters of SmolLM2-135M on English text that comes
with Python, 256 tokens a step. A trainer that loads a bfloat16 checkpoint has masters on the numbers of bfloat16
themselves, and until they have left those, few weights change. After hundreds of steps they lie anywhere between:
``spread`` draws them there, so that the served bits stay those of the checkpoint. Which weights cross a rounding
boundary is decided by the rate and by the scatter of gradients, and not by what is learnt.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

TOKENS, STRIDE = 256, 1000
"""Tokens of a step, and how many characters further the next one begins."""
MAX_NORM = 1.0
SEED = 0
MANTISSA = 0x007F
HALF_CELL = 0x8000
"""A bfloat16 number's rounding cell reaches so many float32 numbers up and down."""
SETTLING_STEPS = 7
"""Adam's first steps are longer than the rest."""


def spread(weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Float32 masters, uniform within the cells that round to these bfloat16 weights, ends left out; zeros stay."""
    bits = weights.to(torch.bfloat16).float().view(torch.int32)
    # Below a power of two a cell is half as wide, with as many float32 numbers, which lie twice as close there.
    is_power = (bits >> 16) & MANTISSA == 0
    least = torch.where(is_power, -HALF_CELL // 2, -HALF_CELL) + 1
    drawn = torch.rand(bits.shape, generator=generator, dtype=torch.float64)
    offset = (least + (drawn * (HALF_CELL - least))).floor().int()
    offset = torch.where(is_power & (offset < 0), 2 * offset, offset)
    return torch.where(bits & 0x7FFFFFFF == 0, bits, bits + offset).view(torch.float32)


class RealTraining:
    """The optimizer and the text of a training.

    Attributes:
        masters: by name, in the order of names.
    """

    def __init__(self, weights: Path, tokenizer: Path, rate: float, settled: bool) -> None:
        """Start at the checkpoint in ``weights``; if ``settled``, anywhere in the cells that round to it."""
        from pydoc_data.topics import topics

        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self.masters = dict(sorted(self._model.named_parameters()))
        if settled:
            generator = torch.Generator().manual_seed(SEED)
            with torch.no_grad():
                for master in self.masters.values():
                    master.copy_(spread(master, generator))
        self._optimizer = torch.optim.AdamW(self.masters.values(), lr=rate, weight_decay=0.0)
        self._text = "\n\n".join(topic for _, topic in sorted(topics.items()))
        self._steps = 0

    def step(self) -> None:
        """Forward, backward and optimizer, once."""
        self._steps += 1
        start = STRIDE * self._steps % (len(self._text) - 2 * STRIDE)
        tokens = self._tokenizer(self._text[start : start + 2 * STRIDE], return_tensors="pt").input_ids[:, :TOKENS]
        self._model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.masters.values(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()


class RoundedTraining:
    """A training well into a run at learning rate 1e-6, rounded into a bfloat16 model in place after each step.

    Attributes:
        model: what is published.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._training = RealTraining(checkpoint, checkpoint, rate=1e-6, settled=True)
        for _ in range(SETTLING_STEPS):
            self._training.step()
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        self._round()

    def step(self) -> None:
        """Take a step and round it."""
        self._training.step()
        self._round()

    def _round(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self._training.masters[name])
