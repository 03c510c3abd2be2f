"""What the bucket's weights say of the tokens that a server sampled."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.soak.load import Answered, Span
from vllm_delta_sync import open_run

BATCH = 32
TOLERANCE = 0.01
"""Root mean square of the differences in a span that the right version may have: bfloat16 against float32.

Measured over 2,502 spans: 0.0012 in the median, 0.0043 at most; of the versions beside it 0.024 in the median."""
BEST_SHARE = 0.95
"""Of the spans, so many have to fit their own version better than the ones beside it."""


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


def findings(fits: Sequence[Fit]) -> tuple[dict[str, float], list[str]]:
    """Figures for the report, and what is wrong."""
    if not fits:
        return {"spans": 0}, ["no span was proven"]
    own = np.array([fit.own for fit in fits])
    beside = np.array([min(fit.beside) for fit in fits])
    best = float(np.mean([fit.is_best for fit in fits]))
    figures = {
        "spans": len(fits),
        "tokens": sum(fit.span.end - fit.span.start for fit in fits),
        "versions": len({fit.span.version for fit in fits}),
        "difference_median": float(np.median(own)),
        "difference_largest": float(own.max()),
        "neighbour_median": float(np.median(beside)),
        "own_version_fits_best": best,
        "neighbours_would_be_noticed": float(np.mean(beside > TOLERANCE)),
    }
    wrong = [
        f"version {fit.span.version} does not explain its span of {fit.span.end - fit.span.start} tokens: "
        f"{ {version: round(value, 4) for version, value in fit.by_version.items()} }"
        for fit in fits
        if fit.own > TOLERANCE
    ]
    if best < BEST_SHARE:
        wrong.append(f"only {best:.0%} of the spans fit their own version better than those beside it")
    return figures, wrong
