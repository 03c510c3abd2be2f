"""HTTP routes under ``/delta_sync`` and the version header, on vLLM's own server."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_delta_sync.engine.http_guard import Answer, CrowdedError, GuardedRoute, refusal
from vllm_delta_sync.engine.service import ReceiverService
from vllm_delta_sync.wire.limits import MAX_VERSION

VERSION_HEADER = b"x-delta-sync-version"
VERSIONED_PATHS = ("/v1/completions", "/v1/chat/completions")
WAIT_STEP_SECONDS = 0.01
LONGEST_WAIT_SECONDS = 3600.0

MAX_WAITING = 64
"""Requests that may wait at a time, those of clients that may change state not counted."""
GONE_SECONDS = 1.0
"""How soon a client that has gone does not count any more."""

router = APIRouter(prefix="/delta_sync", tags=["delta_sync"], route_class=GuardedRoute, default_response_class=Answer)
"""Every route here that is not a GET changes state, and is for those who may: see ``http_guard.check``."""


class SyncRequest(BaseModel):
    """Body of ``POST /delta_sync/sync``."""

    model_config = ConfigDict(extra="forbid")
    version: Annotated[
        int | None, Field(ge=0, le=MAX_VERSION, description="Version to serve; none: what the setting `target` says.")
    ] = None


class RollbackRequest(BaseModel):
    """Body of ``POST /delta_sync/rollback``."""

    model_config = ConfigDict(extra="forbid")
    version: Annotated[
        int, Field(ge=0, le=MAX_VERSION, description="Version to go back to, one of `undo` in the status.")
    ]


def service_of(request: Request) -> ReceiverService:
    """The server's receiver."""
    service: ReceiverService = request.app.state.delta_sync
    return service


@router.get("/status")
async def status(request: Request) -> dict[str, Any]:
    """What is served, what is newest, what went wrong last."""
    return service_of(request).receiver.status()


@router.post("/sync")
async def sync(request: Request, body: SyncRequest | None = None) -> dict[str, Any]:
    """Look into the bucket now and serve what the setting `target` says, or the version asked for; answers with the
    status reached.

    A version before the served one is gone back to, as by rollback."""
    version = None if body is None else body.version
    outcome: dict[str, Any] = await asyncio.wrap_future(service_of(request).request("sync", version))
    return outcome


@router.post("/rollback")
async def rollback(request: Request, body: RollbackRequest) -> dict[str, Any]:
    """Go back to a version in the undo log, without the network, and hold it; answers with the status reached."""
    outcome: dict[str, Any] = await asyncio.wrap_future(service_of(request).request("rollback", body.version))
    return outcome


@router.post("/hold")
async def hold(request: Request) -> dict[str, Any]:
    """Keep the version served, whatever is published; answers with the status."""
    outcome: dict[str, Any] = await asyncio.wrap_future(service_of(request).request("hold"))
    return outcome


@router.post("/release")
async def release(request: Request) -> dict[str, Any]:
    """End a hold; the run is followed again. Answers with the status."""
    outcome: dict[str, Any] = await asyncio.wrap_future(service_of(request).request("release"))
    return outcome


@router.post("/verify")
async def verify(request: Request) -> dict[str, Any]:
    """Rescan all weights against the served version's fingerprint, and compare its manifest with the bucket's.

    `chain` is null if the bucket cannot be read; what is served stays, whatever `chain` says."""
    outcome: dict[str, Any] = await asyncio.wrap_future(service_of(request).request("verify"))
    return outcome


@router.get("/wait")
async def wait(
    request: Request,
    version: Annotated[int, Query(ge=0, le=MAX_VERSION)],
    timeout: Annotated[float, Query(ge=0, le=LONGEST_WAIT_SECONDS)] = 30.0,
) -> Answer:
    """Answer once the version, or a later one, is served: 200 with the status; 408 when late, 503 if too many wait."""
    receiver = service_of(request).receiver
    deadline = time.monotonic() + timeout
    asked = time.monotonic()
    with _place(request):
        while True:
            served, now = receiver.served_version, time.monotonic()
            if served is not None and served >= version:
                return Answer(receiver.status())
            if now >= deadline:
                return Answer(receiver.status(), 408)
            if now - asked > GONE_SECONDS:
                asked = now
                if await request.is_disconnected():
                    return Answer(receiver.status(), 408)
            await asyncio.sleep(min(WAIT_STEP_SECONDS, deadline - now))


@contextmanager
def _place(request: Request) -> Iterator[None]:
    """A place among those who wait. Who may change state always gets one, so that strangers cannot keep them out."""
    if refusal(request) is None:
        yield
        return
    state = request.app.state
    if state.delta_sync_waiting >= MAX_WAITING:
        raise CrowdedError(f"{MAX_WAITING} requests wait already; ask again, or with the admin token")
    state.delta_sync_waiting += 1
    try:
        yield
    finally:
        state.delta_sync_waiting -= 1


class VersionHeader:
    """ASGI middleware: ``X-Delta-Sync-Version`` on generation routes, the version served at admission."""

    def __init__(self, app: ASGIApp, state: Any) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service: ReceiverService | None = getattr(self._state, "delta_sync", None)
        if scope["type"] != "http" or service is None or not scope["path"].endswith(VERSIONED_PATHS):
            await self._app(scope, receive, send)
            return
        admitted = service.receiver.served_version

        async def send_with_version(message: Message) -> None:
            if message["type"] == "http.response.start" and admitted is not None:
                message.setdefault("headers", [])
                message["headers"] = [*message["headers"], (VERSION_HEADER, str(admitted).encode())]
            await send(message)

        await self._app(scope, receive, send_with_version)


def attach(app: FastAPI) -> None:
    """Add the routes and the middleware to vLLM's application."""
    app.state.delta_sync_waiting = 0
    app.include_router(router)
    app.add_middleware(VersionHeader, state=app.state)
