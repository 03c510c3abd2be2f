"""Codec ``context`` on the publishing side, and ``auto`` over stores of different speed."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.publishers import FailAt, Hooked, Trainer, assert_holds
from tests.support.publishing import damage
from trainer_side import Gate, Publisher
from trainer_side.baseline import Baseline
from trainer_side.encoding import Before
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import StoreOptions, open_bucket
from vllm_delta_sync.errors import PublishError, UsageError


def publish(publisher: Publisher, trainer: Trainer, history: list[dict[str, torch.Tensor]]) -> None:
    trainer.step()
    publisher.publish(step=len(history), wait=True)
    publisher.flush()
    history.append(trainer.copy())


def assert_all_hold(bucket: Hooked, history: list[dict[str, torch.Tensor]]) -> None:
    assert open_run(bucket.url).verify().replayed
    for version, expected in enumerate(history):
        assert_holds(bucket, version, expected)


def test_manifest_says_what_readers_need(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, codec="context", every=2) as publisher:
        skipped = publisher.publish(step=1)
        assert (skipped.version, skipped.codec) == (None, None)
        trainer.live["a"].view(torch.int16)[::40] += 1
        changed = publisher.publish(step=1)
        publisher.flush()
        manifest = open_run(bucket.url).manifest(1)
        assert (changed.version, changed.codec, manifest.codec, manifest.reversible) == (1, "context", "context", False)
        assert manifest.requires == ["context", "zstd"]
        publisher.publish(step=2)
        same = publisher.publish(step=2)
        publisher.flush()
        assert (same.version, same.codec, same.payload_bytes) == (2, None, 0)
        manifest = open_run(bucket.url).manifest(2)
        assert (manifest.codec, manifest.reversible, manifest.requires, manifest.objects) == (None, True, [], [])


def test_changes_start_from_the_version_before(bucket: Hooked, trainer: Trainer) -> None:
    """After skips, failures, an older version and a new process, too: ``old`` is what the base version has."""
    history = [trainer.copy()]
    with Publisher(trainer.live, bucket, codec="context", read_back=True) as publisher:
        publish(publisher, trainer, history)
        bucket.before = FailAt("versions/")
        trainer.step()
        publisher.publish(step=90)
        with pytest.raises(PublishError, match="injected"):
            publisher.flush()
        publish(publisher, trainer, history)
        publish(publisher, trainer, history)
        publisher.rebase(1)
        publish(publisher, trainer, history)
    with Publisher(trainer.live, bucket, codec="context", read_back=True) as publisher:
        publish(publisher, trainer, history)
    assert [manifest.base_version for manifest in open_run(bucket.url).log()] == [None, 0, 1, 2, 1, 4]
    assert_all_hold(bucket, history)


def test_quarantined_versions(bucket: Hooked, trainer: Trainer) -> None:
    history = [trainer.copy()]
    with Publisher(trainer.live, bucket, codec="context", gate=Gate(action="quarantine")) as publisher:
        publish(publisher, trainer, history)
        value = trainer.live["a"][5].clone()
        trainer.live["a"][5] = torch.nan
        publish(publisher, trainer, history)
    with Publisher(trainer.live, bucket, codec="context", gate=Gate(action="quarantine")) as publisher:
        publish(publisher, trainer, history)
        trainer.live["a"][5] = value
        publish(publisher, trainer, history)
    assert [manifest.sound for manifest in open_run(bucket.url).log()] == [0, 1, 1, 1, 4]
    assert_all_hold(bucket, history)


def test_damaged_baseline_is_fetched_from_the_bucket(bucket: Hooked, trainer: Trainer) -> None:
    history = [trainer.copy()]
    with Publisher(trainer.live, bucket, codec="context") as publisher:
        publish(publisher, trainer, history)
        publish(publisher, trainer, history)
        baseline = publisher._committer.baseline
        baseline.bits(0)[7] ^= 1
        assert publisher.rescan() == ["a"]
        publish(publisher, trainer, history)
    assert_all_hold(bucket, history)


def test_damaged_version_is_begun_anew_behind(bucket: Hooked, trainer: Trainer) -> None:
    history = [trainer.copy()]
    with Publisher(trainer.live, bucket, codec="context") as publisher:
        publish(publisher, trainer, history)
    damage(bucket.url, open_run(bucket.url).head().objects[0].key)
    with Publisher(trainer.live, bucket, codec="context") as publisher:
        assert publisher.version == 2
        history.append(trainer.copy())
        publish(publisher, trainer, history)
    assert [manifest.kind for manifest in open_run(bucket.url).log()] == ["anchor", "delta", "anchor", "delta"]
    for version in (2, 3):
        assert_holds(bucket, version, history[version])


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize(("shard_bytes", "objects"), [(1, 13), (3000, 4), (2**30, 1)])
def test_every_dtype_in_objects_of_any_size(shard_bytes: int, objects: int, bucket: Hooked) -> None:
    torch.manual_seed(0)
    live = {str(dtype): (torch.randn(30, 20) * 3).abs().to(dtype) for dtype in DTYPES} | {"scalar": torch.randn(())}
    history = [{name: tensor.clone() for name, tensor in live.items()}]
    with Publisher(live, bucket, codec="context", shard_bytes=shard_bytes) as publisher:
        for step in range(1, 3):
            for tensor in live.values():
                if tensor.ndim:
                    tensor[step::7] = (tensor[step::7].float() < 1).to(tensor.dtype)
            live["scalar"].add_(1)
            publisher.publish(step=step, wait=True)
            history.append({name: tensor.clone() for name, tensor in live.items()})
    assert len(open_run(bucket.url).head().objects) == objects
    assert_all_hold(bucket, history)


def test_bits_before_are_copies_of_one_tensor_at_a_time(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, codec="context") as publisher:
        baseline: Baseline = publisher._committer.baseline
        before = [baseline.bits(tensor).copy() for tensor in range(len(baseline.table))]
        trainer.step()
        patch = publisher._course._diff(None)
        now = [baseline.bits(tensor).copy() for tensor in range(len(baseline.table))]
        old = Before(baseline, patch.changes())
        for tensor in (0, 1, 0):
            assert np.array_equal(old(tensor).bits, before[tensor])
            assert old(tensor).held is None
            assert not np.array_equal(before[tensor], now[tensor])
        assert all(np.array_equal(baseline.bits(tensor), bits) for tensor, bits in enumerate(now))


# Speeds: the limit is exact, and a directory is at least as fast as what the test needs.

LIMIT = 40_000


def move(weight: torch.Tensor, each: int) -> None:
    weight.view(torch.int16)[::each] += 1


def test_auto_is_packed_where_the_store_is_fast(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    # So large that writing them to a directory is far above a megabyte per second, whatever else the machine does.
    weight = torch.randn(8_000_000).bfloat16()
    with Publisher([("w", weight)], url) as publisher:
        for step in range(1, 3):
            move(weight, 100)
            assert publisher.publish(step=step, wait=True).codec == "packed"
    assert [manifest.codec for manifest in open_run(url).log()] == [None, "packed", "packed"]
    [line] = [record.getMessage() for record in caplog.records if "codec 'auto'" in record.getMessage()]
    assert line.startswith("codec 'auto': 'packed' from version 1 on: 80,000 of 8,000,000 elements changed; at ")


def test_auto_is_context_where_the_store_is_slow(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    weight = torch.randn(256, 130).bfloat16()
    history = [weight.clone()]
    with (
        open_bucket(url, StoreOptions(store_upload_limit=LIMIT)) as bucket,
        Publisher([("w", weight)], bucket, resume=False) as publisher,
    ):
        for step in range(1, 3):
            move(weight.view(-1), 2)
            assert publisher.publish(step=step, wait=True).codec == "context"
            history.append(weight.clone())
    assert [manifest.codec for manifest in open_run(url).log()] == [None, "context", "context"]
    assert open_run(url).verify().replayed
    for version, expected in enumerate(history):
        assert torch.equal(dict(open_run(url).tensors(version))["w"], expected)
    [line] = [record.getMessage() for record in caplog.records if "codec 'auto'" in record.getMessage()]
    assert line.startswith(
        "codec 'auto': 'context' from version 1 on: 16,640 of 33,280 elements changed; at 0.04 MB/s up and 0.04 MB/s "
        "down new weights take about 0."
    )


def test_auto_is_context_where_receivers_are_slow(url: str) -> None:
    weight = torch.randn(300, 200).bfloat16()
    with Publisher([("w", weight)], url, receiver_bytes_per_second=2000.0) as publisher:
        move(weight.view(-1), 20)
        assert publisher.publish(step=1).codec == "context"


def test_auto_is_packed_until_an_upload_was_measured(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, receiver_bytes_per_second=1.0) as publisher:
        trainer.live["a"].view(torch.int16)[::40] += 1
        assert publisher.publish(step=1).codec == "packed", "the anchor is too small to measure anything"


@pytest.mark.parametrize("rate", [0, -1.0, float("inf"), float("nan"), True, "fast"])
def test_rates_that_are_none(rate: Any, url: str) -> None:
    with pytest.raises(UsageError, match=r"receiver_bytes_per_second is .* bytes per second above 0, or None"):
        Publisher([("w", torch.ones(3))], url, receiver_bytes_per_second=rate)
