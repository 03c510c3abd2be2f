"""``SmallServer`` and ``SmallHandler``: what the servers of ``delta-sync dashboard`` and ``mirror`` share."""

import ipaddress
import socket
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from vllm_delta_sync.errors import UsageError

REQUEST_SECONDS = 10.0
"""Longest time for a client to send its request, and to take a part of the answer."""
MAX_CONNECTIONS = 512
"""Connections beyond are closed at once."""


def is_loopback(host: str) -> bool:
    """Return whether a host is an address of this machine's loopback; a name is none."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


class SmallServer(ThreadingTCPServer):
    """Serves HTTP until ``shutdown``, each connection in a thread, with one request.

    A connection is cut when its deadline has passed: a timeout of the socket begins again with each byte.

    Attributes:
        lock: of ``deadlines``. deadlines: connection → when it is cut if the exchange has not ended.

    Args:
        host, port: to listen at; port 0 means any free one.

    Raises:
        UsageError: the address cannot be used.
    """

    # An HTTPServer would look up this machine's name, and wait for a DNS server that does not answer.
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: "type[SmallHandler]") -> None:
        self.lock = threading.Lock()
        self.deadlines: dict[socket.socket, float] = {}
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            super().__init__((host, port), handler)
        except (OSError, OverflowError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"cannot listen at {_bracketed(host)}:{port}: {reason}; name another --host or --port"
            ) from error

    @property
    def url(self) -> str:
        """Its own address."""
        host, port = self.server_address[:2]
        return f"http://{_bracketed(str(host))}:{port}"

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether there is room for another connection."""
        with self.lock:
            if len(self.deadlines) >= MAX_CONNECTIONS:
                return False
            self.deadlines[request] = time.monotonic() + REQUEST_SECONDS
        return True

    def service_actions(self) -> None:
        """Cut connections that have taken too long; called twice a second, and after each new one."""
        now = time.monotonic()
        with self.lock:
            late = [connection for connection, end in self.deadlines.items() if end < now]
        for connection in late:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended meanwhile

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and make room for another."""
        with self.lock:
            self.deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client may close its connection at any time."""


class SmallHandler(BaseHTTPRequestHandler):
    """Answers one request; logs nothing."""

    server: SmallServer
    timeout = REQUEST_SECONDS
    server_version = "delta-sync"
    sys_version = ""

    def answer(self, code: int, body: bytes, kind: str, headers: Mapping[str, str]) -> None:
        """Send an answer. Args: kind: its content type."""
        self.extend(REQUEST_SECONDS)
        self.send_response(code)
        for name, value in {"content-type": kind, "content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def extend(self, seconds: float) -> None:
        """Give the exchange so long from now on."""
        with self.server.lock:
            self.server.deadlines[self.connection] = time.monotonic() + seconds

    def log_message(self, *_: object) -> None:
        return


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
