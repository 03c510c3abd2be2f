"""``ServerClient`` sends the doctor's requests to a server, with limits on time and size; answers are not trusted."""

import http.client
import ipaddress
import json
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from vllm_delta_sync.doctor.findings import HungError, bounded
from vllm_delta_sync.errors import FormatError, UnavailableError, UsageError
from vllm_delta_sync.redaction import public_url

REQUEST_SECONDS = 10.0
MAX_ANSWER_BYTES = 8 * 1024 * 1024
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Reply:
    """An HTTP status code and the JSON object of the answer; an empty one if the body is not a JSON object."""

    status: int
    document: dict[str, Any]

    def field(self, path: str, kind: type[_Value]) -> _Value | None:
        """Return the member at ``a.b`` if it is of that type, else None."""
        return field(self.document, path, kind)


def field(document: Any, path: str, kind: type[_Value]) -> _Value | None:
    """Return the member of a JSON object at ``a.b`` if it is of that type, else None."""
    for name in path.split("."):
        document = document.get(name) if isinstance(document, dict) else None
    if isinstance(document, bool) and kind is not bool:
        return None
    return document if isinstance(document, kind) else None


class ServerClient:
    """Sends requests to one server.

    Raises:
        UsageError: the URL is not an http URL, or holds credentials.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise UsageError(f"server URL {url[:200]!r} is not valid: {error}") from error
        if parts.scheme not in ("http", "https") or not host or not url.isascii() or " " in url:
            raise UsageError(f"server URL {url[:200]!r} is not valid; write it like http://host:8000")
        if public_url(url) != url or parts.username is not None:
            raise UsageError(f"server URL {url[:200]!r} has a user, a password, a query or a fragment; leave them out")
        self.url = url.rstrip("/")
        self._opener = _opener(host)

    def ask(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Reply:
        """Send a request without a body.

        Raises:
            UnavailableError: no server answers in time, or what answers is not an HTTP server.
            FormatError: the answer is too large.
        """
        request = Request(self.url + path, method=method, headers=headers or {})
        try:
            return bounded(lambda: self._ask(request), REQUEST_SECONDS)
        except HungError as error:
            raise UnavailableError(
                f"{self.url}{path} does not answer within {REQUEST_SECONDS:g} s; the server is overloaded or hangs, or "
                "a firewall drops requests"
            ) from error

    def _ask(self, request: Request) -> Reply:
        try:
            with self._opener.open(request, timeout=REQUEST_SECONDS) as answer:
                return Reply(answer.status, self._parsed(answer))
        except HTTPError as error:
            with error:
                return Reply(error.code, self._parsed(error))
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            reason_text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise UnavailableError(
                f"{self.url} does not answer: {reason_text}; check host and port, and whether the server has started"
            ) from error

    def _parsed(self, answer: Any) -> dict[str, Any]:
        data = answer.read(MAX_ANSWER_BYTES + 1)
        if len(data) > MAX_ANSWER_BYTES:
            raise FormatError(f"{self.url} answers with more than {MAX_ANSWER_BYTES} bytes, so it is not a vLLM server")
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow no redirect: the check is about the server that was named."""


def _opener(host: str) -> OpenerDirector:
    handlers = [_NoRedirect(), *([ProxyHandler({})] if _is_loopback(host) else [])]
    return build_opener(*handlers)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
