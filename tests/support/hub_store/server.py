"""The loopback Hub as one ASGI application, and as a server with two ports: the Hub and its content store."""

import json
import socket
from dataclasses import asdict, fields
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.hub_store.access import Access, Denied, Options
from tests.support.hub_store.content import ContentStore
from tests.support.hub_store.faults import Faults
from tests.support.hub_store.rest import Rest
from tests.support.hub_store.store import Store

HOST = "127.0.0.1"
STOP_SECONDS = 120


class Server:
    """A server in the main thread.

    Attributes:
        endpoint: of the Hub, for HF_ENDPOINT. store: what it holds. faults: rules and record. options: may be changed.

    Args:
        folder: all state; a folder of an earlier server is served on. port: of the Hub; 0: any.
    """

    def __init__(self, folder: Path, port: int = 0, options: Options | None = None) -> None:
        self.options = options or Options()
        self.store = Store(folder, self.options.quota or None)
        self._sockets = [socket.create_server((HOST, port)), socket.create_server((HOST, 0))]
        self.endpoint, content = (f"http://{HOST}:{one.getsockname()[1]}" for one in self._sockets)
        self.access = Access(self.options, self.store, content)
        self.faults = Faults(self._application())
        config = uvicorn.Config(self.faults, log_level="critical", lifespan="off", proxy_headers=False)
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Serve until the process ends."""
        self._server.run(self._sockets)

    def change(self, **options: object) -> None:
        """Change options. Raises TypeError: there is no such option."""
        known = {field.name for field in fields(Options)}
        if options.keys() - known:
            raise TypeError(f"unknown options {sorted(options.keys() - known)}")
        for name, value in options.items():
            setattr(self.options, name, value)
        self.store.quota = self.options.quota or None

    def _application(self) -> Starlette:
        routes = Rest(self.store, self.access).routes()
        routes += ContentStore(self.store, self.access).routes()
        routes += [
            Route("/_faults", self._steer_faults, methods=["GET", "POST", "DELETE"]),
            Route("/_requests", self._show_requests, methods=["GET", "DELETE"]),
            Route("/_options", self._steer_options, methods=["GET", "POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={Denied: _denied})

    async def _steer_faults(self, request: Request) -> Response:
        if request.method == "DELETE":
            self.faults.clear(request.query_params.get("path"))
        if request.method == "POST":
            try:
                self.faults.add(**json.loads(await request.body()))
            except (TypeError, ValueError) as error:
                return JSONResponse({"error": str(error)}, 400)
        return JSONResponse(self.faults.pending())

    async def _show_requests(self, request: Request) -> Response:
        if request.method == "DELETE":
            self.faults.forget()
        return JSONResponse(self.faults.requests())

    async def _steer_options(self, request: Request) -> Response:
        if request.method == "POST":
            try:
                self.change(**json.loads(await request.body()))
            except TypeError as error:
                return JSONResponse({"error": str(error)}, 400)
        return JSONResponse(asdict(self.options))


async def _denied(request: Request, error: Exception) -> Response:
    if not isinstance(error, Denied):
        raise error
    return error.answer
