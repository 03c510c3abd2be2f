"""``Admission`` serves the versions that requests ask for: at least one, by waiting, or exactly one, or an error.

A waiting request has not reached vLLM yet: it uses no slot of the engine, and its body is not parsed.
``VersionWaiters`` wakes those that wait for a version; one poll of the receiver serves all of them.
"""

import asyncio
import json
import re
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_delta_sync.engine.api.access import CrowdedError, answer_error
from vllm_delta_sync.engine.api.api_servers import Serving
from vllm_delta_sync.engine.api.exact_requests import (
    MIN_VERSION_HEADER,
    VERSION_HEADER,
    ExactRequest,
    ExactRequests,
    VersionError,
)
from vllm_delta_sync.engine.observe import metrics
from vllm_delta_sync.engine.observe.states import ENDING, Answer, unreachable
from vllm_delta_sync.errors import BusyError, DeltaSyncError, UsageError
from vllm_delta_sync.format.limits import MAX_VERSION

VERSIONED_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/cohere/v2/chat",
    "/inference/v1/generate",
    "/generative_scoring",
    "/v1/systemone",
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/realtime",
    "/invocations",
)
"""vLLM's routes that compute answers from the weights. They read both headers, and name the version in the answer. On
any other route that is a POST or a WebSocket, a request with one of the headers is refused: a later vLLM, or another
plugin, may have one that computes answers too."""
SESSION_PATHS = ("/v1/realtime",)
"""Those that are WebSockets: a session outlives commits, so it cannot ask for exactly one version."""
OWN_PREFIX = "/delta_sync/"

MAX_WAITING = 1024
"""Maximum number of waiting requests: all rollouts of a step come at once."""
MAX_KEPT_BYTES = 1024 * 1024
"""Of a request's body that are read while it waits."""
DISCONNECTED = ("http.disconnect", "websocket.disconnect")
HEADS = ("http.response.start", "websocket.accept", "websocket.http.response.start")
"""Messages that carry the headers of an answer."""
POLICY_VIOLATION, MAX_REASON = 1008, 120
"""Code of a WebSocket that is closed instead of accepted, and the longest reason in characters."""
NAMED_EVENT = b"event:"
"""How the streams of /v1/responses and /v1/messages begin. vLLM ends them without an error, or with one of its own."""
_VERSION = re.compile(rb"[0-9]{1,20}")

STEP_SECONDS = 0.01
STEPS_PER_CHECK = 10
"""Polls between checks that a version is still reachable; the check is slower than a poll."""


class UnreachableError(BusyError):
    """The version will not be served without an operator's action."""

    kind = "unreachable"


class LateError(CrowdedError):
    """The version is not served yet; a retry may succeed."""

    kind = "late"


class _ClientGoneError(Exception):
    """The client has closed the connection of a request that waits."""


OUTCOMES = {UsageError: "malformed", UnreachableError: "unreachable", VersionError: "version", _ClientGoneError: "gone"}
"""How waiting ended, of ``metrics.OUTCOMES``; all other errors mean ``late``."""


class _ReadAhead:
    """A request's ``receive`` that can be asked, before the application reads, whether the client is still there.

    Args:
        receive: the server's.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept: deque[Message] = deque()

    async def __call__(self) -> Message:
        return self._kept.popleft() if self._kept else await self._receive()

    async def until_gone(self) -> None:
        """Return once the client has gone. What comes before that is kept, up to ``MAX_KEPT_BYTES``."""
        size = 0
        while size <= MAX_KEPT_BYTES:
            message = await self._receive()
            self._kept.append(message)
            if message["type"] in DISCONNECTED:
                return
            size += len(message.get("body", b""))
        await asyncio.Event().wait()  # the rest of a body so large is left to the application


class VersionWaiters:
    """Requests that wait for versions of one server, all in one event loop.

    Args:
        serving: returns the server's receiver; called at every poll, because the leader may change.
        has_ended: returns whether the engine has died or is being stopped; vLLM exits once all requests are answered.

    Attributes:
        slots: for the requests of ``Admission``.
    """

    def __init__(self, serving: Callable[[], Serving], has_ended: Callable[[], bool]) -> None:
        self._serving = serving
        self._has_ended = has_ended
        self.slots = asyncio.Semaphore(MAX_WAITING)
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


class Admission:
    """ASGI middleware for the routes in ``VERSIONED_PATHS``: both request headers, and the response header.

    Args:
        state: the application's state, with ``delta_sync``, ``delta_sync_exact`` and, as the longest wait,
            ``delta_sync_min_version_seconds``.
    """

    def __init__(self, app: ASGIApp, state: Any, waiters: VersionWaiters) -> None:
        self._app = app
        self._state = state
        self._waiters = waiters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service: Serving | None = getattr(self._state, "delta_sync", None)
        path = None if service is None else _route_of(scope)
        if service is None or path is None:
            await self._app(scope, receive, send)
            return
        wish = {
            name: values
            for name in (MIN_VERSION_HEADER, VERSION_HEADER)
            if (values := [value for key, value in scope["headers"] if key.lower() == name.lower().encode()])
        }
        if path not in VERSIONED_PATHS and not (wish and _may_compute(scope, path)):
            await self._app(scope, receive, send)
            return
        reading = _ReadAhead(receive)
        try:
            served, exact = service.receiver.served_version, None
            if wish:
                served, exact = await self._admit(path, wish, reading)
        except _ClientGoneError:
            return
        except DeltaSyncError as error:
            await _refuse(scope, reading, _with_version_header(send, service.receiver.served_version), error)
            return
        if exact is None:
            await self._app(scope, reading, _with_version_header(send, served))
        else:
            await self._answer_exactly(exact, scope, reading, send)

    async def _admit(
        self, path: str, wish: dict[str, list[bytes]], receive: "_ReadAhead"
    ) -> tuple[int, ExactRequest | None]:
        """Return the version served when a request is admitted, and the request if it asks for exactly that one.

        Raises:
            UsageError: a header is no version, or the route or the server cannot do what it says.
            UnreachableError: the version needs an operator's action. VersionError: another version is served.
            LateError, CrowdedError: it is not served in time, or too many requests wait. _ClientGoneError.
        """
        began = time.monotonic()
        outcome = "late"
        try:
            versions = {name: _parse_header(name, values) for name, values in wish.items()}
            minimum, version = versions.get(MIN_VERSION_HEADER), versions.get(VERSION_HEADER)
            tracker: ExactRequests | None = getattr(self._state, "delta_sync_exact", None)
            _check_wish(path, minimum, version, tracker)
            served = 0
            if minimum is not None:
                found = self._waiters.newest_served(minimum)
                if found is None:
                    if self._waiters.slots.locked():
                        raise CrowdedError(
                            f"{MAX_WAITING} requests wait for a version already; retry, or use another server"
                        )
                    async with self._waiters.slots:
                        found = await self._wait_for(minimum, receive)
                served = found
            exact = None
            if version is not None and tracker is not None:
                exact = await tracker.admit(version)
                served = version
            outcome = "served"
            return served, exact
        except Exception as error:
            outcome = next((word for kind, word in OUTCOMES.items() if isinstance(error, kind)), outcome)
            raise
        finally:
            metrics.observe_admission(outcome, time.monotonic() - began)

    async def _answer_exactly(self, exact: ExactRequest, scope: Scope, receive: Receive, send: Send) -> None:
        """Let vLLM answer. If a commit falls inside the answer, it becomes an error, at the latest in the stream.

        The head of the answer waits for the first part of the body, because routes that stream send it at once.
        """
        head: Message | None = None
        began = ended = named = False
        answering = _with_version_header(send, exact.version)

        async def forward(message: Message) -> None:
            nonlocal head, began, ended, named
            if message["type"] == "http.response.start":
                head = message
                return
            if exact.error is not None and (named or not began):
                return  # it is answered below
            if head is not None:
                await answering(head)
                head, began = None, True
            named = named or message.get("body", b"").startswith(NAMED_EVENT)
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            with exact.current():
                await self._app(scope, receive, forward)
        except Exception:
            if exact.error is None:
                raise
        if exact.error is not None and not began:
            served = self._state.delta_sync.receiver.served_version
            await answer_error(exact.error)(scope, receive, _with_version_header(send, served))
        elif exact.error is not None and not ended:
            await send({"type": "http.response.body", "body": _error_event(exact.error), "more_body": False})
        if exact.interrupted:
            metrics.count_interrupted()

    async def _wait_for(self, version: int, receive: "_ReadAhead") -> int:
        """Wait for a version, as long as the client does. Raises LateError, UnreachableError, _ClientGoneError."""
        waiting = asyncio.ensure_future(self._wait(version))
        gone = asyncio.ensure_future(receive.until_gone())
        try:
            await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise _ClientGoneError
            return waiting.result()
        finally:
            for task in (waiting, gone):
                task.cancel()
            await asyncio.gather(waiting, gone, return_exceptions=True)

    async def _wait(self, version: int) -> int:
        timeout: float = self._state.delta_sync_min_version_seconds
        try:
            async with asyncio.timeout(timeout):
                return await self._waiters.wait_for(version)
        except TimeoutError:
            served = self._state.delta_sync.receiver.served_version
            raise LateError(
                f"version {version} is wanted, and {served} is served after min_version_seconds ({timeout:g} s); retry"
            ) from None


async def _refuse(scope: Scope, receive: Receive, send: Send, error: DeltaSyncError) -> None:
    """Answer with an error a request that does not reach the application; for a WebSocket, its handshake."""
    if scope["type"] == "websocket":
        message = await receive()
        if message["type"] != "websocket.connect":
            return  # the client has disconnected
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": error.message[:MAX_REASON]})
            return
    await answer_error(error)(scope, receive, send)


def _route_of(scope: Scope) -> str | None:
    """Return the path of the route that answers a request, as vLLM registered it; None if there is none."""
    if scope["type"] in ("http", "websocket"):
        for route in scope["app"].routes:
            if route.matches(scope)[0] is Match.FULL:
                return getattr(route, "path", "")
    return None


def _may_compute(scope: Scope, path: str) -> bool:
    """Return whether a route that is not in the list might compute an answer from the weights."""
    reads = scope["type"] == "http" and scope["method"] != "POST"
    return not reads and not path.startswith(OWN_PREFIX)


def _check_wish(path: str, minimum: int | None, version: int | None, tracker: ExactRequests | None) -> None:
    """Raise UsageError if the route or the server cannot do what a request's headers say."""
    if path not in VERSIONED_PATHS:
        given = MIN_VERSION_HEADER if version is None else VERSION_HEADER
        raise UsageError(
            f"{given} is not supported on {path}: it computes no answers, or this release does not know it; leave the "
            "header out, or use /v1/completions or /v1/chat/completions"
        )
    if version is None:
        return
    if path in SESSION_PATHS:
        raise UsageError(
            f"{VERSION_HEADER} is not supported on {path}: a session outlives commits; use {MIN_VERSION_HEADER}"
        )
    if minimum is not None and minimum > version:
        raise UsageError(
            f"{MIN_VERSION_HEADER} is {minimum} and {VERSION_HEADER} is {version}, which is older; leave one out"
        )
    if tracker is None or tracker.objection is not None:
        objection = "and this server has no engine" if tracker is None else tracker.objection
        raise UsageError(f"version {version} is asked for ({VERSION_HEADER}), {objection}")


def _parse_header(name: str, values: list[bytes]) -> int:
    if len(values) != 1 or not _VERSION.fullmatch(values[0]) or int(values[0]) > MAX_VERSION:
        given = b", ".join(values)[:40].decode("latin-1")
        raise UsageError(f"{name} is {given!r}; send one number from 0 to {MAX_VERSION}")
    return int(values[0])


def _with_version_header(send: Send, version: int | None) -> Send:
    async def send_with_version(message: Message) -> None:
        if message["type"] in HEADS and version is not None:
            header = VERSION_HEADER.lower().encode(), str(version).encode()
            message["headers"] = [*message.get("headers", ()), header]
        await send(message)

    return send_with_version


def _error_event(error: VersionError | UsageError) -> bytes:
    """Return the end of a stream of named events that failed, in the form of both OpenAI's and Anthropic's."""
    shown = {"type": error.kind, "code": 409, "message": error.message, "param": None}
    event = {"type": "error", "code": error.kind, "message": error.message, "param": None, "error": shown}
    return f"event: error\ndata: {json.dumps(event, separators=(',', ':'))}\n\n".encode()
