"""Two publishers on one run: whoever comes later has it, and nothing of either is lost or mixed up."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import write_checkpoint
from tests.support.notices import DEADLINE_SECONDS as SECONDS
from tests.support.publishers import FailAt, Hooked, Once, Trainer, assert_holds, assert_stopped, publish, small_trainer
from trainer_side import Publisher, session, writer
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import base as bucket_base
from vllm_delta_sync.errors import ConflictError, LimitError, PublishError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import CLAIMS_PREFIX, Claim, claim_key
from vllm_delta_sync.format.manifest import HEAD_KEY, RUN_KEY, Head, version_key


@pytest.fixture(params=[False, True], ids=["near", "far"], autouse=True)
def remote(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A writer makes its checks before a commit in sequence, or together and while its objects are being stored."""
    monkeypatch.setattr(writer, "is_remote", lambda url: request.param)
    return bool(request.param)


FAR = pytest.mark.parametrize("remote", [True], ids=["far"], indirect=True)


def epochs(bucket: Hooked) -> list[int]:
    return [manifest.epoch for manifest in open_run(bucket.url).log()]


def overtaken(
    former: Publisher, bucket: Hooked, trainer: Trainer, step: int, **options: Any
) -> tuple[Publisher, dict[str, torch.Tensor]]:
    """Train and publish: the writer has looked for a claim, then the claim comes, then its manifest.

    Returns the later publisher, and the weights that it publishes.
    """
    late, mine = list[Publisher](), trainer.copy()
    bucket.before = Once("versions/", lambda: late.append(Publisher(mine, Hooked(bucket.folder), **options)))
    trainer.step()
    former.publish(step=step)
    former.flush()
    (later,) = late
    return later, mine


@FAR
def test_a_version_passes_a_remote_store_in_two_round_trips(bucket: Hooked, trainer: Trainer) -> None:
    """The checks begin while the object is being stored."""
    checked = {RUN_KEY: threading.Event(), claim_key(1): threading.Event()}

    def check(key: str) -> None:
        if key in checked:
            checked[key].set()
            # Neither check waits for the other one to end.
            assert all(event.wait(SECONDS) for event in checked.values())

    def wait(key: str) -> None:
        if key.startswith("objects/"):
            assert all(event.wait(SECONDS) for event in checked.values())

    with Publisher(trainer.live, bucket) as publisher:
        bucket.reading = bucket.looking = check
        bucket.before = wait
        trainer.step()
        publisher.publish(step=1, wait=True)
        publisher.flush()


@FAR
@pytest.mark.parametrize(("seconds", "checks"), [(120.0, 1), (0.0, 2)])
def test_checks_that_began_long_ago_are_made_again(
    bucket: Hooked, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, seconds: float, checks: int
) -> None:
    monkeypatch.setattr(writer, "EARLY_SECONDS", seconds)
    looked: list[str] = []
    with Publisher(trainer.live, bucket) as publisher:
        bucket.looking = looked.append
        trainer.step()
        publisher.publish(step=1, wait=True)
        publisher.flush()
    assert looked.count(claim_key(1)) == checks


@pytest.mark.parametrize("exclusive", [True, False])
def test_checks_begin_early_only_where_that_saves_time_and_the_store_keeps_writers_apart(
    remote: bool, exclusive: bool, bucket: Hooked, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(function: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        function()
        future.set_result(None)
        return future

    monkeypatch.setattr(writer, "start_call", call)
    monkeypatch.setattr(bucket_base, "SETTLING_SECONDS", 0.0)
    bucket.supports_conditional_put = exclusive
    order: list[str] = []
    with Publisher(trainer.live, bucket) as publisher:
        bucket.looking = lambda key: order.append("check") if key == claim_key(1) else None
        bucket.before = lambda key: order.append(key.partition("/")[0])
        publish(publisher, trainer)
    checks = ["check", "objects"] if remote and exclusive else ["objects", "check"]
    assert order == [*checks, "versions", *([] if exclusive else ["check"]), HEAD_KEY]


def test_damage_that_is_gone_at_a_second_look_is_none(bucket: Hooked, trainer: Trainer) -> None:
    """Bytes that flip on their way are no reason to begin anew."""
    with Publisher(trainer.live, bucket) as former:
        publish(former, trainer)
    good, other, looks = bucket.get(version_key(1)), Hooked(bucket.folder), list[str]()

    def spoil(key: str) -> None:
        if key.startswith(CLAIMS_PREFIX):
            looks.clear()
            other.put(version_key(1), b"{}")

    def look(key: str) -> None:
        looks.append(key)
        if looks.count(HEAD_KEY) == 2:
            other.put(version_key(1), good)

    bucket.after, bucket.reading = spoil, look
    with Publisher(trainer.live, bucket) as later:
        assert later.version == 1
    assert [manifest.kind for manifest in open_run(bucket.url).log()] == ["anchor", "delta"]


def test_newest_version_whose_manifest_is_lost_is_written_anew(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as former:
        publish(former, trainer, 2)
    bucket.delete(version_key(2))
    with Publisher(trainer.live, bucket) as later:
        assert later.version == 1
        publish(later, trainer)
    assert [manifest.epoch for manifest in open_run(bucket.url).log()] == [0, 0, 1]
    assert_holds(bucket, 2, trainer.live)


def test_former_writer_is_stopped_and_leaves_no_trace_in_the_chain(bucket: Hooked, trainer: Trainer) -> None:
    former = Publisher(trainer.live, bucket)
    trainer.step()
    former.publish(step=1)
    former.flush()
    other = Hooked(bucket.folder)
    elsewhere = trainer.copy()
    with Publisher(elsewhere, other) as later:
        trainer.step()
        former.publish(step=2)
        with pytest.raises(ConflictError, match=r"taken over the run .*claims/0000000001\.json"):
            former.flush()
        assert later.publish(step=3).version == 2
        later.flush()
        head = bucket.get(HEAD_KEY)
        assert_stopped(former, "taken over the run")
        assert bucket.get(HEAD_KEY) == head
    assert epochs(bucket) == [0, 0, 1]
    assert open_run(bucket.url).verify().replayed
    assert_holds(bucket, 2, elsewhere)


@pytest.mark.parametrize("rebased", [False, True])
def test_last_commit_of_the_former_writer_is_adopted(rebased: bool, bucket: Hooked, trainer: Trainer) -> None:
    former = Publisher(trainer.live, bucket)
    trainer.step()
    former.publish(step=1)
    former.publish(step=2, wait=True)
    former.flush()
    if rebased:
        former.rebase(0)
    later, mine = overtaken(former, bucket, trainer, step=3)
    theirs = trainer.copy()
    assert (former.version, later.version) == (3, 2)
    # As if it had died before it could point there.
    bucket.delete(HEAD_KEY)
    mine["b"][0] += 1
    later.publish(step=4)
    message = r"version 3 was committed by the former writer.*continues from that version"
    with pytest.raises(PublishError, match=message):
        later.flush()
    assert later.version == 3
    assert Head.from_bytes(bucket.get(HEAD_KEY)).version == 3
    assert later._maintenance is not None
    assert later._maintenance.recent is not None
    # What this one had encoded as version 3 would not fit into a merged delta.
    assert later._maintenance.recent.of(3) is None
    mine["b"][1] += 1
    expected = {name: tensor.clone() for name, tensor in mine.items()}
    assert later.publish(step=5).version == 4
    later.close()
    former.publish(step=6)
    assert_stopped(former, "taken over")
    assert epochs(bucket) == [0, 0, 0, 0, 1]
    assert open_run(bucket.url).verify().replayed
    assert_holds(bucket, 3, theirs)
    assert_holds(bucket, 4, expected)
    assert Head.from_bytes(bucket.get(HEAD_KEY)).version == 4


def test_last_commit_that_cannot_be_read_is_not_built_upon(bucket: Hooked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_ATTEMPTS", 1)
    trainer = small_trainer()
    former = Publisher(trainer.live, bucket)
    later, _ = overtaken(former, bucket, trainer, step=1)
    bucket.delete(open_run(bucket.url).head().objects[0].key)
    for _ in range(2):
        later.publish(step=2)
        with pytest.raises(PublishError, match=r"cannot be rebuilt.*restart this publisher"):
            later.flush()
        assert later.version == 0
    with pytest.raises(PublishError, match=r"step 2, the last one, is not published.*is 0 \(step 0\)"):
        later.close()
    with Publisher(trainer.live, bucket) as third:
        assert third.version == 2
    assert_holds(bucket, 2, trainer.live)
    former.publish(step=3)
    assert_stopped(former, "taken over")


def test_last_commit_that_only_the_base_leads_to_waits_for_the_base(
    bucket: Hooked, trainer: Trainer, tmp_path: Path
) -> None:
    base = write_checkpoint(tmp_path / "base", trainer.live)
    former = Publisher(trainer.live, bucket, base=base, merge=False)
    later, _ = overtaken(former, bucket, trainer, step=1, base=base)
    base.rename(tmp_path / "elsewhere")
    later.publish(step=2)
    with pytest.raises(PublishError, match=r"cannot be read without the run's base: .* which is not here") as caught:
        later.flush()
    assert "full snapshot" not in caught.value.message
    (tmp_path / "elsewhere").rename(base)
    later.publish(step=3)
    with pytest.raises(PublishError, match="continues from that version"):
        later.flush()
    assert later.version == 1
    later.close()
    former.publish(step=3)
    assert_stopped(former, "taken over")


def test_head_that_the_former_writer_would_move_back_stays(bucket: Hooked, trainer: Trainer) -> None:
    """Its manifest is written, then it sleeps, then the run is taken over and goes on."""
    former = Publisher(trainer.live, bucket)
    other = Hooked(bucket.folder)

    def take_over() -> None:
        with Publisher(trainer.copy(), other) as later:
            later.publish(step=2)

    once = bucket.after = Once("versions/", take_over)
    trainer.step()
    former.publish(step=1)
    former.flush()
    assert once.done
    assert Head.from_bytes(bucket.get(HEAD_KEY)).version == 2
    former.publish(step=3)
    assert_stopped(former, "taken over")
    assert Head.from_bytes(bucket.get(HEAD_KEY)).version == 2
    assert epochs(bucket) == [0, 0, 1]


def test_two_that_take_over_at_once_get_different_epochs(bucket: Hooked, trainer: Trainer) -> None:
    Publisher(trainer.live, bucket).close()
    other = Hooked(bucket.folder)
    later: list[Publisher] = []
    bucket.before = Once(CLAIMS_PREFIX, lambda: later.append(Publisher(trainer.copy(), other)))
    first = Publisher(trainer.live, bucket)
    assert [Claim.from_bytes(bucket.get(claim_key(epoch))).epoch for epoch in (1, 2)] == [1, 2]
    trainer.step()
    later[0].publish(step=1)
    assert_stopped(later[0], "taken over")
    first.publish(step=2)
    first.close()
    assert epochs(bucket) == [0, 2]
    assert_holds(bucket, 1, trainer.live)


@pytest.mark.parametrize("takeovers", [0, 2])
def test_writer_after_a_restored_backup_stops_the_former_one(bucket: Hooked, trainer: Trainer, takeovers: int) -> None:
    """The backup has no claim of the former one, so the next to take over gets the same epoch, or an earlier one."""
    Publisher(trainer.live, bucket).close()
    backup = {info.key: bucket.get(info.key) for info in bucket.list()}
    for _ in range(takeovers):
        Publisher(trainer.live, bucket).close()
    former, theirs = Publisher(trainer.live, bucket, merge=False), trainer.copy()
    publish(former, trainer)
    for info in list(bucket.list()):
        bucket.delete(info.key)
    for key, data in backup.items():
        bucket.put(key, data)
    with Publisher(theirs, Hooked(bucket.folder)) as later:
        trainer.step()
        former.publish(step=2)
        assert_stopped(former, "taken over")
        next(iter(theirs.values())).data += 1
        later.publish(step=3, wait=True)
    assert epochs(bucket) == [0, 1]
    assert_holds(bucket, 1, theirs)


def test_claim_that_is_damaged_or_lost_stops_no_writer(bucket: Hooked, trainer: Trainer) -> None:
    Publisher(trainer.live, bucket).close()
    Publisher(trainer.live, bucket).close()
    with Publisher(trainer.live, bucket) as publisher:
        own = bucket.get(claim_key(2))
        at = own.index(b'"writer":"') + 10
        bucket.put(claim_key(2), own[:at] + (b"0" if own[at : at + 1] != b"0" else b"1") + own[at + 1 :])
        publish(publisher, trainer)
        bucket.put(claim_key(2), b"{")
        publish(publisher, trainer)
        for key in (claim_key(2), claim_key(1)):
            bucket.delete(key)
            publish(publisher, trainer)
    assert epochs(bucket) == [0, 2, 2, 2, 2]


def test_manifest_of_the_same_or_a_later_epoch_is_a_conflict(bucket: Hooked, trainer: Trainer) -> None:
    Publisher(trainer.live, bucket).close()
    for ahead in (0, 1):
        publisher = Publisher(trainer.live, bucket)
        newest = open_run(bucket.url).head()
        claims = [info.key for info in bucket.list(CLAIMS_PREFIX)]
        epoch = Claim.from_bytes(bucket.get(claims[-1])).epoch + ahead
        fields = {"version": newest.version + 1, "base_version": newest.version, "epoch": epoch, "kind": "delta"}
        empty = {"objects": [], "changed": 0, "payload_bytes": 0, "tensor_fingerprints": None}
        theirs = newest.model_copy(update={**fields, **empty, "parent": newest.digest})
        theirs._raw = None
        bucket.put(version_key(theirs.version), theirs.to_bytes())
        trainer.step()
        publisher.publish(step=1)
        assert_stopped(publisher, "written by another publisher")
        assert bucket.get(version_key(theirs.version)) == theirs.to_bytes()


@pytest.mark.parametrize("again", [False, True])
def test_run_that_is_removed_under_a_publisher_stops_it(again: bool, bucket: Hooked, trainer: Trainer) -> None:
    publisher = Publisher(trainer.live, bucket)
    trainer.step()
    bucket.before = FailAt(HEAD_KEY)
    publisher.publish(step=1)
    publisher.flush()
    for info in list(bucket.list()):
        bucket.delete(info.key)
    if again:
        Publisher(trainer.copy(), Hooked(bucket.folder)).close()
    before = {info.key for info in bucket.list() if not info.key.startswith("objects/")}
    trainer.step()
    publisher.publish(step=2)
    assert_stopped(publisher, "another run was started" if again else "was removed")
    assert {info.key for info in bucket.list() if not info.key.startswith("objects/")} == before
    if again:
        assert open_run(bucket.url).verify().head == 0


def test_looking_for_a_newer_writer_costs_one_get_and_one_stat(bucket: Hooked, trainer: Trainer) -> None:
    read: list[str] = []
    looked: list[str] = []
    with Publisher(trainer.live, bucket) as publisher:
        bucket.reading, bucket.looking = read.append, looked.append
        publish(publisher, trainer)
    assert read == [RUN_KEY, HEAD_KEY]
    assert [key for key in looked if not key.startswith("objects/")] == [claim_key(1)]


def test_epoch_grows_whatever_became_of_the_claims(bucket: Hooked, trainer: Trainer) -> None:
    Publisher(trainer.live, bucket).close()
    for step in (1, 2):
        with Publisher(trainer.live, bucket) as publisher:
            publisher.publish(step=step)
        for info in list(bucket.list(CLAIMS_PREFIX)):
            bucket.delete(info.key)
    assert epochs(bucket) == [0, 1, 2]


def test_a_claim_that_no_publisher_reaches_is_named_and_nothing_is_written_after_it(
    bucket: Hooked, trainer: Trainer
) -> None:
    """The next one would have a key of eleven digits, which no reader takes for a claim."""
    Publisher(trainer.live, bucket).close()
    key = claim_key(limits.MAX_VERSION)
    bucket.put(key, b"{}")
    before = {info.key for info in bucket.list()}
    with pytest.raises(LimitError, match=r"claims/ of .* has no numbers left"):
        Publisher(trainer.live, bucket)
    assert {info.key for info in bucket.list()} == before
    bucket.delete(key)
    with Publisher(trainer.live, bucket) as publisher:
        publisher.publish(step=1)
    open_run(bucket.url).verify()


@pytest.mark.parametrize("taken", ["removed", "replaced", "taken over"])
def test_anchor_from_memory_is_not_written_over_another_run(taken: str, bucket: Hooked, trainer: Trainer) -> None:
    publisher = Publisher(trainer.live, bucket)
    if taken != "taken over":
        for info in list(bucket.list()):
            bucket.delete(info.key)
    if taken != "removed":
        Publisher(trainer.copy(), Hooked(bucket.folder)).close()
    with pytest.raises(ConflictError, match="stops"):
        publisher.anchor()
    assert list(bucket.list("anchors/")) == []
    assert_stopped(publisher, "stops")
