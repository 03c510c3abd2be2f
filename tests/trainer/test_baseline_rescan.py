"""A baseline whose memory goes bad: found at the next versions, taken back, fetched from the bucket again."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints import write_checkpoint
from tests.support.publishers import (
    FailAt,
    Hooked,
    Trainer,
    assert_holds,
    expect_failure,
    flip,
    left_unfinished,
    publish,
)
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import FingerprintError, PublishError
from vllm_delta_sync.format.documents import anchor_key


@pytest.mark.parametrize("changed_too", [False, True])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_damage_is_found_before_it_is_written(name: str, changed_too: bool, bucket: Hooked, trainer: Trainer) -> None:
    """Whether the training step overwrites the damaged element or not: the diff was made against wrong bits."""
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer)
        expected = trainer.copy()
        flip(publisher, name)
        if changed_too:
            trainer.live[name].view(-1)[5] = 9
        before = {info.key for info in bucket.list("versions/")}
        publisher.publish(step=2)
        expect_failure(publisher, rf"version 2 is not published: .* damaged in tensor '{name}'")
        assert {info.key for info in bucket.list("versions/")} == before
        assert publisher.publish(step=3).changed == (1 if changed_too else 0)
        publisher.flush()
        trainer.step()
        publisher.publish(step=4)
    assert open_run(bucket.url).verify().replayed
    assert_holds(bucket, 1, expected)
    assert_holds(bucket, 3, trainer.live)


def test_all_damaged_tensors_are_restored_not_only_the_one_in_turn(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, rescan_bytes=1) as publisher:
        for name in "abc":
            flip(publisher, name)
        publisher.publish(step=1)
        expect_failure(publisher, "tensors 'a', 'b', 'c'")
        assert publisher.rescan() == []
        assert publisher.publish(step=2).changed == 0
    assert_holds(bucket, 1, trainer.live)


def test_tensors_are_looked_at_in_turn(bucket: Hooked, trainer: Trainer) -> None:
    """Each version looks at one; the damage is in the third."""
    with left_unfinished(Publisher(trainer.live, bucket, rescan_bytes=1)) as publisher:
        flip(publisher, "c", 1999)
        for step in range(2):
            publisher.publish(step=step, weights=[("a", trainer.live["a"])])
            publisher.flush()
        publisher.publish(step=2, weights=[("a", trainer.live["a"])])
        expect_failure(publisher, "damaged in tensor 'c'")


def test_no_bytes_means_no_look(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, rescan_bytes=0) as publisher:
        flip(publisher, "a")
        publisher.publish(step=1, weights=[("b", trainer.live["b"])])
        publisher.flush()
        assert publisher.version == 1
        assert publisher.rescan() == ["a"]
        assert publisher.rescan() == []
        assert publisher.publish(step=2).changed == 0


def test_nothing_is_published_until_the_damage_can_be_mended(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        flip(publisher, "b")
        bucket.reading = FailAt("objects/")
        trainer.step()
        publisher.publish(step=1)
        expect_failure(publisher, r"cannot be restored from version 0 .*injected.*until it can")
        bucket.reading = FailAt("objects/")
        with pytest.raises(PublishError, match="until it can"):
            publisher.publish(step=2, wait=True)
        assert publisher.publish(step=3, wait=True).version == 1
    assert open_run(bucket.url).verify().replayed
    assert_holds(bucket, 1, trainer.live)


def test_damage_after_a_rebase_is_mended_from_the_version_rebased_to(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 2)
        publisher.rebase(1)
        flip(publisher, "a")
        publisher.publish(step=3)
        expect_failure(publisher, "damaged in tensor 'a'")
        publisher.publish(step=4)
    assert open_run(bucket.url).head().base_version == 1
    assert_holds(bucket, 3, trainer.live)


def test_anchor_from_memory_replaces_what_the_bucket_lost(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, shard_bytes=7000) as publisher:
        publish(publisher, trainer, 2)
        assert publisher.anchor() == 2
        run = open_run(bucket.url)
        kept = {ref.key for ref in run.anchor(2).objects}
        assert len(kept) == 3
        for _ in range(2):
            for info in list(bucket.list("objects/")):
                bucket.delete(info.key)
            # The second time its document is there already.
            assert publisher.anchor() == 2
            assert_holds(bucket, 2, trainer.live)
        publisher.publish(step=3)
    assert_holds(bucket, 3, trainer.live)
    assert open_run(bucket.url).anchor(2).manifest == open_run(bucket.url).manifest(2).digest


def test_anchor_is_never_made_of_damaged_bits(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        flip(publisher, "a")
        publisher.anchor()
        flip(publisher, "a")
        bucket.reading = FailAt("objects/")
        with pytest.raises(PublishError, match="until it can"):
            publisher.anchor()
    assert_holds(bucket, 0, trainer.live)


def test_anchor_is_never_made_of_a_base_that_was_overwritten(bucket: Hooked, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", {"a": torch.zeros(64), "b": torch.zeros(64)})
    with Publisher({"a": torch.zeros(64)}, bucket, base=base) as publisher:
        publisher.anchor()
        data = np.memmap(base / "model.safetensors", np.uint8, mode="r+")
        data[-1] ^= 1
        data.flush()
        with pytest.raises(FingerprintError, match=r"tensor 'b' .* overwritten"):
            publisher.anchor()
    assert bucket.stat(anchor_key(0)).bytes > 0


@pytest.mark.parametrize("at", ["objects/", "anchors/"])
def test_anchor_that_cannot_be_stored_hinders_nothing(at: str, bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        bucket.before = FailAt(at)
        with pytest.raises(Exception, match="injected"):
            publisher.anchor()
        trainer.step()
        assert publisher.publish(step=1).version == 1
    assert_holds(bucket, 1, trainer.live)
