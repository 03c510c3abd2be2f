"""The content store's routes: xorbs, shards, reconstructions. It knows no chunk: each is uploaded anew."""

import json
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.hub_store import ranges
from tests.support.hub_store.access import READ, WRITE, Access, failure
from tests.support.hub_store.shard import Term, parse_files
from tests.support.hub_store.store import EMPTY, Store
from tests.support.hub_store.xorb import DamagedError, span

SYNC_PERFORMED, EXISTS = 1, 0


class ContentStore:
    """Routes under /v1 and /v2, and signed downloads of parts of xorbs."""

    def __init__(self, store: Store, access: Access) -> None:
        self._store, self._access = store, access

    def routes(self) -> list[Route]:
        return [
            Route("/v1/xorbs/{prefix}/{hash}", self.add_xorb, methods=["POST"]),
            Route("/v2/shards", self.add_shard, methods=["POST"]),
            Route("/v2/reconstructions/{hash}", self.reconstruct, methods=["GET"]),
            Route("/cdn/xorb/{hash}", self.xorb, methods=["GET", "HEAD"]),
        ]

    async def add_xorb(self, request: Request) -> Response:
        self._access.check_xet(request, WRITE)
        path = self._store.incoming()
        await ranges.save(request, path)
        try:
            fresh = await to_thread.run_sync(self._store.add_xorb, request.path_params["hash"], path)
        except DamagedError as error:
            path.unlink(missing_ok=True)
            return failure(400, str(error))
        return JSONResponse({"was_inserted": fresh})

    async def add_shard(self, request: Request) -> Response:
        """Answers with one line per step."""
        inner = self._access.check_xet(request, WRITE)
        try:
            fresh = self._add_files(inner, await request.body())
        except DamagedError as error:
            return failure(400, str(error))
        line = json.dumps({"type": "result", "result": SYNC_PERFORMED if fresh else EXISTS})
        return Response(line + "\n", media_type="application/x-ndjson")

    def _add_files(self, inner: str, shard: bytes) -> bool:
        """Raises DamagedError."""
        fresh = [self._store.add_content(inner, hash, terms) for hash, terms in parse_files(shard) if hash != EMPTY]
        return any(fresh)

    async def reconstruct(self, request: Request) -> Response:
        """One range per address; the form allows several."""
        found = self._find(request)
        if isinstance(found, Response):
            return found
        skip, terms = found
        fetch: dict[str, list[dict[str, Any]]] = {}
        for first, last, xorb in _runs(terms):
            url, start, end = self._address(xorb, first, last)
            part = {"chunks": {"start": first, "end": last}, "bytes": {"start": start, "end": end}}
            fetch.setdefault(xorb, []).append({"url": url, "ranges": [part]})
        return JSONResponse({"offset_into_first_range": skip, "terms": _written(terms), "xorbs": fetch})

    def _find(self, request: Request) -> tuple[int, list[Term]] | Response:
        inner = self._access.check_xet(request, READ)
        hash = request.path_params["hash"]
        if not self._store.holds(inner, hash):
            return failure(404, f"file {hash} is not known")
        content = self._store.content(hash)
        wanted = ranges.wanted(request, content.size)
        if wanted is None:
            return ranges.beyond(content.size)
        return self._store.cut(content, *wanted)

    def _address(self, xorb: str, first: int, last: int) -> tuple[str, int, int]:
        """Signed address of a run of chunks, and its bytes (end inclusive)."""
        start, end = span(self._store.index(xorb), first, last)
        return self._access.signed(f"/cdn/xorb/{xorb}", range=f"bytes={start}-{end - 1}"), start, end - 1

    async def xorb(self, request: Request) -> Response:
        self._access.check_signed(request)
        path = self._store.xorb_path(request.path_params["hash"])
        size = path.stat().st_size
        wanted = ranges.wanted(request, size)
        if wanted is None:
            return ranges.beyond(size)
        return ranges.answer(request, size, wanted, ranges.blocks(path, *wanted), Content_Type="binary/octet-stream")


def _written(terms: list[Term]) -> list[dict[str, Any]]:
    return [
        {"hash": term.xorb, "unpacked_length": term.length, "range": {"start": term.first, "end": term.last}}
        for term in terms
    ]


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
