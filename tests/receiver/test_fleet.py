"""Receivers of a fleet: what each writes to the bucket about itself; they pause without waiting for one another."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.chains import Chain, Server
from tests.support.hooks import HookedPort
from tests.support.services import POLL, WAIT, serving, wait_until
from tests.support.stores import STORES
from tests.support.world import World
from vllm_delta_sync import open_run
from vllm_delta_sync.engine.follow import heartbeat as keeper_module
from vllm_delta_sync.engine.follow.heartbeat import HeartbeatWriter
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.follow.service import ReceiverService
from vllm_delta_sync.engine.follow.standing_orders import StandingOrder, StandingOrderStore
from vllm_delta_sync.errors import DeltaSyncError, StoreError
from vllm_delta_sync.fleet.heartbeats import read_heartbeats, write_heartbeat
from vllm_delta_sync.settings import Settings

NAMES = [f"r{number}" for number in range(5)]


class Fleet:
    """A world, whose publisher any number of servers follow by name.

    Attributes:
        pauses: names of servers, in the order in which they paused. lasting: called in each pause.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.world = folder, World(folder)
        self.services: dict[str, ReceiverService] = {}
        self.pauses: list[str] = []
        self.lasting: Callable[[], object] = lambda: None

    def serve(self, name: str) -> ReceiverService:
        """Start a server on the trainer's weights."""
        port = HookedPort(*self.world.fresh())
        port.after = lambda method, arguments: self.paused(name) if method == "pause" else None
        chosen: dict[str, Any] = {
            "bucket": self.world.url,
            "state_dir": self.folder / f"state-{name}",
            "poll_seconds": POLL,
        }
        service = ReceiverService(port, Settings(**chosen, receiver_id=name, heartbeat_seconds=3))
        self.services[name] = service
        service.start()
        return service

    def paused(self, name: str) -> None:
        self.pauses.append(name)
        self.lasting()

    def end(self, name: str) -> None:
        """Stop a server, as it does when its process ends."""
        service = self.services.pop(name)
        service.stop()
        service.join(WAIT)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    for name in list(fleet.services):
        fleet.end(name)


def test_servers_pause_when_they_are_ready(fleet: Fleet) -> None:
    """They do not wait for one another: each pause lasts until the last one has begun, and all end."""
    together = threading.Barrier(len(NAMES))
    fleet.lasting = lambda: together.wait(WAIT)
    for name in NAMES:
        fleet.serve(name)
    fleet.world.publisher.wait_served(0, replicas=len(NAMES), timeout=WAIT)
    for step in (1, 2):
        fleet.world.train(step)
        served = fleet.world.publisher.wait_served(replicas=len(NAMES), timeout=WAIT)
        assert [replica.heartbeat.served for replica in served] == [step] * len(NAMES)
    assert sorted(fleet.pauses) == sorted(2 * NAMES)
    for name, service in fleet.services.items():
        assert service.receiver.verify()["verdict"]
        assert service.receiver.status()["fleet"] == {"receiver": name}


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


def test_heartbeat_names_the_version_that_was_held_before_a_restart(chain: Chain, tmp_path: Path) -> None:
    """Until it is served again, a collection keeps it."""
    settings = Settings(bucket=chain.url, state_dir=tmp_path / "state")
    server = Server(chain, chain.bits[0])
    orders = StandingOrderStore(settings)
    orders.save(StandingOrder(setting="head", holding=True, run=chain.run, version=3))
    receiver = Receiver(server.port, settings, orders)
    chain.lose(1, 2, 3)
    with pytest.raises(DeltaSyncError):
        receiver.advance()
    HeartbeatWriter(receiver, "one").write_if_due()
    assert [(heartbeat.served, heartbeat.target) for heartbeat in heartbeats(chain)] == [(None, 3)]


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


def test_heartbeat_is_renewed_in_time_by_a_slow_store(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a write takes is part of the third of its lifetime after which it is written again."""
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    keeper = HeartbeatWriter(server.receiver, "one", seconds=3)
    monkeypatch.setattr(keeper_module, "write_heartbeat", lambda *_, **__: time.sleep(1.1))
    assert keeper.write_if_due()
    assert keeper.write_if_due()


def test_heartbeat_that_cannot_be_written_is_said_once(chain: Chain, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    (chain.folder / "heartbeats").write_text("in the way")
    keeper = HeartbeatWriter(server.receiver, "one", seconds=0)
    for _ in range(3):
        keeper.write_if_due()
    assert sum("could not write the heartbeat" in record.getMessage() for record in caplog.records) == 1
    server.serves(6)


@pytest.mark.parametrize(("policy", "name"), [("follow", "one"), ("manual", "one"), ("follow", None)])
def test_service_writes_a_heartbeat_only_under_a_name(chain: Chain, policy: str, name: str | None) -> None:
    server = Server(chain, chain.bits[0])
    with serving(server.port, bucket=chain.url, policy=policy, receiver_id=name) as service:
        service.request("sync").result(WAIT)
        if name is None:
            assert not (chain.folder / "heartbeats").exists()
        else:
            wait_until(lambda: [heartbeat.served for heartbeat in heartbeats(chain)] == [6])


def test_heartbeat_is_valid_for_three_seconds_at_least() -> None:
    with pytest.raises(ValueError, match="heartbeat_seconds"):
        Settings(bucket="/run", receiver_id="one", heartbeat_seconds=2)


def test_server_says_what_it_does_and_that_it_leaves(fleet: Fleet) -> None:
    service = fleet.serve("a")
    run = open_run(fleet.world.url)
    fleet.world.train(1)
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


LEAVING = """
import sys
from pathlib import Path
from tests.support.modules import FusedModel, ModulePort, checkpoint_tensors
from tests.support.services import wait_until
from vllm_delta_sync.settings import Settings
from vllm_delta_sync.engine.follow.service import ReceiverService
import torch, tempfile
model = FusedModel()
model.load_weights((name, tensor.to(torch.bfloat16)) for name, tensor in checkpoint_tensors().items())
settings = Settings(bucket=sys.argv[1], receiver_id="a", poll_seconds=0.05, state_dir=tempfile.mkdtemp())
service = ReceiverService(ModulePort(model), settings)
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
        World(tmp_path, url=place.url).close()
        subprocess.run([sys.executable, "-c", LEAVING, place.url], check=True, timeout=WAIT)
        (held,) = read_heartbeats(open_run(place.url)).stored
    assert (held.heartbeat.state, held.heartbeat.served) == ("left", 0)


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


def test_heartbeat_whose_only_write_seemed_to_fail_is_ended(chain: Chain) -> None:
    """The store may have kept what it did not answer."""
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    keeper, stop = HeartbeatWriter(server.receiver, "one"), threading.Event()

    def unanswered(*arguments: Any, **content: Any) -> None:
        write_heartbeat(*arguments, **content)
        raise StoreError("the connection was closed")

    with mock.patch.object(keeper_module, "write_heartbeat", unanswered):
        assert not keeper.write_if_due()
    assert [heartbeat.state for heartbeat in heartbeats(chain)] == ["idle"]
    stop.set()
    keeper.run(stop)
    assert [heartbeat.state for heartbeat in heartbeats(chain)] == ["left"]
