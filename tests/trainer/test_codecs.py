"""The codec of what is published, and whether a tensor goes in full."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.differences import diff
from tests.support.publishers import Hooked, Trainer, assert_holds, left_to_the_test, publish, small_trainer
from tests.support.publishing import damage
from tests.support.samples import CONTEXT
from trainer_side import Publisher
from trainer_side.diff import memory_limits
from trainer_side.diff.change_log import ChangeLog, ExpandedChanges
from trainer_side.diff.pending_delta import SPARSE_RATIO, full_is_smaller
from trainer_side.encode.encoder import KEPT_VERSIONS
from vllm_delta_sync import open_run
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.format.table import DTYPES as ELEMENTS
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.maintenance.merge_writer import make_merged_delta
from vllm_delta_sync.tensors.changes import Bits, Changes, Full, Sparse


def test_manifest_says_what_readers_need(bucket: Hooked, trainer: Trainer) -> None:
    """``auto`` is the codec that a publisher chooses by itself."""
    with Publisher(trainer.live, bucket, codec="auto", every=2) as publisher:
        skipped = publisher.publish(step=1)
        assert (skipped.version, skipped.codec) == (None, None)
        trainer.live["a"].view(torch.int16)[::40] += 1
        changed = publisher.publish(step=1)
        publisher.flush()
        manifest = open_run(bucket.url).manifest(1)
        assert (changed.version, changed.codec, manifest.codec, manifest.reversible) == (1, "tiled", "tiled", False)
        assert manifest.requires == ["tiled", "zstd"]
        publisher.publish(step=2)
        same = publisher.publish(step=2)
        publisher.flush()
        assert (same.version, same.codec, same.payload_bytes) == (2, None, 0)
        manifest = open_run(bucket.url).manifest(2)
        assert (manifest.codec, manifest.reversible, manifest.requires, manifest.objects) == (None, True, [], [])


# Merging beside training


def test_plain_copies_are_merged_without_base_bits(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    """As long as this publisher has them; later ones than the first range's end do not push them out."""
    bucket.upkeep = left_to_the_test
    with Publisher(trainer.live, bucket) as publisher:
        history = publish(publisher, trainer, 6)
        assert publisher._maintenance is not None
        recent = publisher._maintenance.recent
        assert recent is not None
        run = open_run(bucket.url)
        made = make_merged_delta(run, 0, 4, plain_objects=recent.of)
    assert made.requires == ["plain", "zstd"]
    damage(bucket.url, run.manifest(2).objects[0].key)
    assert_holds(bucket, 4, history[4])


def test_old_copies_make_room(bucket: Hooked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "SHARE", 1 << 30)
    trainer, bucket.upkeep = small_trainer(), left_to_the_test

    def kept(versions: int) -> tuple[list[int], int]:
        """Publish so many with a new publisher → how old the versions are that it keeps, and bytes of the newest."""
        with Publisher(trainer.live, bucket) as publisher:
            assert publisher._maintenance is not None
            recent = publisher._maintenance.recent
            assert recent is not None
            publish(publisher, trainer, versions)
            newest = publisher.version or 0
            ages = [newest - version for version in range(newest + 1) if recent.of(version) is not None]
            return ages, sum(map(len, recent.of(newest) or []))

    ages, size = kept(KEPT_VERSIONS + 3)
    assert ages == list(range(KEPT_VERSIONS))[::-1]
    for limit, expected in ((3 * size + size // 2, [2, 1, 0]), (size // 2, [])):
        monkeypatch.setattr(memory_limits, "LEAST_BYTES", limit)
        assert kept(5)[0] == expected


# In full, or only what changed


NUMEL = 60_000


def weights(seed: int, scale: float = 0.02) -> Bits:
    values = (scale * np.random.default_rng(seed).standard_normal(NUMEL)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def moved(share: float, most: int) -> tuple[Bits, Bits]:
    random, old = np.random.default_rng(3), weights(1)
    steps = random.integers(1, most + 1, NUMEL) * random.choice([-1, 1], NUMEL)
    return old, np.where(random.random(NUMEL) < share, old + steps.astype(np.uint16), old)


ZEROS = np.zeros(NUMEL, np.uint16)
CASES: dict[str, tuple[Bits, Bits]] = {
    "few": moved(0.01, 1), "half, a little": moved(0.5, 2), "all, a little": moved(1.0, 3),
    "all, a hundred": moved(1.0, 100), "all, thousands": moved(1.0, 10_000), "drawn anew": (weights(1), weights(2)),
    "set to zero": (weights(1), ZEROS), "from zero": (ZEROS, weights(1)),
    "rounded": (weights(1), weights(1) & np.uint16(0xFFF0)),
}  # fmt: skip


@pytest.mark.parametrize("compression", ["zstd", "none"])
@pytest.mark.parametrize("case", CASES)
def test_the_smaller_one_is_chosen(case: str, compression: Any) -> None:
    old, new = CASES[case]
    table = TensorTable([TensorSpec("w", "BF16", (NUMEL,))])
    positions, distances, change = diff("w", ELEMENTS["BF16"], old.copy(), new)
    one, count = np.zeros(1, np.uint32), np.array([positions.size])
    sparse = Changes([Sparse("BF16", one, count, positions, distances, True)], [], {0: change})
    full = Changes([], [Full(0, new)], {0: change})
    sizes = [len(encode(changes, table, "plain", compression, CONTEXT)) for changes in (sparse, full)]
    found = ChangeLog(ELEMENTS["BF16"])
    found.parts = [[ExpandedChanges(positions, distances)]]
    asked: list[int] = []
    chosen = full_is_smaller(table[0], found, "plain", compression, lambda: asked.append(1) or new)  # type: ignore[func-returns-value]
    assert sizes[int(chosen)] < 1.03 * min(sizes) + 600
    assert not asked or (compression == "zstd" and positions.size * SPARSE_RATIO >= NUMEL)


def test_what_changes_little_is_never_sent_in_full() -> None:
    """It could not be taken back, for a few bytes."""
    ones = np.full(500, 0x3F80, np.uint16)
    new = ones.copy()
    new[::4] += 1
    found = ChangeLog(ELEMENTS["BF16"])
    positions, distances, _ = diff("w", ELEMENTS["BF16"], ones, new)
    found.parts = [[ExpandedChanges(positions, distances)]]
    for compression in ("zstd", "none"):
        assert not full_is_smaller(TensorSpec("w", "BF16", (500,)), found, "plain", compression, lambda: new)  # type: ignore[arg-type]
