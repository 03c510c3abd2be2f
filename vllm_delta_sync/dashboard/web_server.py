"""``DashboardServer`` serves the page and its document over HTTP, for ``delta-sync dashboard``; it only reads."""

import ipaddress
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import urlsplit

from vllm_delta_sync.dashboard.page import encode_overview, live_page, page_headers
from vllm_delta_sync.errors import UsageError

REQUEST_SECONDS = 10.0
"""Longest time for a client to send its request, and to take a part of the answer."""


class DashboardServer(ThreadingTCPServer):
    """Serves ``/`` and ``/overview`` until ``shutdown``.

    Args:
        host, port: to listen at; port 0 means any free one. overview: returns the page's document; called in threads.

    Raises:
        UsageError: the address cannot be used.
    """

    # An HTTPServer would look up this machine's name, and wait for a DNS server that does not answer.
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, host: str, port: int, overview: Callable[[], dict[str, Any]]) -> None:
        self.overview = overview
        self.loopback = _is_loopback(host)
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"cannot listen at {_bracketed(host)}:{port}: {reason}; name another --host or --port"
            ) from error

    @property
    def url(self) -> str:
        """Where to find the page."""
        host, port = self.server_address[:2]
        return f"http://{_bracketed(str(host))}:{port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a browser may close a connection at any time."""


class _Handler(BaseHTTPRequestHandler):
    server: DashboardServer
    timeout = REQUEST_SECONDS
    server_version = "delta-sync"
    sys_version = ""

    def do_GET(self) -> None:
        if self._is_foreign():
            self._answer(403, b"pages of other sites may not read this page\n", "text/plain; charset=utf-8")
        elif self.path == "/":
            self._answer(200, live_page(), "text/html; charset=utf-8")
        elif self.path == "/overview":
            self._answer(200, encode_overview(self.server.overview()), "application/json")
        else:
            self._answer(404, b"not found\n", "text/plain; charset=utf-8")

    def _is_foreign(self) -> bool:
        """Return whether a page of another site may have sent the request."""
        site, mode = self.headers.get("Sec-Fetch-Site", "none"), self.headers.get("Sec-Fetch-Mode")
        if site not in ("none", "same-origin") and mode != "navigate":
            return True
        # DNS rebinding: another site's name may be made to resolve to this machine. Host shows the name.
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            return True
        return self.server.loopback and not _is_loopback(host)

    def _answer(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        for name, value in {**page_headers(), "content-type": kind, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
