"""``SharedObjects``: the objects in a server's cache, for other servers of the run."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.bucket.peer import CALLER_HEADER, PROGRESS_HEADER
from vllm_delta_sync.cache.object_server import ObjectServer, Slice
from vllm_delta_sync.engine.api.access import HEADERS, AdminRefused, BadRequest
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.settings import MIN_BYTES_PER_SECOND, Settings

MAX_REQUESTS = 32
"""Requests for objects that one API server answers at once; more are asked to come again."""
SEND_SECONDS = 10.0
"""Longest time for a client to take an object, with one more second per MB."""

_threads = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="delta-sync-objects")


class SharedObjects:
    """The objects in the cache of this node; each API server serves them, whichever process has fetched them.

    Attributes:
        objects: None if this node has no cache. busy: requests that are being answered.
        progress: grows while answers are sent, and with each that ends.
    """

    def __init__(self, settings: Settings) -> None:
        folder, store = settings.cache_folder(), settings.store().without_copies()
        self.objects: ObjectServer | None = None
        if folder is not None:
            self.objects = ObjectServer(
                folder, settings.cache_bytes, lambda: open_bucket(settings.bucket, store), settings.admin_token()
            )
        self.busy = self.progress = 0

    async def answer(self, request: Request, digest: str) -> Response:
        """Answer a request for an object.

        Raises:
            AdminRefused: the token is missing or wrong, or none is set. As ``ObjectServer.find``.
        """
        if request.app.state.delta_sync_token is None:
            raise AdminRefused("no admin token is set, so no object is served; set it to the same on all servers")
        if self.objects is None:
            raise NotFoundError("this server has no cache of objects; set cache_dir")
        if not self.objects.allows(request.headers.get("authorization", "")):
            raise AdminRefused("the token of the run is missing or wrong; set the same admin token on both", 401)
        if self.objects.is_cache(request.headers.get(CALLER_HEADER)):
            raise BadRequest("the request comes from this cache itself", 421)
        if self.busy >= MAX_REQUESTS:
            return Response("busy", 202, {**HEADERS, PROGRESS_HEADER: str(self.progress)})
        self.busy += 1
        found: Slice | None = None
        try:
            call = _threads.submit(self.objects.find, digest, request.headers.get("range"))
            found = await asyncio.wrap_future(call)
        finally:
            if found is None:
                self.done()
        if found is None:
            return Response("being fetched", 202, {**HEADERS, PROGRESS_HEADER: self.objects.progress(digest)})
        return _SliceResponse(found, self)

    def done(self) -> None:
        """Count a request as answered."""
        self.busy -= 1
        self.progress += 1


class _SliceResponse(Response):
    def __init__(self, found: Slice, owner: SharedObjects) -> None:
        super().__init__(status_code=found.status, headers={**HEADERS, **found.headers})
        self._found, self._owner = found, owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        chunks, loop = self._found.chunks(), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(SEND_SECONDS + self._found.length / MIN_BYTES_PER_SECOND):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                while data := await loop.run_in_executor(_threads, next, chunks, b""):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    self._owner.progress += 1
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            return  # the server closes a connection whose answer is not complete
        finally:
            self._found.close()
            self._owner.done()
