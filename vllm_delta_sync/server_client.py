"""``call_plugin`` asks a vLLM server for one of the routes under ``/delta_sync``; ``ask`` is one HTTP request to it.

Requests go to the named server only: no proxy is used and no redirect is followed.
"""

import http.client
import json
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    computed_field,
    field_validator,
)

from vllm_delta_sync import admin_token
from vllm_delta_sync.errors import (
    DataError,
    DeadlineError,
    DeltaSyncError,
    EngineError,
    FormatError,
    UnavailableError,
    UsageError,
    error_kinds,
)
from vllm_delta_sync.format.base_document import load_json
from vllm_delta_sync.logs import REMOVED, public_url

REQUEST_SECONDS = 10.0
LONGEST_WAIT_SECONDS = 3600.0
"""Longest ``timeout`` that ``/delta_sync/wait`` takes."""
MAX_ANSWER_BYTES = 8 * 1024 * 1024
MAX_MESSAGE = 2000
"""Most characters of a server's message that are shown."""
MAX_NAME = 100
MAX_ITEMS = 64
"""Most items of a list in a status that are shown."""
MAX_INTEGER = 2**53
"""Larger numbers in a status, which no server can mean, are not shown: a float cannot hold all of them."""
MAX_MILLISECONDS = 1e15
"""Longer durations in a status, which no server can mean, are not shown."""
STAGING = ("fetch", "verify", "decode", "route", "rescan")
"""Phases of ``timings_ms`` in the status that run beside generation."""
NOT_LOADED = (
    "Start it with `delta-sync serve MODEL --bucket URL`. With plain `vllm serve`: install vllm-delta-sync there, add "
    "delta_sync to VLLM_PLUGINS, set DELTA_SYNC_BUCKET, and pass --worker-extension-cls "
    "vllm_delta_sync.engine.WorkerExtension"
)
_KIND = re.compile(r"[a-z_]{1,40}")


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

    @cached_property
    def server_status(self) -> "ServerStatus":
        """The document as a server's status."""
        return ServerStatus.model_validate(self.document)


Whole = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]
Text = Annotated[str, AfterValidator(lambda text: text[:MAX_NAME])]
Message = Annotated[str, AfterValidator(lambda text: text[:MAX_MESSAGE])]
Messages = Annotated[list[Message], BeforeValidator(lambda found: [str(item) for item in found[:MAX_ITEMS]])]


class _Untrusted(BaseModel):
    """A part of a server's status: texts and lists are cut, and a member of another type counts as missing."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _default_if_invalid(cls, value: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        try:
            return check(value)
        except (ValidationError, TypeError, AttributeError, LookupError):
            field = cls.model_fields[str(info.field_name)]
            if field.is_required():
                raise
            return field.get_default(call_default_factory=True)


class VersionPoint(_Untrusted):
    """A version that the status names. ``distance``: relative, from the trainer's weights; None if it is not known."""

    version: Whole
    step: Whole | None = None
    quarantined: Messages = []
    held_back: Annotated[dict[str, Any] | None, Field(exclude=True)] = None
    distance: float | None = Field(None, validation_alias=AliasPath("held_back", "relative_norm"))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exact(self) -> bool:
        """Whether it is the trainer's exact state."""
        return self.held_back is None


class RecentUpdate(_Untrusted):
    """A commit of ``versions`` versions, the newest of which is ``version``. Timings are in milliseconds."""

    version: Whole | None = None
    versions: Whole = 1
    step: Whole | None = None
    changed: Whole | None = None
    payload: Whole | None = Field(None, validation_alias="payload_bytes")
    timings: Annotated[
        dict[str, float],
        BeforeValidator(lambda found: {name: float(ms) for name, ms in found.items() if _is_duration(ms)}),
        Field(validation_alias="timings_ms", exclude=True),
    ] = {}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def pause(self) -> float | None:
        """Length of the pause."""
        return self.timings.get("pause")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def staged(self) -> float | None:
        """Time of staging, which runs beside generation; None if no phase of it is reported."""
        phases = [self.timings[phase] for phase in STAGING if phase in self.timings]
        return sum(phases) if phases else None


class ServerFailure(_Untrusted):
    """An error that the server reports."""

    kind: Text
    message: Message


class ServerStatus(_Untrusted):
    """What a server says of itself, as far as commands and the page show it; docs/REFERENCE.md describes the fields.

    Attributes:
        last_error: the receiver's last failure. error: why the server refused what it was asked for.
        reasons: why the server is not ready. polled, heard: seconds since the last poll, and since the last notice.
    """

    run: Text | None = None
    served: VersionPoint | None = None
    head: VersionPoint | None = None
    lag: Whole | None = None
    state: Text | None = None
    policy: Text | None = None
    target: Text | None = None
    holding: bool = False
    ready: bool | None = Field(None, validation_alias=AliasPath("ready", "ready"))
    reasons: Messages = Field([], validation_alias=AliasPath("ready", "reasons"))
    last_error: ServerFailure | None = None
    error: Annotated[ServerFailure | None, Field(exclude=True)] = None
    commits: Whole | None = None
    polled: float | None = Field(None, validation_alias="polled_seconds")
    listens: bool | None = Field(None, validation_alias=AliasPath("notice", "listens"))
    heard: float | None = Field(None, validation_alias=AliasPath("notice", "heard_seconds"))
    receiver: Text | None = Field(None, validation_alias=AliasPath("fleet", "receiver"))
    vllm: Text | None = Field(None, validation_alias=AliasPath("versions", "vllm"))
    undo: Annotated[list[int], BeforeValidator(lambda found: [item for item in found if type(item) is int])] = []
    recent: Annotated[
        list[RecentUpdate], BeforeValidator(lambda found: [row for row in found if isinstance(row, dict)][-MAX_ITEMS:])
    ] = []

    @property
    def retries(self) -> bool:
        """Whether the server serves a version, and tries again by itself what failed."""
        follows = self.policy == "follow" and not self.holding and self.state not in ("held", "lost")
        return self.served is not None and follows


def _is_duration(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < MAX_MILLISECONDS  # type: ignore[arg-type]


def check_server_url(url: str) -> None:
    """Raise UsageError unless ``url`` is an http or https URL without credentials."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        # As a connection would write it: an empty or too long label of a name is an error there.
        (host or "").encode("idna")
    except ValueError as error:
        raise UsageError(f"server URL {url[:200]!r} is not valid: {error}") from error
    if parts.scheme not in ("http", "https") or not host or port == 0 or not url.isascii() or " " in url:
        raise UsageError(f"server URL {url[:200]!r} is not valid; write it like http://host:8000")
    if public_url(url) != url or parts.username is not None:
        raise UsageError(f"server URL {url[:200]!r} has a user, a password, a query or a fragment; leave them out")


def connection_to(url: str, timeout: float) -> http.client.HTTPConnection:
    """Return a connection to the server of a valid URL, not opened yet. Args: timeout: in seconds, of each step."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    # With a port, http.client does not look for one in an IPv6 address.
    return kind(parts.hostname or "", parts.port or kind.default_port, timeout=timeout)


@contextmanager
def cut_after(connection: http.client.HTTPConnection, seconds: float) -> Iterator[threading.Event]:
    """Connect, and cut the connection if the block takes longer; yields an event that is set then.

    A timeout of the socket begins again with each byte.
    """
    late = threading.Event()
    connection.connect()

    def give_up(sock: socket.socket) -> None:
        late.set()
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, give_up, (connection.sock,))
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


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
    connection = connection_to(url, REQUEST_SECONDS)
    seconds = REQUEST_SECONDS if seconds is None else seconds
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    late = threading.Event()
    try:
        with cut_after(connection, seconds) as late:
            connection.sock.settimeout(None)
            connection.request(
                method, urlsplit(url).path.rstrip("/") + path, None if body is None else json.dumps(body), headers
            )
            answer = connection.getresponse()
            data = answer.read(MAX_ANSWER_BYTES + 1)
        if late.is_set():
            raise TimeoutError
    except (OSError, http.client.HTTPException) as error:
        if late.is_set():
            raise DeadlineError(
                f"{url} took the request and did not answer within {seconds:g} s; it may still do what was asked: see "
                "its log, and ask again or wait longer"
            ) from error
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        remedy = "check host and port, and whether the server has started"
        if isinstance(error, ssl.SSLCertVerificationError):
            remedy = "name the host that its certificate is for; for a private CA, set SSL_CERT_FILE to its certificate"
        raise UnavailableError(f"{url} does not answer: {reason}; {remedy}") from error
    finally:
        connection.close()
    if len(data) > MAX_ANSWER_BYTES:
        raise FormatError(f"{url} answers with more than {MAX_ANSWER_BYTES} bytes, so it is not a vLLM server")
    if token is not None:
        # Something in between may echo a request's headers, and answers are printed.
        data = data.replace(token.encode(), REMOVED.encode())
    try:
        # Not ``json.loads``, which takes NaN and reads 1e999 as infinity: the commands print answers as JSON again.
        document = load_json(data, url)
    except DataError:
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
    error = reply.server_status.error
    if reply.status in (200, 408) and reply.server_status.state is not None:
        return reply
    if error is not None and _KIND.fullmatch(error.kind):
        message = error.message
        if reply.status == 401:
            missing = "requires an admin token" if token is None else "has another admin token"
            message = f"it {missing}; set {admin_token.VARIABLE} to the token of that server"
        elif reply.status == 403:
            message = f"{message} for that server, and {admin_token.VARIABLE} here"
        raise ServerError(error.kind, f"{url}: {message}")
    name = route.partition("?")[0]
    if reply.status == 404:
        raise EngineError(f"{url} has no /delta_sync/{name}: the plugin is not loaded there. {NOT_LOADED}")
    raise EngineError(
        f"{url} answers /delta_sync/{name} with HTTP status {reply.status}, and not as the plugin does; name the "
        "server's own address: no proxy in between is asked, and no redirect is followed"
    )
