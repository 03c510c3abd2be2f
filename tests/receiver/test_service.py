"""The thread that follows: how often it tries what fails, what it does for a server that follows nothing, and policy
``manual``."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.support.services import POLL, WAIT, Site, serving, wait_until
from tests.support.world import World
from vllm_delta_sync.engine.follow import service as service_module
from vllm_delta_sync.engine.observe import metrics
from vllm_delta_sync.notice import NoticeSubscriber


@pytest.fixture(params=[True], ids=["with a base"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A run with a base; without one if the test says so."""
    site = Site(World(tmp_path, with_base=request.param))
    yield site
    site.end()


class Attempts:
    """When operations of a kind were started; ``enough`` is set after so many."""

    def __init__(self, operation: str, enough: int) -> None:
        self.operation = operation
        self.wanted = enough
        self.at: list[float] = []
        self.enough = threading.Event()

    def hook(self, method: str, arguments: dict[str, Any]) -> None:
        if method == "start" and arguments["operation"] == self.operation:
            self.at.append(time.monotonic())
            if len(self.at) == self.wanted:
                self.enough.set()

    def expect_backoff(self) -> None:
        """Each waits twice as long as the one before."""
        assert self.enough.wait(WAIT)
        gaps = [late - early for early, late in zip(self.at, self.at[1:], strict=False)]
        for number, gap in enumerate(gaps[: self.wanted - 1]):
            assert gap >= POLL * 2**number * 0.99


@pytest.mark.parametrize("site", [False], indirect=True, ids=["without a base"])
def test_object_that_is_missing_is_not_asked_for_at_full_pace(site: Site, tmp_path: Path) -> None:
    """The weights, which only anchors replace, are hashed for the first attempt only."""
    site.world.model.norm.data[:] = 0
    (anchor,) = (tmp_path / "run" / "objects").iterdir()
    hidden = anchor.rename(tmp_path / "hidden")
    attempts = Attempts("stage", 5)
    site.port.before = attempts.hook
    service = site.serve()
    service.start()
    attempts.expect_backoff()
    assert service.receiver.status()["last_error"]["kind"] == "not_found"
    hidden.rename(anchor)
    wait_until(lambda: service.receiver.served_version == 0)


@pytest.mark.parametrize("awaited", ["run", "target"])
def test_what_is_not_there_yet_is_looked_for_at_the_usual_pace(site: Site, tmp_path: Path, awaited: str) -> None:
    there, hidden = Path(site.world.url), tmp_path / "hidden"
    service = site.serve(target="1" if awaited == "target" else "head")
    if awaited == "run":
        there.rename(hidden)
    service.start()
    board = service.receiver.board

    def pace() -> float:
        """How long it takes until the next look."""
        looks, began = board.polls, time.monotonic()
        wait_until(lambda: board.polls > looks)
        return time.monotonic() - began

    for _ in range(6):
        pace()
    # Doubling each time, every wait from the seventh on would take longer.
    wait_until(lambda: pace() < 1)
    if awaited == "run":
        hidden.rename(there)
        wait_until(lambda: service.receiver.served_version == 0)
    else:
        assert service.receiver.target_unavailable
        site.world.train(1)
        wait_until(lambda: service.receiver.served_version == 1)
    wait_until(lambda: service.receiver.status()["last_error"] is None)


def test_after_a_sleep_it_goes_on_at_the_usual_pace(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleep is no failure: it does not count as one, and no poll after it is late."""
    counted: list[str] = []
    monkeypatch.setattr(metrics, "count_failure", counted.append)
    service = site.serve()
    service.start()
    wait_until(lambda: service.receiver.served_version == 0)
    memory: Any = site.port.ranks[0].memory
    memory.asleep = True
    site.world.train(1)
    board = service.receiver.board
    wait_until(lambda: board.asleep)
    looks = board.polls
    # Doubling each time, the last of these would take a minute.
    wait_until(lambda: board.polls > looks + 12)
    memory.asleep = False
    wait_until(lambda: service.receiver.served_version == 1)
    assert counted == []


@pytest.mark.parametrize("repairs", [False, True], ids=["before the first version", "before a repair"])
def test_an_engine_that_sleeps_before_its_weights_are_known_is_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch, repairs: bool
) -> None:
    service = site.serve()
    if repairs:
        service.receiver.advance()
        site.world.model.norm.data.mul_(2.0)
        assert not service.receiver.verify()["verdict"]
    counted: list[str] = []
    monkeypatch.setattr(metrics, "count_failure", counted.append)
    memory: Any = site.port.ranks[0].memory
    memory.asleep = True
    service.start()
    board = service.receiver.board
    wait_until(lambda: board.asleep and board.polls > 12)
    memory.asleep = False
    wait_until(lambda: service.receiver.served_version == 0)
    assert counted == []


def test_repair_that_fails_stays_refused_and_backs_off(site: Site, tmp_path: Path) -> None:
    world = site.world
    service = site.serve()
    receiver = service.receiver
    receiver.advance()
    world.train(1)
    receiver.advance()
    hidden = (tmp_path / "base").rename(tmp_path / "hidden")
    world.model.norm.data.mul_(2.0)
    assert not receiver.verify()["verdict"]
    attempts = Attempts("repair", 5)
    states: set[str] = set()
    receiver.board.watch(lambda: states.add(receiver.board.state))
    site.port.before = attempts.hook
    service.start()
    attempts.expect_backoff()
    assert states <= {"refused", "repairing"}
    assert receiver.status()["last_error"]["kind"] == "base"
    assert receiver.status()["served"] is None
    hidden.rename(tmp_path / "base")
    wait_until(lambda: receiver.served_version == 1)
    world.expect_exact()


@pytest.mark.parametrize(("action", "argument", "reached"), [("hold", None, (1, 2)), ("rollback", 0, (0,))])
def test_request_does_not_wait_for_a_whole_catch_up(
    site: Site, action: str, argument: int | None, reached: tuple[int, ...]
) -> None:
    site.world.train(*range(1, 9))
    # One version per commit.
    service = site.serve(stage_bytes=0)
    asked: list[Future[Any]] = []
    came = threading.Event()

    def ask(method: str, arguments: dict[str, Any]) -> None:
        if method == "confirm" and not asked:
            asked.append(service.request(action, argument))
            came.set()

    site.port.after = ask
    service.start()
    assert came.wait(WAIT)
    status = asked[0].result(WAIT)
    assert status["served"]["version"] in reached
    assert (status["state"], status["holding"]) == ("held", True)
    service.request("release").result(WAIT)
    wait_until(lambda: service.receiver.served_version == 8)
    site.world.expect_exact()


@pytest.mark.parametrize(("action", "argument", "left"), [("hold", None, 1), ("rollback", 0, 0), ("target", "1", 1)])
def test_what_is_staged_is_not_served_after_an_order_to_stay_or_go_back(
    site: Site, action: str, argument: int | str | None, left: int
) -> None:
    service = site.serve()
    receiver = service.receiver
    receiver.advance()
    site.world.train(1)
    receiver.advance()
    calls: list[str] = []
    asked: list[Future[Any]] = []

    def ask(method: str, arguments: dict[str, Any]) -> None:
        calls.append(method)
        if method == "start" and arguments["operation"] == "stage" and not asked:
            asked.append(service.request(action, argument))

    site.port.after = ask
    site.world.train(2)
    service.start()
    wait_until(lambda: asked)
    assert asked[0].result(WAIT)["served"]["version"] == left
    assert "commit" not in calls
    assert receiver.served_version == left
    service.request("release").result(WAIT)
    service.request("target", "head").result(WAIT)
    wait_until(lambda: receiver.served_version == 2)
    site.world.expect_exact()


@pytest.mark.parametrize("policy", ["follow", "manual"])
def test_server_that_follows_nothing_still_looks_for_other_writers(site: Site, policy: str) -> None:
    world = site.world
    service = site.serve(policy=policy)
    receiver = service.receiver
    receiver.advance()
    world.train(1)
    receiver.advance()
    if policy == "follow":
        receiver.hold()
    refused = threading.Event()
    site.port.before = lambda method, named: refused.set() if method == "label" and named["version"] is None else None
    service.start()
    world.model.norm.data.mul_(2.0)
    site.port.ranks[0].note_external_write("update_weights")
    assert refused.wait(WAIT)
    if policy == "manual":
        wait_until(lambda: receiver.status()["state"] == "refused")
        assert receiver.status()["served"] is None
    else:
        wait_until(lambda: receiver.status()["state"] == "held")
        assert receiver.served_version == 1
        world.expect_exact()


def test_idle_poll_asks_the_ranks_once(site: Site) -> None:
    """For external writes and sleep, which no API server sees all of."""
    site.world.receiver.advance()
    calls: list[str] = []
    site.port.before = lambda method, arguments: calls.append(method)
    for _ in range(3):
        site.world.receiver.advance()
    assert calls == ["describe"] * 3


def test_listening_outlives_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug while a notice is read costs one retry; the next notice is heard by the same thread."""
    world = World(tmp_path, notice="tcp://127.0.0.1:*")
    monkeypatch.setattr(service_module, "LONGEST_RETRY_SECONDS", 0.01)
    receive, left = NoticeSubscriber.receive, [2]

    def broken(subscriber: NoticeSubscriber, timeout_s: float) -> Any:
        if left[0]:
            left[0] -= 1
            raise KeyError("a bug")
        return receive(subscriber, timeout_s)

    monkeypatch.setattr(NoticeSubscriber, "receive", broken)
    address = world.publisher.notice_address
    with serving(world.port, bucket=world.url, poll_seconds=3600, notice=address) as service:
        wait_until(lambda: service.receiver.served_version == 0 and not left[0])
        assert any("listening for notices failed unexpectedly" in record.getMessage() for record in caplog.records)
        world.train(1)
        wait_until(lambda: service.receiver.served_version == 1)
        assert service.receiver.status()["notice"]["heard_seconds"] is not None


# Policy manual: a server looks, shows what waits, and moves when it is told to


def test_nothing_moves_by_itself_and_lag_says_what_waits(site: Site) -> None:
    service = site.serve(policy="manual")
    service.start()
    wait_until(lambda: service.receiver.served_version == 0)
    before = site.world.bits()
    for version in (1, 2, 3):
        site.world.train(version)
        wait_until(lambda version=version: service.receiver.status()["lag"] == version)  # type: ignore[misc]
    looks = service.receiver.status()["polls"]
    wait_until(lambda: service.receiver.status()["polls"] > looks + 3)
    status = service.receiver.status()
    assert (status["served"]["version"], status["state"], status["last_error"]) == (0, "idle", None)
    assert "commit" not in site.port.log
    site.world.expect_bits(before)
    for asked, lag in ((2, 1), (None, 0)):
        status = service.request("sync", asked).result(WAIT)
        assert (status["served"]["version"], status["lag"]) == (3 - lag, lag)
    site.world.expect_exact()


def test_servers_do_not_poll_in_step(site: Site) -> None:
    """A notice wakes all at one moment. With one interval they would poll together ever after."""
    service = site.serve(poll_seconds=10)
    intervals = [service._delay() for _ in range(200)]
    assert 7.5 <= min(intervals) < 8
    assert 12 < max(intervals) <= 12.5


@pytest.mark.parametrize("site", [False], indirect=True, ids=["without a base"])
def test_weights_that_are_no_version_are_compared_once(site: Site) -> None:
    """Each comparison reads the whole model."""
    site.world.model.norm.data[:] = 0
    proofs: list[str] = []
    compared = threading.Event()

    def count(method: str, arguments: dict[str, object]) -> None:
        if method == "start" and arguments["operation"] == "identify":
            proofs.append(method)
            compared.set()

    site.port.before = count
    service = site.serve(policy="manual")
    service.start()
    assert compared.wait(WAIT)
    looks = service.receiver.status()["polls"]
    wait_until(lambda: service.receiver.status()["polls"] > looks + 5)
    assert (len(proofs), service.receiver.served_version) == (1, None)
    assert service.request("sync").result(WAIT)["served"]["version"] == 0
    site.world.expect_exact()
