"""A service in front of a world, and waiting for what no event tells of."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.hooks import HookedPort, hooked
from tests.support.world import World
from vllm_delta_sync.engine.follow.service import ReceiverService
from vllm_delta_sync.settings import Settings

POLL = 0.05
WAIT = 120


class Site:
    """A world, and a service in front of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.port: HookedPort = hooked(world)
        self.services: list[ReceiverService] = []

    def serve(self, **settings: Any) -> ReceiverService:
        service = ReceiverService(self.port, Settings(**{"bucket": self.world.url, "poll_seconds": POLL, **settings}))
        self.services.append(service)
        return service

    def end(self) -> None:
        for service in self.services:
            service.stop()
            service.join(WAIT)


def wait_until(reached: Callable[[], object]) -> None:
    """Until something is shown that no event tells of."""
    deadline = time.monotonic() + WAIT
    while not reached():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


@contextmanager
def serving(port: Any, **settings: Any) -> Iterator[ReceiverService]:
    """A service that runs for as long as the block."""
    service = ReceiverService(port, Settings(**{"poll_seconds": POLL, **settings}))
    service.start()
    try:
        yield service
    finally:
        service.stop()
        service.join(WAIT)
