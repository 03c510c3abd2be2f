"""HTTP routes under ``/delta_sync`` and the version header, on vLLM's own server."""

import asyncio
import ipaddress
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_delta_sync.config import token_matches
from vllm_delta_sync.engine.service import ReceiverService
from vllm_delta_sync.errors import (
    BusyError,
    ChainError,
    ConflictError,
    DeltaSyncError,
    EngineError,
    NotFoundError,
    StoreError,
    UsageError,
)

VERSION_HEADER = b"x-delta-sync-version"
VERSIONED_PATHS = ("/v1/completions", "/v1/chat/completions")
WAIT_STEP_SECONDS = 0.01
LONGEST_WAIT_SECONDS = 3600.0

_STATUS_CODES: tuple[tuple[type[DeltaSyncError], int], ...] = (
    (UsageError, 400),
    (NotFoundError, 404),
    (BusyError, 409),
    (ConflictError, 409),
    (ChainError, 409),
    (StoreError, 503),
    (EngineError, 500),
)
REFUSED_DATA = 422
"""Any other error of ours: the bucket's data was refused."""

router = APIRouter(prefix="/delta_sync", tags=["delta_sync"])


class SyncRequest(BaseModel):
    """Body of ``POST /delta_sync/sync``."""

    model_config = ConfigDict(extra="forbid")
    version: Annotated[
        int | None, Field(ge=0, description="Version to serve; none: what the setting `target` says.")
    ] = None


class RollbackRequest(BaseModel):
    """Body of ``POST /delta_sync/rollback``."""

    model_config = ConfigDict(extra="forbid")
    version: Annotated[int, Field(ge=0, description="Version to go back to, one of `undo` in the status.")]


def service_of(request: Request) -> ReceiverService:
    """The server's receiver."""
    service: ReceiverService = request.app.state.delta_sync
    return service


def admin(request: Request) -> None:
    """Let a state-changing request pass: right token, or no token set and a client on this machine.

    Raises:
        AdminRefused: anyone else, and any request that a web page sent.
    """
    if "origin" in request.headers:
        raise AdminRefused("requests from web pages may not change state; call this route without Origin")
    token = request.app.state.delta_sync_token
    if token is None:
        host = request.client.host if request.client else ""
        if not _is_loopback(host):
            raise AdminRefused("no admin token is set, so only this machine may call this; set admin_token_file")
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token_matches(token, given.strip()):
        raise AdminRefused("the admin token is missing or wrong; send Authorization: Bearer TOKEN", 401)


class AdminRefused(DeltaSyncError):
    """A state-changing request came without the right to make it."""

    kind = "forbidden"

    def __init__(self, message: str, status: int = 403) -> None:
        super().__init__(message)
        self.status = status


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback
    except ValueError:
        return False


@router.get("/status")
async def status(request: Request) -> dict[str, Any]:
    """What is served, what is newest, what went wrong last."""
    return service_of(request).receiver.status()


@router.post("/sync", dependencies=[Depends(admin)])
async def sync(request: Request, body: SyncRequest | None = None) -> dict[str, Any]:
    """Look into the bucket now and serve what the setting `target` says, or the version asked for; answers with the
    status reached.

    A version before the served one is gone back to, as by rollback."""
    version = None if body is None else body.version
    outcome: dict[str, Any] = await asyncio.wrap_future(service_of(request).request("sync", version))
    return outcome


@router.post("/rollback", dependencies=[Depends(admin)])
async def rollback(request: Request, body: RollbackRequest) -> dict[str, Any]:
    """Go back to a version in the undo log, without the network, and hold it; answers with the status reached."""
    outcome: dict[str, Any] = await asyncio.wrap_future(service_of(request).request("rollback", body.version))
    return outcome


@router.post("/hold", dependencies=[Depends(admin)])
async def hold(request: Request) -> dict[str, Any]:
    """Keep the version served, whatever is published; answers with the status."""
    outcome: dict[str, Any] = await asyncio.wrap_future(service_of(request).request("hold"))
    return outcome


@router.post("/release", dependencies=[Depends(admin)])
async def release(request: Request) -> dict[str, Any]:
    """End a hold; the run is followed again. Answers with the status."""
    outcome: dict[str, Any] = await asyncio.wrap_future(service_of(request).request("release"))
    return outcome


@router.post("/verify", dependencies=[Depends(admin)])
async def verify(request: Request) -> dict[str, Any]:
    """Rescan all weights against the served version's fingerprint, and compare its manifest with the bucket's.

    `chain` is null if the bucket cannot be read; what is served stays, whatever `chain` says."""
    outcome: dict[str, Any] = await asyncio.wrap_future(service_of(request).request("verify"))
    return outcome


@router.get("/wait")
async def wait(
    request: Request,
    version: Annotated[int, Query(ge=0)],
    timeout: Annotated[float, Query(ge=0, le=LONGEST_WAIT_SECONDS)] = 30.0,
) -> JSONResponse:
    """Answer once the version, or a later one, is served: 200 with the status, or 408 when late."""
    receiver = service_of(request).receiver
    deadline = time.monotonic() + timeout
    while True:
        served = receiver.served_version
        if served is not None and served >= version:
            return JSONResponse(receiver.status())
        left = deadline - time.monotonic()
        if left <= 0:
            return JSONResponse(receiver.status(), status_code=408)
        await asyncio.sleep(min(WAIT_STEP_SECONDS, left))


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Any error of ours as ``{"error": {"kind", "message"}}``."""
    if not isinstance(error, DeltaSyncError):
        raise error
    if isinstance(error, AdminRefused):
        code = error.status
    else:
        code = next((code for cls, code in _STATUS_CODES if isinstance(error, cls)), REFUSED_DATA)
    return JSONResponse({"error": {"kind": error.kind, "message": error.message}}, status_code=code)


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
    """Add routes, error answers and the middleware to vLLM's application."""
    app.include_router(router)
    app.add_exception_handler(DeltaSyncError, answer_error)
    app.add_middleware(VersionHeader, state=app.state)
