"""The process of tests.support.hub_store: ``python -m tests.support.hub_store.server FOLDER OPTIONS-AS-JSON``.

Two ports of loopback, the Hub and its content store, serve one application. Prints the Hub's address, and ends with
its standard input. All that changes what is stored happens in the one thread of the event loop.
"""

import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.hub_store.faults import Faults
from tests.support.hub_store.xet import Contents, DamagedError, Term, files_of

HOST = "127.0.0.1"
READ, WRITE = "read", "write"
PATHS_PER_REQUEST = 1000
BLOCK_BYTES = 1 << 20
WRONG_PATH = re.compile(r"^(|/.*|\./.*|.*/|.*\.\.|.*(//|\.\./|\\|\0).*)$", re.DOTALL)
"""Keys that the rules do not allow which the Hub documents."""


@dataclass
class Options:
    """What may be changed while the server runs.

    Attributes:
        token: may write. read_token: may read only.
        quota: bytes of files per bucket; 0: any number.
        xet_seconds: life of a token of the content store. url_seconds: life of a signed address.
        page: entries of a listing per page.
    """

    token: str
    read_token: str | None = None
    quota: int = 0
    xet_seconds: int = 3600
    url_seconds: int = 3600
    page: int = 1000


class Refused(Exception):
    """Carries the answer."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer: Response = JSONResponse({"error": message}, status, headers)


@dataclass(frozen=True)
class File:
    """``mtime``: milliseconds. ``uploaded``: seconds. ``kind``: content type."""

    path: str
    hash: str
    size: int
    mtime: int
    kind: str | None
    uploaded: float

    def described(self) -> dict[str, Any]:
        told = {"type": "file", "path": self.path, "size": self.size, "xetHash": self.hash}
        told |= {"mtime": moment(self.mtime / 1000), "uploadedAt": moment(self.uploaded)}
        return told | ({"contentType": self.kind} if self.kind else {})


@dataclass
class Bucket:
    """``inner``: names this life of the bucket; another when it is made again under the same ``id``. ``held``: hashes
    of the contents that were uploaded to it."""

    id: str
    private: bool
    inner: str = field(default_factory=lambda: secrets.token_hex(12))
    created: float = field(default_factory=time.time)
    files: dict[str, File] = field(default_factory=dict)
    held: set[str] = field(default_factory=lambda: {"0" * 64})

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


class Server:
    """The application and all that it knows.

    Attributes:
        grants: what tokens of the content store, and signatures of addresses, are good for: (what, until when).
        origin: of the content store, on another port than the Hub's as in the real one.
    """

    def __init__(self, folder: Path, options: Options) -> None:
        self.options, self.contents = options, Contents(folder)
        self.buckets: dict[str, Bucket] = {}
        self.grants: dict[str, tuple[Any, float]] = {}
        sockets = [socket.create_server((HOST, 0)) for _ in range(2)]
        self.endpoint, self.origin = (f"http://{HOST}:{one.getsockname()[1]}" for one in sockets)
        one, steer = "/api/buckets/{space}/{name}", ["GET", "POST", "DELETE"]
        routes = [
            Route(one, self.create, methods=["POST"]),
            Route(one, self.info, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(one + "/tree", self.tree, methods=["GET"]),
            Route(one + "/tree/{prefix:path}", self.tree, methods=["GET"]),
            Route(one + "/paths-info", self.paths_info, methods=["POST"]),
            Route(one + "/batch", self.batch, methods=["POST"]),
            Route(one + "/xet-{right}-token", self.xet_token, methods=["GET"]),
            Route("/buckets/{space}/{name}/resolve/{path:path}", self.resolve, methods=["GET", "HEAD"]),
            Route("/cdn/file/{hash}", self.download_file, methods=["GET", "HEAD"]),
            Route("/cdn/xorb/{hash}", self.download_xorb, methods=["GET", "HEAD"]),
            Route("/v1/xorbs/{prefix}/{hash}", self.add_xorb, methods=["POST"]),
            Route("/v2/shards", self.add_shard, methods=["POST"]),
            Route("/v2/reconstructions/{hash}", self.reconstruct, methods=["GET"]),
            Route("/_{what}", self.steer, methods=steer),
        ]

        async def refused(request: Request, error: Exception) -> Response:
            assert isinstance(error, Refused)
            return error.answer

        async def damaged(request: Request, error: Exception) -> Response:
            return Refused(400, str(error)).answer

        self.faults = Faults(Starlette(routes=routes, exception_handlers={Refused: refused, DamagedError: damaged}))
        config = uvicorn.Config(self.faults, log_level="critical", lifespan="off", proxy_headers=False)
        self.run = lambda: uvicorn.Server(config).run(sockets)

    async def steer(self, request: Request) -> Response:
        """What tests order and ask: faults, requests, options, tokens."""
        what, body = request.path_params["what"], json.loads(await request.body() or b"{}")
        if (what, request.method) == ("faults", "POST"):
            self.faults.add(**body)
        elif (what, request.method) == ("faults", "DELETE"):
            self.faults.clear(body["path"])
        elif (what, request.method) == ("requests", "DELETE"):
            self.faults.record.clear()
        elif (what, request.method) == ("options", "POST"):
            self.options = replace(self.options, **body)
        elif (what, request.method) == ("tokens", "DELETE"):
            self.grants.clear()
        rules = [asdict(rule) for rule in self.faults.rules]
        return JSONResponse(
            {"faults": rules, "requests": list(self.faults.record), "options": asdict(self.options)}.get(what)
        )

    # Who may do what

    def grant(self, what: Any, seconds: int) -> tuple[str, float]:
        """A secret that stands for a right, and when it expires (Unix seconds)."""
        secret, until = secrets.token_hex(16), int(time.time()) + seconds
        self.grants[secret] = what, until
        return secret, until

    def granted(self, secret: str) -> Any:
        what, until = self.grants.get(secret, (None, 0.0))
        return what if until > time.time() else None

    def check_user(self, request: Request, right: str) -> None:
        """401 for a missing or unknown token, 403 for one without the right."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if not given:
            raise Refused(401, "Invalid username or password.", "RepoNotFound")
        if scheme != "Bearer" or given not in (self.options.token, self.options.read_token):
            raise Refused(401, "Invalid credentials in Authorization header")
        if right == WRITE and given != self.options.token:
            raise Refused(403, "you must use a token with write permission")

    def bucket(self, request: Request, right: str) -> Bucket:
        """401, 403 or 404."""
        self.check_user(request, right)
        found = self.buckets.get("{space}/{name}".format_map(request.path_params))
        if found is None:
            raise Refused(404, "Repository not found", "RepoNotFound")
        return found

    def xet_bucket(self, request: Request, right: str) -> Bucket:
        """The bucket that a token of the content store is for; 401 for a void or expired one, 403 without the right."""
        granted = self.granted(request.headers.get("authorization", "").removeprefix("Bearer "))
        found = granted and next((one for one in self.buckets.values() if one.inner == granted[0]), None)
        if not found:
            raise Refused(401, "xet token is unknown or has expired")
        if right == WRITE and granted[1] != WRITE:
            raise Refused(403, "xet token has no write scope")
        return found

    def signed(self, path: str, **fields: str) -> str:
        """An address at the content store that needs no token until it expires."""
        secret, _ = self.grant((path, fields), self.options.url_seconds)
        return f"{self.origin}{quote(path)}?{urlencode(fields | {'Signature': secret})}"

    def check_signed(self, request: Request) -> None:
        """403 for a wrong signature, an expired address, or another range than the signed one."""
        fields = dict(request.query_params)
        if self.granted(fields.pop("Signature", "")) != (request.url.path, fields):
            raise Refused(403, "signature is wrong or has expired")
        if "range" in fields and request.headers.get("range") != fields["range"]:
            raise Refused(403, "range is not the signed one")

    # Buckets and their files

    async def create(self, request: Request) -> Response:
        self.check_user(request, WRITE)
        id = "{space}/{name}".format_map(request.path_params)
        url = f"{self.endpoint}/buckets/{id}"
        if id in self.buckets:
            return JSONResponse({"error": "You already created this bucket", "url": url}, 409)
        body = json.loads(await request.body() or b"{}")
        self.buckets[id] = Bucket(id, body.get("visibility") == "private")
        return JSONResponse({"url": url, "name": id, "id": self.buckets[id].inner})

    async def info(self, request: Request) -> Response:
        bucket = self.bucket(request, READ)
        told = {"id": bucket.id, "private": bucket.private, "createdAt": moment(bucket.created)}
        return JSONResponse({"_id": bucket.inner, **told, "size": bucket.size, "totalFiles": len(bucket.files)})

    async def delete(self, request: Request) -> Response:
        del self.buckets[self.bucket(request, WRITE).id]
        return Response(status_code=204)

    async def tree(self, request: Request) -> Response:
        """One page of all files below a prefix; its clients never ask for folders."""
        bucket, limit = self.bucket(request, READ), self.options.page
        prefix, after = request.path_params.get("prefix", ""), request.query_params.get("cursor", "")
        found = sorted(path for path in bucket.files if path.startswith(prefix) and path > after)
        headers = {}
        if len(found) > limit:
            query = urlencode({**request.query_params, "cursor": found[limit - 1]})
            headers["Link"] = f'<{self.endpoint}{quote(request.url.path)}?{query}>; rel="next"'
        return JSONResponse([bucket.files[path].described() for path in found[:limit]], headers=headers)

    async def paths_info(self, request: Request) -> Response:
        bucket, paths = self.bucket(request, READ), json.loads(await request.body())["paths"]
        if len(paths) > PATHS_PER_REQUEST:
            raise Refused(400, f"{len(paths)} paths, at most {PATHS_PER_REQUEST} are allowed")
        return JSONResponse([bucket.files[path].described() for path in paths if path in bucket.files])

    async def batch(self, request: Request) -> Response:
        bucket = self.bucket(request, WRITE)
        lines = [json.loads(line) for line in (await request.body()).splitlines() if line.strip()]
        failed = []
        for line in lines:
            wrong = None
            if line["type"] == "addFile":
                wrong = self.put(bucket, line["path"], line["xetHash"], line.get("mtime", 0), line.get("contentType"))
            elif line["type"] != "deleteFile":
                wrong = f"operation {line['type']!r} is unknown"
            elif bucket.files.pop(line["path"], None) is None:
                wrong = "file does not exist"
            if wrong:
                failed.append({"path": line["path"], "error": wrong})
        done = len(lines) - len(failed)
        told = {"success": not failed, "processed": len(lines), "succeeded": done, "failed": failed}
        return JSONResponse(told, 422 if failed and not done else 200)

    def put(self, bucket: Bucket, path: str, hash: str, mtime: int, kind: str | None) -> str | None:
        """Name a content that the bucket holds; why that cannot be, or None."""
        if bucket.id not in self.buckets:
            return "bucket is gone"
        if WRONG_PATH.match(path):
            return f"path {path!r} is not allowed"
        if hash not in bucket.held:
            return f"xet hash {hash} was not uploaded"
        size = self.contents.size(hash)
        total = bucket.size - (bucket.files[path].size if path in bucket.files else 0) + size
        if self.options.quota and total > self.options.quota:
            return f"storage quota exceeded: {total} of {self.options.quota} bytes"
        bucket.files[path] = File(path, hash, size, mtime, kind, time.time())
        return None

    async def xet_token(self, request: Request) -> Response:
        right = request.path_params["right"]
        bucket = self.bucket(request, right)
        if right == WRITE and self.options.quota and bucket.size >= self.options.quota:
            raise Refused(403, f"Storage quota of bucket {bucket.id} is used up")
        token, expiry = self.grant((bucket.inner, right), self.options.xet_seconds)
        headers = {"X-Xet-Cas-Url": self.origin, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(expiry)}
        return JSONResponse({"casUrl": self.origin, "accessToken": token, "exp": expiry}, headers=headers)

    async def resolve(self, request: Request) -> Response:
        bucket = self.bucket(request, READ)
        file = bucket.files.get(request.path_params["path"])
        if file is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        headers = {
            "Location": self.signed(f"/cdn/file/{file.hash}", **({"type": file.kind} if file.kind else {})),
            "X-Xet-Hash": file.hash,
            "X-Linked-Size": str(file.size),
            "X-Linked-ETag": f'"{file.hash}"',
            "Link": f'<{self.endpoint}/api/buckets/{bucket.id}/xet-read-token>; rel="xet-auth"',
        }
        return Response(status_code=302, headers=headers)

    # The content store. It knows no chunk: each is uploaded anew.

    async def add_xorb(self, request: Request) -> Response:
        self.xet_bucket(request, WRITE)
        fresh = self.contents.add_xorb(request.path_params["hash"], await request.body())
        return JSONResponse({"was_inserted": fresh})

    async def add_shard(self, request: Request) -> Response:
        """Answers with one line per step."""
        bucket, fresh = self.xet_bucket(request, WRITE), False
        for hash, terms in files_of(await request.body()):
            fresh |= hash not in bucket.held and self.contents.add_file(hash, terms)
            bucket.held.add(hash)
        return Response(json.dumps({"type": "result", "result": int(fresh)}) + "\n", media_type="application/x-ndjson")

    async def reconstruct(self, request: Request) -> Response:
        """One range per address; the form allows several."""
        bucket, hash = self.xet_bucket(request, READ), request.path_params["hash"]
        if hash not in bucket.held:
            raise Refused(404, f"file {hash} is not known")
        size = self.contents.size(hash)
        wanted = wanted_range(request, size)
        if wanted is None:
            return beyond(size)
        skip, terms = self.contents.cut(hash, *wanted)
        fetch: dict[str, list[dict[str, Any]]] = {}
        for first, last, xorb in _runs(terms):
            start, end = self.contents.span(xorb, first, last)
            url = self.signed(f"/cdn/xorb/{xorb}", range=f"bytes={start}-{end - 1}")
            part = {"chunks": {"start": first, "end": last}, "bytes": {"start": start, "end": end - 1}}
            fetch.setdefault(xorb, []).append({"url": url, "ranges": [part]})
        written = [
            {"hash": term.xorb, "unpacked_length": term.length, "range": {"start": term.first, "end": term.last}}
            for term in terms
        ]
        return JSONResponse({"offset_into_first_range": skip, "terms": written, "xorbs": fetch})

    async def download_file(self, request: Request) -> Response:
        self.check_signed(request)
        hash = request.path_params["hash"]
        size = self.contents.size(hash)
        if (wanted := wanted_range(request, size)) is None:
            return beyond(size)
        kind = request.query_params.get("type", "application/octet-stream")
        return answer(request, size, wanted, self.contents.read(hash, *wanted), kind, ETag=f'"{hash}"')

    async def download_xorb(self, request: Request) -> Response:
        self.check_signed(request)
        path = self.contents.path(request.path_params["hash"])
        size = path.stat().st_size
        if (wanted := wanted_range(request, size)) is None:
            return beyond(size)
        return answer(request, size, wanted, _blocks(path, *wanted), "binary/octet-stream")


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def wanted_range(request: Request, size: int) -> tuple[int, int] | None:
    """Bytes asked for, end exclusive; all without a Range header; None: not within ``size``."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
    if not found or found[0] == "bytes=-":
        return 0, size
    if not found[1]:
        start, end = max(0, size - int(found[2])), size
    else:
        start, end = int(found[1]), min(size, int(found[2]) + 1 if found[2] else size)
    return (start, end) if start < end else None


def beyond(size: int) -> Response:
    return Response(status_code=416, headers={"Content-Range": f"bytes */{size}"})


def answer(
    request: Request, size: int, part: tuple[int, int], body: Iterator[bytes], kind: str, **more: str
) -> Response:
    """200 or 206 with a body that is made while it is sent."""
    start, end = part
    headers = {"Accept-Ranges": "bytes", "Content-Length": str(end - start), "Content-Type": kind, **more}
    if "range" in request.headers:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    status = 206 if "range" in request.headers else 200
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers)
    return StreamingResponse(body, status, headers)


def _blocks(path: Path, start: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        for at in range(start, end, BLOCK_BYTES):
            yield file.read(min(BLOCK_BYTES, end - at))


def _runs(terms: list[Term]) -> list[tuple[int, int, str]]:
    """Chunks to fetch of each xorb: runs that touch or overlap are one."""
    merged: list[tuple[int, int, str]] = []
    for term in sorted(terms, key=lambda term: (term.xorb, term.first)):
        if merged and merged[-1][2] == term.xorb and term.first <= merged[-1][1]:
            first, last, xorb = merged[-1]
            merged[-1] = (first, max(last, term.last), xorb)
        else:
            merged.append((term.first, term.last, term.xorb))
    return merged


def main(folder: str, options: str) -> None:
    def leave_with_parent() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    server = Server(Path(folder), Options(**json.loads(options)))
    threading.Thread(target=leave_with_parent, daemon=True).start()
    print(server.endpoint, flush=True)
    server.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
