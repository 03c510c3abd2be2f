"""``DeltaSyncCallback`` in real Trainers: what is published when, what becomes of failures, and what loggers get."""

import copy
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import PreTrainedModel, TrainerCallback

from tests.support.adapters import adapted
from tests.support.publishers import Down, Gated, Hook, Hooked, nothing
from tests.support.publishing import Tensors, assert_holds
from tests.support.running import eventually, run_python
from tests.support.tiny import make_model, save_checkpoint
from tests.support.trainers import (
    FIGURES,
    SIZES,
    Logged,
    Settled,
    checkpoint_of,
    interrupt,
    steps_of,
    threads_of_ours,
    trainer_of,
)
from trainer_side import DeltaSyncCallback, Publisher, PublishResult
from vllm_delta_sync.client import open_run
from vllm_delta_sync.errors import ConflictError, ModelError, PublishError, StoreError, UsageError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def every_thread_ends() -> Iterator[None]:
    """Whatever becomes of a training, its publisher's threads are gone afterwards."""
    others = threads_of_ours()
    yield
    assert not threads_of_ours(others)


def test_each_kth_step_and_the_last_are_published(model: PreTrainedModel, url: str, tmp_path: Path) -> None:
    # Searches for hyperparameters copy a Trainer, and with it the callback.
    callback = copy.deepcopy(DeltaSyncCallback(bucket=url, every=2))
    seen = Settled(callback)
    trainer_of(model, tmp_path, [callback, seen], max_steps=5).train()
    run = open_run(url)
    assert steps_of(run) == [2, 4, 5]
    for version, step in enumerate((2, 4, 5), start=1):
        assert_holds(run, version, seen.weights[step])
    assert callback.publisher is None


def test_an_adapter_alone_is_a_run_of_its_own(model: PreTrainedModel, url: str, tmp_path: Path) -> None:
    peft_model, callback = adapted(model), DeltaSyncCallback(bucket=url, adapter=True)
    saved: dict[int, Tensors] = {}

    class Saving(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            found = get_peft_model_state_dict(peft_model)
            saved[state.global_step] = {name: tensor.clone() for name, tensor in found.items()}
            assert callback.publisher is not None
            callback.publisher.flush()

    trainer_of(peft_model, tmp_path, [callback, Saving()], max_steps=3).train()
    run = open_run(url)
    assert steps_of(run) == [1, 2, 3]
    for version in (1, 2, 3):
        assert_holds(run, version, saved[version])
    assert run.file("adapter_config.json")
    with pytest.raises(ModelError, match="has no adapter 'math', but 'default'"):
        trainer_of(peft_model, tmp_path, [DeltaSyncCallback(f"{url}-other", adapter="math")]).train()


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_moe"])
def test_mixed_precision_serves_what_save_pretrained_gives(family: str, url: str, tmp_path: Path) -> None:
    """Masters in float32 under bf16 autocast, rounded to the dtype of the base; experts fused in memory, or none.

    Optimizer steps count, however many batches are accumulated for each.
    """
    model = make_model(family, **SIZES)
    base = save_checkpoint(model, tmp_path / "base")
    callback = DeltaSyncCallback(bucket=url, base=base)
    trainer = trainer_of(
        model, tmp_path, [callback, Settled(callback)], max_steps=2, bf16=True, gradient_accumulation_steps=2
    )
    trainer.train()
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
    # A run that a resumed training begins has its step.
    trainer = trainer_of(again, tmp_path, [DeltaSyncCallback(bucket=f"{url}-begun")])
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert [manifest.step for manifest in open_run(f"{url}-begun").log()] == [2, 3, 4]


def test_a_training_without_a_step_publishes_no_version(model: PreTrainedModel, url: str, tmp_path: Path) -> None:
    callback = DeltaSyncCallback(bucket=url)
    for _ in range(2):
        trainer_of(model, tmp_path, [callback], max_steps=-1, num_train_epochs=0).train()
        assert open_run(url).head().version == 0
    with torch.no_grad():
        next(model.parameters()).add_(1.0)  # between trainings
    trainer_of(model, tmp_path, [callback], max_steps=-1, num_train_epochs=0).train()
    assert open_run(url).head().version == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_saved", [True, False])
def test_what_training_puts_back_is_published_last(
    is_saved: bool, model: PreTrainedModel, url: str, tmp_path: Path
) -> None:
    """With load_best_model_at_end the weights change once more, to those of a checkpoint, if not of the best step."""
    callback = DeltaSyncCallback(bucket=url)
    seen = Settled(callback)
    trainer = trainer_of(
        model, tmp_path, [callback, seen], max_steps=9, load_best_model_at_end=True, metric_for_best_model="eval_loss",
        greater_is_better=is_saved, eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=1 if is_saved else 2,
    )  # fmt: skip
    seen.at[3] = lambda: setattr(trainer.control, "should_training_stop", True)
    trainer.train()
    best = trainer.state.best_global_step
    assert best is not None
    assert (best < 3) == is_saved
    restored = best if is_saved else 2
    assert steps_of(open_run(url)) == [1, 2, 3, restored]
    assert_holds(open_run(url), 4, seen.weights[restored])


def test_a_failure_is_logged_and_made_up_for(
    model: PreTrainedModel,
    bucket: Hooked,
    url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results: list[PublishResult] = []
    publish = Publisher.publish

    def noted(*arguments: Any, **options: Any) -> PublishResult:
        results.append(publish(*arguments, **options))
        return results[-1]

    monkeypatch.setattr(Publisher, "publish", noted)
    callback = DeltaSyncCallback(bucket=bucket)
    seen = Settled(callback, wait=False)

    def settle(before: Hook | None = None) -> None:
        eventually(lambda: results[-1].done, 60)
        bucket.before = before or bucket.before

    seen.at = dict.fromkeys((2, 4, 5, 6), settle)
    seen.at |= {1: lambda: settle(Down("")), 3: lambda: settle(nothing)}
    with caplog.at_level(logging.WARNING, "trainer_side.integrations.training"):
        trainer_of(model, tmp_path, [callback, seen], max_steps=6).train()
    run = open_run(url)
    assert steps_of(run) == [1, 4, 5, 6]
    assert_holds(run, 4, seen.weights[6])
    said = [record.getMessage() for record in caplog.records if record.name == "trainer_side.integrations.training"]
    assert len(said) == 2
    assert "training continues" in said[0]
    assert "the store is away" in said[0]
    assert said[1] == "version 2 is published: publishing works again"


def test_sigterm_ends_a_wait_at_the_end_of_training_too(
    model: PreTrainedModel, bucket: Hooked, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it, the end would wait for the store for ``close_seconds``."""
    callback = DeltaSyncCallback(bucket=bucket, close_seconds=3600, grace_seconds=0.1)
    seen, away = Settled(callback, wait=False), Down("")

    def stop() -> None:
        eventually(lambda: away.tries > 2, 60)  # by then training has made its last step
        os.kill(os.getpid(), signal.SIGTERM)

    def go_away() -> None:
        bucket.before = away
        threading.Thread(target=stop).start()

    seen.at = {2: go_away}
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        trainer_of(model, tmp_path, [callback, seen], max_steps=2).train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert re.search("ended at step 2, and its last weights are not published: .* the store is away", caplog.text)


def test_sigterm_ends_a_wait_for_a_store_that_does_not_answer(
    model: PreTrainedModel, bucket: Hooked, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = DeltaSyncCallback(bucket=bucket, close_seconds=3600, grace_seconds=0.1)
    seen, gate = Settled(callback, wait=False), Gated("")

    def stop() -> None:
        gate.reached.wait(60)
        time.sleep(1)  # by then training has made its last step
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: "has not answered within the time that SIGTERM leaves" in caplog.text, 60)
        gate.open.set()

    def hang() -> None:
        bucket.before = gate
        threading.Thread(target=stop).start()

    seen.at = {1: hang}
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        trainer_of(model, tmp_path, [callback, seen], max_steps=2).train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "ended at step 2, and its last weights are not published" in caplog.text


@pytest.mark.parametrize("stop", [True, False])
def test_a_failure_ends_training_where_that_is_wanted_and_the_end_tells_of_it_where_not(
    stop: bool, model: PreTrainedModel, bucket: Hooked, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = DeltaSyncCallback(bucket=bucket, stop_on_error=stop, close_seconds=0.5)
    seen = Settled(callback, wait=False)
    seen.at[1] = lambda: setattr(bucket, "before", Down(""))
    trainer = trainer_of(model, tmp_path, [callback, seen], max_steps=50 if stop else 3)
    if stop:
        with pytest.raises((PublishError, StoreError), match="the store is away"):
            trainer.train()
        assert trainer.state.global_step < 50
    else:
        trainer.train()
        end = "training has ended at step 3, and its last weights are not published: step 3, the last one, is not"
        assert end in caplog.text
    assert callback.publisher is None


def test_another_writer_ends_publishing_not_training(
    model: PreTrainedModel, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
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


def test_training_does_not_begin_with_what_cannot_be_published(
    model: PreTrainedModel, url: str, tmp_path: Path
) -> None:
    Publisher(model, bucket=url).close()
    callback = DeltaSyncCallback(bucket=url, resume=False)
    with pytest.raises(ConflictError):
        trainer_of(model, tmp_path, [callback]).train()
    trainer = trainer_of(model, tmp_path, [DeltaSyncCallback(bucket=str(tmp_path / "other"))], max_steps=1)
    model.register_buffer("bad", torch.zeros(2, device="meta"))
    with pytest.raises(ModelError, match="bad"):
        trainer.train()


@pytest.mark.parametrize("scope", [True, False])
def test_an_interrupt_leaves_what_the_scope_or_the_next_training_closes(
    scope: bool, model: PreTrainedModel, url: str, tmp_path: Path
) -> None:
    callback = DeltaSyncCallback(bucket=url)
    seen = Settled(callback)
    seen.at[2] = interrupt
    trainer = trainer_of(model, tmp_path, [callback, seen], max_steps=3)
    with pytest.raises(KeyboardInterrupt), callback if scope else nullcontext():
        trainer.train()
    assert (callback.publisher is None) == scope
    trainer.train()
    assert steps_of(open_run(url)) == [1, 2, 1, 2, 3]
    assert_holds(open_run(url), 5, checkpoint_of(model))


@pytest.mark.parametrize(
    "options",
    [
        *({"every": every} for every in (0, -1, 1.5, True, "2")),
        *({"codecs": 1}, {"model": 1}, {"bucket_url": 1}, {"close_seconds": "600"}, {"grace_seconds": "25"}),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        DeltaSyncCallback(bucket="memory://x/run", **options)


DOCUMENT = Path(__file__).parents[2] / "docs" / "trainer.md"


def test_all_loggers_get_the_metrics_of_each_version(model: PreTrainedModel, url: str, tmp_path: Path) -> None:
    """Also those that stand before the callback, as what report_to names does; and the Trainer's own lines stay."""
    before, behind = Logged(), Logged()
    callback = DeltaSyncCallback(bucket=url)
    trainer = trainer_of(model, tmp_path, [before, callback, Settled(callback), behind])
    trainer.train()
    run = open_run(url)
    own = [line for line in trainer.state.log_history if line.keys() >= FIGURES]
    for published in (before.published, behind.published, own):
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


def test_skips_are_told_once(
    model: PreTrainedModel, bucket: Hooked, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback, gate = DeltaSyncCallback(bucket=bucket), Gated("")
    logged, seen = Logged(), Settled(callback, wait=False)

    def settle() -> None:
        assert callback.publisher is not None
        callback.publisher.flush()

    def hold() -> None:
        settle()
        bucket.before = gate

    def let_go() -> None:
        gate.open.set()
        settle()

    seen.at = {1: hold, 5: let_go, 6: settle}
    with caplog.at_level(logging.INFO, "trainer_side.session"):
        trainer_of(model, tmp_path, [callback, logged, seen], max_steps=7).train()
    assert steps_of(open_run(url)) == [1, 2, 6, 7]
    assert [line["delta_sync/skipped"] for line in logged.published] == [0, 0, 3, 0]
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("step 3 is not published: encoding and upload of version 2 (step 2) take ")
    assert second == "step 6: published again, after 3 that were skipped"
    assert_holds(open_run(url), 3, seen.weights[6])


@pytest.mark.slow
def test_the_documentation_runs(tmp_path: Path) -> None:
    """All of its code, on a tiny model in place of the one downloaded; and it lists the metrics that there are."""
    text = DOCUMENT.read_text()
    assert set(re.findall(r"^\| `(delta_sync/\w+)` \|", text, re.MULTILINE)) == FIGURES
    checkpoint = save_checkpoint(make_model("qwen3", **SIZES), tmp_path / "Qwen3-0.6B")
    blocks = [
        block.replace("/mnt/shared", str(tmp_path / "shared")).replace("bf16=True,", "bf16=True, use_cpu=True,")
        for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]
    trainer, again, accelerate, *others = blocks
    script = tmp_path / "block.py"
    script.write_text("\n".join((accelerate, trainer, again, *others)))
    run_python(script.name, folder=tmp_path)
    runs = {name: open_run(str(tmp_path / "shared" / name)) for name in ("trainer", "accelerate")}
    # Those in between may be skipped where versions come faster than the store takes them.
    assert steps_of(runs["trainer"])[-1] == 10
    assert 1 <= len(steps_of(runs["accelerate"])) <= 4
    for run in runs.values():
        assert run.manifest(0).kind == "reference"
        run.verify(checkpoint)
