"""A storm of forged notices: how often a server looks into the bucket, and that it still follows."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hooks import hooked
from tests.support.notices import DIGEST, LOOPBACK, Keys, public
from tests.support.running import eventually
from tests.support.world import World
from vllm_delta_sync import open_run
from vllm_delta_sync.engine.follow.service import MIN_POLL_SECONDS, ReceiverService
from vllm_delta_sync.errors import SettingsError
from vllm_delta_sync.notice import Notice, NoticePublisher
from vllm_delta_sync.settings import Settings

WAIT = 120.0
POLL = 0.5


class Site:
    """A server that follows a run, a channel that anybody may write to, and a count of its looks."""

    def __init__(self, root: Path) -> None:
        self.world = World(root)
        self.publisher = NoticePublisher(LOOPBACK, repeat_seconds=3600)
        self.services: list[ReceiverService] = []
        self.looks = 0

    def serve(self, poll_seconds: float, **settings: object) -> ReceiverService:
        values = {"bucket": self.world.url, "notice": self.publisher.address, "poll_seconds": poll_seconds, **settings}
        service = ReceiverService(hooked(self.world), Settings.model_validate(values))
        self.services.append(service)
        advance = service.receiver.advance

        def counted(*arguments: Any, **named: Any) -> None:
            self.looks += 1
            advance(*arguments, **named)

        service.receiver.advance = counted  # type: ignore[method-assign]
        service.start()
        eventually(lambda: service.receiver.served_version == 0)
        return service

    def tell(self, version: int, digest: str = DIGEST) -> None:
        self.publisher.send(Notice(self.world.publisher.run, version, digest))

    def close(self) -> None:
        for service in self.services:
            service.stop()
            service.join(WAIT)
        self.publisher.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    opened = Site(tmp_path)
    yield opened
    opened.close()


class Storm:
    """Forged notices of versions that never were, each another, as fast as they go."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._rage)
        self.sent = 0

    def _rage(self) -> None:
        while not self._over.is_set():
            self._tell(10**9 + self.sent)
            self.sent += 1
            time.sleep(0.0005)

    def __enter__(self) -> "Storm":
        self._thread.start()
        return self

    def __exit__(self, *outcome: object) -> None:
        self._over.set()
        self._thread.join()


def heed(site: Site, service: ReceiverService, version: int) -> None:
    """Announce it, truly, until somebody has come to look."""
    digest = open_run(site.world.url).manifest(version).digest

    def served() -> bool:
        site.tell(version, digest)
        return service.receiver.served_version == version

    eventually(served)


def test_a_notice_gets_in_at_once(site: Site) -> None:
    service = site.serve(3600)
    for version in (1, 2, 3):
        site.world.train(version)
        heed(site, service, version)
    # One for each, and the first; and whichever came while one was under way.
    assert site.looks <= 12


def test_a_storm_costs_about_as_much_as_polling(site: Site) -> None:
    site.serve(POLL)
    with Storm(site.tell) as storm:
        eventually(lambda: site.looks > 1)
        before, began = site.looks, time.monotonic()
        time.sleep(2)
        looks, seconds = site.looks - before, time.monotonic() - began
    assert storm.sent > 500
    assert looks <= 2 * seconds / POLL


@pytest.mark.slow
def test_versions_get_in_during_a_storm_by_polling(site: Site) -> None:
    service = site.serve(POLL)
    with Storm(site.tell):
        for version in (1, 2, 3):
            site.world.train(version)
            eventually(lambda version=version: service.receiver.served_version == version)  # type: ignore[misc]
    site.world.expect_exact()


@pytest.mark.slow
def test_after_a_storm_a_notice_counts_again(site: Site) -> None:
    service = site.serve(3600)
    with Storm(site.tell):
        eventually(lambda: site.looks >= 5)
    site.world.train(1)
    heed(site, service, 1)
    # It told the truth, so the next ones are believed at once; else each would wait twice as long as the one before.
    began = time.monotonic()
    for version in range(2, 9):
        site.world.train(version)
        heed(site, service, version)
    assert time.monotonic() - began < WAIT / 2


def test_what_is_known_costs_no_look(site: Site) -> None:
    service = site.serve(3600)
    site.world.train(1)
    heed(site, service, 1)
    time.sleep(2 * MIN_POLL_SECONDS)
    before, head = site.looks, service.receiver.board.head
    digest = "" if head is None else head.digest
    for _ in range(200):
        site.tell(0)
        site.tell(1, digest)
        time.sleep(0.002)
    assert site.looks == before


@pytest.mark.slow
def test_another_manifest_of_the_version_known_is_news(site: Site) -> None:
    """What was found first may have been somebody else's, and be gone."""
    service = site.serve(3600)
    site.world.train(1)
    heed(site, service, 1)
    before = site.looks

    def looked() -> bool:
        site.tell(1)
        return site.looks > before

    eventually(looked)


@pytest.mark.slow
def test_a_storm_while_held_or_told_to_wait(site: Site) -> None:
    """Looking after what is served is all that such a server does, and that seldom too."""
    service = site.serve(3600)
    service.request("hold").result(WAIT)
    checks = 0
    check = service.receiver.check_served

    def counted() -> None:
        nonlocal checks
        checks += 1
        check()

    service.receiver.check_served = counted  # type: ignore[method-assign]
    with Storm(site.tell):
        time.sleep(3)
    # 0.02 s, doubled each time: 3 s are over at the eighth.
    assert 0 < checks <= 9


@pytest.mark.slow
def test_requests_do_not_wait_behind_a_storm(site: Site) -> None:
    service = site.serve(3600)
    with Storm(site.tell):
        eventually(lambda: site.looks >= 5)
        site.world.train(1)
        assert service.request("sync").result(WAIT)["served"]["version"] == 1


def test_keys_for_notices(site: Site, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    trainer, server = keys.make("trainer"), keys.make("server")
    site.publisher.close()
    site.publisher = NoticePublisher(LOOPBACK, trainer, public(server))
    service = site.serve(3600, notice_key=server, notice_server_key=public(trainer))
    site.world.train(1)
    heed(site, service, 1)
    server.chmod(0o644)
    settings = Settings(bucket=site.world.url, notice_key=server, notice_server_key=public(trainer))
    with pytest.raises(SettingsError, match="chmod 600"):
        ReceiverService(hooked(site.world), settings)
