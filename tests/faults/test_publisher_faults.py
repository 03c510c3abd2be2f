"""A publisher that meets failures: of the store at every step, of another writer, of its own process."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.architectures import same_bits
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import Bucket, ObjectInfo, open_bucket
from vllm_delta_sync.errors import ConflictError, NotFoundError, PublishError, StoreError
from vllm_delta_sync.wire import kernels
from vllm_delta_sync.wire.bits import Bits
from vllm_delta_sync.wire.manifest import HEAD_KEY, RUN_KEY, TABLE_KEY, Manifest, version_key

Hook = Callable[[str], None]


def _nothing(key: str) -> None:
    return None


class Hooked(Bucket):
    """A real local bucket that calls back before and after each put, and before each get."""

    def __init__(self, folder: Path) -> None:
        self._inner = open_bucket(str(folder))
        self.url = self._inner.url
        self.before: Hook = _nothing
        self.after: Hook = _nothing
        self.reading: Hook = _nothing

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        self.before(key)
        self._inner.put(key, data, if_absent=if_absent)
        self.after(key)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        self.reading(key)
        return self._inner.get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._inner.get_range(key, start, length)

    def get_file(self, key: str, path: Path) -> None:
        self._inner.get_file(key, path)

    def stat(self, key: str) -> ObjectInfo:
        return self._inner.stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        self._inner.delete(key)


class FailAt:
    """Raises once, for the first key that begins as given."""

    def __init__(self, prefix: str, error: BaseException | None = None) -> None:
        self._prefix = prefix
        self._error = error or StoreError(f"injected at {prefix}")
        self.fired = False

    def __call__(self, key: str) -> None:
        if not self.fired and key.startswith(self._prefix):
            self.fired = True
            raise self._error


class Trainer:
    """Weights that change a little at each step, dense and sparse, and a record of what they were."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.live = {
            "a": torch.randn(3000).bfloat16(),
            "b": torch.randn(50, 40),
            "c": torch.randn(2000).half(),
        }
        self._steps = 0

    def step(self) -> None:
        """Sparse in ``a``, a few in ``b``, and all of ``c`` at random, which is sent in full."""
        self._steps += 1
        self.live["a"].view(torch.int16)[torch.randperm(3000)[:100]] += 1
        self.live["b"][self._steps % 50, self._steps % 40] += 0.5
        self.live["c"].view(torch.int16).random_().bitwise_and_(0x3FFF)

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.live.items()}


@pytest.fixture
def bucket(tmp_path: Path) -> Hooked:
    return Hooked(tmp_path / "run")


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def assert_holds(bucket: Bucket, version: int, expected: dict[str, torch.Tensor]) -> None:
    held = dict(open_run(bucket.url).tensors(version))
    assert [name for name in expected if not same_bits(held[name], expected[name])] == []


def assert_true(value: bool) -> None:
    assert value


STEPS = ["objects/", "versions/"]


def test_order_of_writes_keeps_the_run_whole_at_every_moment(bucket: Hooked, trainer: Trainer) -> None:
    written: list[str] = []
    bucket.after = lambda key: written.append(key.partition("/")[0])
    with Publisher(trainer.live, bucket) as publisher:
        trainer.step()
        publisher.publish(step=1)
    version = ["objects", "versions", HEAD_KEY]
    assert written == [RUN_KEY, TABLE_KEY, *version, *version]


@pytest.mark.parametrize("told_by", ["flush", "publish", "payload_bytes", "seconds"])
@pytest.mark.parametrize("at", STEPS)
def test_failed_version_is_taken_back_and_its_changes_go_out_with_the_next(
    at: str, told_by: str, bucket: Hooked, trainer: Trainer
) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        trainer.step()
        publisher.publish(step=1)
        publisher.flush()
        failure = bucket.before = FailAt(at)
        trainer.step()
        result = publisher.publish(step=2)
        tell: dict[str, Callable[[], object]] = {
            "flush": publisher.flush,
            "publish": lambda: publisher.publish(step=3, wait=True),
            "payload_bytes": lambda: result.payload_bytes,
            "seconds": lambda: result.seconds["upload"],
        }
        with pytest.raises(PublishError, match="injected") as caught:
            tell[told_by]()
        assert isinstance(caught.value.__cause__, StoreError)
        assert failure.fired
        assert publisher.version == 1
        assert open_run(bucket.url).head().version == 1
        trainer.step()
        assert publisher.publish(step=4).version == 2
        publisher.flush()
    report = open_run(bucket.url).verify()
    assert (report.head, report.replayed) == (2, True)
    assert [manifest.step for manifest in open_run(bucket.url).log()] == [0, 1, 4]
    assert_holds(bucket, 2, trainer.live)


@pytest.mark.parametrize("at", STEPS)
def test_unexpected_failure_is_taken_back_too(at: str, bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        bucket.before = FailAt(at, MemoryError("injected"))
        trainer.step()
        publisher.publish(step=1)
        with pytest.raises(PublishError, match="MemoryError"):
            publisher.flush()
        assert publisher.publish(step=2).version == 1
    assert open_run(bucket.url).verify().head == 1
    assert_holds(bucket, 1, trainer.live)


def test_head_that_cannot_be_written_lags_and_is_rolled_forward(
    bucket: Hooked, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        bucket.before = FailAt(HEAD_KEY)
        trainer.step()
        assert publisher.publish(step=1).payload_bytes > 0
        assert publisher.version == 1
        assert "version 1 is durable but HEAD.json still points before it" in caplog.text
        assert b'"version":0' in bucket.get(HEAD_KEY)
        assert open_run(bucket.url).head().version == 1
        publisher.publish(step=2)
        publisher.flush()
        assert b'"version":2' in bucket.get(HEAD_KEY)
    assert open_run(bucket.url).verify().head == 2


def test_closing_rolls_a_lagging_head_forward(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        bucket.before = FailAt(HEAD_KEY)
        publisher.publish(step=1)
        publisher.flush()
    assert b'"version":1' in bucket.get(HEAD_KEY)


def test_manifest_that_was_written_before_the_store_failed_counts(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        bucket.after = FailAt("versions/")
        trainer.step()
        expected = trainer.copy()
        assert publisher.publish(step=1).payload_bytes > 0
        assert publisher.version == 1
        trainer.step()
        publisher.publish(step=2)
    assert open_run(bucket.url).verify().head == 2
    assert_holds(bucket, 1, expected)
    assert_holds(bucket, 2, trainer.live)


@pytest.mark.parametrize("written", [True, False])
def test_fate_of_a_manifest_is_looked_up_once_the_store_is_back(
    written: bool, bucket: Hooked, trainer: Trainer
) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        if written:
            bucket.after = FailAt("versions/")
        else:
            bucket.before = FailAt("versions/")
        down = True

        def unreachable(key: str) -> None:
            if down and key.startswith("versions/"):
                raise StoreError("still down")

        bucket.reading = unreachable
        trainer.step()
        publisher.publish(step=1)
        with pytest.raises(PublishError, match="is not known"):
            publisher.flush()
        trainer.step()
        with pytest.raises(PublishError, match="is not known"):
            publisher.publish(step=2)
        down = False
        assert publisher.publish(step=3).version == (2 if written else 1)
    assert open_run(bucket.url).verify().replayed
    steps = [manifest.step for manifest in open_run(bucket.url).log()]
    assert steps == ([0, 1, 3] if written else [0, 3])
    assert_holds(bucket, len(steps) - 1, trainer.live)


def test_call_while_a_version_is_under_way_is_skipped_or_waits(bucket: Hooked, trainer: Trainer) -> None:
    gate, reached = threading.Event(), threading.Event()

    def block(key: str) -> None:
        if key.startswith("objects/"):
            reached.set()
            assert gate.wait(30)

    with Publisher(trainer.live, bucket) as publisher:
        bucket.before = block
        trainer.step()
        first_weights = trainer.copy()
        first = publisher.publish(step=1)
        assert reached.wait(30)
        trainer.step()
        skipped = publisher.publish(step=2)
        assert (skipped.version, skipped.kind, skipped.payload_bytes) == (None, "skipped", 0)
        assert publisher.version == 0
        threading.Timer(0.2, gate.set).start()
        trainer.step()
        waited = publisher.publish(step=3, wait=True)
        assert (first.version, waited.version) == (1, 2)
        assert waited.changed > 0
    assert [manifest.step for manifest in open_run(bucket.url).log()] == [0, 1, 3]
    assert_holds(bucket, 1, first_weights)
    assert_holds(bucket, 2, trainer.live)


def test_skipped_call_still_drains_what_it_was_handed(bucket: Hooked, trainer: Trainer) -> None:
    gate = threading.Event()
    drained: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in trainer.live.items():
            yield name, tensor
            drained.append(name)

    with Publisher(trainer.live, bucket) as publisher:
        bucket.before = lambda key: assert_true(gate.wait(30))
        publisher.publish(step=1)
        assert publisher.publish(step=2, weights=weights()).version is None
        assert drained == list(trainer.live)
        gate.set()


def test_publisher_that_lost_a_race_stops_for_good(bucket: Hooked, trainer: Trainer) -> None:
    publisher = Publisher(trainer.live, bucket)
    trainer.step()
    publisher.publish(step=1)
    publisher.flush()
    ours = Manifest.from_bytes(bucket.get(version_key(1)))
    theirs = ours.model_copy(update={"version": 2, "base_version": 1, "parent": ours.digest, "objects": []})
    theirs = theirs.model_copy(update={"changed": 0, "payload_bytes": 0, "step": 99})
    theirs._raw = None
    bucket.put(version_key(2), theirs.to_bytes())
    trainer.step()
    result = publisher.publish(step=2)
    with pytest.raises(ConflictError, match="another publisher"):
        publisher.flush()
    for call in (
        lambda: publisher.publish(step=3),
        publisher.flush,
        lambda: result.payload_bytes,
        publisher.close,
    ):
        with pytest.raises(ConflictError, match="another publisher"):
            call()
    publisher.close()
    assert Manifest.from_bytes(bucket.get(version_key(2))).step == 99
    open_run(bucket.url).verify()


def test_own_manifest_found_at_its_place_is_no_conflict(bucket: Hooked, trainer: Trainer) -> None:
    """A put whose answer was lost and that the store's client repeats finds its own object."""
    inner = bucket._inner
    with Publisher(trainer.live, bucket) as publisher:
        original = Hooked.put

        def twice(key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
            if key.startswith("versions/"):
                inner.put(key, data, if_absent=if_absent)
            original(bucket, key, data, if_absent=if_absent)

        bucket.put = twice  # type: ignore[method-assign]
        trainer.step()
        assert publisher.publish(step=1).payload_bytes > 0
    assert open_run(bucket.url).verify().head == 1


@pytest.mark.parametrize("at", ["tensors.json", "objects/", "versions/"])
def test_run_that_cannot_be_started_gives_its_url_back(at: str, bucket: Hooked, trainer: Trainer) -> None:
    bucket.before = FailAt(at)
    with pytest.raises(StoreError, match="injected"):
        Publisher(trainer.live, bucket)
    with pytest.raises(NotFoundError):
        open_run(bucket.url)
    with Publisher(trainer.live, bucket) as publisher:
        trainer.step()
        publisher.publish(step=1)
    assert open_run(bucket.url).verify().head == 1


def refused(match: str, bucket: Bucket) -> None:
    with pytest.raises(ConflictError, match=match):
        Publisher({"other": torch.ones(4)}, bucket)


@pytest.mark.parametrize("at", [RUN_KEY, TABLE_KEY, "objects/"])
def test_failed_start_removes_what_it_wrote_and_nothing_else(at: str, bucket: Hooked, trainer: Trainer) -> None:
    """The store fails after the write, which is there all the same."""
    bucket.put("notes/ours.txt", b"")
    failure = bucket.after = FailAt(at)
    with pytest.raises(StoreError, match="injected"):
        Publisher(trainer.live, bucket)
    assert failure.fired
    assert [info.key for info in bucket.list() if not info.key.startswith("objects/")] == ["notes/ours.txt"]
    Publisher(trainer.live, bucket).close()


@pytest.mark.parametrize("error", [StoreError("injected"), KeyboardInterrupt()])
@pytest.mark.parametrize("written", [True, False])
def test_start_whose_version_0_may_be_there_keeps_the_claim(
    written: bool, error: BaseException, bucket: Hooked, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    failure = FailAt("versions/", error)
    if written:
        bucket.after = failure
    else:
        bucket.before = failure
    bucket.reading = FailAt("versions/", StoreError("still down"))
    with pytest.raises((PublishError, KeyboardInterrupt)) as caught:
        Publisher(trainer.live, bucket)
    told = str(caught.value) if isinstance(error, StoreError) else caplog.text
    assert "stays claimed by run" in told
    assert "publish to a new run URL" in told
    refused("holds a run already" if written else "holds run.json, tensors.json but no whole run", bucket)
    if written:
        assert open_run(bucket.url).verify().head == 0


def test_interrupted_start_gives_its_url_back(bucket: Hooked, trainer: Trainer) -> None:
    for at in (RUN_KEY, TABLE_KEY, "objects/"):
        bucket.after = FailAt(at, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            Publisher(trainer.live, bucket)
    Publisher(trainer.live, bucket).close()


def test_start_that_cannot_tidy_says_what_is_left(bucket: Hooked, trainer: Trainer) -> None:
    bucket.after = FailAt(RUN_KEY)
    bucket.reading = FailAt(RUN_KEY, StoreError("still down"))
    with pytest.raises(StoreError, match=r"injected.*may have left run\.json in .*remove by hand"):
        Publisher(trainer.live, bucket)
    refused(r"holds run\.json but no whole run", bucket)


LEFTOVERS = {
    "no run.json": ([RUN_KEY], r"holds tensors\.json, HEAD\.json, versions/ but no whole run"),
    "table": ([RUN_KEY, HEAD_KEY, version_key(0)], r"holds tensors\.json but .* remove tensors\.json by hand"),
    "HEAD": ([RUN_KEY, TABLE_KEY, version_key(0)], r"holds HEAD\.json but no whole run"),
    "version": ([RUN_KEY, TABLE_KEY, HEAD_KEY], r"holds versions/ but no whole run"),
    "claim": ([TABLE_KEY, HEAD_KEY, version_key(0)], r"holds run\.json but no whole run"),
}


@pytest.mark.parametrize("case", LEFTOVERS)
def test_parts_of_a_run_are_refused_and_left_alone(case: str, bucket: Hooked, trainer: Trainer) -> None:
    gone, message = LEFTOVERS[case]
    Publisher(trainer.live, bucket).close()
    for key in gone:
        bucket.delete(key)
    before = [info.key for info in bucket.list()]
    refused(message, bucket)
    assert [info.key for info in bucket.list()] == before


@pytest.mark.parametrize("same", [True, False])
def test_table_of_another_is_never_removed(same: bool, bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    """It comes between the look at the URL and the write."""
    Publisher(trainer.live, str(tmp_path / "same")).close()
    table = open_bucket(str(tmp_path / "same")).get(TABLE_KEY) if same else b"{}"

    def race(key: str) -> None:
        if key == TABLE_KEY:
            bucket._inner.put(key, table)
        if key.startswith("versions/"):
            raise StoreError("injected")

    bucket.before = race
    with pytest.raises(StoreError if same else ConflictError, match="injected" if same else "of another publisher"):
        Publisher(trainer.live, bucket)
    assert [info.key for info in bucket.list()] == [TABLE_KEY]
    assert bucket.get(TABLE_KEY) == table


def publish_and_break(trainer: Trainer, bucket: Hooked, before: Hook = _nothing) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        bucket.before = before
        trainer.step()
        publisher.publish(step=1)
        raise ZeroDivisionError


def test_exception_in_the_body_is_not_masked_and_all_is_flushed(bucket: Hooked, trainer: Trainer) -> None:
    with pytest.raises(ZeroDivisionError):
        publish_and_break(trainer, bucket)
    assert_holds(bucket, 1, trainer.live)


def test_exception_in_the_body_wins_over_a_failed_version(
    bucket: Hooked, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError):
        publish_and_break(trainer, bucket, FailAt("objects/"))
    assert "closing the publisher after ZeroDivisionError" in caplog.text


def test_failed_version_is_raised_at_close(bucket: Hooked, trainer: Trainer) -> None:
    publisher = Publisher(trainer.live, bucket)
    bucket.before = FailAt("objects/")
    trainer.step()
    publisher.publish(step=1)
    with pytest.raises(PublishError, match="injected"):
        publisher.close()
    assert open_run(bucket.url).verify().head == 0


@pytest.mark.parametrize("moved", ["more", "fewer", "others"])
def test_weights_that_move_while_they_are_compared_make_one_whole_version(
    moved: str, bucket: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.zeros(10_000, dtype=torch.bfloat16)
    count = kernels.count_different

    def train_meanwhile(old: Bits, new: Bits) -> int:
        found = int(count(old, new))
        if moved != "more":
            weight[:50] = 0
        if moved != "fewer":
            weight[5_000:5_050] += 1
        return found

    with Publisher({"w": weight}, bucket) as publisher:
        monkeypatch.setattr(kernels, "count_different", train_meanwhile)
        for step in range(1, 4):
            weight[:100] += 1
            expected = weight.clone()
            publisher.publish(step=step, wait=True)
            publisher.flush()
            assert_holds(bucket, step, {"w": expected})
        monkeypatch.undo()
    assert open_run(bucket.url).verify().replayed


def test_training_in_another_thread_never_makes_a_broken_version(bucket: Hooked) -> None:
    weight = torch.zeros(300_000, dtype=torch.bfloat16)
    over = threading.Event()

    def keep_training() -> None:
        chosen = torch.arange(0, weight.numel(), 50)
        while not over.is_set():
            weight[chosen] += 1.0
            chosen.add_(1).remainder_(weight.numel())

    thread = threading.Thread(target=keep_training)
    with Publisher({"w": weight}, bucket) as publisher:
        thread.start()
        try:
            for step in range(1, 11):
                publisher.publish(step=step, wait=True)
        finally:
            over.set()
            thread.join()
    report = open_run(bucket.url).verify()
    assert (report.head, report.replayed) == (10, True)


@pytest.mark.parametrize("miscounted", [-1, 1])
def test_count_that_does_not_hold_is_taken_back(
    miscounted: int, bucket: Hooked, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = kernels.count_different
    with Publisher({"w": trainer.live["a"]}, bucket) as publisher:
        trainer.live["a"].view(torch.int16)[:2000:20] += 1
        monkeypatch.setattr(kernels, "count_different", lambda old, new: int(count(old, new)) + miscounted)
        with pytest.raises(PublishError, match="'w' changed while it was compared"):
            publisher.publish(step=1)
        monkeypatch.undo()
        assert publisher.publish(step=2).changed == 100
    assert open_run(bucket.url).verify().head == 1
    assert_holds(bucket, 1, {"w": trainer.live["a"]})


def test_iterator_that_breaks_changes_nothing(bucket: Hooked, trainer: Trainer) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(3000).bfloat16()
        raise ZeroDivisionError

    with Publisher(trainer.live, bucket) as publisher:
        with pytest.raises(ZeroDivisionError):
            publisher.publish(step=1, weights=weights())
        assert publisher.publish(step=2).changed == 0
    assert_holds(bucket, 1, trainer.live)


def test_interrupts_at_any_moment_lose_nothing(bucket: Hooked, trainer: Trainer) -> None:
    """SIGALRM stands for Ctrl-C: its handler raises KeyboardInterrupt wherever the main thread is."""

    armed = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        if armed.is_set():
            raise KeyboardInterrupt

    chance = random.Random(5)
    previous = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    with Publisher(trainer.live, bucket) as publisher:
        for step in range(1, 200):
            trainer.step()
            try:
                try:
                    armed.set()
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 3e-3))
                    publisher.publish(step=step, wait=chance.random() < 0.5)
                finally:
                    armed.clear()
            except KeyboardInterrupt:
                interrupted += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        assert interrupted > 20
        trainer.step()
        publisher.publish(step=1000, wait=True)
    report = open_run(bucket.url).verify()
    assert (report.head, report.replayed) == (publisher.version, True)
    assert open_run(bucket.url).head().step == 1000
    assert_holds(bucket, report.head, trainer.live)


PUBLISH_FOR_EVER = """
import sys, torch
from tests.faults.test_publisher_faults import Trainer
from trainer_side import Publisher
trainer = Trainer()
with Publisher(trainer.live, sys.argv[1]) as publisher:
    for step in range(1, 1_000_000):
        trainer.step()
        publisher.publish(step=step, wait=True)
        print(publisher.version, flush=True)
"""


PUBLISH_AND_END = """
import sys
from tests.faults.test_publisher_faults import Trainer
from trainer_side import Publisher
trainer = Trainer()
publisher = Publisher(trainer.live, sys.argv[1])
trainer.step()
publisher.publish(step=1)
"""


def test_program_that_ends_without_closing_still_finishes_its_version(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", PUBLISH_AND_END, url], env=environment, timeout=60, check=True)
    report = open_run(url).verify()
    assert (report.head, report.replayed) == (1, True)


@pytest.mark.parametrize("seed", range(3))
def test_killed_publisher_leaves_a_whole_run(seed: int, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, "-c", PUBLISH_FOR_EVER, url],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert process.stdout is not None
    try:
        while int(process.stdout.readline()) < 5:
            continue
        time.sleep(random.Random(seed).uniform(0, 0.1))
    finally:
        process.kill()
    durable = [int(line) for line in process.stdout.read().splitlines()]
    process.wait()
    report = open_run(url).verify()
    assert report.replayed
    assert report.head >= max(durable, default=5)
