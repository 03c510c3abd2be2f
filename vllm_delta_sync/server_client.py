"""``call_plugin`` asks a vLLM server for one of the routes under ``/delta_sync``; ``ask`` is one HTTP request to it.

Requests go to the named server only: no proxy is used and no redirect is followed.
"""

import http.client
import json
import re
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from vllm_delta_sync import admin_token
from vllm_delta_sync.errors import (
    DeadlineError,
    DeltaSyncError,
    EngineError,
    FormatError,
    UnavailableError,
    UsageError,
    error_kinds,
)
from vllm_delta_sync.redaction import REMOVED, public_url

REQUEST_SECONDS = 10.0
MAX_ANSWER_BYTES = 8 * 1024 * 1024
MAX_MESSAGE = 2000
"""Most characters of a server's message that are shown."""
STAGING = ("fetch", "verify", "decode", "route", "rescan")
"""Phases of ``timings_ms`` in the status that run beside generation."""
NOT_LOADED = (
    "Start it with `delta-sync serve MODEL --bucket URL`. With plain `vllm serve`: install vllm-delta-sync there, add "
    "delta_sync to VLLM_PLUGINS, set DELTA_SYNC_BUCKET, and pass --worker-extension-cls "
    "vllm_delta_sync.engine.WorkerExtension"
)
_KIND = re.compile(r"[a-z_]{1,40}")
_Value = TypeVar("_Value")


class ServerError(DeltaSyncError):
    """An error that a server reported, with the server's ``kind`` and the exit code of that kind."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        # Kinds that only the engine raises are not known here; the exit code of each that a route answers with is 1.
        cls = error_kinds().get(kind, DeltaSyncError)
        vars(self).update(kind=kind, exit_code=cls.exit_code)


@dataclass(frozen=True)
class Reply:
    """An HTTP status code and the JSON object of the answer; an empty one if the body is not a JSON object."""

    status: int
    document: dict[str, Any]

    def field(self, path: str, kind: type[_Value]) -> _Value | None:
        """Return the member at ``a.b`` if it is of that type, else None; the server is not trusted."""
        found: Any = self.document
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        if isinstance(found, bool) and kind is not bool:
            return None
        return found if isinstance(found, kind) else None


def check_server_url(url: str) -> None:
    """Raise UsageError unless ``url`` is an http or https URL without credentials."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"server URL {url[:200]!r} is not valid: {error}") from error
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or " " in url:
        raise UsageError(f"server URL {url[:200]!r} is not valid; write it like http://host:8000")
    if public_url(url) != url or parts.username is not None:
        raise UsageError(f"server URL {url[:200]!r} has a user, a password, a query or a fragment; leave them out")


def ask(
    url: str,
    path: str,
    *,
    method: str = "GET",
    body: dict[str, Any] | None = None,
    token: str | None = None,
    seconds: float | None = None,
) -> Reply:
    """Send one request to a server.

    Args:
        url: see ``check_server_url``. path: below it, with its query. body: sent as JSON; None: no body.
        token: sent as a bearer token. seconds: longest wait for the answer, once connected; None: ``REQUEST_SECONDS``.

    Raises:
        UnavailableError: no server accepts the connection, or what answers is not an HTTP server.
        DeadlineError: the answer does not come in time. FormatError: it is too large.
    """
    parts = urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    # With a port, http.client does not look for one in an IPv6 address.
    port = parts.port or (443 if parts.scheme == "https" else 80)
    connection = connect(parts.hostname or "", port, timeout=REQUEST_SECONDS)
    seconds = REQUEST_SECONDS if seconds is None else seconds
    connected = False
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        connection.connect()
        connected = True
        connection.sock.settimeout(seconds)
        connection.request(method, parts.path.rstrip("/") + path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        data = answer.read(MAX_ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        if connected and isinstance(error, TimeoutError):
            raise DeadlineError(
                f"{url} took the request and did not answer within {seconds:g} s; it may still do what was asked: see "
                "its log, and ask again or wait longer"
            ) from error
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UnavailableError(
            f"{url} does not answer: {reason}; check host and port, and whether the server has started"
        ) from error
    finally:
        connection.close()
    if len(data) > MAX_ANSWER_BYTES:
        raise FormatError(f"{url} answers with more than {MAX_ANSWER_BYTES} bytes, so it is not a vLLM server")
    if token is not None:
        # Something in between may echo a request's headers, and answers are printed.
        data = data.replace(token.encode(), REMOVED.encode())
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    return Reply(answer.status, document if isinstance(document, dict) else {})


def call_plugin(
    url: str,
    route: str,
    *,
    method: str = "GET",
    body: dict[str, Any] | None = None,
    token: str | None = None,
    seconds: float | None = None,
) -> Reply:
    """Call ``/delta_sync/<route>`` of a server, and return the status that it answers with.

    The HTTP status of the reply is 200, or 408 if ``wait`` ended without the version. Arguments as ``ask``.

    Raises:
        ServerError: the error that the server reported; a refusal says what to set.
        EngineError: the plugin is not loaded there, or what answers is not the plugin. As ``ask``.
    """
    reply = ask(url, f"/delta_sync/{route}", method=method, body=body, token=token, seconds=seconds)
    kind, message = reply.field("error.kind", str), reply.field("error.message", str)
    if reply.status in (200, 408) and reply.field("state", str) is not None:
        return reply
    if kind is not None and message is not None and _KIND.fullmatch(kind):
        if reply.status == 401:
            missing = "requires an admin token" if token is None else "has another admin token"
            message = f"it {missing}; set {admin_token.VARIABLE} to the token of that server"
        elif reply.status == 403:
            message = f"{message} for that server, and {admin_token.VARIABLE} here"
        raise ServerError(kind, f"{url}: {message[:MAX_MESSAGE]}")
    name = route.partition("?")[0]
    if reply.status == 404:
        raise EngineError(f"{url} has no /delta_sync/{name}: the plugin is not loaded there. {NOT_LOADED}")
    raise EngineError(
        f"{url} answers /delta_sync/{name} with HTTP status {reply.status}, and not as the plugin does; name the "
        "server's own address: no proxy in between is asked, and no redirect is followed"
    )
