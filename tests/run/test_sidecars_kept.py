"""Sidecars stay as long as their version can be rebuilt, and go with it."""

from pathlib import Path

import pytest

from tests.support.sidecars import STATE, age, held, key_of, publish
from tests.support.sidecars import bucket as bucket
from tests.support.sidecars import trainer as trainer
from tests.trainer.faults.hooks import Hooked, Trainer
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.chain import Run
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.upkeep.retention import Policy, collect
from vllm_delta_sync.upkeep.tagging import set_tag
from vllm_delta_sync.wire.manifest import SIDECARS_PREFIX


def test_retention_keeps_and_drops_them_with_their_versions(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, fold=False) as publisher:
        for step in range(1, 7):
            publish(publisher, trainer, step, state=b"state %d" % step, common=STATE)
            if step == 3:
                publisher.anchor()
        publisher.anchor()
    set_tag(open_run(bucket.url), "best", 2)
    # What a publish that failed has left.
    bucket.put(key_of(b"nobody's"), b"nobody's")
    age(bucket.folder, 24 * 3600)
    young = b"young"
    bucket.put(key_of(young), young)
    before = held(bucket.url)
    planned = collect(open_run(bucket.url), Policy(keep_last=1), dry_run=True)
    assert held(bucket.url) == before
    report = collect(open_run(bucket.url), Policy(keep_last=1))
    assert sorted(planned.sidecars) == sorted(report.sidecars)
    run = open_run(bucket.url)
    assert set(report.kept) == {2, 6}
    record = run.retention()
    assert record is not None
    readable = {version for version in range(1, 7) if not record.gave_up(version)}
    assert {2, 6} <= readable < set(range(1, 7))
    expected = {key_of(b"state %d" % version) for version in readable} | {key_of(STATE), key_of(young)}
    assert held(bucket.url) == expected
    for version in range(1, 7):
        if version in readable:
            assert run.sidecar(version, "state") == b"state %d" % version
            assert dict(run.tensors(version)).keys() == trainer.live.keys()
        else:
            with pytest.raises(NotFoundError, match="was removed with the version by retention"):
                run.sidecar(version, "state")
        assert run.sidecar(version, "common") == STATE
    found = run.verify()
    assert found.sidecars == len(expected) - 1
    assert report.bytes == planned.bytes > 0


class Crash(BaseException):
    """The process is gone."""


class CrashesAt(Hooked):
    """Removes so many sidecars, and then no more."""

    def __init__(self, folder: Path, removals: int) -> None:
        super().__init__(folder)
        self._left = removals

    def delete(self, key: str) -> None:
        if key.startswith(SIDECARS_PREFIX):
            if not self._left:
                raise Crash
            self._left -= 1
        super().delete(key)


@pytest.mark.parametrize("removals", [0, 2])
def test_collection_that_crashed_is_finished_by_the_next(removals: int, bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, fold=False) as publisher:
        for step in range(1, 6):
            publish(publisher, trainer, step, state=b"state %d" % step)
        publisher.anchor()
    age(bucket.folder, 24 * 3600)
    policy = Policy(keep_last=1)
    with pytest.raises(Crash):
        collect(Run(CrashesAt(bucket.folder, removals)), policy)
    run = open_run(bucket.url)
    assert run.sidecar(5, "state") == b"state 5"
    assert len(held(bucket.url)) == 5 - removals
    # What is left over is nobody's by now, which is no error.
    assert run.verify().head == 5
    assert len(collect(run, policy).sidecars) == 4 - removals
    assert held(bucket.url) == {key_of(b"state 5")}


def test_version_stays_readable_and_is_collected_where_its_sidecar_is_lost(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 1, state=STATE)
        publish(publisher, trainer, 2)
    bucket.delete(key_of(STATE))
    age(bucket.folder, 24 * 3600)
    report = collect(open_run(bucket.url))
    assert set(report.kept) == {0, 1, 2}
    assert (report.lost, report.gone) == ({}, [])
    assert dict(open_run(bucket.url).tensors(1)).keys() == trainer.live.keys()
