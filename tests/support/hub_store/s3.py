"""The S3 gateway, through which objects are created: PUT of /s3/NAMESPACE/BUCKET/KEY. It checks no signatures."""

import re
import time
from xml.sax.saxutils import escape

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support.hub_store import hashing
from tests.support.hub_store.access import Access
from tests.support.hub_store.shard import Term
from tests.support.hub_store.store import EMPTY, RefusedError, Store
from tests.support.hub_store.xorb import CHUNK_BYTES, HEADER_BYTES, MAX_XORB_BYTES, raw_header

BYTES_PER_XORB = MAX_XORB_BYTES // (CHUNK_BYTES + HEADER_BYTES) * CHUNK_BYTES


class Gateway:
    """What obstore needs to create an object with one request."""

    def __init__(self, store: Store, access: Access) -> None:
        self._store, self._access = store, access

    def routes(self) -> list[Route]:
        return [Route("/s3/{space}/{name}/{key:path}", self.put, methods=["PUT"])]

    async def put(self, request: Request) -> Response:
        found = re.search(r"Credential=([^/]+)/", request.headers.get("authorization", ""))
        if not found or found[1] != self._access.options.s3_key:
            return _error(403, "InvalidAccessKeyId", "The access key id is not known")
        bucket = self._store.bucket("{space}/{name}".format_map(request.path_params))
        if bucket is None:
            return _error(404, "NoSuchBucket", "The specified bucket does not exist")
        absent = request.headers.get("if-none-match") == "*"
        hash = await to_thread.run_sync(self._take_in, bucket.inner, await request.body())
        kind, now = request.headers.get("content-type"), int(time.time() * 1000)
        try:
            made = self._store.put_file(bucket, request.path_params["key"], hash, now, kind, absent)
        except RefusedError as error:
            return _error(403, "QuotaExceeded" if "quota" in str(error) else "InvalidArgument", str(error))
        if made is None:
            return _error(412, "PreconditionFailed", "At least one of the preconditions did not hold")
        return Response(headers={"ETag": f'"{hash}"'})

    def _take_in(self, inner: str, data: bytes) -> str:
        """Cut plain bytes into chunks and xorbs, and give them to a bucket; the hash of the content.

        All chunks have the same length, so it differs from the hash that a Xet client finds.
        """
        chunks: list[tuple[bytes, int]] = []
        terms: list[Term] = []
        for start in range(0, len(data), BYTES_PER_XORB):
            part = data[start : start + BYTES_PER_XORB]
            pieces = [part[at : at + CHUNK_BYTES] for at in range(0, len(part), CHUNK_BYTES)]
            own = [(hashing.chunk_hash(piece), len(piece)) for piece in pieces]
            path = self._store.incoming()
            path.write_bytes(b"".join(raw_header(len(piece)) + piece for piece in pieces))
            xorb = hashing.text_of(hashing.tree_hash(own))
            self._store.add_xorb(xorb, path)
            terms.append(Term(xorb, 0, len(own), len(part)))
            chunks += own
        if not chunks:
            return EMPTY
        hash = hashing.text_of(hashing.file_hash(chunks))
        self._store.add_content(inner, hash, terms)
        return hash


def _error(status: int, code: str, message: str) -> Response:
    body = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
    return Response('<?xml version="1.0" encoding="UTF-8"?>' + body, status, media_type="application/xml")
