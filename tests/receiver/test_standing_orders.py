"""Standing orders outlive a server: a target chosen at run time, a hold, a rollback."""

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.chains import Chain, models_of
from tests.support.modules import ModulePort
from tests.support.seeds import seeds
from tests.support.services import WAIT, wait_until
from vllm_delta_sync.client import open_run
from vllm_delta_sync.engine.commit.transaction import EngineStopped
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.follow.service import ReceiverService
from vllm_delta_sync.engine.follow.standing_orders import StandingOrder, StandingOrderStore
from vllm_delta_sync.engine.protocol import ClaimedVersion
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format.fingerprint import fingerprint_tensor
from vllm_delta_sync.maintenance.tags import set_tag
from vllm_delta_sync.settings import Settings

ORDER = StandingOrder(setting="head", target="3").model_dump_json()


class Life:
    """A server that is started again and again, from its checkpoint or from a version of the bucket."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.settings: dict[str, Any] = {"bucket": chain.url, "state_dir": chain.root / "state", "poll_seconds": 0.02}
        self.services: list[ReceiverService] = []

    def start(self, loaded: int = 0, **settings: Any) -> ReceiverService:
        """Args: loaded: what ``--load-format delta_sync`` found; 0: the checkpoint."""
        self.end()
        self.port = ModulePort(*models_of(self.chain.bits[loaded]))
        if loaded:
            bits = self.chain.bits[loaded]
            sums = [fingerprint_tensor(spec.name, bits[at]) for at, spec in enumerate(self.chain.table)]
            for rank in self.port.ranks:
                rank.model.delta_sync_loaded = ClaimedVersion(self.chain.run, self.chain.url, loaded, sums)  # type: ignore[assignment]
        service = ReceiverService(self.port, Settings(**{**self.settings, **settings}))
        self.services.append(service)
        service.start()
        return service

    def end(self) -> None:
        for service in self.services:
            service.stop()
            service.join(WAIT)
        self.services.clear()

    def serves(self, version: int) -> None:
        """It comes to that, proven bit for bit; and nothing newer was named on the way."""
        (service,) = self.services
        wait_until(lambda: service.receiver.served_version == version)
        assert service.request("verify").result(WAIT)["verdict"]
        for rank, right in zip(self.port.ranks, models_of(self.chain.bits[version]), strict=True):
            for mine, other in zip(rank.model.parameters(), right.parameters(), strict=True):  # type: ignore[attr-defined]
                assert mine.equal(other)

    def labels(self) -> list[int]:
        return [int(entry[6:]) for entry in self.port.log if entry.startswith("label ") and entry != "label None"]

    def keep(self, text: str, mode: int = 0o600) -> Path:
        """Write what an earlier life may have left."""
        path = StandingOrderStore(Settings(**self.settings)).path
        assert path is not None
        path.parent.mkdir()
        path.write_text(text)
        path.chmod(mode)
        return path

    @property
    def file(self) -> Path | None:
        found = list((self.chain.root / "state").glob("*.order"))
        return found[0] if found else None

    @property
    def order(self) -> dict[str, Any]:
        """What is kept; empty if nothing is."""
        found: dict[str, Any] = json.loads(self.file.read_bytes()) if self.file else {}
        return found


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    chain = Chain(tmp_path)
    chain.grow(7)
    life = Life(chain)
    yield life
    life.end()


@pytest.fixture
def service(life: Life) -> ReceiverService:
    """Of a first life, which serves version 7."""
    service = life.start()
    life.serves(7)
    return service


@pytest.mark.parametrize(("loaded", "policy"), [(0, "follow"), (3, "manual"), (5, "manual"), (7, "follow")])
def test_rollback_outlives_a_restart(life: Life, loaded: int, policy: str) -> None:
    service = life.start(policy=policy)
    service.request("sync").result(WAIT)
    life.serves(7)
    service.request("rollback", 5).result(WAIT)
    assert life.file is not None
    assert life.file.stat().st_mode & 0o777 == 0o600
    life.chain.grow(1)
    service = life.start(loaded, policy=policy)
    life.serves(5)
    wait_until(lambda: service.receiver.status()["state"] == "held")
    assert set(life.labels()) == {5}
    service.request("release").result(WAIT)
    service.request("sync").result(WAIT)
    life.serves(8)
    assert not list((life.chain.root / "state").glob("*.order"))
    life.start(policy=policy).request("sync").result(WAIT)
    life.serves(8)


@pytest.mark.parametrize("loaded", [0, 6], ids=["checkpoint", "beside a bad version"])
@pytest.mark.parametrize("policy", ["manual", "follow"])
def test_hold_before_anything_is_served_outlives_a_restart_too(life: Life, policy: str, loaded: int) -> None:
    if loaded:
        life.chain.spoil_manifest(7)
    away = life.chain.folder.rename(life.chain.root / "away")
    life.start(loaded, policy=policy).request("hold").result(WAIT)
    away.rename(life.chain.folder)
    life.serves(loaded)
    wait_until(lambda: life.order.get("version") == loaded)
    life.start(loaded)
    life.serves(loaded)


def test_a_request_that_fails_half_way_is_held_where_it_came_to(life: Life) -> None:
    life.settings["stage_bytes"] = 1
    service = life.start()
    life.serves(7)
    service.request("rollback", 3).result(WAIT)
    life.chain.grow(2)
    life.chain.lose(9)
    with pytest.raises(DeltaSyncError):
        service.request("sync", 9).result(WAIT)
    life.serves(8)
    assert life.order["version"] == 8
    life.start()
    life.serves(8)


def test_engines_of_one_process_have_orders_of_their_own(life: Life, service: ReceiverService) -> None:
    """Such as two adapters that follow one run."""
    service.request("rollback", 5).result(WAIT)
    written = life.file
    assert written is not None
    order = written.read_bytes()
    others: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"receiver_id": "two"}, True),
        ({"lora_name": "a"}, True),
    ]
    for more, written_apart in others:
        store = StandingOrderStore(Settings(**life.settings, **more))
        store.save(StandingOrder(setting="head"))
        store.save(StandingOrder(setting="head", holding=True))
        assert store.path is not None
        assert (store.path != written and store.path.exists()) == written_apart
        assert written.read_bytes() == order
    life.end()
    store = StandingOrderStore(Settings(**life.settings))
    store.save(StandingOrder(setting="head", target="3"))
    assert written.read_bytes() != order, "an engine that has ended lets go of it"


def test_an_engine_that_follows_another_in_one_process_finds_its_order(
    life: Life, service: ReceiverService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that was shut down, and of one whose ``close`` did not wait to the end; its objects are still there."""
    service.request("rollback", 5).result(WAIT)
    monkeypatch.setattr(life.port, "call", mock.Mock(side_effect=EngineStopped))
    service._threads[0].join(WAIT)
    life.services.clear()
    life.start()
    life.serves(5)


@pytest.mark.parametrize("loaded", [0, 7])
def test_target_outlives_a_restart(life: Life, service: ReceiverService, loaded: int) -> None:
    set_tag(open_run(life.chain.url), "best", 3)
    for named, version in (("4", 4), ("tag:best", 3)):
        service.request("target", named).result(WAIT)
        service = life.start(loaded)
        life.serves(version)
        assert (service.receiver.status()["target"], max(life.labels())) == (named, version)
    set_tag(open_run(life.chain.url), "best", 6)
    life.serves(6)
    service.request("target", "head").result(WAIT)
    assert life.file is None


def test_setting_that_was_changed_wins(life: Life, service: ReceiverService, caplog: pytest.LogCaptureFixture) -> None:
    service.request("rollback", 5).result(WAIT)
    life.start(target="6")
    life.serves(6)
    assert "the setting target is 6, and was head when the standing order (hold at version 5) was given" in caplog.text
    # It is not in force again when the setting is as it was.
    life.start()
    life.serves(7)


def test_answer_comes_after_the_order_is_kept(life: Life, service: ReceiverService) -> None:
    for action, argument in (("rollback", 5), ("target", "3"), ("hold", None)):
        service.request(action, argument).result(WAIT)
        kept = life.order
        assert (kept["holding"], kept["target"]) == (action != "target", None if action == "rollback" else "3")


DAMAGED = ["", "{", "{}", '{"setting":"head","holding":1}', '{"setting":"head","bucket":"/elsewhere/run"}', "x" * 20000]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_order_holds_what_the_server_starts_with(
    life: Life, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    life.keep(text)
    service = life.start()
    life.serves(0)
    wait_until(lambda: service.receiver.status()["state"] == "held")
    assert sum("cannot be read" in record.getMessage() for record in caplog.records) == 1
    service.request("release").result(WAIT)
    life.serves(7)


@pytest.mark.parametrize("how", ["link", "others"])
def test_order_that_another_may_have_written_is_not_believed(life: Life, how: str) -> None:
    path = life.keep(ORDER, 0o666 if how == "others" else 0o600)
    if how == "link":
        path.symlink_to(path.rename(life.chain.root / "order.json"))
    service = life.start()
    life.serves(0)
    assert service.receiver.status()["target"] == "head"


def test_order_that_cannot_be_looked_for_holds_what_the_server_starts_with(life: Life) -> None:
    """A disk that fails does not say that there is none; a folder that leads to itself stands for it."""
    (life.chain.root / "state").symlink_to(life.chain.root / "state")
    service = life.start()
    life.serves(0)
    wait_until(lambda: service.receiver.status()["state"] == "held")


def test_order_that_cannot_be_kept_is_in_force(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    (life.chain.root / "state").write_text("in the way")
    service = life.start()
    life.serves(7)
    assert service.request("rollback", 5).result(WAIT)["state"] == "held"
    service.request("target", "5").result(WAIT)
    looks = service.receiver.board.polls
    wait_until(lambda: service.receiver.board.polls > looks + 10)
    assert sum("will not survive a restart" in record.getMessage() for record in caplog.records) == 2
    life.start()
    life.serves(7)


def test_a_full_disk_is_named_with_the_way_out(
    life: Life, service: ReceiverService, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=full))
    service.request("hold").result(WAIT)
    (said,) = (text for record in caplog.records if "will not survive" in (text := record.getMessage()))
    assert "No space left on device; make room, or set state_dir" in said


def test_version_that_was_held_and_is_gone_is_said(life: Life, service: ReceiverService) -> None:
    service.request("rollback", 5).result(WAIT)
    life.end()
    life.chain.lose(*range(1, 8))
    service = life.start(7)
    wait_until(lambda: service.receiver.status()["last_error"] is not None)
    assert service.receiver.served_version is None
    assert life.labels() == []
    service.request("release").result(WAIT)
    life.serves(7)


def test_another_server_of_this_user_has_orders_of_its_own(life: Life, tmp_path: Path) -> None:
    """Another process holds the file's lock."""
    path = life.keep(ORDER)
    script = (
        "import fcntl, sys\n"
        "lock = open(sys.argv[1], 'a')\n"
        "fcntl.lockf(lock, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, f"{path}.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        service = life.start()
        life.serves(7)
        service.request("hold").result(WAIT)
        assert json.loads(path.read_bytes())["target"] == "3"
        named = StandingOrderStore(Settings(**life.settings, receiver_id="two"))
        named.save(StandingOrder(setting="head", holding=True))
        assert named.path is not None
        assert named.path.exists()
    finally:
        holder.communicate()
    life.start()
    life.serves(3)


def test_nothing_is_written_without_an_order_or_a_place_for_it(life: Life) -> None:
    Receiver(ModulePort(*models_of(life.chain.bits[0])), Settings(**life.settings)).advance()
    assert not (life.chain.root / "state").exists()
    life.start()
    life.serves(7)
    assert not (life.chain.root / "state").exists() or not os.listdir(life.chain.root / "state")


@pytest.mark.parametrize("seed", seeds(3, 8))
def test_random_orders_and_restarts(life: Life, seed: int) -> None:
    """Whatever was asked for and answered last is what is served, also after a restart; every version bit for bit."""
    chance = random.Random(seed)
    life.settings |= {"undo_bytes": chance.choice([0, 10**9]), "stage_bytes": chance.choice([100_000, 10**9])}
    service, chain = life.start(), life.chain
    version, holding, head = 7, False, True
    life.serves(7)
    for _ in range(14):
        newest = len(chain.manifests) - 1
        asked = chance.choice(["target", "head", "rollback", "hold", "release", "grow", "restart"])
        if asked == "target":
            version, holding, head = chance.randint(0, newest), False, False
            service.request("target", str(version)).result(WAIT)
        elif asked == "head":
            version, holding, head = newest, False, True
            service.request("target", "head").result(WAIT)
        elif asked == "rollback":
            version, holding = chance.randint(0, version), True
            service.request("rollback", version).result(WAIT)
        elif asked == "hold":
            holding = True
            service.request("hold").result(WAIT)
        elif asked == "release":
            if not head and holding:
                continue
            holding = False
            service.request("release").result(WAIT)
        elif asked == "grow":
            chain.grow(chance.randint(1, 3))
        else:
            service = life.start(chance.choice([0, len(chain.manifests) - 1]))
        if head and not holding:
            version = len(chain.manifests) - 1
        life.serves(version)
        assert service.receiver.status()["holding"] == holding
