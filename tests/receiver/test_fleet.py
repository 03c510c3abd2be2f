"""Receivers of a fleet: what each writes to the bucket about itself, and how they take turns to pause. Never do more
pause at once than the setting says; all get there, whoever dies."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chains import Chain, Server
from tests.support.fleets import Rollouts, rollouts
from tests.support.services import WAIT, serving, wait_until
from tests.support.stores import STORES
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.engine.follow import heartbeat as keeper_module
from vllm_delta_sync.engine.follow.heartbeat import HeartbeatWriter
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.errors import AccessError, SettingsError, StoreError
from vllm_delta_sync.fleet.heartbeats import read_heartbeats
from vllm_delta_sync.fleet.pause_slots import PauseSlot, PauseSlots
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.maintenance.branch import branch
from vllm_delta_sync.settings import Settings, load_settings

NAMES = [f"r{number}" for number in range(5)]


HOLDER = """
import sys, time
from vllm_delta_sync import open_run
from vllm_delta_sync.fleet.pause_slots import PauseSlots
assert PauseSlots(open_run(sys.argv[1]), "killed", 1, 1.0).try_acquire(1) is not None
print("holds", flush=True)
time.sleep(600)
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Rollouts]:
    with rollouts(str(tmp_path / "run"), tmp_path) as fleet:
        yield fleet


@pytest.mark.parametrize(("store", "slots"), [("local", 2), ("s3", 1)])
def test_no_more_pause_at_once_and_everyone_gets_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, slots: int
) -> None:
    with STORES[store](tmp_path / "store") as place:
        for name, value in place.environment.items():
            monkeypatch.setenv(name, value)
        with rollouts(place.url, tmp_path) as fleet:
            fleet.lasting = lambda: time.sleep(0.05)
            for name in NAMES:
                fleet.serve(name, fleet_pauses=slots)
            for step in (1, 2):
                fleet.train(step)
                served = fleet.publisher.wait_served(replicas=5, timeout=WAIT)
                assert [replica.heartbeat.served for replica in served] == [step] * 5
            assert fleet.pauses.most <= slots
            assert sorted(fleet.pauses.log) == sorted(2 * NAMES)
            for service in fleet.services.values():
                assert service.receiver.verify()["verdict"]
                wait_until(lambda: service.receiver.status()["commits"] == 2)  # noqa: B023
                assert service.receiver.status()["timings_ms"]["queued"] > 0


def test_without_the_setting_nobody_waits(fleet: Rollouts) -> None:
    """All of them are paused together: each pause lasts until the last one has begun."""
    together = threading.Barrier(3)

    def lasting() -> None:
        together.wait(WAIT)

    fleet.lasting = lasting
    for name in NAMES[:3]:
        fleet.serve(name)
    fleet.publisher.wait_served(0, replicas=3, timeout=WAIT)
    fleet.train(1)
    fleet.publisher.wait_served(replicas=3, timeout=WAIT)
    assert fleet.pauses.most == 3
    assert [*open_bucket(fleet.url).list(side.PAUSE_SLOTS_PREFIX)] == []


def test_killed_holder_delays_others_by_the_life_of_its_claim(fleet: Rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_delta_sync.fleet.pause_slots.MARGIN_SECONDS", 2)
    service = fleet.serve("a", fleet_pauses=1)
    wait_until(lambda: service.receiver.served_version == 0)
    program = HOLDER.replace("assert", "import vllm_delta_sync.fleet.pause_slots as t; t.MARGIN_SECONDS = 2\nassert")
    holder = subprocess.Popen([sys.executable, "-c", program, fleet.url], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(WAIT)
    fleet.train(1)
    wait_until(lambda: service.receiver.status()["fleet"]["waiting"])
    assert service.receiver.status()["fleet"] == {"receiver": "a", "pauses": 1, "waiting": True}
    assert service.receiver.status()["state"] == "staging"
    assert fleet.pauses.log == []
    wait_until(lambda: service.receiver.status()["commits"] == 1)
    assert service.receiver.status()["timings_ms"]["queued"] > 0
    assert fleet.pauses.log == ["a"]


def holding(fleet: Rollouts) -> PauseSlots:
    """Somebody else has the turn."""
    turns = PauseSlots(open_run(fleet.url), "other", 1, 600.0)
    assert turns.try_acquire(1) is not None
    return turns


@pytest.mark.parametrize(("action", "argument"), [("hold", None), ("rollback", 0)])
def test_request_does_not_wait_for_the_turn(fleet: Rollouts, action: str, argument: int | None) -> None:
    service = fleet.serve("a", fleet_pauses=1)
    fleet.train(1)
    wait_until(lambda: service.receiver.served_version == 1)
    wait_until(lambda: service.receiver.status()["state"] == "idle")
    wait_until(lambda: any(info.key.endswith(".end") for info in open_bucket(fleet.url).list(side.PAUSE_SLOTS_PREFIX)))
    holding(fleet)
    fleet.train(2)
    wait_until(lambda: service.receiver.status()["fleet"]["waiting"])
    status = service.request(action, argument).result(WAIT)
    assert status["served"]["version"] == (1 if argument is None else argument)
    assert (status["holding"], status["fleet"]["waiting"], status["last_error"]) == (True, False, None)


class Broken:
    """Fails what a bucket is asked about turns."""

    def __init__(self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, error: StoreError) -> None:
        self.error: StoreError | None = error
        put = bucket.put

        def failing(key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
            if key.startswith(side.PAUSE_SLOTS_PREFIX) and self.error is not None:
                raise self.error
            put(key, data, if_absent=if_absent)

        monkeypatch.setattr(bucket, "put", failing)


@pytest.mark.parametrize("error", [AccessError("read only"), StoreError("the store is down")])
def test_where_turns_cannot_be_had_versions_are_taken_all_the_same(
    fleet: Rollouts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: StoreError
) -> None:
    monkeypatch.setattr("vllm_delta_sync.fleet.pause_slots.PATIENCE_SECONDS", 0.2)
    caplog.set_level(logging.INFO, "vllm.delta_sync")
    service = fleet.serve("a", fleet_pauses=1)
    wait_until(lambda: service.receiver.served_version == 0)
    broken = Broken(service.receiver.history.run.bucket, monkeypatch, error)
    for step in (1, 2):
        fleet.train(step)
        wait_until(lambda wanted=step: service.receiver.served_version == wanted)  # type: ignore[misc]
    broken.error = None
    fleet.train(3)
    wait_until(lambda: service.receiver.served_version == 3)
    told = [record.getMessage() for record in caplog.records if record.module == "pause_slot_client"]
    assert told == [
        "committing without a pause slot, so more than fleet_pauses = 1 servers may be paused at once: "
        f"{error.message}",
        "pause slots are available again",
    ]


def test_end_that_cannot_be_written_keeps_nothing_up(fleet: Rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the commit while the store hangs, and not the next one: that would wait for a turn of its own."""
    hangs = threading.Event()
    end = PauseSlots.release

    def hanging(turns: PauseSlots, held: PauseSlot) -> None:
        if not hangs.is_set():
            hangs.wait(WAIT)
            raise StoreError("the store is down")
        end(turns, held)

    monkeypatch.setattr(PauseSlots, "release", hanging)
    service = fleet.serve("a", fleet_pauses=1, pause_seconds=2 * WAIT)
    wait_until(lambda: service.receiver.served_version == 0)
    fleet.train(1)
    wait_until(lambda: service.receiver.status()["commits"] == 1)
    wait_until(lambda: service.receiver.status()["state"] == "idle")
    hangs.set()
    fleet.train(2)
    wait_until(lambda: service.receiver.served_version == 2)


def test_turns_are_taken_under_names() -> None:
    with pytest.raises(SettingsError, match="'receiver_id' is missing"):
        load_settings({"bucket": "/run", "fleet_pauses": "1"}, {})
    assert load_settings({"bucket": "/run", "fleet_pauses": "2", "receiver_id": "a"}, {}).fleet_pauses == 2
    for fields in ({"fleet_pauses": 0}, {"fleet_pauses": 65}, {"heartbeat_seconds": 2}):
        with pytest.raises(ValueError):
            Settings.model_validate({"bucket": "/run", "receiver_id": "a", **fields})


# Heartbeats


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    chain = Chain(tmp_path)
    chain.grow(6)
    return chain


def heartbeats(chain: Chain) -> list[Any]:
    return [held.heartbeat for held in read_heartbeats(open_run(chain.url)).stored]


def test_heartbeat_says_what_is_served_and_what_can_be_gone_back_to(chain: Chain) -> None:
    server = Server(chain, chain.bits[0])
    keeper = HeartbeatWriter(server.receiver, "one")
    keeper.write_if_due()
    assert heartbeats(chain) == []
    for version in (2, 5):
        server.receiver.advance(version)
    keeper.write_if_due()
    (heartbeat,) = heartbeats(chain)
    assert (heartbeat.receiver, heartbeat.served, heartbeat.target, heartbeat.pins) == ("one", 5, None, [2, 0])
    server.receiver.advance()
    keeper.write_if_due()
    assert [(heartbeat.served, heartbeat.pins) for heartbeat in heartbeats(chain)] == [(6, [5, 2, 0])]


def test_heartbeat_is_written_again_before_it_ends(chain: Chain) -> None:
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    path = chain.folder / "heartbeats" / "one.json"
    slow = HeartbeatWriter(server.receiver, "one")
    slow.write_if_due()
    path.unlink()
    slow.write_if_due()
    assert not path.exists()
    fast = HeartbeatWriter(server.receiver, "one", seconds=1)
    stop = threading.Event()
    thread = threading.Thread(target=fast.run, args=(stop,))
    thread.start()
    for _ in range(2):
        wait_until(path.exists)
        path.unlink()
    stop.set()
    fast.notify()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_heartbeat_that_cannot_be_written_is_said_once(chain: Chain, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    (chain.folder / "heartbeats").write_text("in the way")
    keeper = HeartbeatWriter(server.receiver, "one", seconds=0)
    for _ in range(3):
        keeper.write_if_due()
    assert sum("could not write the heartbeat" in record.getMessage() for record in caplog.records) == 1
    server.serves(6)


def test_a_heartbeat_outlives_an_unexpected_error(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    document, failing = server.receiver.board.document, threading.Event()
    failing.set()

    def broken() -> dict[str, Any]:
        if failing.is_set():
            raise KeyError("a bug")
        return document()

    monkeypatch.setattr(server.receiver.board, "document", broken)
    monkeypatch.setattr(keeper_module, "SPACING_SECONDS", 0.01)
    keeper, stop = HeartbeatWriter(server.receiver, "one", seconds=1), threading.Event()
    thread = threading.Thread(target=keeper.run, args=(stop,))
    thread.start()
    wait_until(lambda: any("failed unexpectedly" in record.getMessage() for record in caplog.records))
    assert thread.is_alive()
    failing.clear()
    wait_until(lambda: [heartbeat.served for heartbeat in heartbeats(chain)] == [6])
    # It says that it ends even where it cannot tell its last state.
    failing.set()
    stop.set()
    keeper.notify()
    thread.join(WAIT)
    assert not thread.is_alive()
    assert [heartbeat.state for heartbeat in heartbeats(chain)] in ([], ["left"])


def test_heartbeat_whose_only_write_seemed_to_fail_is_ended(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may have kept what it did not answer."""
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    keeper, stop = HeartbeatWriter(server.receiver, "one"), threading.Event()
    write, lost = keeper._write, [True]

    def unanswered(*content: Any) -> None:
        write(*content)
        if lost:
            lost.pop()
            raise StoreError("the connection was closed")

    monkeypatch.setattr(keeper, "_write", unanswered)
    assert not keeper.write_if_due()
    assert [heartbeat.state for heartbeat in heartbeats(chain)] == ["idle"]
    stop.set()
    keeper.run(stop)
    assert [heartbeat.state for heartbeat in heartbeats(chain)] == ["left"]


@pytest.mark.parametrize(("policy", "name"), [("follow", "one"), ("manual", "one"), ("follow", None)])
def test_service_writes_a_heartbeat_only_under_a_name(chain: Chain, policy: str, name: str | None) -> None:
    server = Server(chain, chain.bits[0])
    with serving(server.port, bucket=chain.url, policy=policy, receiver_id=name) as service:
        service.request("sync").result(WAIT)
        if name is None:
            assert not (chain.folder / "heartbeats").exists()
        else:
            wait_until(lambda: [heartbeat.served for heartbeat in heartbeats(chain)] == [6])


def test_receiver_alone_writes_nothing(chain: Chain) -> None:
    server = Server(chain, chain.bits[0])
    Receiver(server.port, Settings(bucket=chain.url, receiver_id="one")).advance()
    assert not (chain.folder / "heartbeats").exists()


def test_server_says_what_it_does_and_that_it_leaves(fleet: Rollouts) -> None:
    service = fleet.serve("a")
    run = open_run(fleet.url)
    fleet.train(1)
    wait_until(lambda: [held.heartbeat.served for held in read_heartbeats(run).stored] == [1])
    wait_until(lambda: read_heartbeats(run).stored[0].heartbeat.state == "idle")
    service.request("hold").result(WAIT)
    wait_until(lambda: read_heartbeats(run).stored[0].heartbeat.state == "held")
    (held,) = read_heartbeats(run).stored
    heartbeat = held.heartbeat
    said = (heartbeat.step, heartbeat.head, heartbeat.lag, heartbeat.following, heartbeat.holding, heartbeat.pins)
    assert said == (1, 1, 0, "head", True, [0])
    assert heartbeat.pause_ms == service.receiver.status()["timings_ms"]["pause"]
    assert heartbeat.error is None
    fleet.end("a")
    (held,) = read_heartbeats(run).stored
    assert (held.heartbeat.state, held.heartbeat.seconds, held.heartbeat.served, held.heartbeat.pins) == (
        "left",
        1,
        1,
        [],
    )
    assert [replica.left for replica in run.fleet().replicas] == [True]


def test_server_that_goes_to_another_run_leaves_the_one_before(fleet: Rollouts, tmp_path: Path) -> None:
    fleet.train(1)
    run = open_run(fleet.url)
    other = branch(run, 1, str(tmp_path / "branch"))
    service = fleet.serve("a")
    wait_until(lambda: [held.heartbeat.served for held in read_heartbeats(run).stored] == [1])
    service.request("target", ("head", other.bucket.url)).result(WAIT)
    wait_until(lambda: [held.heartbeat.served for held in read_heartbeats(other).stored] == [0])
    assert [held.heartbeat.state for held in read_heartbeats(run).stored] == ["left"]
    assert fleet.publisher.wait_served(1, replicas=1, timeout=WAIT)


LEAVING = """
import sys
from pathlib import Path
from tests.support.fleets import Pauses, RecordedPort
from tests.support.modules import FusedModel, checkpoint_tensors
from tests.support.services import wait_until
from vllm_delta_sync.settings import Settings
from vllm_delta_sync.engine.follow.service import ReceiverService
import torch, tempfile
model = FusedModel()
model.load_weights((name, tensor.to(torch.bfloat16)) for name, tensor in checkpoint_tensors().items())
port = RecordedPort(model, "a", Pauses(), lambda: None)
settings = Settings(bucket=sys.argv[1], receiver_id="a", poll_seconds=0.05, state_dir=tempfile.mkdtemp())
service = ReceiverService(port, settings)
service.start()
# Once it has noted what it wrote: that is what it takes back at its end.
wait_until(lambda: service._heartbeat._last_content is not None and service._heartbeat._last_content[1]["served"] == 0)
"""


@pytest.mark.parametrize("store", ["local", pytest.param("s3", marks=pytest.mark.slow)])
def test_process_that_ends_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    """A server does not stop its receiver: it just ends."""
    with STORES[store](tmp_path / "store") as place:
        for name, value in place.environment.items():
            monkeypatch.setenv(name, value)
        with rollouts(place.url, tmp_path) as fleet:
            subprocess.run([sys.executable, "-c", LEAVING, fleet.url], check=True, timeout=WAIT)
            (held,) = read_heartbeats(open_run(fleet.url)).stored
    assert (held.heartbeat.state, held.heartbeat.served) == ("left", 0)
