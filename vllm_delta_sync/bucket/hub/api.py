"""The Hub's own requests for a bucket: look up, list, change, open, and the way to its content store.

They go out directly through ``huggingface_hub``'s client, one try each: ``HfApi`` repeats them up to five times, for
minutes if a rate limit says so, and cannot be told not to.
"""

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlsplit

# Before the libraries themselves: it says which are missing.
from vllm_delta_sync.bucket.hub.errors import NO_FILE, UnexpectedAnswerError, RefusedError  # isort: skip

from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers, get_session

from vllm_delta_sync.settings import StoreOptions

READ, WRITE = "read", "write"
_SPARE_SECONDS = 60
"""A token that runs out so soon is not used any more."""
_ERROR_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a bucket. ``hash``: of its content, by which the content store knows it. ``modified``: Unix seconds."""

    path: str
    bytes: int
    hash: str
    modified: float


@dataclass(frozen=True, slots=True)
class Connection:
    """How the content store is reached for one bucket. ``headers`` get a new token at ``refresh``."""

    endpoint: str
    expires: int
    refresh: str
    token: str = field(repr=False)
    headers: dict[str, str] = field(repr=False)

    @property
    def arguments(self) -> dict[str, Any]:
        """As hf_xet takes them."""
        plain = {name: value for name, value in self.headers.items() if name.lower() != "authorization"}
        return {
            "endpoint": self.endpoint,
            "token": self.token,
            "token_expiry_unix_secs": self.expires,
            "token_refresh_url": self.refresh,
            "token_refresh_headers": self.headers,
            "custom_headers": plain,
        }


@dataclass(frozen=True, slots=True)
class HubContent:
    """A file's content, as it comes. ``size``: of the whole file, None if the Hub does not say. ``start``: where
    ``blocks`` begin."""

    size: int | None
    start: int
    blocks: Iterator[bytes]


class HubApi:
    """Requests for one bucket, each answered or failed after one try. Threads and forked processes may share it.

    Every method raises RefusedError for a refusal, NonsenseError for an answer that cannot be read, and whatever the
    client raises; see ``hub_errors.mapped``.

    Args:
        id: ``namespace/name``.

    Attributes:
        endpoint: of the Hub, without a slash at its end.
    """

    def __init__(self, id: str, options: StoreOptions) -> None:
        self.id = id
        self._options = options
        endpoint = options.store_endpoint or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
        self.endpoint = endpoint.rstrip("/")
        self._bucket = f"{self.endpoint}/api/buckets/{id}"
        self._lock = threading.Lock()
        self._connections: dict[str, Connection] = {}

    def info(self, path: str) -> HubFile | None:
        """A file, or None if there is none."""
        found = self._send("POST", f"{self._bucket}/paths-info", json={"paths": [path]})
        if not isinstance(found, list):
            raise UnexpectedAnswerError(f"it answers a look-up with {str(found)[:80]!r}")
        return next((file for file in map(_file, found) if file is not None and file.path == path), None)

    def tree(self, folder: str) -> Iterator[HubFile]:
        """All files below a folder, in no order; also such whose path begins with its name but lies beside it."""
        address = f"{self._bucket}/tree" + (f"/{quote(folder, safe='')}" if folder else "")
        url: str | None = f"{address}?recursive=true"
        while url is not None:
            response = self._answered("GET", url)
            found = _json(response)
            if not isinstance(found, list):
                raise UnexpectedAnswerError(f"it answers a listing with {str(found)[:80]!r}")
            yield from (file for file in map(_file, found) if file is not None)
            following = response.links.get("next", {}).get("url")
            following = None if following is None else self._ours(following)
            if following == url:
                raise UnexpectedAnswerError("it lists the same page again and again")
            url = following

    def add(self, path: str, hash: str) -> None:
        """Give an uploaded content a name; when this returns everybody sees it."""
        self._change({"type": "addFile", "path": path, "xetHash": hash, "mtime": int(time.time() * 1000)})

    def remove(self, path: str) -> None:
        """Remove a file; RefusedError also if there is none, as the Hub does not tell the two apart."""
        self._change({"type": "deleteFile", "path": path})

    @contextmanager
    def opened(self, path: str, start: int = 0, length: int | None = None) -> Iterator[HubContent]:
        """Open a file, or ``length`` bytes of it from ``start`` on, which must lie within; RefusedError 416 if not."""
        headers = {**self._headers(), "Accept-Encoding": "identity"}
        if length is not None:
            headers["Range"] = f"bytes={start}-{start + length - 1}"
        url = f"{self.endpoint}/buckets/{self.id}/resolve/{quote(path)}"
        stream = get_session().stream(
            "GET", url, headers=headers, timeout=self._options.store_deadline, follow_redirects=True
        )
        with stream as response:
            if response.status_code == 404 and not response.headers.get("x-error-code") and self.info(path) is None:
                raise RefusedError(404, NO_FILE, "there is no such file", True)
            self._check(response, headers)
            first = start if response.status_code == 206 else 0
            if response.status_code == 206 and not response.headers.get("content-range", "").startswith(
                f"bytes {start}-"
            ):
                raise UnexpectedAnswerError(
                    f"it answers bytes from {start} with {response.headers.get('content-range')!r}"
                )
            linked = [
                answer.headers["x-linked-size"] for answer in response.history if "x-linked-size" in answer.headers
            ]
            said = linked[-1] if linked else response.headers.get("content-length") if length is None else None
            size = int(said) if said is not None and said.isdigit() else None
            yield HubContent(size, first, response.iter_bytes(_BLOCK_BYTES))

    def connection(self, right: str) -> tuple[Connection, bool]:
        """How to reach the content store, and whether that was asked for just now.

        What was learned before may be of a bucket that is gone since; ``forget`` it then.
        """
        headers = self._headers()
        with self._lock:
            known = self._connections.get(right)
        if known is not None and known.headers == headers and known.expires > time.time() + _SPARE_SECONDS:
            return known, False
        refresh = f"{self._bucket}/xet-{right}-token"
        told = self._send("GET", refresh)
        try:
            fresh = Connection(str(told["casUrl"]), int(told["exp"]), refresh, str(told["accessToken"]), headers)
        except (KeyError, TypeError, ValueError) as error:
            raise UnexpectedAnswerError("it does not tell how its content store is reached") from error
        with self._lock:
            self._connections[right] = fresh
        return fresh, True

    def forget(self) -> None:
        """Ask anew how the content store is reached."""
        with self._lock:
            self._connections.clear()

    def _change(self, operation: dict[str, Any]) -> None:
        content = json.dumps(operation).encode() + b"\n"
        told = self._send(
            "POST", f"{self._bucket}/batch", content=content, kind="application/x-ndjson", also_read=(422,)
        )
        failed = told.get("failed") if isinstance(told, dict) else None
        if not isinstance(told, dict) or not isinstance(failed, list | None):
            raise UnexpectedAnswerError(f"it answers a change with {str(told)[:80]!r}")
        if failed or told.get("success") is False:
            first = failed[0] if failed else told
            text = first.get("error") if isinstance(first, dict) else None
            raise RefusedError(422, None, str(text or "no reason is given"), True)

    def _send(self, method: str, url: str, **request: Any) -> Any:
        return _json(self._answered(method, url, **request))

    def _answered(
        self, method: str, url: str, *, kind: str | None = None, also_read: Sequence[int] = (), **request: Any
    ) -> Any:
        headers = self._headers() | ({"Content-Type": kind} if kind else {})
        response = get_session().request(
            method, url, headers=headers, timeout=self._options.store_deadline, follow_redirects=True, **request
        )
        if response.status_code not in also_read:
            self._check(response, headers)
        return response

    def _check(self, response: Any, headers: dict[str, str]) -> None:
        """Raise RefusedError unless the request was granted."""
        if response.is_success:
            return
        body = b""
        for block in response.iter_bytes(_ERROR_BYTES):
            body += block
            if len(body) >= _ERROR_BYTES:
                break
        text = response.headers.get("x-error-message") or _said(body)
        beyond = not str(response.url).startswith(self.endpoint)
        with_token = any(name.lower() == "authorization" for name in headers)
        raise RefusedError(response.status_code, response.headers.get("x-error-code"), text, with_token, beyond)

    def _headers(self) -> dict[str, str]:
        """Headers of a request; the token is looked up each time, as it may have been renewed meanwhile."""
        headers: dict[str, str] = build_hf_headers(library_name="vllm-delta-sync")
        return headers

    def _ours(self, url: str) -> str:
        """A page's address at the endpoint that is used, whatever name the Hub itself goes by; the token goes there."""
        parts = urlsplit(url)
        if url.startswith(f"{self.endpoint}/"):
            return url
        return f"{self.endpoint}{parts.path}" + (f"?{parts.query}" if parts.query else "")


def _json(response: Any) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise UnexpectedAnswerError(f"it answers with {response.text[:80]!r}, which is not JSON") from error


def _said(body: bytes) -> str:
    """What an answer says went wrong."""
    text = body.decode(errors="replace").strip()
    try:
        told = json.loads(text)
    except ValueError:
        return "" if text.startswith("<") else text[:300]
    found = told.get("error") or told.get("message") if isinstance(told, dict) else None
    return str(found or text)[:300]


def _file(told: Any) -> HubFile | None:
    """A file as the Hub describes it; None for a folder."""
    try:
        if told["type"] != "file":
            return None
        return HubFile(str(told["path"]), int(told["size"]), str(told["xetHash"]), _moment(told))
    except (KeyError, TypeError, ValueError) as error:
        raise UnexpectedAnswerError(f"it describes a file as {str(told)[:200]!r}") from error


def _moment(told: dict[str, Any]) -> float:
    """When a file was put, by the Hub's clock; by the uploader's if the Hub does not say, else just now: what removes
    old files must not take one whose age nobody knows."""
    said = told.get("uploadedAt") or told.get("mtime")
    return datetime.fromisoformat(said).timestamp() if isinstance(said, str) else time.time()
