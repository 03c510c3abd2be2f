"""Waiting for a version: one look at what is served for all who wait, however many they are."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from vllm_delta_sync.engine.api.api_servers import StatusView
from vllm_delta_sync.engine.commit.transaction import Answer
from vllm_delta_sync.engine.observe.readiness import unreachable
from vllm_delta_sync.errors import BusyError

STEP_SECONDS = 0.01
OUTLOOK_SECONDS = 0.1
"""How often it is asked whether what is waited for can still come: that takes longer than a look."""


class UnreachableError(BusyError):
    """What was asked for does not come unless somebody does something."""

    kind = "unreachable"


class Serving(Protocol):
    """A controller, or a service."""

    @property
    def receiver(self) -> StatusView:
        """What is known of the receiver."""


class VersionWaiters:
    """Those who wait for versions of one server, all in one event loop.

    Args:
        serving: whose versions; asked each time.
    """

    def __init__(self, serving: Callable[[], Serving]) -> None:
        self._serving = serving
        self._waiting: set[tuple[int, asyncio.Future[int]]] = set()
        self._looking: asyncio.Task[None] | None = None

    def served(self, version: int) -> int | None:
        """The version served, if it is the one given or a later one; None: not yet.

        Raises:
            UnreachableError: not yet, and it does not come by itself.
        """
        served = self._serving().receiver.served_version
        if served is not None and served >= version:
            return served
        status = self._status()
        if status is not None and (reason := unreachable(status, version)) is not None:
            raise UnreachableError(reason)
        return None

    async def reach(self, version: int) -> int:
        """Wait until the version or a later one is served, however long; the one that is.

        Raises:
            UnreachableError: it does not come by itself, or not any more.
        """
        if (served := self.served(version)) is not None:
            return served
        entry = version, asyncio.get_running_loop().create_future()
        self._waiting.add(entry)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            return await entry[1]
        finally:
            self._waiting.discard(entry)

    async def _look(self) -> None:
        """Until nobody waits: tell those whose version has come, and those whose version does not."""
        outlook = 0.0
        while self._waiting:
            asks = time.monotonic() >= outlook
            try:
                status = self._status() if asks else None
                self._settle(self._serving().receiver.served_version, status)
            except Exception as error:  # noqa: BLE001  theirs to show; nobody may be left waiting for ever
                for _, future in self._waiting:
                    if not future.done():
                        future.set_exception(error)
            if asks:
                outlook = time.monotonic() + OUTLOOK_SECONDS
            await asyncio.sleep(STEP_SECONDS)

    def _settle(self, served: int | None, status: Answer | None) -> None:
        for version, future in self._waiting:
            if future.done():
                continue
            if served is not None and served >= version:
                future.set_result(served)
            elif status is not None and (reason := unreachable(status, version)) is not None:
                future.set_exception(UnreachableError(reason))

    def _status(self) -> Answer | None:
        with suppress(BusyError):  # nobody leads this server at the moment, but soon
            return self._serving().receiver.status()
        return None
