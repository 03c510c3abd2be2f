"""The soak's own judgement: what it must notice, and what it must not complain of."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.fits import Answered, Span, fits_of, one_thread, recompute
from tests.support.tiny import make_model, make_model_like, save_checkpoint
from tests.tools.soak import proof
from tests.tools.soak.load import covers, read_plain, read_stream
from tests.tools.soak.memory import FEWEST, Sample, growth
from tests.tools.soak.trainer import FAMILY, SEED, steps
from trainer_side import Publisher

PROMPT = 6


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


def samples(slopes: dict[str, float], life: int, count: int) -> list[Sample]:
    """Memory that grows for the first half, and then by so many megabytes a commit, with noise."""
    chance = random.Random(life)
    found = []
    for commit in range(count):
        for name, rate in slopes.items():
            early = min(commit, count // 3) * 3.0
            found.append(Sample(life, name, commit, 500 + early + rate * commit + chance.uniform(-0.2, 0.2)))
    return found


def test_growth_is_that_of_the_last_half_of_the_longest_life() -> None:
    long = samples({"API server": 0.0, "VLLM::Worker": 0.2}, life=2, count=3 * FEWEST)
    found = growth(samples({"API server": 9.0}, life=1, count=FEWEST) + long)
    assert found["API server"] == pytest.approx(0, abs=1)
    assert found["VLLM::Worker"] == pytest.approx(20, abs=1)


def test_short_lives_say_nothing_of_growth() -> None:
    assert growth(samples({"API server": 9.0}, life=1, count=FEWEST - 1)) == {}
    assert growth([]) == {}


@pytest.mark.parametrize(
    ("spans", "whole"),
    [
        ([Span(3, 0, 4), Span(4, 4, 9)], True),
        ([Span(None, 0, 9)], True),
        ([Span(3, 0, 4), Span(4, 5, 9)], False),
        ([Span(3, 0, 4)], False),
        ([Span(3, 1, 9)], False),
        ([], False),
    ],
)
def test_spans_that_leave_a_token_out_are_noticed(spans: list[Span], whole: bool) -> None:
    assert covers(spans, 9) is whole


def test_streamed_and_plain_answers_are_read_alike() -> None:
    spans = {"delta_sync": {"run": "r", "spans": [{"index": 0, "version": 2, "start": 0, "end": 3}]}}
    plain = {"choices": [{"token_ids": [7, 8, 9], "logprobs": {"token_logprobs": [-1.0, -2.0, -3.0]}}], **spans}
    chunks: list[dict[str, Any]] = [
        {"choices": [{"token_ids": [7, 8], "logprobs": {"token_logprobs": [-1.0, -2.0]}}]},
        {"choices": [{"token_ids": [9], "logprobs": {"token_logprobs": [-3.0]}}], **spans},
    ]
    assert read_stream([4], chunks) == read_plain([4], plain)
    with pytest.raises(KeyError, match="delta_sync"):
        read_stream([4], chunks[:1])


def sampled(model: PreTrainedModel, count: int, generator: torch.Generator) -> list[int]:
    """Tokens as a server would sample them from these weights."""
    tokens = torch.randint(3, 200, (1, PROMPT), generator=generator)
    for _ in range(count):
        with torch.no_grad():
            chances = torch.softmax(model(input_ids=tokens).logits[0, -1].float(), -1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)[None]], 1)
    return [int(token) for token in tokens[0]]


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[PreTrainedModel]]:
    """URL of a run of three versions, its base, and the weights of each version, the base's too."""
    folder = tmp_path_factory.mktemp("course")
    model = make_model(FAMILY, seed=SEED)
    base = save_checkpoint(model, folder / "base")
    versions = [make_model_like(model).float()]
    training = steps(model)
    with Publisher(model, bucket=str(folder / "run"), base=base) as publisher:
        for number in range(1, 4):
            next(training)
            publisher.publish(step=number, wait=True)
            versions.append(make_model_like(model).float())
    return str(folder / "run"), base, versions


def answer_of(versions: list[PreTrainedModel], first: int, second: int) -> Answered:
    """Ten tokens by one version and ten by another, as a commit in the middle makes them."""
    row = sampled(versions[second], 20, torch.Generator().manual_seed(second))
    asked = Answered(row[:PROMPT], row[PROMPT:], [], [])
    halves = [recompute(versions[version], [asked])[0] for version in (first, second)]
    logprobs = [float(value) for value in np.concatenate([halves[0][:10], halves[1][10:]])]
    return Answered(asked.prompt, asked.tokens, logprobs, [Span(first, 0, 10), Span(second, 10, 20)])


def test_right_spans_are_proven(course: tuple[str, Path, list[PreTrainedModel]]) -> None:
    url, base, versions = course
    told: list[int] = []
    answers = [answer_of(versions, *pair) for pair in ((1, 2), (2, 3), (0, 1))]
    figures, wrong = proof.findings(fits_of(answers, url, base, told.append))
    assert wrong == []
    assert (figures["spans"], figures["tokens"], figures["own_version_fits_best"]) == (6, 60, 1.0)
    assert told == [0, 1, 2, 3]


def test_a_span_that_names_another_version_is_noticed(course: tuple[str, Path, list[PreTrainedModel]]) -> None:
    url, base, versions = course
    right = answer_of(versions, 1, 2)
    # The commit in the middle is not told of.
    told = Answered(right.prompt, right.tokens, right.logprobs, [Span(1, 0, 20)])
    _, wrong = proof.findings(fits_of([told], url, base, lambda version: None))
    assert any(text.startswith("version 1 does not explain its span of 20 tokens") for text in wrong)


def test_nothing_proven_is_no_proof() -> None:
    assert proof.findings([])[1] == ["no span was proven"]
