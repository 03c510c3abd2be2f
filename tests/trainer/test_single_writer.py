"""Two publishers on a bucket whose create-if-absent does not hold: at most one goes on, and never over the other's."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.publishers import Hooked, Once, Trainer, assert_stopped, publish
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import base as bucket_base
from vllm_delta_sync.errors import ConflictError
from vllm_delta_sync.format.base_document import Document, timestamp
from vllm_delta_sync.format.documents import Claim, claim_key
from vllm_delta_sync.format.manifest import RUN_KEY, TABLE_KEY, Manifest, RunInfo, version_key


class Shared(Hooked):
    """Looks a key up and then writes, as the Hub's own interface has it. ``after`` stands for another writer that had
    looked before, and is served later."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.supports_conditional_put = False

    def overwrite(self, key: str, data: bytes) -> None:
        self._inner.put(key, data)


class Late:
    """Another writer's object, which comes right after ours under the same key, once."""

    def __init__(self, bucket: Shared, key: str, make: Callable[[bytes], bytes]) -> None:
        self._bucket, self._key, self._make = bucket, key, make
        self.left: bytes | None = None

    def __call__(self, key: str) -> None:
        if key == self._key and self.left is None:
            self.left = self._make(self._bucket.get(key))
            self._bucket.overwrite(key, self.left)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shared:
    monkeypatch.setattr(bucket_base, "SETTLING_SECONDS", 0.01)
    return Shared(tmp_path / "run")


def changed(document: type[Document], **fields: str) -> Callable[[bytes], bytes]:
    """Makes another writer's document of one of ours."""

    def change(data: bytes) -> bytes:
        return document.model_validate(document.from_bytes(data, "ours").model_dump() | fields).to_bytes()

    return change


their_manifest = changed(Manifest, created_at="2030-01-01T00:00:00Z")
their_claim = changed(Claim, writer="f" * 32, created_at="2030-01-01T00:00:00Z")
their_run = changed(RunInfo, run="e" * 32)


def test_of_two_claims_of_one_epoch_the_one_that_stays_counts(shared: Shared, trainer: Trainer) -> None:
    Publisher(trainer.live, shared).close()
    shared.after = late = Late(shared, claim_key(1), their_claim)
    with Publisher(trainer.live, shared, resume=True) as publisher:
        trainer.step()
        publisher.publish(step=1)
    assert shared.get(claim_key(1)) == late.left
    assert [manifest.epoch for manifest in open_run(shared.url).log()] == [0, 2]


def test_a_claim_that_is_written_over_later_stops_its_writer(shared: Shared, trainer: Trainer) -> None:
    Publisher(trainer.live, shared).close()
    publisher = Publisher(trainer.live, shared, resume=True)
    shared.overwrite(claim_key(1), their_claim(shared.get(claim_key(1))))
    trainer.step()
    publisher.publish(step=1)
    assert_stopped(publisher, r"taken over the run .*claims/0000000001\.json")
    assert [manifest.version for manifest in open_run(shared.url).log()] == [0]


def test_a_manifest_that_was_written_over_is_left_and_stops_its_writer(shared: Shared, trainer: Trainer) -> None:
    publisher = Publisher(trainer.live, shared)
    shared.after = late = Late(shared, version_key(1), their_manifest)
    trainer.step()
    publisher.publish(step=1)
    assert_stopped(publisher, "version 1 .* was written by another publisher")
    assert shared.get(version_key(1)) == late.left


def test_a_claim_that_came_while_the_manifest_was_written_stops_its_writer(shared: Shared, trainer: Trainer) -> None:
    publisher = Publisher(trainer.live, shared)

    def claim() -> None:
        digest = open_run(shared.url).manifest(0).digest
        made = Claim(run=publisher.run, epoch=1, version=0, manifest=digest, writer="f" * 32, created_at=timestamp())
        shared.overwrite(claim_key(1), made.to_bytes())

    shared.after = Once(version_key(1), claim)
    trainer.step()
    publisher.publish(step=1)
    assert_stopped(publisher, "taken over the run")


def test_a_version_that_was_written_over_later_stops_its_writer(shared: Shared, trainer: Trainer) -> None:
    publisher = Publisher(trainer.live, shared)
    publish(publisher, trainer)
    theirs = their_manifest(shared.get(version_key(1)))
    shared.overwrite(version_key(1), theirs)
    trainer.step()
    publisher.publish(step=2)
    assert_stopped(publisher, r"versions/0000000001\.json .* was overwritten by another publisher")
    assert shared.get(version_key(1)) == theirs
    assert [info.key for info in shared.list("versions/")] == [version_key(0), version_key(1)]


def test_of_two_starts_the_one_whose_run_json_stays_has_the_url(shared: Shared, trainer: Trainer) -> None:
    shared.after = late = Late(shared, RUN_KEY, their_run)
    with pytest.raises(ConflictError, match=r"holds run\.json of another publisher"):
        Publisher(trainer.live, shared)
    assert [(info.key, shared.get(info.key)) for info in shared.list()] == [(RUN_KEY, late.left)]


def test_a_start_that_lost_its_run_json_late_removes_nothing_of_the_other(shared: Shared, trainer: Trainer) -> None:
    shared.after = Once("objects/", lambda: shared.overwrite(RUN_KEY, their_run(shared.get(RUN_KEY))))
    with pytest.raises(ConflictError, match="another run was started"):
        Publisher(trainer.live, shared)
    found = [info.key for info in shared.list()]
    assert found[-2:] == [RUN_KEY, TABLE_KEY]
    assert found[0].startswith("objects/")


def test_exclusive_stores_wait_for_nothing(tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_base, "SETTLING_SECONDS", -1)
    bucket = Hooked(tmp_path / "run")
    Publisher(trainer.live, bucket).close()
    Publisher(trainer.live, bucket, resume=True).close()
