"""Sidecars: bytes beside a version, committed with it, bound by it, and kept as long as it can be rebuilt."""

import io
import json
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.collecting import Crash
from tests.support.commands import answer, shown
from tests.support.publishers import FailAt, Hooked, Trainer
from tests.support.sidecars import STATE, age, copy_of, edited, listed, publish, spoil
from tests.support.sidecars import bucket as bucket
from tests.support.sidecars import held as held_below
from tests.support.sidecars import trainer as trainer
from tests.support.signed import Keys
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.errors import (
    FormatError,
    NotFoundError,
    PublishError,
    SignatureError,
    UnsupportedError,
    UsageError,
)
from vllm_delta_sync.format.limits import MAX_SIDECAR_BYTES, MAX_SIDECARS
from vllm_delta_sync.format.manifest import OBJECTS_PREFIX, SIDECARS_PREFIX, Manifest, sidecar_key, version_key
from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy, collect
from vllm_delta_sync.maintenance.repair.repair import repair
from vllm_delta_sync.maintenance.tags import set_tag


def key_of(data: bytes) -> str:
    return sidecar_key(sha256(data).hexdigest())


def held(url: str) -> set[str]:
    return held_below(url, SIDECARS_PREFIX)


@pytest.fixture
def publisher(bucket: Hooked, trainer: Trainer) -> Iterator[Publisher]:
    with Publisher(trainer.live, bucket) as made:
        yield made


# Committed with the version


def test_state_of_training_comes_back_as_it_was(url: str) -> None:
    """The way that it is meant for: weights from the version, the optimizer's few numbers from beside it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Publisher(model, url) as publisher:
        for step in range(1, 4):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            buffer = io.BytesIO()
            torch.save(optimizer.state_dict(), buffer)
            publisher.publish(step, wait=True, sidecars={"optimizer.pt": buffer.getvalue(), "note": b""})
    run = open_run(url)
    assert run.sidecar(3, "optimizer.pt") == run.sidecar(None, "optimizer.pt") == buffer.getvalue()
    assert run.sidecar(2, "note") == b""
    again = torch.nn.Linear(4, 4)
    run.load_into(again, 3)
    resumed = torch.optim.SGD(again.parameters(), lr=9.0, momentum=0.9)
    resumed.load_state_dict(torch.load(io.BytesIO(run.sidecar(3, "optimizer.pt"))))
    for module, one in ((model, optimizer), (again, resumed)):
        module(torch.ones(4)).sum().backward()
        one.step()
    assert torch.equal(model.weight, again.weight)
    report = run.verify()
    assert (report.sidecars, report.replayed) == (4, True)


def test_manifests_with_and_without(bucket: Hooked, trainer: Trainer, publisher: Publisher) -> None:
    publish(publisher, trainer, 1)
    publish(publisher, trainer, 2, state=STATE)
    without, with_one = (json.loads(bucket.get(version_key(version))) for version in (1, 2))
    assert with_one["sidecars"] == [listed(STATE, "state", key_of(STATE))]
    assert with_one.keys() - without.keys() == {"sidecars"}
    assert with_one["payload_bytes"] == sum(item["bytes"] for item in with_one["objects"])
    run = open_run(bucket.url)
    for version, name in ((2, "stat"), (0, "state"), (3, "state")):
        with pytest.raises(NotFoundError, match=f"version {version}"):
            run.sidecar(version, name)


def test_they_are_durable_before_the_manifest(bucket: Hooked, trainer: Trainer, publisher: Publisher) -> None:
    seen: list[bool] = []

    def before(key: str) -> None:
        if key == version_key(1):
            seen.append(held(bucket.url) == {key_of(STATE), key_of(b"other")})

    def after(key: str) -> None:
        if key == version_key(1):
            bucket.delete(key_of(STATE))

    bucket.before, bucket.after = before, after
    publish(publisher, trainer, 1, state=STATE, other=b"other", same=STATE)
    assert seen == [True]
    # One that a collection removed meanwhile is put again.
    assert open_run(bucket.url).sidecar(1, "state") == STATE


def test_whether_they_are_still_there_is_asked_at_once(bucket: Hooked, trainer: Trainer, publisher: Publisher) -> None:
    """On a distant store each question takes a round trip, in which the next version waits."""
    together = threading.Barrier(3)

    def looking(key: str) -> None:
        if key.startswith((OBJECTS_PREFIX, SIDECARS_PREFIX)):
            together.wait(60)

    bucket.looking = looking
    publish(publisher, trainer, 1, state=STATE, other=b"other")
    assert not together.broken


@pytest.mark.parametrize("prefix", [SIDECARS_PREFIX, "versions/0000000001"])
def test_version_that_cannot_be_written_has_none_and_the_next_has_its_own(
    prefix: str, bucket: Hooked, trainer: Trainer, publisher: Publisher
) -> None:
    bucket.before = FailAt(prefix)
    trainer.step()
    publisher.publish(1, sidecars={"state": b"lost"})
    with pytest.raises(PublishError):
        publisher.flush()
    assert open_run(bucket.url).head().version == 0
    assert publish(publisher, trainer, 2, state=STATE) == 1
    run = open_run(bucket.url)
    assert run.sidecar(1, "state") == STATE
    assert dict(run.tensors(1))["a"].view(torch.int16).equal(trainer.live["a"].view(torch.int16))


def test_those_of_a_skipped_call_are_not_kept_for_the_next(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, every=2) as publisher:
        assert publish(publisher, trainer, 1, state=b"skipped") is None
        assert publish(publisher, trainer, 2) == 1
    assert open_run(bucket.url).manifest(1).sidecars == []
    assert held(bucket.url) == set()


def test_bytes_that_change_after_the_call_are_as_they_were(bucket: Hooked, publisher: Publisher) -> None:
    changing = bytearray(STATE)
    publisher.publish(1, sidecars={"state": changing, "view": memoryview(changing)[:4]})
    changing[:] = bytes(len(changing))
    publisher.flush()
    run = open_run(bucket.url)
    assert (run.sidecar(1, "state"), run.sidecar(1, "view")) == (STATE, STATE[:4])


WRONG: tuple[Any, ...] = (
    *([("state", STATE)], {"state": "text"}, {"": STATE}, {"a/b": STATE}, {3: STATE}, {"state\n": STATE}),
    *({"s" * 101: STATE}, {f"s{n}": b"" for n in range(MAX_SIDECARS + 1)}, {"state": bytes(MAX_SIDECAR_BYTES + 1)}),
)


def test_what_makes_no_sense_is_refused_and_nothing_is_published(bucket: Hooked, publisher: Publisher) -> None:
    for given in WRONG:
        with pytest.raises(UsageError, match="sidecar"):
            publisher.publish(1, sidecars=given)
    # What the limits allow is published.
    most = {f"s{number}": bytes([number]) for number in range(MAX_SIDECARS - 1)} | {"large": bytes(MAX_SIDECAR_BYTES)}
    assert publisher.publish(1, wait=True, sidecars=most).version == 1
    publisher.flush()
    run = open_run(bucket.url)
    assert run.sidecar(1, "large") == bytes(MAX_SIDECAR_BYTES)
    assert len(run.manifest(1).sidecars) == run.verify().sidecars == MAX_SIDECARS


def malformed(**changes: Any) -> dict[str, Any]:
    return {**listed(STATE, "state", key_of(STATE)), **changes}


def test_malformed_lists_are_refused(bucket: Hooked, trainer: Trainer, publisher: Publisher) -> None:
    publish(publisher, trainer, 1)
    for found in (
        [malformed(), malformed()],
        [malformed(name="a/b")],
        [malformed(name="")],
        [malformed(key="sidecars/../run.json")],
        [malformed(key=f"objects/{sha256(STATE).hexdigest()}.safetensors")],
        [malformed(bytes=MAX_SIDECAR_BYTES + 1)],
        [malformed(bytes=-1)],
        [malformed(name=f"s{number}") for number in range(MAX_SIDECARS + 1)],
        None,
    ):
        with pytest.raises(FormatError, match="sidecar"):
            Manifest.from_bytes(edited(bucket, version_key(1), sidecars=found))
    # Unknown members of an entry are ignored, and what is required has to be known.
    later = [malformed(kind="later")]
    assert Manifest.from_bytes(edited(bucket, version_key(1), sidecars=later)).sidecars[0].name == "state"
    with pytest.raises(UnsupportedError):
        Manifest.from_bytes(edited(bucket, version_key(1), sidecars=later, requires=["sidecars"]))


# Bound by the manifest


@pytest.mark.parametrize("way", ["damaged", "cut", "longer", "lost"])
def test_other_bytes_are_refused_and_come_back_from_a_mirror(
    way: str, bucket: Hooked, trainer: Trainer, publisher: Publisher, tmp_path: Path
) -> None:
    publish(publisher, trainer, 1, state=STATE)
    publish(publisher, trainer, 2, state=STATE, large=bytes(70_000))
    mirror, key = copy_of(bucket, tmp_path / "mirror"), key_of(STATE)
    error = spoil(bucket, key, way)
    run = open_run(bucket.url)
    with pytest.raises(error, match=key):
        run.sidecar(1, "state")
    with pytest.raises(error, match="sidecar 'state' of version 1"):
        run.verify()
    report = run.verify(findings=True)
    assert {(finding.key, finding.version) for finding in report.findings} <= {(key, 1), (key, 2)}
    assert report.findings
    # Weights are not touched by it.
    assert report.replayed
    assert dict(run.tensors(1)).keys() == trainer.live.keys()
    alone = repair(run)
    assert (alone.repaired, {line.split(":")[0] for line in alone.lost}) == ([], {key})
    mended = repair(run, mirror=mirror)
    assert (len(mended.repaired), mended.lost) == (1, [])
    assert open_run(bucket.url).sidecar(2, "state") == STATE
    assert open_run(bucket.url).verify().sidecars == 2


def test_signature_of_the_manifest_covers_them(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    with Publisher(trainer.live, bucket, signing_key=keys.private("trainer")) as publisher:
        publish(publisher, trainer, 1, state=STATE)
    readers = keys.readers("trainer")
    assert open_run(bucket.url, readers).sidecar(1, "state") == STATE
    assert open_run(bucket.url, readers).verify().sidecars == 1
    bucket.put(key_of(b"another"), b"another")
    other = [listed(b"another", "state", key_of(b"another"))]
    bucket.put(version_key(1), edited(bucket, version_key(1), sidecars=other))
    with pytest.raises(SignatureError):
        open_run(bucket.url, readers).sidecar(1, "state")


def test_commands_show_them(bucket: Hooked, trainer: Trainer, publisher: Publisher) -> None:
    url = bucket.url
    publish(publisher, trainer, 1)
    assert "sidecar" not in shown("log", "--bucket", url) + shown("inspect", "--bucket", url, "--version", "1")
    publish(publisher, trainer, 2, state=STATE, more=b"")
    assert [row["sidecars"] for row in answer("log", "--bucket", url)["versions"]] == [0, 0, 2]
    assert shown("log", "--bucket", url).splitlines()[0].endswith("sidecars")
    document = answer("inspect", "--bucket", url, "--version", "2")
    assert [(item["name"], item["bytes"]) for item in document["sidecars"]] == [("state", len(STATE)), ("more", 0)]
    assert key_of(STATE) in shown("inspect", "--bucket", url, "--version", "2")
    assert answer("verify", "--bucket", url)["sidecars"] == 2
    assert "2 are undamaged" in shown("verify", "--bucket", url)
    age(bucket.folder)
    assert answer("gc", "--bucket", url, "--keep-last", "1")["removed"]["sidecars"] == []


# Kept as long as their version


def test_gc_keeps_and_drops_them_with_their_versions(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, merge=False) as publisher:
        for step in range(1, 7):
            publish(publisher, trainer, step, state=b"state %d" % step, common=STATE)
            if step == 3:
                publisher.anchor()
        publisher.anchor()
    set_tag(open_run(bucket.url), "best", 2)
    # What a publish that failed has left.
    bucket.put(key_of(b"nobody's"), b"nobody's")
    age(bucket.folder)
    young = b"young"
    bucket.put(key_of(young), young)
    before = held(bucket.url)
    planned = collect(open_run(bucket.url), RetentionPolicy(keep_last=1), dry_run=True)
    assert held(bucket.url) == before
    report = collect(open_run(bucket.url), RetentionPolicy(keep_last=1))
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
            with pytest.raises(NotFoundError, match="retention"):
                run.sidecar(version, "state")
        assert run.sidecar(version, "common") == STATE
    assert run.verify().sidecars == len(expected) - 1
    assert report.bytes == planned.bytes > 0


@pytest.mark.parametrize("removals", [0, 2])
def test_gc_that_crashed_is_finished_by_the_next(removals: int, bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, merge=False) as publisher:
        for step in range(1, 6):
            publish(publisher, trainer, step, state=b"state %d" % step)
        publisher.anchor()
    age(bucket.folder)
    policy = RetentionPolicy(keep_last=1)
    left, remove = iter(range(removals)), LocalBucket.delete

    def delete(held: LocalBucket, key: str) -> None:
        if key.startswith(SIDECARS_PREFIX) and next(left, None) is None:
            raise Crash
        remove(held, key)

    with mock.patch.object(LocalBucket, "delete", delete), pytest.raises(Crash):
        collect(open_run(bucket.url), policy)
    run = open_run(bucket.url)
    assert run.sidecar(5, "state") == b"state 5"
    assert len(held(bucket.url)) == 5 - removals
    # What is left over is nobody's by now, which is no error.
    assert run.verify().head == 5
    assert len(collect(run, policy).sidecars) == 4 - removals
    assert held(bucket.url) == {key_of(b"state 5")}


def test_version_stays_readable_where_its_sidecar_is_lost(
    bucket: Hooked, trainer: Trainer, publisher: Publisher
) -> None:
    publish(publisher, trainer, 1, state=STATE)
    publish(publisher, trainer, 2)
    bucket.delete(key_of(STATE))
    age(bucket.folder)
    report = collect(open_run(bucket.url))
    assert (set(report.kept), report.lost, report.gone) == ({0, 1, 2}, {}, [])
    assert dict(open_run(bucket.url).tensors(1)).keys() == trainer.live.keys()
