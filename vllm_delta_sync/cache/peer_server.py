"""``PeerServer`` serves an ``ObjectServer`` over HTTP, for ``delta-sync mirror``."""

import re

from vllm_delta_sync.bucket.peer import CALLER_HEADER, OBJECTS_PATH, PROGRESS_HEADER
from vllm_delta_sync.cache.object_server import DIGEST, ObjectServer, Slice
from vllm_delta_sync.errors import DeltaSyncError, NotFoundError, UsageError
from vllm_delta_sync.http_server import REQUEST_SECONDS, SmallHandler, SmallServer
from vllm_delta_sync.settings import MIN_BYTES_PER_SECOND

_PATH = re.compile(rf"{OBJECTS_PATH}({DIGEST})")


class PeerServer(SmallServer):
    """Serves ``OBJECTS_PATH`` and nothing else, one request per connection.

    A client has ``REQUEST_SECONDS`` to send its request; to take the answer it has one more second per MB.

    Attributes:
        served: bytes sent so far, or being sent.
    """

    def __init__(self, host: str, port: int, objects: ObjectServer) -> None:
        self.objects = objects
        self.served = 0
        super().__init__(host, port, _PeerHandler)


class _PeerHandler(SmallHandler):
    server: PeerServer

    def do_GET(self) -> None:
        objects, path = self.server.objects, _PATH.fullmatch(self.path)
        if not objects.allows(self.headers.get("Authorization", "")):
            self._answer(401, "the token is missing or wrong", {"www-authenticate": "Bearer"})
        elif path is None:
            self._answer(404, "not found")
        elif objects.is_cache(self.headers.get(CALLER_HEADER)):
            self._answer(421, "the request comes from this cache itself")
        else:
            try:
                self.extend(REQUEST_SECONDS)
                found = objects.find(path[1], self.headers.get("Range"))
            except DeltaSyncError as error:
                self._answer(
                    404 if isinstance(error, NotFoundError) else 400 if isinstance(error, UsageError) else 503,
                    error.message,
                )
                return
            if found is None:
                self._answer(202, "being fetched; ask again", {PROGRESS_HEADER: objects.progress(path[1])})
            else:
                self._send(found)

    def _send(self, found: Slice) -> None:
        try:
            self.extend(REQUEST_SECONDS + found.length / MIN_BYTES_PER_SECOND)
            self.send_response(found.status)
            for name, value in found.headers.items():
                self.send_header(name, value)
            self.end_headers()
            for data in found.chunks():
                # Before the client can know of them, and end this process.
                with self.server.lock:
                    self.server.served += len(data)
                self.wfile.write(data)
        finally:
            found.close()

    def _answer(self, code: int, text: str, headers: dict[str, str] | None = None) -> None:
        self.answer(code, f"{text}\n".encode(), "text/plain", headers or {})
