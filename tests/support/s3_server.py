"""The process of tests.support.s3_store: moto's S3 on a free port of loopback, which it prints; ends with its stdin.

With the argument ``keep-alive`` it keeps connections open, as stores on a network do.

moto as it comes is no measure for a store's client, so this differs from ``moto_server`` in:

- One request changes the store at a time. moto looks whether an object exists and then writes it: of 16 writers who
  create the same object of 6 MB, up to five won.
- Signatures and the digest of the body are checked, and a body that was cut is refused, as S3 does.
- It serves Google's XML API as well; see tests.support.google_store.
- Objects stay on disk. moto joins the parts of an upload in memory, four times over (4.8 GB for an object of 1 GB), and
  reads the whole object for each range of it (0.7 s for 16 MB of 1 GB).
"""

import hashlib
import hmac
import io
import os
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from botocore.auth import S3SigV4Auth  # type: ignore[import-untyped]
from botocore.awsrequest import AWSRequest  # type: ignore[import-untyped]
from botocore.credentials import Credentials  # type: ignore[import-untyped]
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.s3.exceptions import EntityTooSmall, InvalidPart, MalformedXML
from moto.s3.models import FakeKey, FakeMultipart
from moto.settings import S3_UPLOAD_PART_MIN_SIZE
from werkzeug.serving import make_server

from tests.support import google_store
from tests.support.s3_store import ACCESS_KEY, HOST, KEEP_ALIVE, REGION, SECRET_KEY

ALGORITHM = "AWS4-HMAC-SHA256"
PIECE_BYTES = 1 << 20
CREDENTIAL = re.compile(rf"{ALGORITHM} Credential=([^/]+)/([^,]+), *SignedHeaders=([^,]+), *Signature=([0-9a-f]+)")


class Kept:
    """Bytes of a file, read when they are sent. Slices by step 1 share the file."""

    def __init__(self, file: io.FileIO, start: int, end: int) -> None:
        self._file, self._start, self._end = file, start, end

    def __len__(self) -> int:
        return self._end - self._start

    def __getitem__(self, part: slice) -> "Kept":
        start, end, _ = part.indices(len(self))
        return Kept(self._file, self._start + start, self._start + max(start, end))

    def __iter__(self) -> Iterator[bytes]:
        for at in range(self._start, self._end, PIECE_BYTES):
            yield os.pread(self._file.fileno(), min(PIECE_BYTES, self._end - at), at)


def _value(key: Any) -> bytes | Kept:
    with key.lock:
        buffer = key._value_buffer
        if not buffer._rolled:
            buffer.seek(0)
            return bytes(buffer.read())
        buffer.flush()
        # A descriptor of its own: the object may be replaced while this one is being sent.
        return Kept(io.FileIO(os.dup(buffer.fileno()), "rb"), 0, key.contentsize)


def _keep(key: Any, value: bytes | str | Iterable[bytes]) -> None:
    buffer = key._value_buffer
    buffer.seek(0)
    buffer.truncate()
    key.contentsize = 0
    for piece in [value.encode()] if isinstance(value, str) else [value] if isinstance(value, bytes) else value:
        buffer.write(piece)
        key.contentsize += len(piece)


def _complete(upload: Any, listed: Iterable[tuple[int, str]]) -> tuple[Iterator[bytes], str, None]:
    parts: list[Any] = []
    for number, etag in listed:
        part = upload.parts.get(number)
        if part is None or part.etag.strip('"') != etag.strip('"'):
            raise InvalidPart()
        if parts and parts[-1].contentsize < S3_UPLOAD_PART_MIN_SIZE:
            raise EntityTooSmall()
        parts.append(part)
    if not parts:
        raise MalformedXML
    digest = hashlib.md5(b"".join(bytes.fromhex(part.etag.strip('"')) for part in parts)).hexdigest()
    # Taken now: moto closes the parts' files before it asks for the first byte.
    return _joined([part.value for part in parts]), f"{digest}-{len(parts)}", None


def _joined(values: list[bytes | Kept]) -> Iterator[bytes]:
    for value in values:
        yield from [value] if isinstance(value, bytes) else value


class Guard:
    """Lets through whole, signed requests, one at a time; answers are sent side by side."""

    def __init__(self, application: WSGIApplication) -> None:
        self._application = application
        self._lock = threading.Lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        body = _body(environ)
        refused = _refused(environ, body)
        if environ.get("HTTP_AUTHORIZATION", "").startswith("Bearer "):
            # moto finds bucket and service by a request's signature, which has been checked.
            environ["HTTP_AUTHORIZATION"] = f"{ALGORITHM} Credential={ACCESS_KEY}/20260101/{REGION}/s3/aws4_request"
            # To Google a key is one segment of the path, to S3 several; and its client quotes all but letters.
            path, mark, query = environ["RAW_URI"].partition("?")
            environ["RAW_URI"] = environ["REQUEST_URI"] = quote(unquote(path), safe="/-_.~") + mark + query
        if environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH") == "0":
            environ["HTTP_IF_NONE_MATCH"] = "*"
        if refused is not None:
            status, code = refused
            text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
            start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [text.encode()]
        environ["wsgi.input"] = io.BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body))
        with self._lock:
            return self._application(environ, start_response)


def _body(environ: WSGIEnvironment) -> bytes:
    length = environ.get("CONTENT_LENGTH")
    source: io.BufferedIOBase = environ["wsgi.input"]
    return source.read(int(length)) if length else source.read() if environ.get("wsgi.input_terminated") else b""


def _refused(environ: WSGIEnvironment, body: bytes) -> tuple[str, str] | None:
    """Status and code of S3's refusal, or None."""
    if len(body) < int(environ.get("CONTENT_LENGTH") or 0):
        return "400 Bad Request", "IncompleteBody"
    scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
    if scheme == "Bearer":
        known = google_store.signed(token, os.environ[google_store.PUBLIC_KEY])
        return None if known else ("401 Unauthorized", "AuthenticationRequired")
    found = CREDENTIAL.fullmatch(environ.get("HTTP_AUTHORIZATION", ""))
    if found is None:
        return "403 Forbidden", "AccessDenied"
    key, scope, names, proof = found.groups()
    if key != ACCESS_KEY:
        return "403 Forbidden", "InvalidAccessKeyId"
    headers = {name: _header(environ, name) for name in names.split(";")}
    if not {"x-amz-date", "x-amz-content-sha256"} <= headers.keys():
        return "403 Forbidden", "AccessDenied"
    expected = _signature(environ["REQUEST_METHOD"], environ["RAW_URI"], headers, scope)
    if not hmac.compare_digest(expected, proof):
        return "403 Forbidden", "SignatureDoesNotMatch"
    digest = headers["x-amz-content-sha256"]
    if re.fullmatch("[0-9a-f]{64}", digest) and digest != hashlib.sha256(body).hexdigest():
        return "400 Bad Request", "XAmzContentSHA256Mismatch"
    return None


def _signature(method: str, target: str, headers: dict[str, str], scope: str) -> str:
    """Signature (version 4) of a request. Args: scope: ``YYYYMMDD/REGION/s3/aws4_request``."""
    # Clients sign a query in one spelling and may send another.
    path, _, query = target.partition("?")
    fields = parse_qsl(query, keep_blank_values=True)
    request = AWSRequest(method, f"http://{HOST}{path}?{urlencode(fields, quote_via=quote, safe='-_.~')}", headers)
    request.context["timestamp"] = headers["x-amz-date"]
    signer = S3SigV4Auth(Credentials(ACCESS_KEY, SECRET_KEY), "s3", scope.split("/")[1])
    found: str = signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
    return found


def _header(environ: WSGIEnvironment, name: str) -> str:
    field = name.upper().replace("-", "_")
    return str(environ.get(field if field in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{field}", ""))


class Handler(MotoRequestHandler):
    """Without a log line for each request."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        return None


class KeepAlive(Handler):
    """HTTP/1.1: otherwise each request would pay for a connection of its own, one round trip more.

    werkzeug closes because an application may leave a part of the body unread, and reads that after its answer; this
    application reads all of it first, so what follows is the next request.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def send_header(self, keyword: str, value: str) -> None:
        if keyword.lower() != "connection":
            super().send_header(keyword, value)

    def make_environ(self) -> WSGIEnvironment:
        environ: WSGIEnvironment = super().make_environ()
        self.rfile = io.BytesIO()
        return environ

    def run_wsgi(self) -> None:
        requests = self.rfile
        try:
            super().run_wsgi()
        finally:
            self.rfile = requests


def main() -> None:
    """Serve until stdin ends."""
    # An open file for each part of an upload, and one more while they are joined.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    patches: dict[tuple[type, str], property | Callable[..., Any]] = {
        (FakeKey, "value"): property(_value, _keep),
        (FakeMultipart, "complete"): _complete,
    }
    for (owner, name), patch in patches.items():
        setattr(owner, name, patch)
    handler = KeepAlive if KEEP_ALIVE in sys.argv[1:] else Handler
    server = make_server(HOST, 0, Guard(DomainDispatcherApplication(create_backend_app)), True, request_handler=handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
