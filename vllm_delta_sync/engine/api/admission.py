"""Requests for completions, on their way in: which version admits them, and waiting for the one they want at least.

A request that waits has not reached vLLM yet: it takes no place in the engine, and its body is not parsed.
"""

import asyncio
import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_delta_sync.engine.api.access import CrowdedError, answer_error
from vllm_delta_sync.engine.api.version_waiters import UnreachableError, VersionWaiters
from vllm_delta_sync.engine.observe import metrics
from vllm_delta_sync.errors import DeltaSyncError, UsageError
from vllm_delta_sync.format.limits import MAX_VERSION

VERSION_HEADER = b"x-delta-sync-version"
WANTED_HEADER = b"x-delta-sync-min-version"
VERSIONED_PATHS = ("/v1/completions", "/v1/chat/completions")

MAX_WAITING = 1024
"""Requests that may wait at a time for the version they want: all rollouts of a step come at once."""
MAX_KEPT_BYTES = 64 * 1024
"""What is taken of a waiting request's body, so that it is noticed if its client goes away."""
_VERSION = re.compile(rb"[0-9]{1,20}")


class LateError(CrowdedError):
    """What was asked for is not there yet; asking again helps."""

    kind = "late"


class Admission:
    """ASGI middleware for generation routes: ``X-Delta-Sync-Min-Version`` and ``X-Delta-Sync-Version``.

    Args:
        state: of the application: ``delta_sync``, and ``delta_sync_min_version_seconds``, how long a request may wait.
    """

    def __init__(self, app: ASGIApp, state: Any, arrivals: VersionWaiters) -> None:
        self._app = app
        self._state = state
        self._arrivals = arrivals
        self._waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = getattr(self._state, "delta_sync", None)
        if scope["type"] != "http" or service is None or not scope["path"].endswith(VERSIONED_PATHS):
            await self._app(scope, receive, send)
            return
        asked = [value for name, value in scope["headers"] if name.lower() == WANTED_HEADER]
        if not asked:
            await self._app(scope, receive, _saying(send, service.receiver.served_version))
            return
        letters = RequestBuffer(receive)
        try:
            admitted = await self._admit(asked, letters)
        except DeltaSyncError as error:
            letters.close()
            await answer_error(error)(scope, receive, _saying(send, service.receiver.served_version))
            return
        await self._app(scope, letters.receive, _saying(send, admitted))

    async def _admit(self, asked: list[bytes], letters: "RequestBuffer") -> int:
        """The version that admits a request.

        Raises:
            UsageError: the header is no version. UnreachableError: that version does not come by itself.
            LateError, CrowdedError: it has not come in time, or too many wait.
        """
        began = time.monotonic()
        outcome = "late"
        try:
            version = _wanted(asked)
            served = self._arrivals.served(version)
            if served is None:
                with self._place():
                    served = await self._wait(version, letters)
            outcome = "served"
            return served
        except UsageError:
            outcome = "malformed"
            raise
        except UnreachableError:
            outcome = "unreachable"
            raise
        finally:
            metrics.observe_admission(outcome, time.monotonic() - began)

    async def _wait(self, version: int, letters: "RequestBuffer") -> int:
        patience: float = self._state.delta_sync_min_version_seconds
        arrival = asyncio.ensure_future(self._arrivals.reach(version))
        gone = asyncio.ensure_future(letters.gone())
        try:
            await asyncio.wait({arrival, gone}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if arrival.done():
                return arrival.result()
        finally:
            arrival.cancel()
            gone.cancel()
        if gone.done() and not gone.cancelled():
            raise LateError("the client went away while its request waited for a version")
        served = self._state.delta_sync.receiver.served_version
        raise LateError(
            f"version {version} is wanted, and {served} is served after min_version_seconds ({patience:g} s); ask again"
        )

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._waiting >= MAX_WAITING:
            raise CrowdedError(f"{MAX_WAITING} requests wait for a version already; ask again, or another server")
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1


class RequestBuffer:
    """What a client sends while its request waits, kept for the application."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept: deque[Message] = deque()
        self._coming: asyncio.Future[Message] | None = None

    async def gone(self) -> None:
        """Return once the client has gone away. Of a large body only the beginning is taken, and then not even that
        is noticed: what is not taken makes the client stop sending."""
        taken = 0
        while taken < MAX_KEPT_BYTES:
            if self._coming is None:
                self._coming = asyncio.ensure_future(self._receive())
            # Not cancelled with this: a message that is on its way would be lost.
            message = await asyncio.shield(self._coming)
            self._coming = None
            self._kept.append(message)
            if message["type"] == "http.disconnect":
                return
            taken += len(message.get("body", b""))
        await asyncio.Event().wait()

    async def receive(self) -> Message:
        """For the application, in place of the server's."""
        if self._kept:
            return self._kept.popleft()
        if self._coming is not None:
            coming, self._coming = self._coming, None
            return await coming
        return await self._receive()

    def close(self) -> None:
        """The application is not asked: what is kept, or on its way, is nobody's."""
        if self._coming is not None:
            self._coming.cancel()


def _wanted(values: list[bytes]) -> int:
    if len(values) != 1 or not _VERSION.fullmatch(values[0]) or int(values[0]) > MAX_VERSION:
        given = b", ".join(values)[:40].decode("latin-1")
        raise UsageError(f"X-Delta-Sync-Min-Version is {given!r}; send one number from 0 to {MAX_VERSION}")
    return int(values[0])


def _saying(send: Send, version: int | None) -> Send:
    async def send_with_version(message: Message) -> None:
        if message["type"] == "http.response.start" and version is not None:
            message["headers"] = [*message.get("headers", ()), (VERSION_HEADER, str(version).encode())]
        await send(message)

    return send_with_version
