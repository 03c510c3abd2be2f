"""What to serve: the head, a version, a tag; what retention hears of it; and whether the bucket still says so."""

import shutil
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.receiver.test_service import wait_until
from tests.support.chains import Chain, Server
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.chain.leases import read_leases
from vllm_delta_sync.config import Settings, load_settings
from vllm_delta_sync.engine import keeper as keeper_module
from vllm_delta_sync.engine.keeper import LeaseKeeper
from vllm_delta_sync.engine.receiver import Receiver
from vllm_delta_sync.engine.service import ReceiverService
from vllm_delta_sync.errors import BusyError, ChainError, NotFoundError, SettingsError, StoreError
from vllm_delta_sync.upkeep.tagging import set_tag
from vllm_delta_sync.wire import manifest as keys

WAIT = 120


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    chain = Chain(tmp_path)
    chain.grow(6)
    return chain


@pytest.mark.parametrize("value", ["latest", "-1", "tag:", "tag:a/b", "5.0", "tag:" + "x" * 101, ""])
def test_target_is_one_of_three(value: str) -> None:
    with pytest.raises(SettingsError, match="'target'"):
        load_settings({"bucket": "/x", "target": value}, {})


def test_target_may_be_a_number_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('bucket = "/x"\ntarget = 5\n')
    assert load_settings(environment={"DELTA_SYNC_CONFIG": str(file)}).target == "5"
    assert load_settings({"bucket": "/x"}, {}).target == "head"


@pytest.mark.parametrize("value", ["", "a b", "../x", "x" * 101])
def test_receiver_id_is_a_name(value: str) -> None:
    with pytest.raises(SettingsError, match="'receiver_id'"):
        load_settings({"bucket": "/x", "receiver_id": value}, {})


def test_fixed_version_is_served_and_not_left(chain: Chain) -> None:
    server = Server(chain, chain.bits[0], target="4")
    server.reaches(4, commits=1)
    chain.grow(2)
    server.reaches(4, commits=0)
    status = server.receiver.status()
    assert (status["state"], status["target"], status["lag"], status["last_error"]) == ("idle", "4", 4, None)


def test_version_that_is_not_there_yet_is_waited_for(chain: Chain) -> None:
    server = Server(chain, chain.bits[0], target="8")
    with pytest.raises(NotFoundError, match="not published yet; the head is 6"):
        server.receiver.advance()
    assert server.receiver.waits
    server.serves(0)
    chain.grow(3)
    server.reaches(8, commits=1)
    assert not server.receiver.waits


def test_tag_is_followed_as_it_moves_forward(chain: Chain) -> None:
    server = Server(chain, chain.bits[0], target="tag:best")
    with pytest.raises(NotFoundError, match="has no tag 'best'"):
        server.receiver.advance()
    server.serves(0)
    run = open_run(chain.url)
    for version in (2, 5):
        set_tag(run, "best", version)
        server.reaches(version, commits=1)
    server.reaches(5, commits=0)
    set_tag(run, "best", 3)
    with pytest.raises(ChainError, match="rollback"):
        server.receiver.advance()
    status = server.receiver.status()
    assert (status["state"], status["served"]["version"], status["holding"]) == ("held", 5, False)
    assert status["last_error"]["kind"] == "chain"
    server.receiver.rollback(2)
    with pytest.raises(BusyError):
        server.receiver.advance()
    server.receiver.release()
    server.reaches(3, commits=1)
    assert server.receiver.status()["state"] == "idle"


def test_tag_of_another_manifest_is_refused(chain: Chain) -> None:
    tag = set_tag(open_run(chain.url), "best", 3)
    chain.bucket.put("tags/best.json", tag.model_copy(update={"manifest": "0" * 64}).to_bytes())
    server = Server(chain, chain.bits[0], target="tag:best")
    with pytest.raises(ChainError, match="names manifest"):
        server.receiver.advance()
    server.serves(0)


def test_asking_for_a_version_goes_before_the_setting(chain: Chain) -> None:
    server = Server(chain, chain.bits[0], target="3")
    server.receiver.advance(5)
    server.serves(5)
    with pytest.raises(ChainError):
        server.receiver.advance()
    assert server.receiver.status()["state"] == "held"
    server.serves(5)


def test_bad_head_does_not_concern_who_serves_an_older_version(chain: Chain) -> None:
    chain.spoil_manifest(6)
    server = Server(chain, chain.bits[0], target="4")
    server.reaches(4, commits=1)


def spoil_run(chain: Chain) -> None:
    shutil.rmtree(chain.folder)


def replace_run(chain: Chain) -> None:
    shutil.rmtree(chain.folder)
    Chain(chain.root, seed=1)


def rewrite(chain: Chain) -> None:
    manifest = chain.manifests[6].model_copy(update={"step": 7})
    manifest._raw = None
    (chain.folder / keys.version_key(6)).write_bytes(manifest.to_bytes())


@pytest.mark.parametrize(
    ("spoil", "confirmed", "why"),
    [
        (lambda chain: None, True, None),
        (lambda chain: chain.spoil_manifest(6), False, "0000000006.json"),
        (lambda chain: (chain.folder / keys.version_key(6)).unlink(), False, "0000000006.json"),
        (rewrite, False, "was served"),
        (replace_run, False, "another run"),
        (spoil_run, None, "run.json"),
    ],
    ids=["as it was", "damaged", "gone", "rewritten", "another run", "no bucket"],
)
def test_verify_looks_into_the_bucket_and_keeps_what_is_served(
    chain: Chain, spoil: Callable[[Chain], None], confirmed: bool | None, why: str | None
) -> None:
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    spoil(chain)
    outcome = server.receiver.verify()
    assert (outcome["verdict"], outcome["chain"]) == (True, confirmed)
    assert outcome["reason"] is None if why is None else why in outcome["reason"]
    status = server.receiver.status()
    assert (status["served"]["version"], status["state"]) == (6, "idle")


def test_verify_cannot_tell_where_the_store_fails(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(chain, chain.bits[0])
    server.receiver.advance()

    def fail(*arguments: Any, **options: Any) -> bytes:
        raise StoreError("the network is gone")

    monkeypatch.setattr(server.receiver.history.run.bucket, "get", fail)
    outcome = server.receiver.verify()
    assert (outcome["verdict"], outcome["chain"], outcome["reason"]) == (True, None, "the network is gone")
    assert server.receiver.served_version == 6


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


@pytest.mark.parametrize("policy", ["follow", "manual"])
@pytest.mark.parametrize("name", [None, "one"])
def test_service_writes_a_lease_only_under_a_name(chain: Chain, policy: str, name: str | None) -> None:
    server = Server(chain, chain.bits[0])
    settings = Settings.model_validate(
        {"bucket": chain.url, "poll_seconds": 0.05, "policy": policy, "receiver_id": name}
    )
    service = ReceiverService(server.port, settings)
    service.start()
    try:
        service.request("sync").result(WAIT)
        if name is None:
            assert not (chain.folder / "receivers").exists()
        else:
            wait_until(lambda: [lease.served for lease in leases(chain)] == [6])
    finally:
        service.stop()
        service.join(WAIT)


def test_service_waits_for_its_target_at_the_usual_pace(chain: Chain) -> None:
    server = Server(chain, chain.bits[0])
    service = ReceiverService(server.port, Settings(bucket=chain.url, poll_seconds=0.05, target="8"))
    looks: list[float] = []
    look = service.receiver.history.look

    def counted(*served: Any) -> Any:
        looks.append(time.monotonic())
        return look(*served)

    service.receiver.history.look = counted  # type: ignore[assignment]
    service.start()
    try:
        wait_until(lambda: service.receiver.waits)
        before = len(looks)
        # Backing off, every wait from the seventh on would take longer.
        wait_until(lambda: any(late - early < 1 for early, late in pairwise(looks[before + 6 :])))
        chain.grow(3)
        wait_until(lambda: service.receiver.served_version == 8)
        wait_until(lambda: service.receiver.status()["last_error"] is None)
    finally:
        service.stop()
        service.join(WAIT)


def test_receiver_alone_writes_nothing(chain: Chain) -> None:
    server = Server(chain, chain.bits[0])
    Receiver(server.port, Settings(bucket=chain.url, receiver_id="one")).advance()
    assert not (chain.folder / "receivers").exists()
