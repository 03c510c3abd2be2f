"""A server on loopback that speaks the part of the Hub's protocol by which models are read."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """One model, ``org/model``, whose branch ``main`` is at ``COMMIT``.

    Attributes:
        folder: its files. asked: method and path of every request.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.asked: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def log_message(self, format: str, *args: object) -> None:
        return None

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        api = "/api/models/org/model/"
        if path in (f"{api}revision/main", f"{api}revision/{COMMIT}"):
            self._send({}, json.dumps({"id": "org/model", "sha": COMMIT, "siblings": []}).encode(), body)
        elif path == f"{api}tree/{COMMIT}":
            self._send({}, json.dumps([self._entry(file) for file in self._files()]).encode(), body)
        elif path.startswith(f"/org/model/resolve/{COMMIT}/"):
            data = (self.server.folder / path.partition(f"{COMMIT}/")[2]).read_bytes()
            self._send({"ETag": f'"{sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}, data, body)
        else:
            code = "RevisionNotFound" if path.startswith(api) else "RepoNotFound"
            self._send({"X-Error-Code": code}, b"{}", body, 404)

    def _files(self) -> list[Path]:
        return [file for file in sorted(self.server.folder.rglob("*")) if file.is_file()]

    def _entry(self, file: Path) -> dict[str, object]:
        data = file.read_bytes()
        name = file.relative_to(self.server.folder).as_posix()
        return {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}

    def _send(self, headers: dict[str, str], data: bytes, body: bool, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    """Serve a model's files until the end of the block."""
    with Hub(folder) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
