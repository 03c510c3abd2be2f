"""HEAD of a signed run does not run out while its publisher lives, and is never moved back."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.forge import forge
from tests.support.signed import Keys, assert_all_signed, head_of, list_keys, publish, sign_file, stored
from tests.trainer.faults.hooks import FailAt, Hooked, Trainer, small_trainer
from trainer_side import Publisher
from trainer_side.renewal import THREAD_NAME
from vllm_delta_sync.chain import Run
from vllm_delta_sync.errors import ConflictError
from vllm_delta_sync.wire.documents import KeyEntry
from vllm_delta_sync.wire.manifest import HEAD_KEY, Head, Manifest, version_key


@pytest.fixture
def trainer() -> Trainer:
    return small_trainer()


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


class Heads(Hooked):
    """Notes each HEAD that is written, and by which thread."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.written: list[tuple[str, Head]] = []
        self.changed = threading.Condition()

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        super().put(key, data, if_absent=if_absent)
        if key == HEAD_KEY:
            assert isinstance(data, bytes)
            with self.changed:
                self.written.append((threading.current_thread().name, Head.from_bytes(data)))
                self.changed.notify_all()

    def renewals(self) -> list[Head]:
        return [head for name, head in self.written if name == THREAD_NAME]

    def wait(self, renewals: int) -> list[Head]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.renewals()) >= renewals, 120)
        return self.renewals()


def test_head_is_renewed_while_nothing_is_published(folder: Path, keys: Keys, trainer: Trainer) -> None:
    # A machine that stands still for two seconds writes one late; for twenty it does not.
    assert renewed_in_time(folder, keys, trainer, 3) or renewed_in_time(folder / "again", keys, trainer, 30)
    assert THREAD_NAME not in {thread.name for thread in threading.enumerate()}


def renewed_in_time(folder: Path, keys: Keys, trainer: Trainer, head_seconds: int) -> bool:
    """Whether each HEAD was written before the one before it had run out; all else must hold of them anyway."""
    bucket = Heads(folder)
    with Publisher(trainer.live, bucket, signing_key=keys.private("a"), head_seconds=head_seconds) as publisher:
        publish(publisher, trainer)
        renewals = bucket.wait(3)
        assert_all_signed(folder, keys.hex("a"))
    ends = [head.expires_at or "" for _, head in bucket.written]
    assert ends == sorted(set(ends))
    versions = [head.version for head in renewals]
    assert (versions, versions[-1]) == (sorted(versions), 1)
    assert all(head.created_at is not None and head.created_at < (head.expires_at or "") for head in renewals)
    assert THREAD_NAME not in {thread.name for thread in threading.enumerate()}
    starts = [head.created_at or "" for _, head in bucket.written]
    return all(start < end for start, end in zip(starts[1:], ends, strict=False))


def test_close_leaves_a_head_that_holds_for_all_its_time(folder: Path, keys: Keys, trainer: Trainer) -> None:
    bucket = Heads(folder)
    with Publisher(trainer.live, bucket, signing_key=keys.private("a")) as publisher:
        publish(publisher, trainer)
        before = head_of(folder)
    # One that is young is not renewed meanwhile.
    assert bucket.renewals() == []
    after = head_of(folder)
    assert (after.version, after.manifest) == (before.version, before.manifest)
    assert (after.expires_at or "") > (before.expires_at or "")


def test_renewal_that_fails_is_tried_again(folder: Path, keys: Keys, trainer: Trainer, caplog: Any) -> None:
    bucket = Heads(folder)
    fail = FailAt(HEAD_KEY)
    with caplog.at_level(logging.WARNING):
        with Publisher(trainer.live, bucket, signing_key=keys.private("a"), head_seconds=1):
            bucket.before = fail
            bucket.wait(2)
    assert fail.fired
    assert "HEAD.json could not be written again" in caplog.text


def test_renewal_does_not_move_head_back(folder: Path, keys: Keys, trainer: Trainer) -> None:
    """It has decided to write the version of before; then a version is committed, and waits with its HEAD."""
    bucket = Heads(folder)
    renewing, committed, overtaken = threading.Event(), threading.Event(), threading.Event()
    waited: list[bool] = []

    def hold(key: str) -> None:
        if key == HEAD_KEY and threading.current_thread().name == THREAD_NAME and not waited:
            renewing.set()
            # Nobody comes to HEAD in this second, or the test fails.
            waited.append(committed.wait(120) and not overtaken.wait(1))

    def look(key: str) -> None:
        if key == HEAD_KEY and threading.current_thread().name != THREAD_NAME:
            overtaken.set()

    with Publisher(trainer.live, bucket, signing_key=keys.private("a"), head_seconds=1) as publisher:
        bucket.before = hold
        assert renewing.wait(120)
        bucket.reading = look
        bucket.after = lambda key: committed.set() if key == version_key(1) else None
        publish(publisher, trainer)
        assert waited == [True]
        assert head_of(folder).version == 1
    versions = [head.version for _, head in bucket.written]
    assert versions == sorted(versions)


@pytest.mark.parametrize("signer", [None, "stranger"])
def test_head_of_a_stranger_is_written_over_wherever_it_points(
    signer: str | None, folder: Path, keys: Keys, trainer: Trainer, caplog: Any
) -> None:
    """It points at a version that is there, but not of anybody who is trusted: that is no reason to leave it."""
    bucket = Heads(folder)
    with Publisher(trainer.live, bucket, signing_key=keys.private("a"), head_seconds=1) as publisher:
        publish(publisher, trainer)
        forge(folder)
        forged = Manifest.from_bytes((folder / version_key(2)).read_bytes())
        (folder / HEAD_KEY).write_bytes(Head(run=forged.run, version=2, manifest=forged.digest).to_bytes())
        if signer is not None:
            sign_file(folder, HEAD_KEY, Head, keys.ring(signer))
        with caplog.at_level(logging.ERROR):
            # One may have looked at HEAD just before.
            bucket.wait(len(bucket.renewals()) + 2)
        assert "which somebody else has written to the bucket" in caplog.text
        assert head_of(folder).version == 1
        assert_all_signed_but(folder, version_key(2), keys.hex("a"))
        (folder / version_key(2)).unlink()
        publish(publisher, trainer)


def assert_all_signed_but(folder: Path, forged: str, key: str) -> None:
    data = (folder / forged).read_bytes()
    (folder / forged).unlink()
    assert_all_signed(folder, key)
    (folder / forged).write_bytes(data)


def test_renewal_ends_when_another_takes_the_run_over(folder: Path, keys: Keys, trainer: Trainer) -> None:
    trusted = [keys.public("a")]
    former = Publisher(trainer.live, str(folder), signing_key=keys.private("a"), head_seconds=1)
    (renewing,) = (thread for thread in threading.enumerate() if thread.name == THREAD_NAME)
    publish(former, trainer)
    list_keys(folder, keys.ring("a"), [KeyEntry(key=keys.hex("b"))])
    bucket = Heads(folder)
    with Publisher(
        trainer.copy(), bucket, signing_key=keys.private("b"), trusted_keys=trusted, head_seconds=1
    ) as later:
        assert (later.version, bucket.written[0][1].version) == (1, 1)
        renewing.join(120)
        assert not renewing.is_alive()
        bucket.wait(len(bucket.renewals()) + 1)
        head = head_of(folder)
        assert head.signature is not None
        assert head.signature.key == keys.hex("b")
        before = stored(folder)
        with pytest.raises(ConflictError, match="taken over"):
            publish(former, trainer)
        with pytest.raises(ConflictError):
            former.close()
        changed = {key for key, data in stored(folder).items() if before.get(key) != data}
        assert not any(key.startswith("versions/") for key in changed)
        publish(later, trainer)
    assert_all_signed(folder, keys.hex("a"), keys.hex("b"))
    assert [manifest.epoch for manifest in Run(bucket, keys.readers("a")).log()] == [0, 0, 1]


def test_head_that_has_run_out_is_renewed_by_who_takes_over(folder: Path, keys: Keys, trainer: Trainer) -> None:
    key = keys.private("a")
    Publisher(trainer.live, str(folder), signing_key=key, head_seconds=1).close()
    before = head_of(folder)
    with Publisher(trainer.live, str(folder), signing_key=key):
        assert (head_of(folder).expires_at or "") > (before.expires_at or "")
        assert_all_signed(folder, keys.hex("a"))


def test_close_does_not_write_over_the_head_of_who_took_over(folder: Path, keys: Keys, trainer: Trainer) -> None:
    former = Publisher(trainer.live, str(folder), signing_key=keys.private("a"))
    list_keys(folder, keys.ring("a"), [KeyEntry(key=keys.hex("b"))])
    with Publisher(trainer.copy(), str(folder), signing_key=keys.private("b"), trusted_keys=[keys.public("a")]):
        head = (folder / HEAD_KEY).read_bytes()
        former.close()
        assert (folder / HEAD_KEY).read_bytes() == head
