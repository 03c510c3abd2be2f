"""``GuardedRoute`` checks access to the routes under ``/delta_sync``, limits bodies, and formats answers and errors."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message

from vllm_delta_sync.admin_token import AdminToken
from vllm_delta_sync.dashboard.page import harmless_json
from vllm_delta_sync.engine.logger import logger
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
from vllm_delta_sync.http_server import is_loopback

MAX_BODY_BYTES = 64 * 1024
BODY_SECONDS = 10.0
"""Maximum seconds for a client to send a body."""
READING = ("GET", "HEAD")
"""Methods that only read; all others count as changing state."""
PROXY_HEADERS = re.compile(
    r"via|(?:x-)?(?:original-)?forwarded(?:-[\w-]*)?|x-envoy-[\w-]*"
    r"|(?:[\w-]*-)?(?:real|client|connecting|originating|remote|proxyuser)-?(?:ip|ipv6|addr|address|host)"
)
"""Names of headers that proxies add, with hyphens for underscores; none of our clients sends them."""
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

STATUS_CODES: tuple[tuple[type[DeltaSyncError], int], ...] = (
    (UsageError, 400),
    (NotFoundError, 404),
    (BusyError, 409),
    (ConflictError, 409),
    (ChainError, 409),
    (StoreError, 503),
    (EngineError, 500),
)
NOT_RETRIED = ("unreachable", "version")
"""Kinds of answers with code 409 that a retry cannot change: the clients of OpenAI and Anthropic retry any 409."""
REFUSED_DATA = 422
"""Status for all other errors of ours: the bucket's data was refused."""
# Matches the whole header, so that no part of it can be mistaken for the host.
_HOST = re.compile(r"(?:(?P<name>[a-z0-9.-]{1,253})|\[(?P<address>[0-9a-f:.]{2,45})\])(?::[0-9]{1,5})?", re.ASCII)


class AdminRefused(DeltaSyncError):
    """A request lacks the right to make it."""

    kind = "forbidden"

    def __init__(self, message: str, status: int = 403) -> None:
        super().__init__(message)
        self.status = status


class BadRequest(UsageError):
    """A request that cannot be read or parsed."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class CrowdedError(BusyError):
    """Too many requests wait already."""

    status = 503


class JsonAnswer(JSONResponse):
    """JSON in ASCII without control characters and HTML special characters; never cached."""

    def __init__(self, content: Any, status_code: int = 200, headers: dict[str, str] | None = None, **rest: Any):
        super().__init__(content, status_code, {**HEADERS, **(headers or {})}, **rest)

    def render(self, content: Any) -> bytes:
        return harmless_json(content)


class GuardedRoute(APIRoute):
    """A route that checks access before it reads the request's body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                check(request)
                if request.method not in READING:
                    request = await _with_body(request)
                return await inner(request)
            except DeltaSyncError as error:
                return answer_error(error)
            except RequestValidationError as error:
                return answer_error(_explain(error))
            except HTTPException as error:
                return answer_error(BadRequest(str(error.detail)[:200], error.status_code))
            except Exception as error:  # vLLM would answer with the error's raw text
                logger.exception("a request failed unexpectedly")
                return answer_error(EngineError(f"unexpected {type(error).__name__}: {error}"))

        return handle


def answer_error(error: DeltaSyncError) -> JsonAnswer:
    """Return the answer for an error of ours: ``{"error": {"kind", "message"}}``."""
    headers = {}
    if isinstance(error, AdminRefused | BadRequest | CrowdedError):
        code = error.status
    else:
        code = next((code for cls, code in STATUS_CODES if isinstance(error, cls)), REFUSED_DATA)
    if code == 401:
        headers["www-authenticate"] = "Bearer"
    elif code == 503:
        headers["retry-after"] = "1"
    elif error.kind in NOT_RETRIED:
        headers["x-should-retry"] = "false"
    elif code in (408, 413):
        # The rest of the body is not read.
        headers["connection"] = "close"
    return JsonAnswer({"error": {"kind": error.kind, "message": error.message}}, code, headers)


def check(request: Request) -> None:
    """Check that no other site's page sent a request, and that it may change state if it does.

    Raises:
        AdminRefused: the request fails the check.
    """
    headers = request.headers
    changes = request.method not in READING
    foreign = any(site not in ("none", "same-origin") for site in headers.getlist("sec-fetch-site"))
    if foreign and (changes or headers.get("sec-fetch-mode") != "navigate"):
        raise AdminRefused("pages of other sites may not call this route; call it without a browser")
    origin = headers.get("origin")
    if changes and origin is not None:
        raise AdminRefused("requests from web pages may not change state; call this route without Origin")
    if origin is not None and origin.lower().partition("://")[2] != headers.get("host", "").lower():
        raise AdminRefused("pages of other sites may not call this route; call it without Origin")
    if changes and (refused := refusal(request)) is not None:
        raise refused


def refusal(request: Request) -> AdminRefused | None:
    """Return why a request may not change state: a wrong token; or none is set, and it may come from elsewhere."""
    token: AdminToken | None = request.app.state.delta_sync_token
    if token is not None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token.matches(given.strip()):
            return None
        return AdminRefused("the admin token is missing or wrong; send Authorization: Bearer TOKEN", 401)
    remedy = "set admin_token_file or DELTA_SYNC_ADMIN_TOKEN"
    if not is_loopback(request.client.host if request.client else ""):
        return AdminRefused(f"no admin token is set, so only this machine may call this; {remedy}")
    # A proxy on this machine makes every client look local. One that adds no header usually speaks HTTP/1.0.
    proxied = any(PROXY_HEADERS.fullmatch(name.lower().replace("_", "-")) for name in request.headers)
    if proxied or request.scope.get("http_version") == "1.0":
        return AdminRefused(f"no admin token is set, and this request came through a proxy; {remedy}")
    hosts = request.headers.getlist("host")
    if not hosts or not all(map(_names_loopback, hosts)):
        # DNS rebinding: a page's own name may resolve to this machine, which makes it same-site. Host shows the name.
        return AdminRefused(f"no admin token is set, and Host is not localhost or a loopback address; {remedy}")
    return None


async def _with_body(request: Request) -> Request:
    """Read a request's body in bounded memory and time.

    Raises:
        BadRequest: it is too large, too slow, or not JSON.
    """
    declared = request.headers.get("content-length", "0")
    if not (declared.isascii() and declared.isdecimal()) or len(declared) > 9 or int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError:
        raise BadRequest(f"the request's body did not arrive within {BODY_SECONDS:g} s", 408) from None
    except ClientDisconnect:
        raise BadRequest("the client disconnected") from None
    kind = request.headers.get("content-type")
    if (body or kind is not None) and (kind or "").partition(";")[0].strip().lower() != "application/json":
        raise BadRequest("a body must be JSON; send Content-Type: application/json", 415)
    pending: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def receive() -> Message:
        return pending.pop() if pending else await request.receive()

    return Request(request.scope, receive)


def _too_large() -> BadRequest:
    return BadRequest(f"a request's body may have at most {MAX_BODY_BYTES} bytes", 413)


def _explain(error: RequestValidationError) -> BadRequest:
    """Return the first validation error, without the invalid input."""
    problem = error.errors()[0]
    field = ".".join(str(part) for part in problem["loc"])
    return BadRequest(f"{field[:80]!r}: {str(problem['msg'])[:200]}")


def _names_loopback(host: str) -> bool:
    found = _HOST.fullmatch(host.strip(" \t").lower())
    return found is not None and (found["name"] == "localhost" or is_loopback(found["address"] or found["name"]))
