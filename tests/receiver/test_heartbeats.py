"""What a server writes to the bucket about itself: what it serves, what it can go back to, that it leaves."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chains import Chain, Server
from tests.support.fleets import Rollouts, rollouts
from tests.support.services import WAIT, serving, wait_until
from tests.support.stores import STORES
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.chain.leases import read_leases
from vllm_delta_sync.config import Settings
from vllm_delta_sync.engine import keeper as keeper_module
from vllm_delta_sync.engine.keeper import LeaseKeeper
from vllm_delta_sync.engine.receiver import Receiver
from vllm_delta_sync.upkeep.branching import branch


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    chain = Chain(tmp_path)
    chain.grow(6)
    return chain


def leases(chain: Chain) -> list[Any]:
    return [held.lease for held in read_leases(open_run(chain.url)).held]


def test_lease_says_what_is_served_and_what_can_be_gone_back_to(chain: Chain) -> None:
    server = Server(chain, chain.bits[0])
    keeper = LeaseKeeper(server.receiver, "one")
    keeper.write_if_due()
    assert leases(chain) == []
    for version in (2, 5):
        server.receiver.advance(version)
    keeper.write_if_due()
    (lease,) = leases(chain)
    assert (lease.receiver, lease.served, lease.target, lease.pins) == ("one", 5, None, [2, 0])
    server.receiver.advance()
    keeper.write_if_due()
    assert [(lease.served, lease.pins) for lease in leases(chain)] == [(6, [5, 2, 0])]


def test_lease_is_written_again_before_it_ends(chain: Chain) -> None:
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    path = chain.folder / "receivers" / "one.json"
    slow = LeaseKeeper(server.receiver, "one")
    slow.write_if_due()
    path.unlink()
    slow.write_if_due()
    assert not path.exists()
    fast = LeaseKeeper(server.receiver, "one", seconds=1)
    stop = threading.Event()
    thread = threading.Thread(target=fast.keep, args=(stop,))
    thread.start()
    for _ in range(2):
        wait_until(path.exists)
        path.unlink()
    stop.set()
    fast.nudge()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_lease_that_cannot_be_written_is_said_once(chain: Chain, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    (chain.folder / "receivers").write_text("in the way")
    keeper = LeaseKeeper(server.receiver, "one", seconds=0)
    for _ in range(3):
        keeper.write_if_due()
    assert sum("the bucket is not told" in record.getMessage() for record in caplog.records) == 1
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
    keeper, stop = LeaseKeeper(server.receiver, "one", seconds=1), threading.Event()
    thread = threading.Thread(target=keeper.keep, args=(stop,))
    thread.start()
    wait_until(lambda: any("failed unexpectedly" in record.getMessage() for record in caplog.records))
    assert thread.is_alive()
    failing.clear()
    wait_until(lambda: [lease.served for lease in leases(chain)] == [6])
    # It says that it ends even where it cannot tell its last state.
    failing.set()
    stop.set()
    keeper.nudge()
    thread.join(WAIT)
    assert not thread.is_alive()
    assert [lease.state for lease in leases(chain)] in ([], ["left"])


@pytest.mark.parametrize(("policy", "name"), [("follow", "one"), ("manual", "one"), ("follow", None)])
def test_service_writes_a_lease_only_under_a_name(chain: Chain, policy: str, name: str | None) -> None:
    server = Server(chain, chain.bits[0])
    with serving(server.port, bucket=chain.url, policy=policy, receiver_id=name) as service:
        service.request("sync").result(WAIT)
        if name is None:
            assert not (chain.folder / "receivers").exists()
        else:
            wait_until(lambda: [lease.served for lease in leases(chain)] == [6])


def test_receiver_alone_writes_nothing(chain: Chain) -> None:
    server = Server(chain, chain.bits[0])
    Receiver(server.port, Settings(bucket=chain.url, receiver_id="one")).advance()
    assert not (chain.folder / "receivers").exists()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Rollouts]:
    with rollouts(str(tmp_path / "run"), tmp_path) as fleet:
        yield fleet


def test_server_says_what_it_does_and_that_it_leaves(fleet: Rollouts) -> None:
    service = fleet.serve("a")
    run = open_run(fleet.url)
    fleet.train(1)
    wait_until(lambda: [held.lease.served for held in read_leases(run).held] == [1])
    wait_until(lambda: read_leases(run).held[0].lease.state == "idle")
    service.request("hold").result(WAIT)
    wait_until(lambda: read_leases(run).held[0].lease.state == "held")
    (held,) = read_leases(run).held
    lease = held.lease
    said = (lease.step, lease.head, lease.lag, lease.following, lease.holding, lease.pins)
    assert said == (1, 1, 0, "head", True, [0])
    assert lease.pause_ms == service.receiver.status()["timings_ms"]["pause"]
    assert lease.error is None
    fleet.end("a")
    (held,) = read_leases(run).held
    assert (held.lease.state, held.lease.seconds, held.lease.served, held.lease.pins) == ("left", 1, 1, [])
    assert [replica.left for replica in run.fleet().replicas] == [True]


def test_server_that_goes_to_another_run_leaves_the_one_before(fleet: Rollouts, tmp_path: Path) -> None:
    fleet.train(1)
    run = open_run(fleet.url)
    other = branch(run, 1, str(tmp_path / "branch"))
    service = fleet.serve("a")
    wait_until(lambda: [held.lease.served for held in read_leases(run).held] == [1])
    service.request("target", ("head", other.bucket.url)).result(WAIT)
    wait_until(lambda: [held.lease.served for held in read_leases(other).held] == [0])
    assert [held.lease.state for held in read_leases(run).held] == ["left"]
    assert fleet.publisher.wait_served(1, replicas=1, timeout=WAIT)


LEAVING = """
import sys
from pathlib import Path
from tests.support.fleets import Pauses, RecordedPort
from tests.support.modules import FusedModel, checkpoint_tensors
from tests.support.services import wait_until
from vllm_delta_sync.config import Settings
from vllm_delta_sync.engine.service import ReceiverService
import torch, tempfile
model = FusedModel()
model.load_weights((name, tensor.to(torch.bfloat16)) for name, tensor in checkpoint_tensors().items())
port = RecordedPort(model, "a", Pauses(), lambda: None)
settings = Settings(bucket=sys.argv[1], receiver_id="a", poll_seconds=0.05, state_dir=tempfile.mkdtemp())
service = ReceiverService(port, settings)
service.start()
# Once it has noted what it wrote: that is what it takes back at its end.
wait_until(lambda: service._keeper._said is not None and service._keeper._said[1]["served"] == 0)
"""


@pytest.mark.parametrize("store", ["local", pytest.param("s3", marks=pytest.mark.slow)])
def test_process_that_ends_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    """A server does not stop its receiver: it just ends."""
    with STORES[store](tmp_path / "store") as place:
        for name, value in place.environment.items():
            monkeypatch.setenv(name, value)
        with rollouts(place.url, tmp_path) as fleet:
            subprocess.run([sys.executable, "-c", LEAVING, fleet.url], check=True, timeout=WAIT)
            (held,) = read_leases(open_run(fleet.url)).held
    assert (held.lease.state, held.lease.served) == ("left", 0)
