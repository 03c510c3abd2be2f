"""``attach`` adds the HTTP routes under ``/delta_sync`` and the admission middleware to vLLM's own server."""

import asyncio
import time
from contextlib import nullcontext
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from vllm_delta_sync.cache.object_server import DIGEST
from vllm_delta_sync.dashboard.page import live_page, page_headers
from vllm_delta_sync.engine.api.access import HEADERS, CrowdedError, GuardedRoute, JsonAnswer, refusal
from vllm_delta_sync.engine.api.admission import Admission, VersionWaiters
from vllm_delta_sync.engine.api.live_page import LivePage
from vllm_delta_sync.engine.follow.service import ReceiverService
from vllm_delta_sync.errors import BusyError, NotFoundError, UsageError
from vllm_delta_sync.format.limits import MAX_VERSION
from vllm_delta_sync.server_client import LONGEST_WAIT_SECONDS
from vllm_delta_sync.settings import TARGET, Settings

MAX_WAITING = 64
"""Maximum number of waiting ``/delta_sync/wait`` requests, not counting clients that may change state."""
DISCONNECT_CHECK_SECONDS = 1.0
"""Seconds between checks that a waiting client is still connected."""

router = APIRouter(
    prefix="/delta_sync", tags=["delta_sync"], route_class=GuardedRoute, default_response_class=JsonAnswer
)
"""Every route that is not a GET changes state and needs the right to: see ``access.check``."""


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
        int, Field(ge=0, le=MAX_VERSION, description="Version to roll back to; without the bucket if `undo` has it.")
    ]


class TargetRequest(BaseModel):
    """Body of ``POST /delta_sync/target``."""

    model_config = ConfigDict(extra="forbid")
    target: Annotated[str, Field(pattern=TARGET, description="What to follow: head, a version's number, or tag:NAME.")]


def service_of(request: Request) -> ReceiverService:
    """Return the server's receiver, or that of an adapter in ``lora_adapters`` (query parameter ``adapter``).

    Raises:
        NotFoundError: no such adapter is followed.
    """
    state, name = request.app.state, request.query_params.get("adapter")
    others: dict[str, ReceiverService] = getattr(state, "delta_sync_adapters", {})
    if name is not None and name not in others:
        raise NotFoundError(
            f"no adapter {name[:100]!r} is in the setting lora_adapters, which has {', '.join(others) or 'none'}"
        )
    service: ReceiverService = state.delta_sync if name is None else others[name]
    return service


async def _ask(request: Request, action: str, argument: Any = None) -> dict[str, Any]:
    outcome: dict[str, Any] = await asyncio.wrap_future(service_of(request).request(action, argument))
    return outcome


@router.get("/")
async def page() -> Response:
    """Return a page for people: versions, lag, pauses, receivers, holds, quarantined versions, and what to do.

    It only reads; with `?adapter=NAME` that of an adapter."""
    return Response(live_page(), media_type="text/html; charset=utf-8", headers=page_headers())


@router.get("/overview")
async def overview(request: Request) -> Response:
    """Return what the page shows, as JSON: the status, and what the bucket held some seconds ago.

    The newest 200 versions are read from the bucket in the background, at most every 5 seconds, whatever the number of
    viewers."""
    service, name = service_of(request), request.query_params.get("adapter")
    pages: dict[str | None, LivePage] = request.app.state.delta_sync_pages
    return Response(pages[name].answer(service.receiver.status), media_type="application/json", headers=HEADERS)


@router.get("/status")
async def status(request: Request) -> dict[str, Any]:
    """Return the version served, the newest one, the last error, and more."""
    return service_of(request).receiver.status()


@router.get("/ready")
async def ready(request: Request) -> JsonAnswer:
    """Return whether requests may be sent here: 200 if `ready`, else 503; `reasons` name causes and remedies.

    Does not ask the engine, so it answers during a commit too."""
    try:
        status = service_of(request).receiver.status()
    except BusyError as error:
        status = {"ready": {"ready": False, "reasons": [error.message]}, "served": None, "head": None, "lag": None}
    versions = {name: None if status[name] is None else status[name]["version"] for name in ("served", "head")}
    return JsonAnswer({**status["ready"], **versions, "lag": status["lag"]}, 200 if status["ready"]["ready"] else 503)


@router.post("/sync")
async def sync(request: Request, body: SyncRequest | None = None) -> dict[str, Any]:
    """Poll the bucket now and serve the requested version, or what the setting `target` names; answers with the status
    reached.

    A version older than the served one is rolled back to, as by `rollback`."""
    return await _ask(request, "sync", None if body is None else body.version)


@router.post("/rollback")
async def rollback(request: Request, body: RollbackRequest) -> dict[str, Any]:
    """Serve an older version and hold it; answers with the status reached.

    From the undo log if that has it, else from the bucket; 404 if it is not published, or no longer retained."""
    return await _ask(request, "rollback", body.version)


@router.post("/hold")
async def hold(request: Request) -> dict[str, Any]:
    """Stay at the version served, whatever is published; answers with the status."""
    return await _ask(request, "hold")


@router.post("/release")
async def release(request: Request) -> dict[str, Any]:
    """End a hold and follow the run again; answers with the status."""
    return await _ask(request, "release")


@router.post("/target")
async def target(request: Request, body: TargetRequest) -> dict[str, Any]:
    """Follow another target from now on, newer or older; ends a hold. Answers with the status reached.

    The target outlives a restart. If it cannot be served, the old target and the served version stay."""
    return await _ask(request, "target", body.target)


@router.post("/verify")
async def verify(request: Request) -> dict[str, Any]:
    """Rescan all weights against the served version's fingerprint, and compare its manifest with the bucket's.

    `chain` is null if the bucket cannot be read. The served version stays, whatever `chain` says."""
    return await _ask(request, "verify")


@router.get("/wait")
async def wait(
    request: Request,
    version: Annotated[int, Query(ge=0, le=MAX_VERSION)],
    timeout: Annotated[float, Query(ge=0, le=LONGEST_WAIT_SECONDS)] = 30.0,
) -> JsonAnswer:
    """Answer once the version, or a later one, is served: 200 with the status; 408 when late, 503 if too many wait.

    409 at once, kind `unreachable`, if it will not be served without an operator's action: this server is held, is
    being stopped, or has an older target."""
    if "adapter" in request.query_params:
        raise UsageError("wait is for the run in the setting bucket; poll /delta_sync/status?adapter=NAME instead")
    waiters: VersionWaiters = request.app.state.delta_sync_waiters
    deadline = time.monotonic() + timeout
    # Clients that may change state need no slot, so that others cannot block them.
    slots: asyncio.Semaphore | None = None if refusal(request) is None else request.app.state.delta_sync_slots
    if slots is not None and slots.locked():
        raise CrowdedError(f"{MAX_WAITING} requests wait already; retry, or send the admin token")
    async with slots or nullcontext():
        if waiters.newest_served(version) is not None:
            return JsonAnswer(service_of(request).receiver.status())
        waiter = asyncio.ensure_future(waiters.wait_for(version))
        try:
            while (left := deadline - time.monotonic()) > 0 and not await request.is_disconnected():
                await asyncio.wait({waiter}, timeout=min(DISCONNECT_CHECK_SECONDS, left))
                if waiter.done():
                    waiter.result()
                    return JsonAnswer(service_of(request).receiver.status())
        finally:
            waiter.cancel()
        return JsonAnswer(service_of(request).receiver.status(), 408)


@router.get("/objects/{digest}")
async def objects(request: Request, digest: Annotated[str, Path(pattern=f"^{DIGEST}$")]) -> Response:
    """Return an object of the run by its SHA-256, from this node's cache, for servers whose setting `peer` names this
    one; with Range, one range of it.

    What the cache lacks is fetched from the bucket, once for all who ask; 202 means that it is still being fetched.
    Every request needs the token for peers, which is derived from the admin token; without one, none is served."""
    answer: Response = await request.app.state.delta_sync_objects.answer(request, digest)
    return answer


def attach(app: FastAPI) -> None:
    """Add the routes and the middleware to vLLM's application."""
    app.state.delta_sync_slots = asyncio.Semaphore(MAX_WAITING)
    app.state.delta_sync_min_version_seconds = Settings.model_fields["min_version_seconds"].default
    app.state.delta_sync_has_ended = lambda: False
    waiters = app.state.delta_sync_waiters = VersionWaiters(
        lambda: app.state.delta_sync, lambda: app.state.delta_sync_has_ended()
    )
    app.include_router(router)
    app.add_middleware(Admission, state=app.state, waiters=waiters)
