"""What the bucket's weights say of the tokens that a server sampled: each version tried on the spans that name it."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from vllm_delta_sync import open_run

BATCH = 32


@dataclass(frozen=True)
class Span:
    """Output tokens ``start`` to ``end`` were sampled by a version."""

    version: int | None
    start: int
    end: int


@dataclass(frozen=True)
class Answered:
    """A finished answer: token ids of prompt and answer, the log probability of each of the latter, and the spans."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    spans: list[Span]


@dataclass
class Fit:
    """One span, and the root mean square difference of its log probabilities for each version that was tried."""

    span: Span
    by_version: dict[int, float] = field(default_factory=dict)

    @property
    def own(self) -> float:
        """Of the version that the span names."""
        return self.by_version[self.span.version or 0]

    @property
    def beside(self) -> list[float]:
        """Of the versions before and after it."""
        return [value for version, value in self.by_version.items() if version != (self.span.version or 0)]

    @property
    def is_best(self) -> bool:
        return self.own < min(self.beside)


def fits_of(answers: Sequence[Answered], url: str, base: Path, told: Callable[[int], None]) -> list[Fit]:
    """Each span that names a version, tried with it and the two beside it.

    Args:
        told: gets each version when it was tried.
    """
    run = open_run(url)
    head = run.head().version
    found: list[Fit] = []
    tried: dict[int, list[tuple[Answered, Fit]]] = defaultdict(list)
    for answer in answers:
        for span in answer.spans:
            if span.version is None or span.start == span.end:
                continue
            found.append(Fit(span))
            for version in range(max(0, span.version - 1), min(head, span.version + 1) + 1):
                tried[version].append((answer, found[-1]))
    disable_progress_bar()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with one_thread():
        for version in sorted(tried):
            weights = {name: tensor.float() for name, tensor in run.tensors(version, base=base)}
            missing, unknown = model.load_state_dict(weights, strict=False)
            if unknown or set(missing) - tied(model):
                raise ValueError(f"version {version} is not this model's: {missing}, {unknown}")
            _try(model, version, tried[version])
            told(version)
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    """For a model as small as this, threads of torch cost more than they bring, and minutes where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tied(model: PreTrainedModel) -> set[str]:
    """Names of parameters that are others under a second name, and so not in a checkpoint."""
    return set(model.state_dict()) - {name for name, _ in model.named_parameters()}


def _try(model: PreTrainedModel, version: int, pairs: Sequence[tuple[Answered, Fit]]) -> None:
    """Put down how well this version explains each span. An answer is computed once, however many spans it has."""
    by_answer: dict[int, tuple[Answered, list[Fit]]] = {}
    for answer, fit in pairs:
        by_answer.setdefault(id(answer), (answer, []))[1].append(fit)
    for group in _batches(sorted(by_answer.values(), key=lambda item: len(item[0].tokens))):
        for (answer, fits), logprobs in zip(group, recompute(model, [answer for answer, _ in group]), strict=True):
            for fit in fits:
                part = slice(fit.span.start, fit.span.end)
                difference = logprobs[part] - np.asarray(answer.logprobs[part])
                fit.by_version[version] = float(np.sqrt(np.mean(difference**2)))


def _batches(items: Sequence[tuple[Answered, list[Fit]]]) -> Iterator[Sequence[tuple[Answered, list[Fit]]]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def recompute(model: PreTrainedModel, answers: Sequence[Answered]) -> list[np.ndarray]:
    """Log probability of each token of each answer, given its prompt and the tokens before."""
    rows = [answer.prompt + answer.tokens for answer in answers]
    # Causal attention needs no mask for padding at the end.
    tokens = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.int64)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    chosen = torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, 1:, None]).squeeze(-1).numpy()
    return [
        chosen[number, len(answer.prompt) - 1 : len(answer.prompt) + len(answer.tokens) - 1]
        for number, answer in enumerate(answers)
    ]
