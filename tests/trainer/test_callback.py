"""``DeltaSyncCallback`` in real Trainers on a tiny model: what is published when, and what becomes of failures."""

import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tests.support.publishing import assert_holds
from tests.support.tiny import make_model, save_checkpoint
from tests.support.trainers import (
    SIZES,
    HeldBucket,
    Logged,
    Settled,
    checkpoint_of,
    interrupt,
    steps_of,
    threads_of_ours,
    trainer_of,
)
from trainer_side import DeltaSyncCallback, Publisher
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.errors import ConflictError, ModelError, PublishError, StoreError, UsageError

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def others() -> list[threading.Thread]:
    return threads_of_ours()


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model("qwen3", **SIZES)


def test_each_kth_step_and_the_last_are_published(
    model: PreTrainedModel, url: str, tmp_path: Path, others: list[threading.Thread]
) -> None:
    callback = DeltaSyncCallback(bucket=url, every=2)
    seen = Settled(callback)
    trainer_of(model, tmp_path, [callback, seen], max_steps=5).train()
    run = open_run(url)
    assert steps_of(run) == [2, 4, 5]
    for version, step in enumerate((2, 4, 5), start=1):
        assert_holds(run, version, seen.weights[step])
    assert callback.publisher is None
    assert not threads_of_ours(others)


def test_only_optimizer_steps_count_under_gradient_accumulation(
    model: PreTrainedModel, url: str, tmp_path: Path
) -> None:
    callback = DeltaSyncCallback(bucket=url)
    seen = Settled(callback)
    trainer_of(model, tmp_path, [callback, seen], max_steps=3, gradient_accumulation_steps=4).train()
    assert steps_of(open_run(url)) == [1, 2, 3]
    assert_holds(open_run(url), 3, seen.weights[3])


def test_what_torch_compile_trains_is_published(model: PreTrainedModel, url: str, tmp_path: Path) -> None:
    callback = DeltaSyncCallback(bucket=url)
    seen = Settled(callback)
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    trainer = trainer_of(model, tmp_path, [callback, seen], max_steps=2, **compiled)
    trainer.train()
    assert hasattr(trainer.model_wrapped, "_orig_mod")
    assert steps_of(open_run(url)) == [1, 2]
    assert_holds(open_run(url), 2, seen.weights[2])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_mixed_precision_serves_what_save_pretrained_gives(family: str, url: str, tmp_path: Path) -> None:
    """Masters in float32 under bf16 autocast, rounded to the dtype of the base; experts fused in memory, or none."""
    model = make_model(family, **SIZES)
    base = save_checkpoint(model, tmp_path / "base")
    callback = DeltaSyncCallback(bucket=url, base=base)
    trainer_of(model, tmp_path, [callback, Settled(callback)], max_steps=2, bf16=True).train()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    saved = load_file(save_checkpoint(model, tmp_path / "saved") / "model.safetensors")
    run = open_run(url)
    assert run.manifest(0).kind == "reference"
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert_holds(run, 2, saved, base)


def test_resumes_the_run_from_a_checkpoint(model: PreTrainedModel, url: str, tmp_path: Path) -> None:
    first = DeltaSyncCallback(bucket=url)
    trainer_of(model, tmp_path, [first, Settled(first)], save_strategy="steps", save_steps=2).train()
    again = make_model("qwen3", seed=5, **SIZES)
    callback = DeltaSyncCallback(bucket=url)
    seen = Settled(callback)
    trainer = trainer_of(again, tmp_path, [callback, seen], save_strategy="steps", save_steps=2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    run = open_run(url)
    assert steps_of(run) == [1, 2, 3, 4, 3, 4]
    assert [manifest.kind for manifest in run.log() if manifest.version] == ["delta"] * 6
    assert sorted(seen.weights) == [3, 4]
    assert_holds(run, 5, seen.weights[3])
    assert_holds(run, 6, seen.weights[4])


def test_one_callback_for_several_trainings(model: PreTrainedModel, url: str, tmp_path: Path) -> None:
    callback = DeltaSyncCallback(bucket=url)
    trainer = trainer_of(model, tmp_path, [callback, Settled(callback)], max_steps=2)
    trainer.train()
    trainer.train()
    assert steps_of(open_run(url)) == [1, 2, 1, 2]
    assert_holds(open_run(url), 4, checkpoint_of(model))


def test_two_models_in_one_process(tmp_path: Path) -> None:
    models = [make_model("qwen3", seed=seed, **SIZES) for seed in (1, 2)]
    urls = [str(tmp_path / name / "run") for name in "ab"]
    inner = DeltaSyncCallback(bucket=urls[1])
    outer = DeltaSyncCallback(bucket=urls[0])
    between = Settled(outer)
    between.at[2] = lambda: trainer_of(models[1], tmp_path / "b", [inner, Settled(inner)], max_steps=3).train() and None
    trainer_of(models[0], tmp_path / "a", [outer, between], max_steps=3).train()
    for url, model in zip(urls, models, strict=True):
        assert steps_of(open_run(url)) == [1, 2, 3]
        assert_holds(open_run(url), 3, checkpoint_of(model))


def test_what_training_puts_back_is_published_last(model: PreTrainedModel, url: str, tmp_path: Path) -> None:
    """With load_best_model_at_end the weights change once more, to those of an earlier step."""
    callback = DeltaSyncCallback(bucket=url)
    seen = Settled(callback)
    worst = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    trainer = trainer_of(model, tmp_path, [callback, seen], max_steps=3, **worst)
    trainer.train()
    assert trainer.state.best_global_step < 3
    assert steps_of(open_run(url)) == [1, 2, 3, trainer.state.best_global_step]
    assert_holds(open_run(url), 4, seen.weights[trainer.state.best_global_step])


def test_a_failure_is_logged_and_made_up_for(
    model: PreTrainedModel, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_bucket(url) as store:
        bucket = HeldBucket(store)
        callback = DeltaSyncCallback(bucket=bucket)
        logged, seen = Logged(), Settled(callback, wait=False)

        def settle() -> None:
            result = callback._reports.under_way
            assert result is not None
            result._progress.join()  # type: ignore[union-attr]

        def down() -> None:
            settle()
            bucket.down = True

        def up() -> None:
            bucket.down = False

        seen.at = {1: down, 2: settle, 3: up, 4: settle, 5: settle, 6: settle}
        with caplog.at_level(logging.WARNING, "trainer_side.reports"):
            trainer_of(model, tmp_path, [callback, logged, seen], max_steps=6).train()
    run = open_run(url)
    assert steps_of(run) == [1, 4, 5, 6]
    assert_holds(run, 4, seen.weights[6])
    said = [record.getMessage() for record in caplog.records if record.name == "trainer_side.reports"]
    assert len(said) == 2
    assert "training goes on" in said[0]
    assert "the store is down" in said[0]
    assert said[1] == "version 2 is published: publishing works again"


def test_a_failure_ends_training_where_that_is_wanted(
    model: PreTrainedModel, url: str, tmp_path: Path, others: list[threading.Thread]
) -> None:
    with open_bucket(url) as store:
        bucket = HeldBucket(store)
        callback = DeltaSyncCallback(bucket=bucket, stop_on_error=True)
        seen = Settled(callback, wait=False)
        seen.at[1] = lambda: setattr(bucket, "down", True)
        trainer = trainer_of(model, tmp_path, [callback, seen], max_steps=50)
        with pytest.raises((PublishError, StoreError), match="the store is down"):
            trainer.train()
        assert callback.publisher is None
        assert not threads_of_ours(others)
        assert trainer.state.global_step < 50


def test_the_end_says_that_the_last_weights_are_not_published(
    model: PreTrainedModel, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_bucket(url) as store:
        bucket = HeldBucket(store)
        callback = DeltaSyncCallback(bucket=bucket)
        seen = Settled(callback, wait=False)
        seen.at[2] = lambda: setattr(bucket, "down", True)
        trainer = trainer_of(model, tmp_path, [callback, seen], max_steps=3)
        trainer.train()
    assert trainer.state.global_step == 3
    assert callback.publisher is None
    assert "training has ended at step 3, and its last weights are not published" in caplog.messages


def test_another_writer_ends_publishing_not_training(
    model: PreTrainedModel, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, others: list[threading.Thread]
) -> None:
    callback = DeltaSyncCallback(bucket=url)
    seen = Settled(callback, wait=False)
    other = make_model("qwen3", seed=3, **SIZES)
    seen.at[2] = lambda: Publisher(other, bucket=url).close()
    trainer = trainer_of(model, tmp_path, [callback, seen], max_steps=8)
    trainer.train()
    assert trainer.state.global_step == 8
    said = [line for line in caplog.messages if "nothing more is published by this training" in line]
    assert len(said) == 1
    assert not threads_of_ours(others)


def test_training_does_not_begin_with_what_cannot_be_published(
    model: PreTrainedModel, url: str, tmp_path: Path, others: list[threading.Thread]
) -> None:
    Publisher(model, bucket=url).close()
    callback = DeltaSyncCallback(bucket=url, resume=False)
    with pytest.raises(ConflictError):
        trainer_of(model, tmp_path, [callback]).train()
    trainer = trainer_of(model, tmp_path, [DeltaSyncCallback(bucket=str(tmp_path / "other"))], max_steps=1)
    model.register_buffer("bad", torch.zeros(2, device="meta"))
    with pytest.raises(ModelError, match="bad"):
        trainer.train()
    assert not threads_of_ours(others)


def test_an_interrupt_closes_what_it_leaves(
    model: PreTrainedModel, url: str, tmp_path: Path, others: list[threading.Thread]
) -> None:
    callback = DeltaSyncCallback(bucket=url)
    seen = Settled(callback)
    seen.at[2] = interrupt
    with pytest.raises(KeyboardInterrupt), callback:
        trainer_of(model, tmp_path, [callback, seen]).train()
    assert callback.publisher is None
    assert not threads_of_ours(others)
    assert steps_of(open_run(url)) == [1, 2]
    assert_holds(open_run(url), 2, seen.weights[2])


def test_the_next_training_closes_what_an_interrupt_has_left(
    model: PreTrainedModel, url: str, tmp_path: Path, others: list[threading.Thread]
) -> None:
    callback = DeltaSyncCallback(bucket=url)
    seen = Settled(callback)
    seen.at[2] = interrupt
    trainer = trainer_of(model, tmp_path, [callback, seen], max_steps=3)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert steps_of(open_run(url)) == [1, 2, 1, 2, 3]
    assert_holds(open_run(url), 5, checkpoint_of(model))
    assert not threads_of_ours(others)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_every_is_a_number_of_steps(every: Any) -> None:
    with pytest.raises(UsageError, match="every"):
        DeltaSyncCallback(bucket="memory://x/run", every=every)


@pytest.mark.parametrize("option", ["codecs", "model", "bucket_url"])
def test_options_are_those_of_the_publisher(option: str) -> None:
    options: dict[str, Any] = {option: 1}
    with pytest.raises(UsageError, match=option):
        DeltaSyncCallback(bucket="memory://x/run", **options)


def test_a_process_that_is_interrupted_finishes_the_version_under_way(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from tests.support.tiny import make_model
from tests.support.trainers import SIZES, HeldBucket, Settled, interrupt, trainer_of
from trainer_side import DeltaSyncCallback
from vllm_delta_sync.bucket import open_bucket
import threading
bucket = HeldBucket(open_bucket(sys.argv[1]))
callback = DeltaSyncCallback(bucket=bucket)
seen = Settled(callback, wait=False)
def shut():
    callback.publisher.flush()
    bucket.gate.clear()
    threading.Timer(3.0, bucket.gate.set).start()
seen.at = {1: shut, 2: interrupt}
trainer_of(make_model("qwen3", **SIZES), Path(sys.argv[2]), [callback, seen]).train()
"""
    url = str(tmp_path / "run")
    done = subprocess.run(
        [sys.executable, "-c", script, url, str(tmp_path)], cwd=ROOT, capture_output=True, timeout=300, check=False
    )
    assert b"KeyboardInterrupt" in done.stderr
    assert steps_of(open_run(url)) == [1, 2]
    model = make_model("qwen3", **SIZES)
    callback = DeltaSyncCallback(bucket=url)
    trainer_of(model, tmp_path, [callback, Settled(callback)], max_steps=1).train()
    assert steps_of(open_run(url)) == [1, 2, 1]
    assert_holds(open_run(url), 3, checkpoint_of(model))
