"""Sidecars: bytes beside a version, committed with it, and bound by it."""

import io
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.publishing import damage
from tests.support.sidecars import STATE, age, call, held, key_of, publish
from tests.support.sidecars import bucket as bucket
from tests.support.sidecars import trainer as trainer
from tests.support.signed import Keys
from tests.trainer.faults.hooks import FailAt, Hooked, Trainer
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import (
    DigestError,
    FormatError,
    LimitError,
    NotFoundError,
    PublishError,
    SignatureError,
    UnsupportedError,
    UsageError,
)
from vllm_delta_sync.upkeep.repair import repair
from vllm_delta_sync.wire.limits import MAX_SIDECAR_BYTES, MAX_SIDECARS
from vllm_delta_sync.wire.manifest import SIDECARS_PREFIX, Manifest, version_key

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
    assert run.sidecar(3, "optimizer.pt") == buffer.getvalue()
    assert run.sidecar(None, "optimizer.pt") == buffer.getvalue()
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


def test_what_a_version_without_any_looks_like_did_not_change(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 1)
        publish(publisher, trainer, 2, state=STATE)
    without, with_one = (json.loads(bucket.get(version_key(version))) for version in (1, 2))
    assert "sidecars" not in without
    found = {"name": "state", "key": key_of(STATE), "bytes": len(STATE), "sha256": sha256(STATE).hexdigest()}
    assert with_one["sidecars"] == [found]
    assert with_one.keys() - without.keys() == {"sidecars"}
    assert with_one["payload_bytes"] == sum(item["bytes"] for item in with_one["objects"])


def test_they_are_durable_before_the_manifest_is_written(bucket: Hooked, trainer: Trainer) -> None:
    seen: list[bool] = []

    def before(key: str) -> None:
        if key == version_key(1):
            seen.append(held(bucket.url) == {key_of(STATE), key_of(b"other")})

    bucket.before = before
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 1, state=STATE, other=b"other", same=STATE)
    assert seen == [True]


@pytest.mark.parametrize("prefix", [SIDECARS_PREFIX, "versions/0000000001"])
def test_version_that_cannot_be_written_has_none_and_the_next_has_its_own(
    prefix: str, bucket: Hooked, trainer: Trainer
) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        bucket.before = FailAt(prefix)
        trainer.step()
        publisher.publish(1, sidecars={"state": b"lost"})
        with pytest.raises(PublishError, match="next publish carries"):
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


def test_bytes_that_change_after_the_call_are_as_they_were(bucket: Hooked, trainer: Trainer) -> None:
    changing = bytearray(STATE)
    with Publisher(trainer.live, bucket) as publisher:
        publisher.publish(1, sidecars={"state": changing, "view": memoryview(changing)[:4]})
        changing[:] = bytes(len(changing))
    run = open_run(bucket.url)
    assert (run.sidecar(1, "state"), run.sidecar(1, "view")) == (STATE, STATE[:4])


def test_one_that_a_collection_removed_while_it_was_committed_is_put_again(bucket: Hooked, trainer: Trainer) -> None:
    def after(key: str) -> None:
        if key == version_key(1):
            bucket.delete(key_of(STATE))

    bucket.after = after
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 1, state=STATE)
    assert open_run(bucket.url).sidecar(1, "state") == STATE


WRONG: dict[str, tuple[Any, str]] = {
    "no mapping": ([("state", STATE)], "sidecars is a list; give a mapping"),
    "text": ({"state": "text"}, "sidecar 'state' is a str; give bytes"),
    "no name": ({"": STATE}, "sidecar name '' is none; give 1 to 100"),
    "path": ({"a/b": STATE}, "sidecar name 'a/b' is none"),
    "number": ({3: STATE}, "sidecar name '3' is none"),
    "newline": ({"state\n": STATE}, "is none"),
    "long": ({"s" * 101: STATE}, "is none"),
    "too many": ({f"s{n}": b"" for n in range(MAX_SIDECARS + 1)}, "has 17 entries; give at most 16"),
    "too large": ({"state": bytes(MAX_SIDECAR_BYTES + 1)}, "has 16,777,217 bytes; give at most 16,777,216"),
}


def test_what_makes_no_sense_is_refused_and_nothing_is_published(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        for given, message in WRONG.values():
            with pytest.raises(UsageError, match=message):
                publisher.publish(1, sidecars=given)
        assert publish(publisher, trainer, 1, state=STATE) == 1
    assert open_run(bucket.url).head().version == 1


def test_limits_are_allowed(bucket: Hooked, trainer: Trainer) -> None:
    given = {f"s{number}": bytes([number]) for number in range(MAX_SIDECARS - 1)}
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 1, **given, large=bytes(MAX_SIDECAR_BYTES))
    run = open_run(bucket.url)
    assert run.sidecar(1, "large") == bytes(MAX_SIDECAR_BYTES)
    assert len(run.manifest(1).sidecars) == MAX_SIDECARS
    assert run.verify().sidecars == MAX_SIDECARS


# Read


def test_names_that_are_not_there(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 1, state=STATE, more=b"")
    run = open_run(bucket.url)
    with pytest.raises(NotFoundError, match="version 1 has no sidecar 'stat'; it has 'state', 'more'"):
        run.sidecar(1, "stat")
    with pytest.raises(NotFoundError, match="version 0 has no sidecar 'state'; it has none"):
        run.sidecar(0, "state")
    with pytest.raises(NotFoundError, match="version 2 is not published"):
        run.sidecar(2, "state")


def malformed(**changes: Any) -> dict[str, Any]:
    return {"name": "state", "key": key_of(STATE), "bytes": 3, "sha256": sha256(STATE).hexdigest(), **changes}


@pytest.mark.parametrize(
    "listed",
    [
        [malformed(), malformed()],
        [malformed(name="a/b")],
        [malformed(name="")],
        [malformed(key="sidecars/../run.json")],
        [malformed(key=f"objects/{sha256(STATE).hexdigest()}.safetensors")],
        [malformed(bytes=MAX_SIDECAR_BYTES + 1)],
        [malformed(bytes=-1)],
        [malformed(name=f"s{number}") for number in range(MAX_SIDECARS + 1)],
        None,
    ],
)
def test_malformed_lists_are_refused(listed: Any, bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 1)
    value = json.loads(bucket.get(version_key(1))) | {"sidecars": listed}
    with pytest.raises(FormatError, match="sidecar"):
        Manifest.from_bytes(json.dumps(value, separators=(",", ":"), sort_keys=True).encode())


def test_unknown_members_of_an_entry_are_ignored(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 1, state=STATE)
    value = json.loads(bucket.get(version_key(1)))
    value["sidecars"][0]["kind"] = "later"
    found = Manifest.from_bytes(json.dumps(value, separators=(",", ":"), sort_keys=True).encode())
    assert found.sidecars[0].name == "state"
    value["requires"] = ["sidecars"]
    with pytest.raises(UnsupportedError):
        Manifest.from_bytes(json.dumps(value, separators=(",", ":"), sort_keys=True).encode())


# Bound by the manifest


@pytest.mark.parametrize("way", ["damaged", "cut", "longer"])
def test_other_bytes_are_refused_and_verify_says_so(way: str, bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 1, state=STATE)
    if way == "damaged":
        damage(bucket.url, key_of(STATE))
    else:
        bucket.put(key_of(STATE), STATE[:-1] if way == "cut" else STATE + b" ")
    run, error = open_run(bucket.url), LimitError if way == "longer" else DigestError
    with pytest.raises(error) as caught:
        run.sidecar(1, "state")
    assert key_of(STATE) in caught.value.message
    with pytest.raises(error, match="sidecar 'state' of version 1"):
        run.verify()
    report = run.verify(findings=True)
    assert [(finding.key, finding.version) for finding in report.findings] == [(key_of(STATE), 1)]
    # Weights are not touched by it.
    assert report.replayed
    assert dict(run.tensors(1)).keys() == trainer.live.keys()


def test_lost_ones_come_back_from_a_mirror(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 1, state=STATE)
        publish(publisher, trainer, 2, state=STATE, large=bytes(2 * MAX_SIDECAR_BYTES // 3))
    mirror = open_bucket(str(tmp_path / "mirror"))
    for item in bucket.list():
        mirror.put(item.key, bucket.get(item.key))
    bucket.delete(key_of(STATE))
    damage(bucket.url, key_of(bytes(2 * MAX_SIDECAR_BYTES // 3)))
    run = open_run(bucket.url)
    with pytest.raises(NotFoundError, match="sidecar 'state' of version 2"):
        run.sidecar(2, "state")
    alone = repair(run)
    assert not alone.repaired
    assert {line.split(":")[0] for line in alone.lost} == {key_of(STATE), key_of(bytes(2 * MAX_SIDECAR_BYTES // 3))}
    report = repair(run, mirror=mirror)
    assert (len(report.repaired), report.lost) == (2, [])
    assert open_run(bucket.url).sidecar(2, "state") == STATE
    assert open_run(bucket.url).verify().sidecars == 2


def test_signature_of_the_manifest_covers_them(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    with Publisher(trainer.live, bucket, signing_key=keys.private("trainer")) as publisher:
        publish(publisher, trainer, 1, state=STATE)
    readers = keys.readers("trainer")
    assert open_run(bucket.url, readers).sidecar(1, "state") == STATE
    assert open_run(bucket.url, readers).verify().sidecars == 1
    value = json.loads(bucket.get(version_key(1)))
    other = b"another"
    digest = sha256(other).hexdigest()
    value["sidecars"] = [{"name": "state", "key": key_of(other), "bytes": len(other), "sha256": digest}]
    bucket.put(key_of(other), other)
    bucket.put(version_key(1), json.dumps(value, separators=(",", ":"), sort_keys=True).encode())
    with pytest.raises(SignatureError):
        open_run(bucket.url, readers).sidecar(1, "state")


# Shown


def test_commands_show_them(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        publish(publisher, trainer, 1)
        plain = call("log", "--bucket", bucket.url)
        assert "sidecar" not in plain + call("inspect", bucket.url, "--version", "1")
        publish(publisher, trainer, 2, state=STATE, more=b"")
    log = json.loads(call("log", "--bucket", bucket.url, "--json"))
    assert [row["sidecars"] for row in log["versions"]] == [0, 0, 2]
    assert call("log", "--bucket", bucket.url).splitlines()[0].endswith("sidecars")
    shown = json.loads(call("inspect", bucket.url, "--version", "2", "--json"))
    assert [(item["name"], item["bytes"]) for item in shown["sidecars"]] == [("state", len(STATE)), ("more", 0)]
    text = call("inspect", bucket.url, "--version", "2")
    assert key_of(STATE) in text
    verified = json.loads(call("verify", "--bucket", bucket.url, "--json"))
    assert verified["sidecars"] == 2
    assert "2 are undamaged" in call("verify", "--bucket", bucket.url)
    age(bucket.folder, 24 * 3600)
    removed = json.loads(call("gc", "--bucket", bucket.url, "--keep-last", "1", "--json"))["removed"]
    assert removed["sidecars"] == []
