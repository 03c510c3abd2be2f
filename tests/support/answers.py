"""A web server on loopback that answers as it is told, and keeps what it was asked.

For what no real store does on order."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Asked:
    """A request; names of headers are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """What is sent back. ``cut``: the connection ends after so many bytes of the body."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None


class Answers:
    """The server: ``reply`` may be changed at any time.

    Attributes:
        asked: all requests, in order.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[Asked] = []
        self.reply: Callable[[Asked], Answer] = lambda asked: Answer(404)


@contextmanager
def answering() -> Iterator[Answers]:
    """Serve until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                self.close_connection = True  # a client that has read enough hangs up

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            asked = Asked(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            answers.asked.append(asked)
            self._send(answers.reply(asked))

        def _send(self, answer: Answer) -> None:
            self.send_response(answer.status)
            headers = {"Content-Length": str(len(answer.body)), **answer.headers}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body if answer.cut is None else answer.body[: answer.cut])
            if answer.cut is not None:
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    answers = Answers(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield answers
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def silent() -> Iterator[str]:
    """URL of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def dripping() -> Iterator[str]:
    """URL of a server that sends one byte of an answer after another, without an end."""
    ended = threading.Event()

    def drip() -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
            while not ended.wait(0.05):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        ended.set()
        thread.join()


def closed_port() -> int:
    """A port of loopback that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def in_pieces(data: bytes, asked: Asked) -> Answer:
    """Serve ``data`` as a store or web server does: whole, a range of it, or its size."""
    headers = {"ETag": '"e"', "Last-Modified": "Sun, 22 Nov 2026 02:46:43 GMT", "Accept-Ranges": "bytes"}
    wanted = asked.headers.get("range")
    if wanted is None or asked.method == "HEAD":
        return Answer(200, data, headers)
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    start, end = int(first), min(int(last or len(data) - 1) + 1, len(data))
    if start >= len(data):
        return Answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
    return Answer(206, data[start:end], {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})


@contextmanager
def untrusted(folder: Path) -> Iterator[str]:
    """The address of a server with a certificate that no client trusts; a connection ends with its handshake."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    file, secret = folder / "server.pem", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file.write_bytes(secret + made.sign(key, SHA256()).public_bytes(Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def shake() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with suppress(OSError), connection:
                        context.wrap_socket(connection, server_side=True).close()

        pool.submit(shake)
        try:
            yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
