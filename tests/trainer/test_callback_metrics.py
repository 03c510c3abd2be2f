"""What loggers, and loops of one's own, are told of each version."""

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import DefaultFlowCallback, PreTrainedModel, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from tests.support.publishing import assert_holds
from tests.support.tiny import make_model, save_checkpoint
from tests.support.trainers import (
    FIGURES,
    SIZES,
    HeldBucket,
    Logged,
    Settled,
    checkpoint_of,
    steps_of,
    trainer_of,
)
from trainer_side import DeltaSyncCallback, Publisher
from trainer_side import lag as lag_module
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.chain import Run, open_run
from vllm_delta_sync.upkeep.leases import write_lease

DOCUMENT = Path(__file__).parents[2] / "docs" / "trainer.md"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model("qwen3", **SIZES)


def test_all_loggers_get_the_metrics_of_each_version(model: PreTrainedModel, url: str, tmp_path: Path) -> None:
    """Also those that stand before the callback, as what report_to names does; and the Trainer's own lines stay."""
    before, behind = Logged(), Logged()
    callback = DeltaSyncCallback(bucket=url)
    trainer = trainer_of(model, tmp_path, [before, callback, Settled(callback), behind])
    trainer.train()
    run = open_run(url)
    for published in (
        before.published,
        behind.published,
        [x for x in trainer.state.log_history if x.keys() >= FIGURES],
    ):
        assert [line["delta_sync/version"] for line in published] == [1, 2, 3, 4]
        assert all(line.keys() >= FIGURES for line in published)
        assert all(line["delta_sync/skipped"] == 0 for line in published)
        for line in published:
            objects = run.manifest(line["delta_sync/version"]).objects
            assert line["delta_sync/payload_bytes"] == sum(ref.bytes for ref in objects)
            assert 0 < line["delta_sync/changed_percent"] <= 100
    assert [step for step, line in before.lines if "loss" in line] == [1, 2, 3, 4]
    # All of it is there when loggers are told that training has ended, by the line of its totals.
    assert "train_runtime" in before.lines[-2][1]
    assert "delta_sync/version" in before.lines[-1][1]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would read."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.rglob("events.*")):
        data = file.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_tensorboard_has_the_metrics(
    model: PreTrainedModel, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    callback = DeltaSyncCallback(bucket=url)
    trainer_of(model, tmp_path, [callback, Settled(callback)], report_to="tensorboard").train()
    found = scalars(tmp_path / "board")
    assert [value for _, value in found["train/delta_sync/version"]] == [1, 2, 3, 4]
    assert {f"train/{name}" for name in FIGURES} <= found.keys()
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4]
    assert len(list((tmp_path / "board").rglob("events.*"))) == 1


def test_a_slow_store_is_told_of_once(
    model: PreTrainedModel, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_bucket(url) as store:
        bucket = HeldBucket(store)
        callback = DeltaSyncCallback(bucket=bucket)
        logged, seen = Logged(), Settled(callback, wait=False)

        def settle() -> None:
            assert callback.publisher is not None
            callback.publisher.flush()

        def hold() -> None:
            settle()
            bucket.gate.clear()

        def let_go() -> None:
            bucket.gate.set()
            settle()

        seen.at = {1: hold, 5: let_go, 6: settle}
        with caplog.at_level(logging.INFO, "trainer_side.skips"):
            trainer_of(model, tmp_path, [callback, logged, seen], max_steps=7).train()
    assert steps_of(open_run(url)) == [1, 2, 6, 7]
    assert [line["delta_sync/skipped"] for line in logged.published] == [0, 0, 3, 0]
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("step 3 is not published: encoding and upload of version 2 (step 2) take ")
    assert second == "step 6: published again, after 3 that were skipped"
    assert_holds(open_run(url), 3, seen.weights[6])


def test_receivers_lag_is_among_the_metrics(
    model: PreTrainedModel, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lag_module, "LOOK_SECONDS", 0.0)
    callback = DeltaSyncCallback(bucket=url)
    logged, seen = Logged(), Settled(callback)

    def tell(name: str, served: int | None, state: str = "serving") -> Callable[[], None]:
        return lambda: [write_lease(Run(open_bucket(url)), name, served, seconds=600, state=state)].clear()

    def looked() -> None:
        lag = callback._reports.lag
        assert lag is not None
        if lag._job is not None:
            lag._job.join()

    def told(*calls: Callable[[], None]) -> Callable[[], None]:
        return lambda: [call() for call in (looked, *calls)].clear()

    seen.at = dict.fromkeys(range(1, 7), looked)
    seen.at[1] = told(tell("fast", 1))
    seen.at[3] = told(tell("slow", 0), tell("new", None))
    seen.at[5] = told(tell("slow", 0, "left"))
    trainer_of(model, tmp_path, [callback, logged, seen], max_steps=6).train()
    lags = [line.get("delta_sync/receivers_lag") for line in logged.published]
    # Each line has what the look after the line before has found, with the next version there by then, or not yet.
    assert lags[0] is None
    assert lags[1] in (0, 1)
    assert lags[2] in (1, 2)
    assert lags[3] in (3, 4)
    assert lags[5] in (4, 5)


def test_what_is_no_trainer_is_told_that_loggers_get_nothing(
    model: PreTrainedModel, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback, logged = DeltaSyncCallback(bucket=url), Logged()
    handler = CallbackHandler([DefaultFlowCallback(), callback, Settled(callback), logged], model, None, None, None)
    given = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    state, control = TrainerState(max_steps=2), TrainerControl()
    with caplog.at_level(logging.INFO, "trainer_side.reports"):
        handler.on_train_begin(given, state, control)
        for state.global_step in (1, 2):
            with torch.no_grad():
                model.model.norm.weight += 1
            handler.on_step_end(given, state, control)
        handler.on_train_end(given, state, control)
    assert_holds(open_run(url), 2, checkpoint_of(model))
    assert not logged.lines
    assert "no Trainer is found among the callers: metrics go to this log only" in caplog.messages
    assert [line.split(", delta_sync/changed")[0] for line in caplog.messages if line.startswith("delta_sync/")] == [
        "delta_sync/version 1, delta_sync/step 1",
        "delta_sync/version 2, delta_sync/step 2",
    ]


def test_leases_that_cannot_be_read_are_no_lag(model: PreTrainedModel, url: str) -> None:
    Publisher(model, bucket=url).close()
    with open_bucket(url) as store:
        bucket = HeldBucket(store)
        lag = lag_module.ReceiversLag(bucket, lambda: 3)
        write_lease(Run(bucket), "one", 1, seconds=600, state="serving")
        for unlisted, expected in ((False, 2), (True, None), (False, 2)):
            bucket.unlisted = unlisted
            lag._began = float("-inf")
            lag.look()
            assert lag._job is not None
            lag._job.join()
            assert lag._job.error is None
            assert lag.lag == expected
        job = lag._job
        lag.look()
        assert lag._job is job, "leases were read again at once"
        lag.close()


def test_the_documentation_runs(tmp_path: Path) -> None:
    """Both loops, on a tiny model in place of the one downloaded; and it lists the metrics that there are."""
    text = DOCUMENT.read_text()
    assert set(re.findall(r"^\| `(delta_sync/\w+)` \|", text, re.MULTILINE)) == {*FIGURES, "delta_sync/receivers_lag"}
    checkpoint = save_checkpoint(make_model("qwen3", **SIZES), tmp_path / "Qwen3-0.6B")
    blocks = [
        block.replace("/mnt/shared", str(tmp_path / "shared")).replace("bf16=True,", "bf16=True, use_cpu=True,")
        for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]
    trainer, again, accelerate = blocks
    script = tmp_path / "block.py"
    script.write_text("\n".join((accelerate, trainer, again)))
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    runs = {name: open_run(str(tmp_path / "shared" / name)) for name in ("trainer", "accelerate")}
    # Those in between may be skipped where versions come faster than the store takes them.
    assert steps_of(runs["trainer"])[-1] == 10
    assert 1 <= len(steps_of(runs["accelerate"])) <= 4
    for run in runs.values():
        assert run.manifest(0).kind == "reference"
        run.verify(checkpoint)


def test_results_give_metrics_to_loops_of_ones_own(model: PreTrainedModel, url: str) -> None:
    with open_bucket(url) as store:
        bucket = HeldBucket(store)
        with Publisher(model, bucket=bucket) as publisher:
            bucket.gate.clear()
            with torch.no_grad():
                model.model.norm.weight[:3] += 1
            result = publisher.publish(step=5)
            skipped = publisher.publish(step=6)
            assert [result.done, skipped.done, skipped.failed] == [False, True, False]
            assert skipped.metrics() == {"delta_sync/skipped": 1}
            bucket.gate.set()
            metrics = result.metrics()
            assert [result.done, result.failed] == [True, False]
            assert metrics.keys() == FIGURES
            assert metrics["delta_sync/changed_percent"] == pytest.approx(100 * 3 / result.total)
            assert (metrics["delta_sync/version"], metrics["delta_sync/step"]) == (1, 5)
            assert metrics["delta_sync/payload_bytes"] == result.payload_bytes > 0
