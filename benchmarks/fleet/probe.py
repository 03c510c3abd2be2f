"""What a link really is: round trip and throughput, measured through it like anybody's traffic."""

import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PINGS = 9
SECONDS = 0.5
"""How long the link is filled, each way."""
PATIENCE_SECONDS = 60.0
PIECE = bytes(64 * 1024)
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Measured:
    """``round_trip_ms``: median of a byte there and back. ``up_mbit_s`` and ``down_mbit_s``: what arrives."""

    round_trip_ms: float
    up_mbit_s: float
    down_mbit_s: float


@contextmanager
def far_end() -> Iterator[int]:
    """Port of a server for ``measure``, until the block ends."""
    with socket.create_server((HOST, 0)) as listener:
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            # Closing alone does not end an accept in another thread.
            listener.shutdown(socket.SHUT_RDWR)


def measure(port: int, bits_per_second: float) -> Measured:
    """Measure the link whose near end is at this port. Raises OSError: the connection failed."""
    count = int(SECONDS * bits_per_second / 8)
    with socket.create_connection((HOST, port), PATIENCE_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        exchange(connection, 0, 0)
        empty = statistics.median(exchange(connection, 0, 0) for _ in range(PINGS))
        up, down = exchange(connection, count, 0), exchange(connection, 0, count)
    return Measured(1e3 * empty, 8e-6 * count / (up - empty), 8e-6 * count / (down - empty))


def exchange(connection: socket.socket, sent: int, wanted: int) -> float:
    """Seconds until so many bytes were sent and so many have come back, and a byte of acknowledgement."""
    start = time.monotonic()
    connection.sendall(struct.pack("<QQ", sent, wanted))
    for at in range(0, sent, len(PIECE)):
        connection.sendall(PIECE[: sent - at])
    _drain(connection, wanted + 1)
    return time.monotonic() - start


def _drain(connection: socket.socket, count: int) -> None:
    """Read exactly so many bytes. Raises ConnectionError: there are fewer."""
    while count:
        data = connection.recv(min(count, len(PIECE)))
        if not data:
            raise ConnectionError("the other end closed the connection")
        count -= len(data)


def _accept(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while len(header := connection.recv(16, socket.MSG_WAITALL)) == 16:
                count, wanted = struct.unpack("<QQ", header)
                _drain(connection, count)
                for at in range(0, wanted, len(PIECE)):
                    connection.sendall(PIECE[: wanted - at])
                connection.sendall(b".")
        except OSError:
            return
