"""``Admission`` holds back requests for completions until the minimum version that they ask for is served.

A waiting request has not reached vLLM yet: it uses no slot of the engine, and its body is not parsed.
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
MIN_VERSION_HEADER = b"x-delta-sync-min-version"
VERSIONED_PATHS = ("/v1/completions", "/v1/chat/completions")

MAX_WAITING = 1024
"""Maximum number of waiting requests: all rollouts of a step come at once."""
MAX_KEPT_BYTES = 64 * 1024
"""Maximum bytes read of a waiting request's body, in order to notice a disconnect."""
_VERSION = re.compile(rb"[0-9]{1,20}")


class LateError(CrowdedError):
    """The version is not served yet; a retry may succeed."""

    kind = "late"


class Admission:
    """ASGI middleware for generation routes: ``X-Delta-Sync-Min-Version`` and ``X-Delta-Sync-Version``.

    Args:
        state: the application's state, with ``delta_sync`` and ``delta_sync_min_version_seconds``, the longest wait.
    """

    def __init__(self, app: ASGIApp, state: Any, waiters: VersionWaiters) -> None:
        self._app = app
        self._state = state
        self._waiters = waiters
        self._waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = getattr(self._state, "delta_sync", None)
        if scope["type"] != "http" or service is None or not scope["path"].endswith(VERSIONED_PATHS):
            await self._app(scope, receive, send)
            return
        asked = [value for name, value in scope["headers"] if name.lower() == MIN_VERSION_HEADER]
        if not asked:
            await self._app(scope, receive, _with_version_header(send, service.receiver.served_version))
            return
        buffer = RequestBuffer(receive)
        try:
            admitted = await self._admit(asked, buffer)
        except DeltaSyncError as error:
            buffer.close()
            await answer_error(error)(scope, receive, _with_version_header(send, service.receiver.served_version))
            return
        await self._app(scope, buffer.receive, _with_version_header(send, admitted))

    async def _admit(self, asked: list[bytes], buffer: "RequestBuffer") -> int:
        """Return the version served when a request is admitted.

        Raises:
            UsageError: the header is no version. UnreachableError: that version needs an operator's action.
            LateError, CrowdedError: it is not served in time, or too many requests wait.
        """
        began = time.monotonic()
        outcome = "late"
        try:
            version = _parse_header(asked)
            served = self._waiters.newest_served(version)
            if served is None:
                with self._waiting_slot():
                    served = await self._wait(version, buffer)
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

    async def _wait(self, version: int, buffer: "RequestBuffer") -> int:
        timeout: float = self._state.delta_sync_min_version_seconds
        waiter = asyncio.ensure_future(self._waiters.wait_for(version))
        disconnect = asyncio.ensure_future(buffer.disconnect())
        try:
            await asyncio.wait({waiter, disconnect}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if waiter.done():
                return waiter.result()
        finally:
            waiter.cancel()
            disconnect.cancel()
        if disconnect.done() and not disconnect.cancelled():
            raise LateError("the client disconnected while its request waited for a version")
        served = self._state.delta_sync.receiver.served_version
        raise LateError(
            f"version {version} is wanted, and {served} is served after min_version_seconds ({timeout:g} s); retry"
        )

    @contextmanager
    def _waiting_slot(self) -> Iterator[None]:
        if self._waiting >= MAX_WAITING:
            raise CrowdedError(f"{MAX_WAITING} requests wait for a version already; retry, or use another server")
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1


class RequestBuffer:
    """Buffers what a client sends while its request waits, for the application."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept: deque[Message] = deque()
        self._coming: asyncio.Future[Message] | None = None

    async def disconnect(self) -> None:
        """Return once the client has disconnected. Of a large body only the beginning is read; a disconnect is not
        noticed after that, because the unread rest stops the client from sending."""
        taken = 0
        while taken < MAX_KEPT_BYTES:
            if self._coming is None:
                self._coming = asyncio.ensure_future(self._receive())
            # Shielded: a cancelled receive would lose its message.
            message = await asyncio.shield(self._coming)
            self._coming = None
            self._kept.append(message)
            if message["type"] == "http.disconnect":
                return
            taken += len(message.get("body", b""))
        await asyncio.Event().wait()

    async def receive(self) -> Message:
        """Return the application's ``receive``: buffered messages first."""
        if self._kept:
            return self._kept.popleft()
        if self._coming is not None:
            coming, self._coming = self._coming, None
            return await coming
        return await self._receive()

    def close(self) -> None:
        """Drop the messages of a request that does not reach the application."""
        if self._coming is not None:
            self._coming.cancel()


def _parse_header(values: list[bytes]) -> int:
    if len(values) != 1 or not _VERSION.fullmatch(values[0]) or int(values[0]) > MAX_VERSION:
        given = b", ".join(values)[:40].decode("latin-1")
        raise UsageError(f"X-Delta-Sync-Min-Version is {given!r}; send one number from 0 to {MAX_VERSION}")
    return int(values[0])


def _with_version_header(send: Send, version: int | None) -> Send:
    async def send_with_version(message: Message) -> None:
        if message["type"] == "http.response.start" and version is not None:
            message["headers"] = [*message.get("headers", ()), (VERSION_HEADER, str(version).encode())]
        await send(message)

    return send_with_version
