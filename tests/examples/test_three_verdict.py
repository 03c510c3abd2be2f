"""The verdict of the three-machines example: what it finds in a store, and that each claim of it can fail."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from examples.demo.policy import load_model
from examples.fleet.record import Full
from examples.three_machines import fits, tables, verdict
from examples.three_machines.__main__ import parse_options
from examples.three_machines.reach import Attempt
from examples.three_machines.record import Kill, Record
from examples.three_machines.settings import PARTS, ROLLOUT, TRAINER
from examples.three_machines.state import Consumed
from examples.three_machines.trainer import SIDECAR
from examples.three_machines.trajectories import Batch, Span, Writer, key_of
from tests.support.three import save_policy, some_batch
from trainer_side import Publisher
from vllm_delta_sync.bucket import open_bucket

VERSIONS = 4
OPTIONS = replace(parse_options([]), versions=VERSIONS, max_staleness=1)


def key(number: int) -> str:
    return key_of("w1", number)


def sampled_by(model: PreTrainedModel, batch: Batch, told: int | None = None) -> Batch:
    """The batch with the log-probs that a model gives its tokens; ``told``: version that its spans name instead."""
    games = []
    for game in batch.games:
        answered = [fits.Answered(turn.prompt, turn.output, [], []) for turn in game.turns]
        turns = [
            turn.model_copy(
                update={
                    "logprobs": [min(0.0, float(value)) for value in logprobs],
                    "spans": [
                        Span(version=span.version if told is None else told, start=span.start, end=span.end)
                        for span in turn.spans
                    ],
                }
            )
            for turn, logprobs in zip(game.turns, fits.recompute(model, answered), strict=True)
        ]
        games.append(game.model_copy(update={"turns": turns}))
    version = batch.lowest if told is None else told
    return batch.model_copy(update={"games": games, "lowest": version, "highest": version})


class Story:
    """A run of four versions, as a trainer of three machines leaves it: version n was trained on batch n - 1.

    Attributes:
        url, trajectories: where it lies. checkpoint: of the last version. versions: the weights of each.
    """

    def __init__(self, folder: Path) -> None:
        base = save_policy(folder / "base")
        self.url, self.trajectories = str(folder / "run"), str(folder / "games")
        self.checkpoint = folder / "checkpoint"
        model = load_model(base)
        torch.manual_seed(5)
        with Publisher(model, self.url) as publisher, open_bucket(self.trajectories) as bucket:
            writer = Writer(bucket, "w1")
            for version in range(VERSIONS):
                with fits.one_thread():
                    served = load_model(base).float()
                    served.load_state_dict({name: part.float() for name, part in model.state_dict().items()})
                    writer.put(sampled_by(served, some_batch(version, version, publisher.run)))
                for parameter in model.parameters():
                    parameter.data += 0.02 * torch.randn_like(parameter)
                consumed = Consumed(step=version + 1, trained=[key(version)])
                publisher.publish(version + 1, wait=True, sidecars={SIDECAR: consumed.to_bytes()})
        model.save_pretrained(self.checkpoint)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return Story(tmp_path_factory.mktemp("story"))


@pytest.fixture
def found(story: Story) -> verdict.Found:
    return verdict.read_store(story.url, story.trajectories)


def record(found: verdict.Found) -> Record:
    """What was seen of a run in which everything was in order."""
    made = Record(OPTIONS)
    made.scan = {"verdict": True, "fingerprint": found.head}
    made.looks, made.seen, made.read = 3, Counter({TRAINER: 5, ROLLOUT: 6}), 4
    made.attempts = [Attempt(ROLLOUT, ROLLOUT, True, "it answers"), Attempt(TRAINER, ROLLOUT, False, "no way")]
    made.called = {version: 10.0 * version for version in range(1, VERSIONS + 1)}
    for version in range(VERSIONS + 1):
        made.serve(version, 10.0 * version + 1)
    made.kills = [Kill(part, 1, 1.0, 2.0, 5.0, 2) for part in PARTS]
    made.passed = {name: {"up": 1000, "down": 2000} for name in (TRAINER, ROLLOUT)}
    made.training_seconds = 40.0
    made.full = Full(2000, 0.0, 3.0, 1.0, {ROLLOUT: {"up": 5, "down": 2200}})
    return made


def test_a_run_in_order_holds(story: Story, found: verdict.Found) -> None:
    made = record(found)
    verdict.judge(made, found, story.checkpoint)
    assert made.wrong == []
    assert made.claims == dict.fromkeys(
        (
            *("weights_exact", "never_connected", "told_nothing", "went_on", "trained_once"),
            *("none_too_stale", "versions_explain_tokens", "no_way_between"),
        ),
        True,
    )
    assert [version.batches for version in made.versions] == [1] * VERSIONS
    assert [version.staleness for version in made.versions] == [0] * VERSIONS
    summary = made.summary(60.0)
    assert json.loads(json.dumps(summary)) == summary
    assert summary["fresh_seconds"] == {"median": 1.0, "longest": 1.0}


def test_each_claim_can_fail(story: Story, found: verdict.Found) -> None:
    made = record(found)
    made.scan["fingerprint"] = "0" * 32
    made.found["trainer and rollout are joined"] += 1
    made.told.append("trainer was given 10.77.0.6")
    made.kills[1].going = None
    made.attempts[1] = Attempt(TRAINER, ROLLOUT, True, "it answers")
    lost = {**found.consumed, 2: Consumed(step=2, trained=[key(0)])}
    early = sampled_by(load_model(story.checkpoint).float(), found.batches[key(3)], told=3)
    wrong = replace(
        found, consumed={**lost, 3: Consumed(step=3, trained=[key(3)])}, batches={**found.batches, key(3): early}
    )
    verdict.judge(made, wrong, story.checkpoint)
    assert not any(made.claims.values()), made.claims
    assert "it did not go on after worker was killed" in made.wrong
    assert f"{key(0)} was consumed 2 times" in made.wrong
    assert f"{key(2)} was lost: later ones were consumed" in made.wrong
    assert f"{key(3)}, of versions 3 to 3, was trained on by version 2" in made.wrong


def test_who_was_not_looked_at_proves_nothing(found: verdict.Found) -> None:
    blind = record(found)
    blind.seen, blind.attempts, blind.read = Counter({TRAINER: 5}), [], 0
    assert verdict.not_connected(blind) == ["no connection of rollout was seen at 3 looks"]
    assert verdict.ways(blind) == ["no attempt was made"]


@pytest.mark.parametrize(
    ("consumed", "text"),
    [
        ({1: Consumed(step=1, trained=[key(0), key(0)])}, "was consumed 2 times"),
        ({1: Consumed(step=1, trained=[key(0)], stale=[key(0)])}, "was consumed 2 times"),
        ({1: Consumed(step=1, trained=[key(9)])}, "was consumed, and is not there"),
        ({1: Consumed(step=1, set_aside=[key(0)])}, "was set aside"),
        ({1: Consumed(step=1, trained=[key(1)])}, f"{key(0)} was lost"),
        ({1: Consumed(step=2, trained=[key(0)])}, "steps do not follow each other: [2]"),
    ],
)
def test_what_is_not_trained_on_once_is_named(found: verdict.Found, consumed: dict[int, Consumed], text: str) -> None:
    assert verdict.trained_once(replace(found, consumed=consumed))[0].find(text) >= 0
    assert verdict.trained_once(replace(found, consumed={1: Consumed(step=1, trained=[key(0)])})) == []


def test_what_was_played_for_another_run_is_named(found: verdict.Found) -> None:
    foreign = {**found.batches, key(9): some_batch(9, 0, "f" * 32)}
    assert verdict.trained_once(replace(found, batches=foreign)) == [f"{key(9)} is of run {'f' * 32}"]


def test_too_stale_means_more_than_the_setting(found: verdict.Found) -> None:
    late = replace(found, consumed={3: Consumed(step=3, trained=[key(1)], stale=[key(0)])})
    assert verdict.too_stale(late, 1) == []
    (text,) = verdict.too_stale(late, 0)
    assert text.startswith(f"{key(1)}, of versions 1 to 1, was trained on by version 2")
    (text,) = verdict.too_stale(late, 2)
    assert text == f"{key(0)}, of version 0, was passed by as too old at 2"


def test_a_version_that_did_not_sample_the_tokens_does_not_explain_them(story: Story, found: verdict.Found) -> None:
    explained = verdict.explain(found, story.checkpoint)
    assert [one.version for one in explained] == list(range(VERSIONS))
    assert verdict.unexplained(explained) == []
    batches = dict(found.batches)
    batches[key(1)] = sampled_by(load_model(story.checkpoint).float(), batches[key(1)])
    told = verdict.explain(replace(found, batches=batches), story.checkpoint)
    (text,) = verdict.unexplained(told)
    assert text.startswith("version 1 explains its ")
    assert verdict.unexplained([]) == ["no trajectory was trained on"]


def test_the_time_to_fresh_leaves_out_what_a_kill_delayed(found: verdict.Found) -> None:
    made = record(found)
    made.kills = [Kill(ROLLOUT, 2, 20.5, 25.0, 35.0, 3)]
    assert set(made.fresh()) == {1, 4}
    made.kills = [Kill("environment", 2, 20.5, 25.0, 35.0, 3)]
    assert set(made.fresh()) == {1, 2, 3, 4}


def test_a_server_that_jumps_has_served_what_lies_between() -> None:
    made = Record(OPTIONS)
    for version, at in ((0, 1.0), (3, 2.0), (2, 9.0), (4, 3.0)):
        made.serve(version, at)
    assert made.served == {0: 1.0, 1: 2.0, 2: 2.0, 3: 2.0, 4: 3.0}


def test_tables_say_what_it_cost(story: Story, found: verdict.Found) -> None:
    made = record(found)
    verdict.judge(made, found, story.checkpoint)
    text = tables.markdown(made)
    assert "| full weights, stored and fetched | 2.2 kB | 4.00 |" in text
    assert "| 4.00 × |" in text
    assert "| environment | 1 | 4.0 s |" in text
    assert "| trainer | 1.0 kB | 2.0 kB |" in text
    made.kills[0].going = None
    assert "| environment | 1 | never |" in tables.markdown(made)
