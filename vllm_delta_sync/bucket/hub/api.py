"""``HubApi``: HTTP requests for a bucket of the Hub: look up, list, change and open files, find the content store.

Each request is sent once, through ``huggingface_hub``'s HTTP client. ``HfApi`` is not used, because it always retries
up to five times, for minutes under a rate limit.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlsplit

# Before the libraries themselves, because its message says which of them are missing.
from vllm_delta_sync.bucket.hub.errors import NO_FILE, UnexpectedAnswerError, RefusedError  # isort: skip

from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers, get_session

from vllm_delta_sync.settings import StoreOptions

_SPARE_SECONDS = 60
"""A token is renewed when it expires within this time."""
_ERROR_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a bucket.

    Attributes:
        hash: of the content, its name in the content store. modified: seconds since the epoch.
    """

    path: str
    bytes: int
    hash: str
    modified: float


@dataclass(frozen=True, slots=True)
class Connection:
    """Access to the content store for one bucket.

    Attributes:
        expires: seconds since the epoch. headers: of the Hub's requests. arguments: the keyword arguments of hf_xet.
    """

    expires: int
    headers: dict[str, str] = field(repr=False)
    arguments: dict[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class HubContent:
    """A file's content as a stream.

    Attributes:
        size: of the whole file; None if the Hub does not report it.
    """

    size: int | None
    blocks: Iterator[bytes]


class HubApi:
    """Requests for one bucket, one try each. Threads and forked processes may share an instance.

    Every method raises RefusedError for a refusal, UnexpectedAnswerError for an answer that cannot be parsed, and the
    HTTP client's exceptions; ``errors.translate_hub_error`` translates all of them.

    Args:
        id: ``namespace/name``.

    Attributes:
        endpoint: of the Hub, without a trailing slash.
    """

    def __init__(self, id: str, options: StoreOptions) -> None:
        self.id = id
        self._options = options
        endpoint = options.store_endpoint or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
        self.endpoint = endpoint.rstrip("/")
        self._bucket = f"{self.endpoint}/api/buckets/{id}"
        self._connection: Connection | None = None

    def info(self, path: str) -> HubFile | None:
        """Return a file, or None if there is none."""
        found = self._send("POST", f"{self._bucket}/paths-info", json={"paths": [path]})
        if not isinstance(found, list):
            raise UnexpectedAnswerError(f"it answers a look-up with {str(found)[:80]!r}")
        return next((file for file in map(_file, found) if file is not None and file.path == path), None)

    def tree(self, folder: str) -> Iterator[HubFile]:
        """Yield all files below a folder, in no order, and also files outside it whose path starts with its name."""
        address = f"{self._bucket}/tree" + (f"/{quote(folder, safe='')}" if folder else "")
        url: str | None = f"{address}?recursive=true"
        while url is not None:
            response = self._request("GET", url)
            found = _json(response)
            if not isinstance(found, list):
                raise UnexpectedAnswerError(f"it answers a listing with {str(found)[:80]!r}")
            yield from (file for file in map(_file, found) if file is not None)
            following = response.links.get("next", {}).get("url")
            following = None if following is None else self._at_endpoint(following)
            if following == url:
                raise UnexpectedAnswerError("its next page is the same page again")
            url = following

    def add(self, path: str, hash: str) -> None:
        """Give an uploaded content its name; when this returns, the file is visible to all readers."""
        self._change({"type": "addFile", "path": path, "xetHash": hash, "mtime": int(time.time() * 1000)})

    def remove(self, path: str) -> None:
        """Remove a file; raises RefusedError too if there is none, because the Hub does not distinguish the two."""
        self._change({"type": "deleteFile", "path": path})

    @contextmanager
    def open_file(self, path: str, start: int = 0, length: int | None = None) -> Iterator[HubContent]:
        """Open a file, or ``length`` bytes from ``start``; RefusedError 416 if ``start`` is past the end."""
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
            found = response.headers.get("content-range", "")
            if length is not None and not found.startswith(f"bytes {start}-"):
                what = found or "the whole file"
                raise UnexpectedAnswerError(f"it, or a proxy before it, sends {what} for bytes from {start}")
            linked = [
                answer.headers["x-linked-size"] for answer in response.history if "x-linked-size" in answer.headers
            ]
            text = linked[-1] if linked else response.headers.get("content-length") if length is None else None
            size = int(text) if text is not None and text.isdigit() else None
            yield HubContent(size, response.iter_bytes(_BLOCK_BYTES))

    def connection(self) -> tuple[Connection, bool]:
        """Return a connection to the content store for writing, and whether it was requested just now.

        A cached connection may belong to a bucket that was deleted since; then call ``forget``.
        """
        headers = self._headers()
        known = self._connection
        if known is not None and known.headers == headers and known.expires > time.time() + _SPARE_SECONDS:
            return known, False
        refresh = f"{self._bucket}/xet-write-token"
        answer = self._send("GET", refresh)
        try:
            expires = int(answer["exp"])
            arguments = {
                "endpoint": str(answer["casUrl"]),
                "token": str(answer["accessToken"]),
                "token_expiry_unix_secs": expires,
                "token_refresh_url": refresh,
                "token_refresh_headers": headers,
                "custom_headers": {name: value for name, value in headers.items() if name.lower() != "authorization"},
            }
        except (KeyError, TypeError, ValueError) as error:
            raise UnexpectedAnswerError("it does not tell the address of its content store") from error
        self._connection = fresh = Connection(expires, headers, arguments)
        return fresh, True

    def forget(self) -> None:
        """Drop the cached connection to the content store."""
        self._connection = None

    def _change(self, operation: dict[str, Any]) -> None:
        content = json.dumps(operation).encode() + b"\n"
        answer = self._send(
            "POST", f"{self._bucket}/batch", content=content, kind="application/x-ndjson", accepted=(422,)
        )
        failed = answer.get("failed") if isinstance(answer, dict) else None
        if not isinstance(answer, dict) or not isinstance(failed, list | None):
            raise UnexpectedAnswerError(f"it answers a change with {str(answer)[:80]!r}")
        if failed or answer.get("success") is False:
            first = failed[0] if failed else answer
            text = first.get("error") if isinstance(first, dict) else None
            raise RefusedError(422, None, str(text or "no reason is given"), True)

    def _send(self, method: str, url: str, **request: Any) -> Any:
        return _json(self._request(method, url, **request))

    def _request(
        self, method: str, url: str, *, kind: str | None = None, accepted: Sequence[int] = (), **request: Any
    ) -> Any:
        headers = self._headers() | ({"Content-Type": kind} if kind else {})
        response = get_session().request(
            method, url, headers=headers, timeout=self._options.store_deadline, follow_redirects=True, **request
        )
        if response.status_code not in accepted:
            self._check(response, headers)
        return response

    def _check(self, response: Any, headers: dict[str, str]) -> None:
        """Raise RefusedError unless the request succeeded."""
        if response.is_success:
            return
        body = next(response.iter_bytes(_ERROR_BYTES), b"")
        text = response.headers.get("x-error-message") or _error_text(body)
        from_content_store = not str(response.url).startswith(self.endpoint)
        with_token = any(name.lower() == "authorization" for name in headers)
        raise RefusedError(
            response.status_code, response.headers.get("x-error-code"), text, with_token, from_content_store
        )

    def _headers(self) -> dict[str, str]:
        """Return the headers of a request; looks up the token each time, because it may have been renewed."""
        headers: dict[str, str] = build_hf_headers(library_name="vllm-delta-sync")
        return headers

    def _at_endpoint(self, url: str) -> str:
        """Return a page's URL at our endpoint, because the token must go nowhere else.

        The Hub may give itself another host name in its answers.
        """
        if url.startswith(f"{self.endpoint}/"):
            return url
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise UnexpectedAnswerError(f"it names the next page as {url[:80]!r}, which is no URL") from error
        return f"{self.endpoint}{parts.path}" + (f"?{parts.query}" if parts.query else "")


def _json(response: Any) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise UnexpectedAnswerError(f"it answers with {response.text[:80]!r}, which is not JSON") from error


def _error_text(body: bytes) -> str:
    """Return the error message of an answer."""
    text = body.decode(errors="replace").strip()
    try:
        answer = json.loads(text)
    except ValueError:
        return "" if text.startswith("<") else text[:300]
    found = answer.get("error") or answer.get("message") if isinstance(answer, dict) else None
    return str(found or text)[:300]


def _file(answer: Any) -> HubFile | None:
    """Parse the Hub's description of a file; None for a folder."""
    try:
        if answer["type"] != "file":
            return None
        return HubFile(str(answer["path"]), int(answer["size"]), str(answer["xetHash"]), _modified(answer))
    except (KeyError, TypeError, ValueError) as error:
        raise UnexpectedAnswerError(f"it describes a file as {str(answer)[:200]!r}") from error


def _modified(answer: dict[str, Any]) -> float:
    """Return when a file was put: by the Hub's clock, or else by the uploader's.

    If both are missing, return the current time, so that a file of unknown age is never removed as old.
    """
    text = answer.get("uploadedAt") or answer.get("mtime")
    return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else time.time()
