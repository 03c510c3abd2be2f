"""The fleet of a run: heartbeats, who is live, waiting for a version, and what ``delta-sync fleet`` prints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.chains import Chain
from tests.support.commands import answer, kind, refusal, shown
from tests.support.fleet_run import FleetRun
from tests.support.store_faults import asked_of
from trainer_side import Gate, Publisher
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.cli import fleet as cli_fleet
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import StoreError, UsageError
from vllm_delta_sync.fleet import heartbeats
from vllm_delta_sync.fleet.fleet import FleetLateError
from vllm_delta_sync.fleet.heartbeats import read_heartbeats, write_heartbeat
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import Heartbeat
from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy, collect
from vllm_delta_sync.maintenance.gc.policy import DAY
from vllm_delta_sync.maintenance.tags import set_tag


@pytest.fixture
def world(tmp_path: Path) -> FleetRun:
    """Of versions 0 to 2."""
    return FleetRun(tmp_path, 2)


def names(replicas: list[Any]) -> list[str]:
    return [replica.receiver for replica in replicas]


def test_who_is_live_and_who_is_gone(world: FleetRun) -> None:
    world.heartbeat("old", 1)
    world.bucket.now += 100
    world.heartbeat("b", 2)
    world.heartbeat("a", 1)
    world.heartbeat("gone", 2, state="left", seconds=1)
    fleet = world.fleet()
    fleet.poll()
    assert (names(fleet.replicas), names(fleet.live), names(fleet.ended)) == (
        ["a", "b", "gone", "old"],
        ["a", "b"],
        ["gone", "old"],
    )
    assert [replica.left for replica in fleet.ended] == [True, False]


def test_all_gone_is_told_by_ones_own_clock_or_by_watching(world: FleetRun) -> None:
    world.heartbeat("a", 1)
    world.bucket.now += 100
    assert world.fleet().poll()[0].live is False
    late = world.fleet(skew=-1000)
    assert late.poll()[0].live is True, "a clock that is behind shows what was"
    world.bucket.now += 62
    assert late.poll()[0].live is False


def test_a_store_whose_clock_is_behind(world: FleetRun) -> None:
    fleet = world.fleet(skew=1000)
    for version in (1, 2, 3):
        world.heartbeat("a", version)
        assert fleet.poll()[0].live is (version > 1), "one that is renewed lives, whatever the clock says"
        world.bucket.now += 30
    world.bucket.now += 62
    assert fleet.poll()[0].live is False


def test_wait_is_over_when_every_live_one_is_there(world: FleetRun) -> None:
    world.heartbeat("a", 2)
    with pytest.raises(FleetLateError, match=r"served by 1 of 1 live .*; 1 of 2 replicas have no heartbeat"):
        world.fleet().wait(2, replicas=2, timeout=5)
    world.heartbeat("b", 1, state="held", holding=True, error={"kind": "store", "message": "the disk is full"})
    with pytest.raises(FleetLateError, match=r"'b' serves version 1 \(held, store: the disk is full\)") as caught:
        world.fleet().wait(2, replicas=2, timeout=5)
    assert (caught.value.kind, caught.value.exit_code) == ("fleet_late", 1)
    world.heartbeat("b", 2)
    assert names(world.fleet().wait(2, replicas=2, timeout=0)) == ["a", "b"]
    assert max(world.slept) <= 1.0
    # More than asked for are waited for too.
    world.heartbeat("b", None, state="identifying")
    with pytest.raises(FleetLateError, match=r"'b' serves nothing yet \(identifying\)"):
        world.fleet().wait(2, replicas=1, timeout=5)
    wrong: tuple[dict[str, Any], ...] = ({"version": -1}, {"version": True}, {"version": 1, "replicas": -1})
    for arguments in (*wrong, *({"version": 1, "timeout": seconds} for seconds in (float("nan"), None))):
        with pytest.raises(UsageError):
            world.fleet().wait(**arguments)


@pytest.mark.parametrize("skew", [-1e6, 0.0, 1e6])
def test_a_dead_one_is_waited_for_a_heartbeat(world: FleetRun, skew: float, monkeypatch: pytest.MonkeyPatch) -> None:
    world.heartbeat("a", 2)
    world.heartbeat("dying", 1)
    died = world.bucket.now

    def sleep(seconds: float) -> None:
        world.bucket.now += seconds
        world.heartbeat("a", 2)

    monkeypatch.setattr(world, "passes", sleep)
    assert names(world.fleet(skew).wait(2, replicas=2, timeout=500)) == ["a", "dying"]
    assert 59 <= world.bucket.now - died <= 64


def test_those_who_left_or_died_before_the_version_came(world: FleetRun) -> None:
    world.heartbeat("a", 2)
    world.heartbeat("b", 1, state="left", seconds=1)
    assert world.fleet().wait(2, replicas=2, timeout=0)
    world.bucket.now += 1000
    world.grow()
    world.heartbeat("a", 3)
    with pytest.raises(FleetLateError, match="1 of 2 replicas have no heartbeat"):
        world.fleet().wait(3, replicas=2, timeout=5)
    assert world.fleet().wait(3, replicas=1, timeout=0)


def test_version_that_is_not_published_is_waited_for(world: FleetRun) -> None:
    world.heartbeat("a", 3)
    with pytest.raises(FleetLateError, match="version 3 is not published after 5 s"):
        world.fleet().wait(3, timeout=5)
    world.grow()
    assert world.fleet().wait(3, timeout=0)


def test_heartbeats_that_did_not_change_are_read_once(world: FleetRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        world.heartbeat(f"r{number}", 1)
    fleet = world.fleet()
    fleet.poll()
    world.bucket.now += 5
    world.heartbeat("r4", 2)
    fleet.poll()
    world.bucket.now += 5
    world.heartbeat("r4", 1)
    listed = [*world.bucket.list(side.HEARTBEATS_PREFIX)]
    reads = asked_of(world.bucket, "get")
    monkeypatch.setattr(world.bucket, "list", lambda prefix: iter(listed))
    assert [replica.heartbeat.served for replica in fleet.poll()] == [1, 1, 1, 1, 1]
    assert reads == [side.heartbeat_key("r4")]


def test_older_heartbeats_are_read_and_newer_members_ignored(world: FleetRun) -> None:
    world.heartbeat("a", 2)
    document = json.loads(world.bucket.get(side.heartbeat_key("a")))
    kept = ("format_version", "requires", "run", "receiver", "served", "target", "pins", "seconds", "created_at")
    old = {name: document[name] for name in (*kept, "signature")}
    for fields in (old, old | {"mood": "good"}):
        data = json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()
        world.bucket.put(side.heartbeat_key("a"), data)
        (replica,) = world.fleet().poll()
        assert (replica.heartbeat.served, replica.heartbeat.holding, replica.heartbeat.state) == (2, False, None)


WRONG: tuple[dict[str, Any], ...] = (
    {"error": {"kind": "store", "message": "x" * (limits.MAX_HEARTBEAT_TEXT + 1)}},
    {"error": {"kind": "Not a kind", "message": ""}},
    *({"state": "IDLE"}, {"following": "tag:"}, {"following": "s3://elsewhere/run"}, {"pause_ms": -1.0}, {"lag": -1}),
    *({"holding": 1}, {"seconds": 0}, {"seconds": limits.MAX_HEARTBEAT_SECONDS + 1}, {"served": -1}),
    *({"pins": list(range(limits.MAX_HEARTBEAT_PINS + 1))}, {"receiver_id": "a/b"}, {"receiver_id": ""}),
    {"receiver_id": "a" * 101},
)


@pytest.mark.parametrize("fields", WRONG, ids=lambda fields: next(iter(fields)))
def test_bounds_of_a_heartbeat(world: FleetRun, fields: dict[str, Any]) -> None:
    named = next(iter(fields)).replace("receiver_id", "receiver")
    with pytest.raises(UsageError, match=named):
        write_heartbeat(world.run, **{"receiver_id": "a", "served": 1, **fields})
    assert not list(world.bucket.list(side.HEARTBEATS_PREFIX))


def test_a_heartbeat_is_replaced_and_its_time_counts_from_when_the_store_has_it(world: FleetRun) -> None:
    run = world.run
    world.heartbeat("a", None)
    heartbeat = write_heartbeat(run, "a", 3, target=5, pins=[1, 2], seconds=60)
    put = world.bucket.clock
    (found,) = read_heartbeats(run).live(put)
    assert (found.receiver, found.served, found.target, found.pins, found.seconds) == ("a", 3, 5, [1, 2], 60)
    # What it says of itself counts for nothing.
    late = heartbeat.model_copy(update={"created_at": "2999-01-01T00:00:00Z"})
    world.bucket.held[side.heartbeat_key("a")] = (late.to_bytes(), put)
    assert [len(read_heartbeats(run).live(put + seconds)) for seconds in (59, 60)] == [1, 0]
    assert len(read_heartbeats(run).stored) == 1


def test_what_is_not_believed(world: FleetRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = world.run
    good = write_heartbeat(run, "good", 1)
    documents = {
        "huge": b" " * (limits.MAX_SIDE_BYTES + 1),
        "broken": b"{",
        "foreign": good.model_copy(update={"run": "0" * 32, "receiver": "foreign"}).to_bytes(),
        "renamed": good.to_bytes(),
        "endless": good.to_bytes().replace(b'"seconds":600', b'"seconds":99999999'),
        "newer": good.to_bytes().replace(b'"requires":[]', b'"requires":["telepathy"]'),
    }
    for name, data in documents.items():
        world.bucket.put(side.heartbeat_key(name), data)
    found = read_heartbeats(run)
    assert [item.heartbeat for item in found.stored] == [Heartbeat.from_bytes(good.to_bytes())]
    assert len(found.ignored) == len(documents)
    assert [heartbeat.receiver for heartbeat in found.live(world.bucket.clock)] == ["good"]

    def fail(key: str, *, max_bytes: int | None = None) -> bytes:
        raise StoreError("gone")

    # A store that fails is not an empty one.
    monkeypatch.setattr(world.bucket, "get", fail)
    with pytest.raises(StoreError):
        read_heartbeats(run)


def test_a_flood_is_read_up_to_a_bound(world: FleetRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "MAX_HEARTBEATS", 5)
    for number in range(8):
        world.bucket.now += 1
        world.heartbeat(f"r{number}", number)
    found = read_heartbeats(world.run)
    assert {item.heartbeat.served for item in found.stored} == {3, 4, 5, 6, 7}, "the newest"
    assert len(found.ignored) == 1


def test_collection_removes_what_is_long_over_and_nothing_live(world: FleetRun) -> None:
    world.heartbeat("dead", 1)
    world.bucket.now += DAY + 100
    world.heartbeat("shown", 1, seconds=5)
    world.bucket.now += 100
    world.heartbeat("live", 1)
    before = {info.key for info in world.bucket.list()}
    dry = collect(world.run, RetentionPolicy(), dry_run=True, now=world.bucket.now)
    assert {info.key for info in world.bucket.list()} == before
    report = collect(world.run, RetentionPolicy())
    assert report.heartbeats == dry.heartbeats == [side.heartbeat_key("dead")]
    left = {info.key for info in world.bucket.list()}
    assert {key for key in left if key.startswith(side.HEARTBEATS_PREFIX)} == {
        side.heartbeat_key(n) for n in ("live", "shown")
    }


TABLE = """\
receiver  served  step  lag  state                      target       pause        heartbeat  last error
a              2     2    0  idle                       head       12.3 ms     0 s ago  -
b              1     1    1  staging                    tag:best, holds  -  0 s ago  store: the disk is full\\x07
gone           2     2    0  left                       head       -     0 s ago  -
"""


def test_table(world: FleetRun, capsys: pytest.CaptureFixture[str]) -> None:
    world.heartbeat("a", 2, step=2, lag=0, head=2, state="idle", following="head", pause_ms=12.34)
    error = {"kind": "store", "message": "the disk is full\a"}
    world.heartbeat("b", 1, step=1, lag=1, state="staging", following="tag:best", holding=True, error=error)
    world.heartbeat("gone", 2, step=2, lag=0, state="left", following="head", seconds=1)
    fleet = world.fleet()
    fleet.poll()
    cli_fleet.print_fleet(cli_fleet.fleet_document(world.run, fleet))
    shown = capsys.readouterr().out.splitlines()
    assert [line.split() for line in shown[:4]] == [line.split() for line in TABLE.splitlines()]
    assert shown[4:] == ["", "2 live, 1 ended; version 1 to 2; head 2"]


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    """A run of versions 0 to 2 that two servers follow."""
    chain = Chain(tmp_path)
    chain.grow(2)
    run = Run(chain.bucket)
    write_heartbeat(run, "a", 2, step=2, lag=0, head=2, state="idle", following="head")
    write_heartbeat(run, "b", 1, step=1, lag=1, head=2, state="held", following="head", holding=True)
    return chain


def test_command_lists_them(chain: Chain, tmp_path: Path) -> None:
    assert "2 live, 0 ended; version 1 to 2; head 2" in shown("fleet", "list", "--bucket", chain.url)
    document = answer("fleet", "list", "--bucket", chain.url)
    assert (document["run"], document["live"], document["lowest"]) == (chain.run, 2, 1)
    rows = [(row["receiver"], row["served"], row["live"], row["holding"], row["lag"]) for row in document["replicas"]]
    assert rows == [("a", 2, True, False, 0), ("b", 1, True, True, 1)]
    chain.grow()
    # One that is held does not see the new version.
    assert [row["lag"] for row in answer("fleet", "list", "--bucket", chain.url)["replicas"]] == [1, 2]
    other = Chain(tmp_path / "other")
    assert shown("fleet", "list", "--bucket", other.url) == "0 live, 0 ended; nothing served; head 0\n"
    assert kind(3, "fleet", "list", "--bucket", tmp_path / "elsewhere") == "not_found"


def test_command_waits(chain: Chain) -> None:
    wait = ("fleet", "wait", "--bucket", chain.url, "--version")
    assert answer(*wait, "1", "--replicas", "2")["live"] == 2
    error = refusal(*wait, "2", "--timeout", "0.2", code=1)
    assert (error["kind"], "'b' serves version 1 (held)" in error["message"]) == ("fleet_late", True)
    set_tag(Run(chain.bucket), "best", 1)
    shown(*wait, "tag:best", "--replicas", "2")
    assert kind(3, *wait, "tag:worst") == "not_found"


def test_publisher_waits_for_its_servers(tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(8, dtype=torch.bfloat16)}
    with Publisher(lambda: tensors.items(), str(tmp_path / "run")) as publisher:  # type: ignore[arg-type]
        tensors["w"] += 1
        publisher.publish(step=1)
        with pytest.raises(FleetLateError, match="0 of 0 live"):
            publisher.wait_served(timeout=0.2)
        run = Run(open_bucket(publisher.url))
        write_heartbeat(run, "a", 1)
        assert names(publisher.wait_served()) == ["a"]
        assert names(publisher.wait_served(0, replicas=1)) == ["a"]
        with pytest.raises(FleetLateError, match="version 7 is not published"):
            publisher.wait_served(7, timeout=0.2)
        with pytest.raises(UsageError):
            publisher.wait_served(-1)
    with pytest.raises(UsageError, match="closed"):
        publisher.wait_served()


def test_nothing_waits_for_a_quarantined_version_that_is_not_named(tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(8, dtype=torch.bfloat16)}
    gate = Gate(max_changed_share=0.5, action="quarantine")
    with Publisher(lambda: tensors.items(), str(tmp_path / "run"), gate=gate) as publisher:  # type: ignore[arg-type]
        write_heartbeat(Run(open_bucket(publisher.url)), "a", 0)
        tensors["w"] += 1
        publisher.publish(step=1)
        assert names(publisher.wait_served(timeout=0.2)) == ["a"]
        assert answer("fleet", "wait", "--bucket", publisher.url, "--timeout", "0.2")["live"] == 1
        with pytest.raises(FleetLateError, match="is quarantined, and servers skip it"):
            publisher.wait_served(1, timeout=0.2)
