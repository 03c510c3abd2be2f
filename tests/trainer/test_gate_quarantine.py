"""Versions that the gate marks: for how long, what they are compared with, and what a resumed run makes of them."""

import math
from typing import Any

import pytest
import torch

from tests.support.gating import keeper, marks, refused
from tests.support.publishers import FailAt, Hooked, Trainer, assert_holds
from tests.support.publishing import damage
from trainer_side import Gate, Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import GateError, PublishError, StoreError
from vllm_delta_sync.upkeep.compaction import upkeep
from vllm_delta_sync.wire.manifest import Quarantine

NAN, INF = math.nan, math.inf
MARK = Gate(action="quarantine")


def test_quarantined_version_is_published_with_its_reasons(
    bucket: Hooked, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    with Publisher(trainer.live, bucket, gate=MARK) as publisher:
        trainer.step()
        trainer.live["b"][1, 1] = NAN
        result = publisher.publish(1)
        reasons = ("elements became NaN or infinite: 1 in tensor 'b'; nonfinite is True",)
        assert (result.version, result.quarantined) == (1, reasons)
        assert "version 1 is published as quarantined: elements became NaN" in caplog.text
    assert open_run(bucket.url).head().quarantine == Quarantine(reasons=list(reasons), sound=0)
    assert_holds(bucket, 1, trainer.live)
    assert open_run(bucket.url).verify().replayed


def test_quarantine_lasts_as_long_as_what_is_bad(bucket: Hooked, trainer: Trainer) -> None:
    live = trainer.live
    with Publisher(live, bucket, gate=MARK) as publisher:

        def quarantined() -> bool:
            return bool(publisher.publish(1, wait=True).quarantined)

        trainer.step()
        assert not quarantined()
        live["a"][5] = NAN
        assert quarantined()
        live["b"][0, 0] += 1
        assert quarantined(), "in a tensor that does not change any more"
        live["a"][6] += 1
        assert quarantined(), "in a tensor of which something else changes"
        assert quarantined(), "where nothing changes"
        live["a"][5], live["b"][2, 2] = 1, INF
        assert quarantined(), "one went and another came"
        live["b"][2, 2] = 1
        assert not quarantined()
        assert keeper(publisher)._apart == {}
    assert marks(bucket) == [0, 1, 1, 1, 1, 1, 1, 7]


def test_share_and_norm_count_from_the_sound_version(bucket: Hooked) -> None:
    live = {"a": torch.ones(100)}
    gate = Gate(max_changed_share=0.4, max_norm_jump=0.5, action="quarantine")
    with Publisher(live, bucket, gate=gate) as publisher:

        def reasons() -> int:
            return len(publisher.publish(1, wait=True).quarantined)

        live["a"][:30] = 3
        assert reasons() == 1
        live["a"][30:60] = 1.01
        assert reasons() == 2, "few changed, but many since the sound version"
        live["a"][:30] = 1
        assert reasons() == 0
        live["a"][:] = 1.02
        assert reasons() == 1
        live["a"][30:] = 1.01
        live["a"][60:] = 1
        live["a"][:30] = 1
        assert reasons() == 0, "it came back"
        assert keeper(publisher)._differences == {}


def test_tensor_that_is_as_it_was_is_not_kept_any_longer(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, gate=MARK) as publisher:
        names = [spec.name for spec in open_run(bucket.url).table]
        before = trainer.live["a"][5].item()
        trainer.live["a"][5] = trainer.live["b"][1, 1] = NAN
        assert publisher.publish(1).quarantined
        publisher.flush()
        assert {names[tensor] for tensor in keeper(publisher)._apart} == {"a", "b"}
        trainer.live["a"][5] = before
        assert publisher.publish(2).quarantined
        publisher.flush()
        assert {names[tensor] for tensor in keeper(publisher)._apart} == {"b"}


def test_rebase_to_the_sound_version_leaves_quarantine(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, gate=MARK) as publisher:
        trainer.step()
        publisher.publish(1, wait=True)
        good = trainer.copy()
        trainer.live["a"][5] = NAN
        for step in (2, 3):
            trainer.step()
            assert publisher.publish(step, wait=True).quarantined
        publisher.flush()
        publisher.rebase(1)
        assert publisher.publish(4).quarantined, "the weights are bad still"
        publisher.flush()
        publisher.rebase(1)
        for name, tensor in trainer.live.items():
            tensor.copy_(good[name])
        trainer.live["b"][0, 0] += 1
        assert publisher.publish(5).quarantined == ()
        publisher.flush()
        publisher.rebase(2)
        assert publisher.publish(6).quarantined == ()
        publisher.flush()
        publisher.rebase(2)
        trainer.live["a"][5] = NAN
        assert publisher.publish(7).quarantined, "held is the NaN already, so that it does not even change"
        trainer.live["b"][3, 3] = NAN
        assert "2 tensors" in publisher.publish(8, wait=True).quarantined[0]
    assert marks(bucket) == [0, 1, 1, 1, 1, 5, 6, 6, 6]


def test_version_whose_outcome_was_unknown_is_noted(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, gate=MARK) as publisher:
        trainer.live["a"][5] = NAN
        # Written, and the store says that it failed, and does not answer what it holds.
        bucket.after = FailAt("versions/")
        bucket.reading = FailAt("versions/")
        publisher.publish(1)
        with pytest.raises(PublishError):
            publisher.flush()
        trainer.live["b"][0, 0] += 1
        assert publisher.publish(2).quarantined
        trainer.live["a"][5] = 1
        assert publisher.publish(3, wait=True).quarantined == ()
    assert marks(bucket) == [0, 0, 0, 3]


def test_version_that_failed_changes_nothing(bucket: Hooked, trainer: Trainer) -> None:
    gate = Gate(max_norm_jump=1, action="quarantine")
    with Publisher(trainer.live, bucket, gate=gate) as publisher:
        before = (list(keeper(publisher).squares), list(keeper(publisher).nonfinite))
        trainer.live["a"][5] = NAN
        bucket.before = FailAt("versions/")
        publisher.publish(1)
        with pytest.raises(PublishError, match="injected"):
            publisher.flush()
        assert (keeper(publisher).squares, keeper(publisher).nonfinite) == before
        trainer.live["a"][5] = 1
        assert publisher.publish(2).quarantined == ()
    assert marks(bucket) == [0, 1]


# Resume


def test_resumed_quarantine_is_judged_as_it_was(bucket: Hooked, trainer: Trainer) -> None:
    trainer.live["c"][9] = INF
    with Publisher(trainer.live, bucket, gate=MARK) as publisher:
        trainer.live["a"][5] = NAN
        publisher.publish(1)
    with Publisher(trainer.live, bucket, gate=MARK) as publisher:
        assert keeper(publisher).sound == 0
        trainer.live["b"][0, 0] += 1
        assert publisher.publish(2).quarantined
    with Publisher(trainer.live, bucket, gate=Gate()) as publisher:
        assert "1 in tensor 'a'" in refused(publisher)
        trainer.live["a"][5] = 1
        assert publisher.publish(3).quarantined == ()
    assert marks(bucket) == [0, 0, 0, 3]


def test_wider_bounds_or_no_gate_end_quarantine(bucket: Hooked) -> None:
    live = {"a": torch.ones(100)}
    with Publisher(live, bucket, gate=Gate(max_changed_share=0.1, action="quarantine")) as publisher:
        live["a"] += 1
        assert publisher.publish(1).quarantined
        assert publisher.publish(2, wait=True).quarantined
    with Publisher(live, bucket, gate=Gate(max_changed_share=1.0)) as publisher:
        assert publisher.publish(3).quarantined == ()
        live["a"][0] = NAN
    with Publisher(live, bucket) as publisher:
        assert publisher.publish(4).quarantined == ()
    assert marks(bucket) == [0, 0, 0, 3, 4]


def test_resume_where_the_sound_version_is_lost(
    bucket: Hooked, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    with Publisher(trainer.live, bucket, gate=MARK, fold=False) as publisher:
        trainer.live["a"][5] = NAN
        publisher.publish(1)
        publisher.flush()
        publisher.anchor()
    first = open_run(bucket.url).manifest(0)
    damage(bucket.url, first.objects[0].key)
    with Publisher(trainer.live, bucket, gate=MARK) as publisher:
        assert "the sound version before version 1 cannot be rebuilt" in caplog.text
        assert keeper(publisher).sound is None
        trainer.live["b"][0, 0] += 1
        assert publisher.publish(2).quarantined
        trainer.live["a"][5] = 1
        assert publisher.publish(3, wait=True).quarantined == ()
        publisher.flush()
        assert keeper(publisher).sound == 3
    assert marks(bucket) == [0, 0, 0, 3]


def test_resume_fails_where_the_store_does(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, gate=MARK) as publisher:
        trainer.live["a"][5] = NAN
        publisher.publish(1)

    reads: list[str] = []

    def third(key: str) -> None:
        reads.append(key)
        if reads.count(open_run(bucket.url).manifest(0).objects[0].key) == 2:
            raise StoreError("injected")

    bucket.reading = third
    with pytest.raises(StoreError, match="injected"):
        Publisher(trainer.live, bucket, gate=MARK)


@pytest.mark.parametrize("action", ["refuse", "quarantine"])
def test_run_that_begins_anew_is_looked_at_whole(action: Any, bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, fold=False) as publisher:
        trainer.step()
        publisher.publish(1)
    damage(bucket.url, open_run(bucket.url).head().objects[0].key)
    trainer.live["c"][7] = NAN
    gate = Gate(action=action)
    if action == "refuse":
        with pytest.raises(GateError, match="1 in tensor 'c'"):
            Publisher(trainer.live, bucket, gate=gate)
        assert open_run(bucket.url).head().version == 1
        return
    with Publisher(trainer.live, bucket, gate=gate) as publisher:
        head = open_run(bucket.url).head()
        assert (head.version, head.kind, head.sound) == (2, "anchor", 1)
        trainer.live["a"][0] += 1
        assert publisher.publish(3).quarantined
        trainer.live["c"][7] = 1
        assert publisher.publish(4, wait=True).quarantined == ()


# Upkeep


@pytest.mark.parametrize(
    ("every", "bad", "anchors", "sound"),
    [
        (1, "..!!!!..", [1, 2, 7, 8], [0, 1, 2, 2, 2, 2, 2, 7, 8]),
        (2, "..!!!!..", [2, 8], [0, 1, 2, 2, 2, 2, 2, 7, 8]),
        (3, ".!!..", [1], [0, 1, 1, 1, 4, 5]),
        (1, "!!", [], [0, 0, 0]),
    ],
)
def test_no_anchor_is_made_of_a_quarantined_version(
    every: int, bad: str, anchors: list[int], sound: list[int], bucket: Hooked, trainer: Trainer
) -> None:
    with Publisher(trainer.live, bucket, gate=MARK, fold=False) as publisher:
        assert publisher._upkeep is not None
        publisher._upkeep.close()
        run = open_run(bucket.url)
        for step, mark in enumerate(bad, 1):
            trainer.live["b"][step, step] += 0.5
            trainer.live["a"][5] = NAN if mark == "!" else step
            publisher.publish(step)
            publisher.flush()
            upkeep(run, run.head(), anchor_every=every)
    assert run.anchors() == anchors
    assert marks(bucket) == sound


def test_version_whose_deltas_cost_more_than_a_model_has_no_anchor_while_it_is_bad(
    bucket: Hooked, trainer: Trainer
) -> None:
    with Publisher(trainer.live, bucket, gate=MARK, fold=False) as publisher:
        assert publisher._upkeep is not None
        publisher._upkeep.close()
        for step in range(1, 5):
            trainer.live["a"].view(torch.int16).random_().bitwise_and_(0x3FFF)
            trainer.live["b"] += torch.randn(50, 40)
            trainer.live["c"].view(torch.int16).random_().bitwise_and_(0x3FFF)
            if step > 2:
                trainer.live["a"][5] = NAN
            publisher.publish(step)
            publisher.flush()
            run = open_run(bucket.url)
            upkeep(run, run.head())
    assert marks(bucket) == [0, 1, 2, 2, 2]
    assert run.anchors() == [2]
