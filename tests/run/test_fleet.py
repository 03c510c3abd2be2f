"""The fleet of a run: who is live, who is gone, waiting for a version, and what ``delta-sync fleet`` says."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.chains import Chain
from tests.support.collecting import Grown
from tests.support.turn_model import Clocked
from trainer_side import Publisher
from vllm_delta_sync import cli
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.chain import Run
from vllm_delta_sync.chain.fleet import Fleet, FleetLateError
from vllm_delta_sync.cli import fleet as cli_fleet
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.turns import Turns
from vllm_delta_sync.upkeep.leases import write_lease
from vllm_delta_sync.upkeep.retention import Policy, collect
from vllm_delta_sync.upkeep.retention_plan import DAY
from vllm_delta_sync.upkeep.tagging import set_tag
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire import limits


class World:
    """A run of versions 0 to 2 in a store whose clock is the true time; who looks has one that is wrong by ``skew``."""

    def __init__(self, folder: Path) -> None:
        self.bucket = Clocked()
        self.grown = Grown(self.bucket, folder, 1)
        self.run = Run(self.bucket)
        self.slept: list[float] = []
        self.grow()
        self.grow()

    def grow(self) -> None:
        self.bucket.now += 10
        self.grown.grow()

    def fleet(self, skew: float = 0.0) -> Fleet:
        return Fleet(self.run, lambda: self.bucket.now + skew, lambda: self.bucket.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.bucket.now += seconds

    def tell(self, name: str, served: int | None, **more: Any) -> None:
        write_lease(self.run, name, served, **{"seconds": 60, **more})


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def names(replicas: list[Any]) -> list[str]:
    return [replica.receiver for replica in replicas]


def test_who_is_live_and_who_is_gone(world: World) -> None:
    world.tell("old", 1)
    world.bucket.now += 100
    world.tell("b", 2)
    world.tell("a", 1)
    world.tell("gone", 2, state="left", seconds=1)
    fleet = world.fleet()
    fleet.look()
    assert (names(fleet.replicas), names(fleet.live), names(fleet.ended)) == (
        ["a", "b", "gone", "old"],
        ["a", "b"],
        ["gone", "old"],
    )
    assert [replica.left for replica in fleet.ended] == [True, False]


def test_all_gone_is_told_by_ones_own_clock_or_by_watching(world: World) -> None:
    world.tell("a", 1)
    world.bucket.now += 100
    assert world.fleet().look()[0].live is False
    late = world.fleet(skew=-1000)
    assert late.look()[0].live is True, "a clock that is behind shows what was"
    world.bucket.now += 62
    assert late.look()[0].live is False


def test_wait_is_over_when_every_live_one_is_there(world: World) -> None:
    world.tell("a", 2)
    with pytest.raises(FleetLateError, match=r"served by 1 of 1 live .*; 1 of 2 replicas have no lease"):
        world.fleet().wait(2, replicas=2, timeout=5)
    world.tell("b", 1, state="held", holding=True, error={"kind": "store", "message": "the disk is full"})
    with pytest.raises(FleetLateError, match=r"'b' serves version 1 \(held, store: the disk is full\)") as caught:
        world.fleet().wait(2, replicas=2, timeout=5)
    assert (caught.value.kind, caught.value.exit_code) == ("fleet_late", 1)
    world.tell("b", 2)
    assert names(world.fleet().wait(2, replicas=2, timeout=0)) == ["a", "b"]
    assert max(world.slept) <= 1.0


def test_more_than_asked_for_are_waited_for_too(world: World) -> None:
    world.tell("a", 2)
    world.tell("b", None, state="proving")
    with pytest.raises(FleetLateError, match=r"'b' serves nothing yet \(proving\)"):
        world.fleet().wait(2, replicas=1, timeout=5)


@pytest.mark.parametrize("skew", [-1e6, 0.0, 1e6])
def test_one_that_dies_holds_others_up_for_its_lease(world: World, skew: float) -> None:
    world.tell("a", 2)
    world.tell("dying", 1)
    died = world.bucket.now
    fleet = world.fleet(skew)

    def sleep(seconds: float) -> None:
        world.bucket.now += seconds
        world.tell("a", 2)

    fleet._sleep = sleep
    assert names(fleet.wait(2, replicas=2, timeout=500)) == ["a", "dying"]
    assert 59 <= world.bucket.now - died <= 64


def test_one_that_left_is_not_waited_for(world: World) -> None:
    world.tell("a", 2)
    world.tell("b", 1, state="left", seconds=1)
    assert world.fleet().wait(2, replicas=2, timeout=0)


def test_one_that_died_before_a_version_came_does_not_count_for_it(world: World) -> None:
    world.tell("long-dead", 1)
    world.bucket.now += 1000
    world.grow()
    world.tell("a", 3)
    with pytest.raises(FleetLateError, match="1 of 2 replicas have no lease"):
        world.fleet().wait(3, replicas=2, timeout=5)
    assert world.fleet().wait(3, replicas=1, timeout=0)


def test_version_that_is_not_published_is_waited_for(world: World) -> None:
    world.tell("a", 3)
    with pytest.raises(FleetLateError, match="version 3 is not published after 5 s"):
        world.fleet().wait(3, timeout=5)
    world.grow()
    assert world.fleet().wait(3, timeout=0)


@pytest.mark.parametrize(
    "arguments",
    [{"version": -1}, {"version": True}, {"version": 1, "replicas": -1}, {"version": 1, "timeout": float("nan")}],
)
def test_numbers_that_make_no_sense(world: World, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        world.fleet().wait(**arguments)


def test_leases_that_did_not_change_are_read_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        world.tell(f"r{number}", 1)
    fleet = world.fleet()
    fleet.look()
    world.bucket.now += 5
    world.tell("r4", 2)
    fleet.look()
    world.bucket.now += 5
    world.tell("r4", 1)
    reads: list[str] = []
    get = world.bucket.get

    def counted(key: str, *, max_bytes: int | None = None) -> bytes:
        reads.append(key)
        return get(key, max_bytes=max_bytes)

    listed = [*world.bucket.list(side.LEASES_PREFIX)]
    monkeypatch.setattr(world.bucket, "list", lambda prefix: iter(listed))
    monkeypatch.setattr(world.bucket, "get", counted)
    assert [replica.lease.served for replica in fleet.look()] == [1, 1, 1, 1, 1]
    assert reads == [side.lease_key("r4")]


def test_older_leases_are_read_and_newer_members_ignored(world: World) -> None:
    world.tell("a", 2)
    document = json.loads(world.bucket.get(side.lease_key("a")))
    kept = ("format_version", "requires", "run", "receiver", "served", "target", "pins", "seconds", "created_at")
    old = {name: document[name] for name in (*kept, "signature")}
    for fields in (old, old | {"mood": "good"}):
        data = json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()
        world.bucket.put(side.lease_key("a"), data)
        (replica,) = world.fleet().look()
        assert (replica.lease.served, replica.lease.holding, replica.lease.state) == (2, False, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"error": {"kind": "store", "message": "x" * (limits.MAX_LEASE_TEXT + 1)}},
        {"error": {"kind": "Not a kind", "message": ""}},
        {"state": "IDLE"},
        {"following": "tag:"},
        {"following": "s3://elsewhere/run"},
        {"pause_ms": -1.0},
        {"lag": -1},
        {"holding": 1},
    ],
)
def test_bounds_of_what_a_lease_says(world: World, fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(fields))):
        world.tell("a", 1, **fields)


def test_collection_removes_what_is_long_over_and_nothing_live(world: World) -> None:
    for name in ("a", "b", "c", "d", "e", "f"):
        turns = Turns(world.run, name, 1, 4.0, lambda: world.bucket.now)
        held = turns.attempt(1)
        assert held is not None
        turns.end(held)
    world.tell("dead", 1)
    world.bucket.now += DAY + 100
    world.tell("shown", 1, seconds=5)
    world.bucket.now += 100
    world.tell("live", 1)
    before = {info.key for info in world.bucket.list()}
    dry = collect(world.run, Policy(), dry_run=True, now=world.bucket.now)
    assert {info.key for info in world.bucket.list()} == before
    report = collect(world.run, Policy())
    assert report.leases == dry.leases == [side.lease_key("dead")]
    assert report.turns == dry.turns != []
    left = {info.key for info in world.bucket.list()}
    assert {key for key in left if key.startswith(side.LEASES_PREFIX)} == {side.lease_key(n) for n in ("live", "shown")}
    assert {key for key in left if key.startswith(side.TURNS_PREFIX)} == {side.turn_key(0, 6), side.turn_end_key(0, 6)}


TABLE = """\
receiver  served  step  lag  state                      target       pause        said  last error
a              2     2    0  idle                       head       12.3 ms     0 s ago  -
b              1     1    1  staging, waits for its turn  tag:best, holds  -  0 s ago  store: the disk is full\\x07
gone           2     2    0  left                       head       -     0 s ago  -
"""


def test_table(world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    world.tell("a", 2, step=2, lag=0, head=2, state="idle", following="head", pause_ms=12.34)
    error = {"kind": "store", "message": "the disk is full\a"}
    world.tell("b", 1, step=1, lag=1, state="staging", waiting=True, following="tag:best", holding=True, error=error)
    world.tell("gone", 2, step=2, lag=0, state="left", following="head", seconds=1)
    fleet = world.fleet()
    fleet.look()
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
    write_lease(run, "a", 2, step=2, lag=0, head=2, state="idle", following="head")
    write_lease(run, "b", 1, step=1, lag=1, head=2, state="held", following="head", holding=True)
    return chain


def test_command_lists_them(chain: Chain, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["fleet", "--bucket", chain.url]) == 0
    assert "2 live, 0 ended; version 1 to 2; head 2" in capsys.readouterr().out
    assert cli.run(["fleet", "--bucket", chain.url, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["run"], document["live"], document["lowest"]) == (chain.run, 2, 1)
    rows = [(row["receiver"], row["served"], row["live"], row["holding"]) for row in document["replicas"]]
    assert rows == [("a", 2, True, False), ("b", 1, True, True)]


def test_command_of_a_run_that_nobody_follows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = Chain(tmp_path)
    assert cli.run(["fleet", "--bucket", chain.url]) == 0
    assert capsys.readouterr().out == "0 live, 0 ended; nothing served; head -\n"
    assert cli.run(["fleet", "--bucket", str(tmp_path / "elsewhere")]) == 3


def test_command_waits(chain: Chain, capsys: pytest.CaptureFixture[str]) -> None:
    wait = ["fleet", "--bucket", chain.url, "--wait"]
    assert cli.run([*wait, "1", "--replicas", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["live"] == 2
    assert cli.run([*wait, "2", "--timeout", "0.2", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "fleet_late"
    assert "'b' serves version 1 (held)" in error["message"]
    set_tag(Run(chain.bucket), "best", 1)
    assert cli.run([*wait, "tag:best", "--replicas", "2"]) == 0
    assert cli.run([*wait, "tag:worst"]) == 3


@pytest.mark.parametrize(
    "flags",
    [
        ["--watch", "0"],
        ["--watch", "soon"],
        ["--watch", "1", "--wait", "1"],
        ["--replicas", "2"],
        ["--timeout", "5"],
        ["--wait", "head"],
    ],
)
def test_command_lines_that_make_no_sense(chain: Chain, flags: list[str]) -> None:
    assert cli.run(["fleet", "--bucket", chain.url, *flags]) == 2


@pytest.mark.parametrize("as_json", [False, True])
def test_watching_ends_on_an_interrupt(
    chain: Chain, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("vllm_delta_sync.cli.fleet.time.sleep", sleep)
    flags = ["--watch", "2.5", *(["--json"] if as_json else [])]
    monkeypatch.setattr("sys.argv", ["delta-sync", "fleet", "--bucket", chain.url, *flags])
    monkeypatch.setattr("vllm_delta_sync.cli.sys.stdout.reconfigure", lambda **options: None, raising=False)
    assert cli.main() == cli.INTERRUPTED
    out = capsys.readouterr().out
    assert sleeps == [2.5] * 3
    if as_json:
        assert [json.loads(line)["live"] for line in out.splitlines()] == [2, 2, 2]
    else:
        assert out.count("2 live, 0 ended") == 3


def test_publisher_waits_for_its_servers(tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(8, dtype=torch.bfloat16)}
    with Publisher(lambda: tensors.items(), str(tmp_path / "run")) as publisher:  # type: ignore[arg-type]
        tensors["w"] += 1
        publisher.publish(step=1)
        with pytest.raises(FleetLateError, match="0 of 0 live"):
            publisher.wait_served(timeout=0.2)
        run = Run(open_bucket(publisher.url))
        write_lease(run, "a", 1)
        assert names(publisher.wait_served()) == ["a"]
        assert names(publisher.wait_served(0, replicas=1)) == ["a"]
        with pytest.raises(FleetLateError, match="version 7 is not published"):
            publisher.wait_served(7, timeout=0.2)
        with pytest.raises(UsageError):
            publisher.wait_served(-1)
    with pytest.raises(UsageError, match="closed"):
        publisher.wait_served()


def test_leases_of_another_run_are_not_ours(chain: Chain, tmp_path: Path) -> None:
    branch = Chain(tmp_path, "branch", seed=3)
    branch.inside(branch.fresh())
    shutil.copytree(chain.folder / "receivers", branch.folder / "receivers")
    fleet = Run(branch.bucket).fleet()
    assert (fleet.replicas, len(fleet.ignored)) == ([], 2)
