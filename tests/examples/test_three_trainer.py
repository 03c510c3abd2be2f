"""The three machines' trainer: gradient, state, what it takes and passes by, and going on after kills."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.demo.policy import load_model
from examples.three_machines import state, trainer
from examples.three_machines.learning import Learner, lay_out, per_token, turns_of
from examples.three_machines.loss import off_policy_loss
from examples.three_machines.state import Consumed, Progress, Store
from examples.three_machines.trajectories import Span, Writer, encode, key_of
from tests.support.three import save_policy, some_batch
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import FormatError

SECONDS = 60
VERSIONS = 4


class Trainings:
    """Trainers in real processes, on one run.

    Attributes:
        run: id. url: of the run. trajectories: URL of what is trained on.
    """

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self._process, self.folder = process, folder
        self.checkpoint = save_policy(folder / "base")
        self.url, self.trajectories = str(folder / "run"), str(folder / "trajectories")
        with Publisher(load_model(self.checkpoint), self.url) as publisher:
            self.run = publisher.run

    def write(self, *versions: int, worker: str = "w1", run: str | None = None) -> None:
        """One batch per version, sampled by it."""
        with open_bucket(self.trajectories) as bucket:
            writer = Writer(bucket, worker)
            for version in versions:
                writer.put(some_batch(writer.number, version, run or self.run, worker))

    def train(self, point: str = "-", versions: int = VERSIONS, **options: Any) -> int:
        """Exit status of a trainer that is killed at a point, if any."""
        settings = {
            "bucket": self.url,
            "trajectories": self.trajectories,
            "checkpoint": self.checkpoint,
            "folder": self.folder / "state",
            "versions": versions,
            "max-staleness": 100,
            "patience": SECONDS,
            **options,
        }
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{self.folder} {point} {flags}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def said(self) -> str:
        """What trainers wrote to standard error."""
        return (self.folder / "errors").read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in (self.folder / "events").read_text().splitlines()]
        return [event for event in found if event["event"] == kind]

    def consumed(self) -> list[Consumed]:
        """Of every version, first to last, as the bucket has it."""
        run = open_run(self.url)
        return [
            Consumed.from_bytes(run.sidecar(version, trainer.SIDECAR), str(version))
            for version in range(1, run.head().version + 1)
        ]

    def fingerprint(self) -> str:
        return str(open_run(self.url).head().fingerprint)


@pytest.fixture(scope="module")
def process() -> "Iterator[subprocess.Popen[str]]":
    """It has imported what takes long; every trainer is a fork of it."""
    command = [sys.executable, "-m", "tests.support.three_killed"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture
def trainings(process: "subprocess.Popen[str]", tmp_path: Path) -> Trainings:
    return Trainings(process, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(process: "subprocess.Popen[str]", tmp_path_factory: pytest.TempPathFactory) -> str:
    """Fingerprint of what comes of the same trajectories without a kill."""
    made = Trainings(process, tmp_path_factory.mktemp("undisturbed"))
    made.write(*[0] * VERSIONS)
    assert made.train() == 0
    return made.fingerprint()


@pytest.mark.parametrize(
    "point",
    [
        "save:before:3",
        "save:after:3",
        "manifest:after:2",
        "flush:after:3",
        *(
            pytest.param(point, marks=pytest.mark.slow)
            for point in (
                "gradient:before:2",
                "flush:before:3",
                "step:after:2",
                "sync:after:3",
                "sync:before:4",
                "publish:after:2",
                "sidecar:after:2",
                "object:after:2",
                "manifest:before:2",
                "head:before:2",
            )
        ),
    ],
)
def test_a_killed_trainer_goes_on_and_each_trajectory_is_trained_on_once(
    trainings: Trainings, undisturbed: str, point: str
) -> None:
    trainings.write(*[0] * VERSIONS)
    assert trainings.train(point) == -9
    assert trainings.train() == 0
    consumed = trainings.consumed()
    assert [one.step for one in consumed] == list(range(1, VERSIONS + 1))
    assert [one.trained for one in consumed] == [[key_of("w1", number)] for number in range(VERSIONS)]
    assert trainings.fingerprint() == undisturbed


def test_a_trainer_killed_twice_in_a_row_publishes_what_it_saved_and_no_more(
    trainings: Trainings, undisturbed: str
) -> None:
    trainings.write(*[0] * VERSIONS)
    assert trainings.train("save:after:3") == -9
    assert trainings.train("manifest:before:1") == -9
    assert trainings.train("manifest:after:1") == -9
    assert trainings.train() == 0
    assert [one.trained for one in trainings.consumed()] == [[key_of("w1", number)] for number in range(VERSIONS)]
    assert trainings.fingerprint() == undisturbed


def test_what_is_too_old_by_its_oldest_span_is_passed_by_and_counted(trainings: Trainings) -> None:
    trainings.write(0, 0, 0)
    assert trainings.train(versions=2, max_staleness=1) == 0
    trainings.write(1, 2)
    assert trainings.train(versions=3, max_staleness=1) == 0
    first, second, third = trainings.consumed()
    assert (first.trained, second.trained) == ([key_of("w1", 0)], [key_of("w1", 1)])
    assert (third.stale, third.trained) == ([key_of("w1", 2)], [key_of("w1", 3)])
    assert [event["key"] for event in trainings.events("stale")] == [key_of("w1", 2)]
    assert trainings.events("step")[-1]["ages"].keys() == {"1"}


def test_what_is_no_batch_of_this_run_is_set_aside_and_training_goes_on(trainings: Trainings) -> None:
    trainings.write(0)
    trainings.write(0, worker="other", run="f" * 32)
    trainings.write(9, worker="prophet")
    with open_bucket(trainings.trajectories) as bucket:
        bucket.put(key_of("broken", 0), b"nothing of the kind")
        batch = some_batch(0, 0, trainings.run, "alien")
        alien = batch.games[0].turns[-1].output
        alien[-1] = 4000
        bucket.put(batch.key, encode(batch))
    assert trainings.train(versions=1) == 0
    trainings.write(1)
    assert trainings.train(versions=2) == 0
    consumed = trainings.consumed()
    assert [one.trained for one in consumed] == [[key_of("w1", 0)], [key_of("w1", 1)]]
    aside = {key_of(worker, 0) for worker in ("alien", "broken", "other", "prophet")}
    assert set(consumed[0].set_aside + consumed[1].set_aside) == aside
    reasons = {event["key"].split("/")[1]: event["why"] for event in trainings.events("set_aside")}
    assert "token ids" not in reasons["broken"]
    assert "is not a zstd frame" in reasons["broken"]
    assert "is of run ffff" in reasons["other"]
    assert "names version 9; the newest is" in reasons["prophet"]
    assert "up to id 4000; the policy knows 64 ids" in reasons["alien"]


def test_a_step_may_take_batches_of_several_workers(trainings: Trainings) -> None:
    for worker in ("a", "b"):
        trainings.write(0, 0, worker=worker)
    assert trainings.train(versions=2, take=2) == 0
    assert [one.trained for one in trainings.consumed()] == [
        [key_of("a", 0), key_of("b", 0)],
        [key_of("a", 1), key_of("b", 1)],
    ]


def test_without_trajectories_it_ends_and_nothing_is_published(trainings: Trainings) -> None:
    before = trainings.fingerprint()
    assert trainings.train(versions=1, patience=0.1) == 1
    assert "no trajectory to train on came to" in trainings.said()
    assert trainings.fingerprint() == before


def test_a_state_that_is_not_of_the_runs_newest_version_is_refused(trainings: Trainings) -> None:
    trainings.write(0, 0, 0)
    assert trainings.train(versions=1) == 0
    older = (trainings.folder / "state" / state.NAME).read_bytes()
    assert trainings.train(versions=3) == 0
    before = trainings.fingerprint()
    (trainings.folder / "state" / state.NAME).write_bytes(older)
    assert trainings.train(versions=4) == 1
    assert f"is of step 1 of run {trainings.run}, and {trainings.url} holds run {trainings.run} up to step 3; give" in (
        trainings.said()
    )
    (trainings.folder / "state" / state.NAME).unlink()
    assert trainings.train(versions=4) == 1
    assert trainings.fingerprint() == before


def test_a_state_of_another_model_is_refused(trainings: Trainings) -> None:
    trainings.write(0)
    assert trainings.train(versions=1) == 0
    larger = save_policy(trainings.folder / "larger", layers=3)
    assert trainings.train(versions=2, checkpoint=larger) == 1
    assert f"is not of the model in {larger}" in trainings.said()


def test_a_state_is_replaced_whole_and_restores_the_next_step(tmp_path: Path) -> None:
    checkpoint = save_policy(tmp_path / "base")
    store = Store(tmp_path)
    assert store.load() is None
    learner = Learner(load_model(checkpoint), rate=1e-3, eps=1e-8)
    for number in range(3):
        learner.gradient([some_batch(number)], version=0)
        learner.step()
        if number == 1:
            store.save(Progress(run="r", step=2, cursor={"w1": 2}), learner.masters.tensors())
            drawn = torch.rand(3)
    again = Learner(load_model(checkpoint), rate=1e-3, eps=1e-8)
    held = store.load()
    assert held is not None
    assert (held[0].step, held[0].cursor) == (2, {"w1": 2})
    assert torch.equal(torch.rand(3), drawn)
    again.masters.restore(held[1])
    again.gradient([some_batch(2)], version=0)
    again.step()
    for one, other in zip(learner.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [state.NAME]


@pytest.mark.parametrize("data", [b"", b"x" * 100])
def test_a_file_that_is_no_state_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / state.NAME).write_bytes(data)
    with pytest.raises(FormatError, match="is not a trainer's state"):
        Store(tmp_path).load()


def test_a_game_is_one_sequence_in_which_its_guesses_alone_are_marked() -> None:
    games = [[([3, 4], [5, 6]), ([3, 4, 5, 6, 9, 4], [7, 8])], [([3, 4], [5, 6])]]
    padded = lay_out(games)
    assert padded.tokens.tolist() == [[3, 4, 5, 6, 9, 4, 7, 8], [3, 4, 5, 6, 0, 0, 0, 0]]
    assert [padded.tokens[row, 1:][padded.answers[row]].tolist() for row in range(2)] == [[5, 6, 7, 8], [5, 6]]


def test_each_token_keeps_its_own_logprob_and_age() -> None:
    batch = some_batch(version=3)
    game = batch.games[0]
    turn = game.turns[0].model_copy(
        update={"spans": [Span(version=3, start=0, end=1), Span(version=5, start=1, end=3)]}
    )
    crossing = game.model_copy(update={"turns": [turn, *game.turns[1:]]})
    answers = lay_out([turns_of(crossing)]).answers
    sampled, ages = per_token([crossing], answers, version=6)
    torch.testing.assert_close(sampled[answers], torch.tensor([value for one in game.turns for value in one.logprobs]))
    assert ages[answers].tolist()[:3] == [3, 1, 1]
    assert set(ages[answers].tolist()[3:]) <= {3}


def test_without_age_the_gradient_is_the_advantage_over_the_token_count() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -0.7, -9.0]], requires_grad=True)
    answers = torch.tensor([[True, True, False], [True, True, False]])
    ages = torch.zeros(answers.shape, dtype=torch.int64)
    loss = off_policy_loss(logprobs, logprobs.detach(), torch.tensor([1.0, -2.0]), answers, ages)
    loss.value.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.25, -0.25, 0.0], [0.5, 0.5, 0.0]]))
    assert (loss.truncated, loss.drift) == (0.0, {0: 0.0})


def test_weights_are_truncated_above_and_never_pass_a_gradient_themselves() -> None:
    ratio = torch.tensor([[0.5, 1.5, 8.0]])
    logprobs = torch.full((1, 3), -1.0, requires_grad=True)
    answers = torch.ones(1, 3, dtype=torch.bool)
    ages = torch.tensor([[0, 1, 1]])
    loss = off_policy_loss(logprobs, -1.0 - ratio.log(), torch.tensor([3.0]), answers, ages, truncation=2.0)
    loss.value.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.5, -1.5, -2.0]]))
    assert loss.truncated == pytest.approx(1 / 3)
    assert loss.drift == pytest.approx({0: 0.6931, 1: (0.4055 + 2.0794) / 2}, abs=1e-3)


def test_importance_weights_make_the_gradient_of_another_version_the_own_one() -> None:
    """In expectation: over all outcomes of a policy, weighted by how likely the older version was to sample each."""
    now = torch.tensor([0.3, -0.2, 0.1, 0.5], requires_grad=True)
    then = torch.tensor([0.1, 0.2, -0.3, 0.4]).log_softmax(0)
    rewards = torch.tensor([1.0, -1.0, 0.5, 2.0])
    answers = torch.ones(1, 1, dtype=torch.bool)
    ages = torch.ones(1, 1, dtype=torch.int64)
    total = torch.zeros(())
    for outcome in range(4):
        logprob = now.log_softmax(0)[outcome].view(1, 1)
        loss = off_policy_loss(
            logprob, then[outcome].view(1, 1), rewards[outcome].view(1), answers, ages, truncation=1e9
        )
        total = total + then[outcome].exp() * loss.value
    (found,) = torch.autograd.grad(total, now)
    (expected,) = torch.autograd.grad(-(now.softmax(0) * rewards).sum(), now)
    torch.testing.assert_close(found, expected)
