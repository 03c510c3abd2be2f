"""The toy policy: a 3.2 M parameter Qwen3 over characters, its tokenizer and its supervised start.

Forward and backward run in bf16, the dtype that is served and published, so the trainer computes with
exactly the numbers the server computes with; where the processor has no instructions for that, products are
computed in fp32 and rounded. The optimizer works on fp32 masters, as a large run would.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.demo import task
from examples.demo.characters import EOS, EOS_ID, IDS, PAD, PAD_ID, UNKNOWN, VOCABULARY, encode

WARM_UP_TARGET = 0.28
WARM_UP_BATCH = 128
WARM_UP_RATE = 1.5e-3
WARM_UP_LIMIT = 600
SLOW_IN_BF16 = ("DEFAULT", "AVX2")
"""Processors on which torch multiplies bf16 matrices element by element, ten times slower than fp32 ones."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, 64 entries, nothing added around a text."""
    tokenizer = Tokenizer(WordLevel(IDS, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, model_max_length=64
    )


def make_model(seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised policy, all parameters bf16, embeddings tied."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        dtype="bfloat16",
        attn_implementation="eager",
    )
    return _quick(Qwen3ForCausalLM(config).to(torch.bfloat16))


def load_model(path: Path) -> Qwen3ForCausalLM:
    """The policy of a checkpoint directory, as ``make_model`` gives it."""
    return _quick(Qwen3ForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager"))


def _quick(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The model itself, multiplying in the way that this processor is not slow at."""
    if torch.backends.cpu.get_cpu_capability() in SLOW_IN_BF16:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.forward = partial(_multiply, module)  # type: ignore[method-assign]
    return model


def _multiply(layer: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    """What a layer without bias computes, in fp32 and rounded at the end."""
    return torch.nn.functional.linear(inputs.float(), layer.weight.float()).to(inputs.dtype)


class Masters:
    """AdamW on fp32 copies of a bf16 model's parameters.

    ``step`` moves the gradients of the bf16 parameters to the masters, updates those, and rounds them back
    (to nearest even) into the model in place.
    """

    def __init__(self, model: torch.nn.Module, rate: float, eps: float) -> None:
        self._served = list(model.parameters())
        self._masters = [parameter.detach().float().requires_grad_() for parameter in self._served]
        self._optimizer = torch.optim.AdamW(self._masters, lr=rate, eps=eps, weight_decay=0.0)

    def step(self, max_norm: float) -> float:
        """Update the model once; returns the norm of the gradient before it was clipped to ``max_norm``."""
        for served, master in zip(self._served, self._masters, strict=True):
            master.grad = None if served.grad is None else served.grad.float()
            served.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, max_norm)
        self._optimizer.step()
        with torch.no_grad():
            for served, master in zip(self._served, self._masters, strict=True):
                served.copy_(master)
        return float(norm)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that ``restore`` needs, by name: fp32 masters, and AdamW's moments and counts once there was a step."""
        kept = {f"master.{number}": master.detach() for number, master in enumerate(self._masters)}
        for number, moments in self._optimizer.state_dict()["state"].items():
            kept |= {f"adam.{number}.{name}": value for name, value in moments.items()}
        return kept

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from what ``tensors`` gave, and round the masters into the model.

        Raises:
            KeyError, RuntimeError, ValueError: a master is missing, has another shape, or is one too many.
        """
        if f"master.{len(self._masters)}" in tensors:
            raise ValueError(f"there are more than the model's {len(self._masters)} parameters")
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "adam":
                index, _, moment = rest.partition(".")
                moments.setdefault(int(index), {})[moment] = value
        with torch.no_grad():
            for number, (served, master) in enumerate(zip(self._served, self._masters, strict=True)):
                master.copy_(tensors[f"master.{number}"])
                served.copy_(master)
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences: prompt and completion in a row.

    ``tokens`` (n, length) int64; ``answers`` (n, length - 1) bool marks the positions whose *next* token the
    policy wrote. Causal attention needs no mask for padding on the right.
    """

    tokens: torch.Tensor
    answers: torch.Tensor


def make_batch(prompts: Iterable[list[int]], completions: Iterable[list[int]]) -> Batch:
    """Lay out prompt and completion token ids as one padded batch."""
    pairs = list(zip(prompts, completions, strict=True))
    length = max(len(prompt) + len(completion) for prompt, completion in pairs)
    tokens = torch.full((len(pairs), length), PAD_ID, dtype=torch.int64)
    answers = torch.zeros((len(pairs), length - 1), dtype=torch.bool)
    for row, (prompt, completion) in enumerate(pairs):
        end = len(prompt) + len(completion)
        tokens[row, :end] = torch.tensor(prompt + completion)
        answers[row, len(prompt) - 1 : end - 1] = True
    return Batch(tokens, answers)


def next_token_logprobs(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Log-probability of every next token, (n, length - 1) float32; padding positions are meaningless."""
    logits = model(input_ids=batch.tokens[:, :-1], use_cache=False).logits.float()
    return torch.log_softmax(logits, dim=-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)


def right_answers(rng: random.Random, count: int) -> Batch:
    """``count`` fresh words with their right answers."""
    words = [task.random_word(rng) for _ in range(count)]
    prompts = [encode(task.prompt_of(word)) for word in words]
    return make_batch(prompts, [[*encode(task.answer_of(word)), EOS_ID] for word in words])


def warm_up(model: torch.nn.Module, seed: int, report: Callable[[int, float], None]) -> float:
    """Teach the policy the task until it answers about 28 % of the words right, and stop there.

    Reinforcement learning needs a policy that is right now and then. Every batch is fresh, so its mean
    probability of the exact answer, measured before the update, is an honest estimate. Returns the last one.
    ``report`` gets (step, probability).
    """
    rng = random.Random(seed)
    masters = Masters(model, WARM_UP_RATE, eps=1e-8)
    chance = 0.0
    for step in range(WARM_UP_LIMIT):
        batch = right_answers(rng, WARM_UP_BATCH)
        logprobs = next_token_logprobs(model, batch)
        chance = float((logprobs.detach() * batch.answers).sum(dim=1).exp().mean())
        report(step, chance)
        if chance >= WARM_UP_TARGET:
            break
        loss = -(logprobs * batch.answers).sum() / batch.answers.sum()
        loss.backward()
        masters.step(max_norm=1.0)
    return chance


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Write a checkpoint directory that transformers and vLLM load: bf16 safetensors, config, tokenizer."""
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
