"""HTTP routes under ``/delta_sync``, on vLLM's own server."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from vllm_delta_sync.engine.api.access import Answer, CrowdedError, GuardedRoute, refusal
from vllm_delta_sync.engine.api.admission import VERSIONED_PATHS as VERSIONED_PATHS
from vllm_delta_sync.engine.api.admission import Admission
from vllm_delta_sync.engine.api.version_waiters import VersionWaiters
from vllm_delta_sync.engine.follow.service import ReceiverService
from vllm_delta_sync.errors import BusyError
from vllm_delta_sync.format.limits import MAX_VERSION
from vllm_delta_sync.settings import TARGET, Settings

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
        int, Field(ge=0, le=MAX_VERSION, description="Version to go back to; without the bucket if `undo` has it.")
    ]


class TargetRequest(BaseModel):
    """Body of ``POST /delta_sync/target``."""

    model_config = ConfigDict(extra="forbid")
    target: Annotated[str, Field(pattern=TARGET, description="What to follow: head, a version's number, or tag:NAME.")]
    bucket: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=4096,
            description="URL of a run beside the configured one: the same with another last part. None: the run "
            "followed now.",
        ),
    ] = None


def service_of(request: Request) -> ReceiverService:
    """The server's receiver."""
    service: ReceiverService = request.app.state.delta_sync
    return service


@router.get("/status")
async def status(request: Request) -> dict[str, Any]:
    """What is served, what is newest, what went wrong last."""
    return service_of(request).receiver.status()


@router.get("/ready")
async def ready(request: Request) -> Answer:
    """Whether requests may be sent here: 200 if `ready`, else 503; `reasons` name causes and mends.

    Asks nothing of the engine, so it answers while a version is taken too."""
    try:
        status = service_of(request).receiver.status()
    except BusyError as error:
        status = {"ready": {"ready": False, "reasons": [error.message]}, "served": None, "head": None, "lag": None}
    versions = {name: None if status[name] is None else status[name]["version"] for name in ("served", "head")}
    return Answer({**status["ready"], **versions, "lag": status["lag"]}, 200 if status["ready"]["ready"] else 503)


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
    """Go back to an older version and hold it; answers with the status reached.

    Without the bucket if the undo log has it, else through the chain; 404 if it is not published, or not kept."""
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


@router.post("/target")
async def target(request: Request, body: TargetRequest) -> dict[str, Any]:
    """Follow something else from now on, newer or older, or another run; a hold ends. Answers with the status reached.

    It outlives a restart. If it cannot be done, what was followed before is followed still, and served."""
    outcome: dict[str, Any] = await asyncio.wrap_future(
        service_of(request).request("target", (body.target, body.bucket))
    )
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
    """Answer once the version, or a later one, is served: 200 with the status; 408 when late, 503 if too many wait.

    409 at once, kind `unreachable`, if it does not come unless somebody does something: this server is held, or told
    to serve an older one."""
    arrivals: VersionWaiters = request.app.state.delta_sync_arrivals
    deadline = time.monotonic() + timeout
    with _place(request):
        if arrivals.served(version) is not None:
            return Answer(service_of(request).receiver.status())
        arrival = asyncio.ensure_future(arrivals.reach(version))
        try:
            while (left := deadline - time.monotonic()) > 0 and not await request.is_disconnected():
                await asyncio.wait({arrival}, timeout=min(GONE_SECONDS, left))
                if arrival.done():
                    arrival.result()
                    return Answer(service_of(request).receiver.status())
        finally:
            arrival.cancel()
        return Answer(service_of(request).receiver.status(), 408)


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


def attach(app: FastAPI) -> None:
    """Add the routes and the middleware to vLLM's application."""
    app.state.delta_sync_waiting = 0
    app.state.delta_sync_min_version_seconds = Settings.model_fields["min_version_seconds"].default
    arrivals = app.state.delta_sync_arrivals = VersionWaiters(lambda: app.state.delta_sync)
    app.include_router(router)
    app.add_middleware(Admission, state=app.state, arrivals=arrivals)
