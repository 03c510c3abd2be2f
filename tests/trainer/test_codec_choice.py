"""Which codec a version gets, and whether a tensor goes in full: by what is measured, and what then is published."""

import logging
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.publishers import (
    FailAt,
    Hooked,
    Trainer,
    assert_history,
    assert_holds,
    expect_failure,
    flip,
    left_to_the_test,
    publish,
)
from tests.support.publishing import assert_versions, damage
from tests.support.samples import CONTEXT
from trainer_side import Gate, Publisher
from trainer_side.diff.dense_or_sparse import SPARSE_RATIO, full_is_smaller
from trainer_side.diff.undo_log import ChangeLog, ExpandedChanges
from trainer_side.diff.version_changes import FullTensor, SparseTensor, VersionChanges
from trainer_side.encode import upload_bandwidth as module
from trainer_side.encode.codec_policy import (
    CONTEXT_SHARE,
    ENCODE,
    MIN_MEASURED_CHANGES,
    VALUE_BYTES,
    CodecChoice,
    Estimates,
    Work,
    choose_codec,
    packed_bytes,
    seconds,
)
from trainer_side.encode.upload_bandwidth import MIN_MEASURED_BYTES, UploadBandwidth
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import StoreOptions, open_bucket
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.dtypes import DTYPES as ELEMENTS
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.bits import Bits, diff
from vllm_delta_sync.tensors.changes import Changes, Full, Sparse

KB, MB, GB = 1e3, 1e6, 1e9
ONE = Work(10**9, 10**7)
FAST = 1000 * MB


def work_of(elements: float, share: float) -> Work:
    return Work(int(elements), int(elements * share))


def both(rate: float) -> Estimates:
    return Estimates(rate, rate)


# Slower than one to two megabytes per second, ``context`` wins; how much slower depends on how many elements are read
# for each that changed, and hardly on the size of the model.
@pytest.mark.parametrize("elements", [1e7, 7e9, 7e11])
@pytest.mark.parametrize(
    ("rate", "share", "expected"),
    [
        (20 * KB, 0.001, "context"), (20 * KB, 0.01, "context"), (20 * KB, 0.1, "context"),
        (100 * KB, 0.0001, "packed"), (100 * KB, 0.003, "context"), (100 * KB, 0.05, "context"),
        (300 * KB, 0.001, "packed"), (300 * KB, 0.01, "context"), (300 * KB, 0.1, "context"),
        (1 * MB, 0.001, "packed"), (1 * MB, 0.1, "context"), (3 * MB, 0.01, "packed"), (3 * MB, 0.1, "packed"),
        (10 * MB, 0.01, "packed"), (100 * MB, 0.01, "packed"), (10 * GB, 1.0, "packed"),
    ],
)  # fmt: skip
def test_the_link_decides(elements: float, rate: float, share: float, expected: Codec) -> None:
    assert choose_codec("packed", work_of(elements, share), both(rate)) == expected


SMALL = Work(60_000, 3000)


@pytest.mark.parametrize(
    ("work", "known", "expected"),
    [
        # What takes no time anyway stays packed.
        (SMALL, both(100 * KB), "packed"), (SMALL, both(1 * KB), "context"),
        # Slow receivers count as much as slow uploads.
        (ONE, Estimates(up=FAST, down=100 * KB), "context"), (ONE, Estimates(up=100 * KB, down=FAST), "context"),
        (ONE, both(FAST), "packed"),
        # A slow processor speaks against context.
        (ONE, Estimates(100 * KB, 100 * KB, slowness={"packed": 100.0}), "packed"),
        (ONE, Estimates(100 * KB, 100 * KB, slowness={"packed": 100.0, "context": 1.0}), "context"),
    ],
)  # fmt: skip
def test_sizes_receivers_and_the_processor_count_too(work: Work, known: Estimates, expected: Codec) -> None:
    assert choose_codec("packed", work, known) == expected


def test_context_begins_where_it_saves_a_fifth_and_stays_until_it_is_clearly_worse() -> None:
    rates = np.geomspace(10 * KB, 10 * MB, 100)
    for known in map(both, rates):
        saved = 1 - seconds("context", ONE, known) / seconds("packed", ONE, known)
        assert (choose_codec("packed", ONE, known) == "context") == (saved >= 0.2)
    enter = max(rate for rate in rates if choose_codec("packed", ONE, both(rate)) == "context")
    stay = max(rate for rate in rates if choose_codec("context", ONE, both(rate)) == "context")
    assert stay > 1.5 * enter


def test_positions_take_their_entropy() -> None:
    assert packed_bytes(Work(1000, 1000), 0.25) == 250
    assert packed_bytes(Work(1000, 500), 0.0) == pytest.approx(1000 / 8)
    assert packed_bytes(Work(2**30, 2**20), 0.0) == pytest.approx(2**20 * (10 + math.log2(math.e)) / 8, rel=1e-3)


def test_full_tensors_are_no_work() -> None:
    table = TensorTable([TensorSpec(name, "BF16", (size,)) for name, size in (("a", 100), ("b", 50), ("c", 7))])
    sparse = [SparseTensor(0, 2, lambda: iter(())), SparseTensor(2, 1, lambda: iter(()))]
    changes = VersionChanges(table, True, sparse, [FullTensor(1, lambda: np.zeros(50, np.uint16))])
    assert Work.of(changes) == Work(107, 3)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    caplog.clear()
    return lines


def test_the_log_says_why_when_it_is_chosen_and_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    choice = CodecChoice()
    for version, (work, rate, codec, said) in enumerate(
        [
            (ONE, None, "packed", "no upload was measured yet"), (ONE, None, "packed", None),
            (ONE, FAST, "packed", "10,000,000 of 1,000,000,000 elements changed; at 1e+03 MB/s up"),
            (ONE, FAST, "packed", None), (ONE, 50 * KB, "context", "at 0.05 MB/s up and 0.05 MB/s down"),
            # A version without changes changes nothing.
            (Work(0, 0), FAST, "packed", None), (ONE, 50 * KB, "context", None), (ONE, FAST, "packed", "1e+03 MB/s up"),
        ],
        start=1,
    ):  # fmt: skip
        assert choice.choose(version, work, rate) == codec
        lines = told(caplog)
        assert len(lines) == (said is not None)
        assert all(line.startswith(f"codec 'auto': '{codec}' from version {version} on: ") for line in lines)
        assert all(str(said) in line for line in lines)


def test_receivers_rate_replaces_the_publishers() -> None:
    assert CodecChoice(receivers=100 * KB).choose(1, ONE, FAST) == "context"
    assert CodecChoice(receivers=FAST).choose(1, ONE, FAST) == "packed"


def test_what_encoding_takes_is_learnt_from_the_last_versions() -> None:
    usual = {codec: cost.seconds(ONE) for codec, cost in ENCODE.items()}
    size = int(packed_bytes(ONE, VALUE_BYTES))
    choice = CodecChoice()
    choice.learn("packed", ONE, size, usual["packed"])
    assert choice.choose(1, ONE, 100 * KB) == "context"
    for _ in range(3):
        choice.learn("context", ONE, int(CONTEXT_SHARE * size), 100 * usual["context"])
    assert choice.choose(2, ONE, 100 * KB) == "packed", "it takes this machine too long"
    for _ in range(5):
        choice.learn("context", ONE, int(CONTEXT_SHARE * size), usual["context"])
    assert choice.choose(3, ONE, 100 * KB) == "context"
    for _ in range(5):
        choice.learn("context", ONE, int(0.95 * size), usual["context"])
    assert choice.choose(4, ONE, 100 * KB) == "packed", "it saves too little on such weights"


def test_small_versions_and_one_odd_measurement_teach_nothing() -> None:
    choice = CodecChoice()
    choice.learn("packed", Work(10**6, MIN_MEASURED_CHANGES - 1), 10**9, 3600.0)
    assert choice.choose(1, ONE, 100 * KB) == "context"
    for slowness in (1, 1, 1000, 1):
        choice.learn("packed", ONE, int(packed_bytes(ONE, VALUE_BYTES)), slowness * ENCODE["packed"].seconds(ONE))
    assert choice.choose(2, ONE, 100 * KB) == "context"


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
    """After failures, an older version, damage, quarantine and a new process, too: they are against what that has."""
    options: dict[str, Any] = {"codec": "context", "gate": Gate(action="quarantine")}
    bucket.upkeep = left_to_the_test
    with Publisher(trainer.live, bucket, read_back=True, **options) as publisher:
        history = publish(publisher, trainer)
        bucket.before = FailAt("versions/")
        trainer.step()
        publisher.publish(step=90)
        expect_failure(publisher, "injected")
        history += publish(publisher, trainer, 2)[1:]
        publisher.rebase(1)
        history += publish(publisher, trainer)[1:]
        flip(publisher, "a")
        assert publisher.rescan() == ["a"]
        value = trainer.live["b"][7, 5].clone()
        trainer.live["b"][7, 5] = torch.nan
        history += publish(publisher, trainer)[1:]
    with Publisher(trainer.live, bucket, **options) as publisher:
        history += publish(publisher, trainer)[1:]
        trainer.live["b"][7, 5] = value
        history += publish(publisher, trainer)[1:]
    assert [manifest.base_version for manifest in open_run(bucket.url).log()] == [None, 0, 1, 2, 1, 4, 5, 6]
    assert [manifest.sound for manifest in open_run(bucket.url).log()] == [0, 1, 2, 3, 4, 4, 4, 7]
    assert_history(bucket, history)
    damage(bucket.url, open_run(bucket.url).head().objects[0].key)
    with Publisher(trainer.live, bucket, **options) as publisher:
        assert publisher.version == 8
        history += [trainer.copy(), *publish(publisher, trainer)[1:]]
    assert [manifest.kind for manifest in open_run(bucket.url).log()][-3:] == ["delta", "anchor", "delta"]
    for version in (8, 9):
        assert_holds(bucket, version, history[version])


# Speeds: the limit is exact, and a directory is at least as fast as what the test needs.

LIMIT = 40_000


def move(weight: torch.Tensor, each: int) -> None:
    weight.view(torch.int16)[::each] += 1


def test_auto_is_packed_where_the_store_is_fast_and_context_where_receivers_are_slow(url: str) -> None:
    # So large that writing them to a directory is far above a megabyte per second, whatever else the machine does.
    weight = torch.randn(4_000_000).bfloat16()
    with (
        Publisher([("w", weight)], url) as fast,
        Publisher([("w", weight)], f"{url}-slow", receiver_bytes_per_second=2000.0) as slow,
    ):
        move(weight, 100)
        assert fast.publish(step=1).codec == "packed"
        assert slow.publish(step=1).codec == "context"


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
    assert_versions(url, [{"w": weight} for weight in history])
    [line] = [record.getMessage() for record in caplog.records if "codec 'auto'" in record.getMessage()]
    assert line.startswith(
        "codec 'auto': 'context' from version 1 on: 16,640 of 33,280 elements changed; at 0.04 MB/s up and 0.04 MB/s "
        "down new weights take about 0."
    )


NUMEL = 60_000


def weights(seed: int, scale: float = 0.02) -> Bits:
    values = (scale * np.random.default_rng(seed).standard_normal(NUMEL)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def moved(share: float, most: int) -> tuple[Bits, Bits]:
    random, old = np.random.default_rng(3), weights(1)
    steps = random.integers(1, most + 1, NUMEL) * random.choice([-1, 1], NUMEL)
    return old, np.where(random.random(NUMEL) < share, old + steps.astype(np.uint16), old)


CASES: dict[str, tuple[Bits, Bits]] = {
    "few": moved(0.01, 1),
    "half, a little": moved(0.5, 2),
    "all, a little": moved(1.0, 3),
    "all, a hundred": moved(1.0, 100),
    "all, thousands": moved(1.0, 10_000),
    "drawn anew": (weights(1), weights(2)),
    "set to zero": (weights(1), np.zeros(NUMEL, np.uint16)),
    "from zero": (np.zeros(NUMEL, np.uint16), weights(1)),
    "rounded": (weights(1), weights(1) & np.uint16(0xFFF0)),
}


@pytest.mark.parametrize("compression", ["zstd", "none"])
@pytest.mark.parametrize("case", CASES)
def test_the_smaller_one_is_chosen(case: str, compression: Any) -> None:
    old, new = CASES[case]
    table = TensorTable([TensorSpec("w", "BF16", (NUMEL,))])
    positions, distances, change = diff("w", ELEMENTS["BF16"], old.copy(), new)
    one, count = np.zeros(1, np.uint32), np.array([positions.size])
    sparse = Changes([Sparse("BF16", one, count, positions, distances, True)], [], {0: change})
    full = Changes([], [Full(0, new)], {0: change})
    sizes = {whole: len(encode(changes, table, "packed", compression, CONTEXT)) for whole, changes in
             ((False, sparse), (True, full))}  # fmt: skip
    found = ChangeLog(ELEMENTS["BF16"])
    found.parts = [[ExpandedChanges(positions, distances)]]
    asked: list[int] = []
    chosen = full_is_smaller(table[0], found, "packed", compression, lambda: asked.append(1) or new)  # type: ignore[func-returns-value]
    assert sizes[chosen] < 1.03 * min(sizes.values()) + 600
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
        assert not full_is_smaller(TensorSpec("w", "BF16", (500,)), found, "packed", compression, lambda: new)  # type: ignore[arg-type]


BYTES = 10 * MIN_MEASURED_BYTES


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def send(link: UploadBandwidth, clock: Clock, size: int, seconds: float) -> None:
    with link.upload(size):
        clock.now += seconds


def test_median_of_the_last_ones(clock: Clock) -> None:
    link = UploadBandwidth()
    for taken in (1, 1, 50, 1):
        send(link, clock, BYTES, taken)
    assert link.bytes_per_second == BYTES
    for _ in range(3):
        send(link, clock, BYTES, 10)
    assert link.bytes_per_second == BYTES / 10


def test_tiny_and_failed_ones_and_those_beside_them_do_not_count(clock: Clock) -> None:
    link = UploadBandwidth()
    send(link, clock, MIN_MEASURED_BYTES - 1, 60)
    with pytest.raises(OSError, match="gone"), link.upload(BYTES):
        raise OSError("gone")
    with link.upload(BYTES):
        with pytest.raises(OSError, match="gone"), link.upload(BYTES):
            raise OSError("gone")
        clock.now += 1
    assert (link.bytes_per_second, UploadBandwidth(limit=5).bytes_per_second) == (None, None)
    send(link, clock, MIN_MEASURED_BYTES, 2)
    assert link.bytes_per_second == MIN_MEASURED_BYTES / 2


def test_those_at_once_are_one(clock: Clock) -> None:
    link = UploadBandwidth()
    with link.upload(BYTES):
        clock.now += 1
        with link.upload(3 * BYTES):
            clock.now += 2
        clock.now += 1
    clock.now += 1000
    assert link.bytes_per_second == 4 * BYTES / 4


def test_any_thread_may_send() -> None:
    link = UploadBandwidth()
    barrier = threading.Barrier(4)

    def work() -> None:
        for _ in range(50):
            with link.upload(BYTES):
                barrier.wait()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert link.bytes_per_second is not None


def test_no_faster_than_the_store_is_allowed_to(clock: Clock, tmp_path: Path) -> None:
    with open_bucket(tmp_path, StoreOptions(store_upload_limit=1000)) as bucket:
        link = UploadBandwidth.to(bucket)
    send(link, clock, BYTES, 0.001)
    assert link.bytes_per_second == 1000
    plain = UploadBandwidth.to(open_bucket(tmp_path))
    send(plain, clock, BYTES, 0.001)
    assert plain.bytes_per_second == pytest.approx(BYTES / 0.001)
