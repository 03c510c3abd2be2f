"""``VersionWaiters`` wakes requests that wait for a version; one poll of the receiver serves all of them."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from vllm_delta_sync.engine.api.api_servers import Serving
from vllm_delta_sync.engine.observe.states import ENDING, Answer, unreachable
from vllm_delta_sync.errors import BusyError

STEP_SECONDS = 0.01
STEPS_PER_CHECK = 10
"""Polls between checks that a version is still reachable; the check is slower than a poll."""


class UnreachableError(BusyError):
    """The version will not be served without an operator's action."""

    kind = "unreachable"


class VersionWaiters:
    """Requests that wait for versions of one server, all in one event loop.

    Args:
        serving: returns the server's receiver; called at every poll, because the leader may change.
        has_ended: returns whether the engine has died or is being stopped; vLLM exits once all requests are answered.
    """

    def __init__(self, serving: Callable[[], Serving], has_ended: Callable[[], bool]) -> None:
        self._serving = serving
        self._has_ended = has_ended
        self._waiting: set[tuple[int, asyncio.Future[int]]] = set()
        self._poll_task: asyncio.Task[None] | None = None

    def newest_served(self, version: int) -> int | None:
        """Return the served version if it is at least ``version``, else None.

        Raises:
            UnreachableError: not yet, and not without an operator's action.
        """
        served = self._serving().receiver.served_version
        if served is not None and served >= version:
            return served
        if (reason := self._objection(version, self._status())) is not None:
            raise UnreachableError(reason)
        return None

    async def wait_for(self, version: int) -> int:
        """Wait, without a limit, until the version or a later one is served; returns the version served.

        Raises:
            UnreachableError: it will not be served without an operator's action.
        """
        if (served := self.newest_served(version)) is not None:
            return served
        entry = version, asyncio.get_running_loop().create_future()
        self._waiting.add(entry)
        if self._poll_task is None or self._poll_task.done():
            self._poll_task = asyncio.create_task(self._poll())
        try:
            return await entry[1]
        finally:
            self._waiting.discard(entry)

    async def _poll(self) -> None:
        """While any request is waiting, wake those whose version is now served or has become unreachable."""
        for step in count():
            waiting = [(version, future) for version, future in self._waiting if not future.done()]
            try:
                served = self._serving().receiver.served_version
                status = self._status() if step % STEPS_PER_CHECK == 0 else None
                for version, future in waiting:
                    if served is not None and served >= version:
                        future.set_result(served)
                    elif (reason := self._objection(version, status)) is not None:
                        future.set_exception(UnreachableError(reason))
            except Exception as error:  # noqa: BLE001  the waiting requests raise it; none may wait forever
                for _, future in waiting:
                    if not future.done():
                        future.set_exception(error)
            await asyncio.sleep(STEP_SECONDS)
            if not self._waiting:
                return

    def _objection(self, version: int, status: Answer | None) -> str | None:
        if self._has_ended():
            return f"version {version} is wanted, and {ENDING}"
        return None if status is None else unreachable(status, version)

    def _status(self) -> Answer | None:
        with suppress(BusyError):  # no API server leads at the moment
            return self._serving().receiver.status()
        return None
