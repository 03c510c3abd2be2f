"""What a link really is: round trip and throughput, measured through it like anybody's traffic.

    python -m examples.fleet.probe HOST PORT BITS_PER_SECOND

measures from the machine it runs on, and prints the document of ``Measured``.
"""

import json
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from examples.fleet.links import Links
from examples.fleet.shaping import HOST

PINGS = 9
SECONDS = 0.5
"""How long the link is filled, each way."""
PATIENCE_SECONDS = 60.0
PIECE = bytes(64 * 1024)


@dataclass(frozen=True)
class Measured:
    """``round_trip_ms``: median of a byte there and back. ``up_mbit_s`` and ``down_mbit_s``: what arrives."""

    round_trip_ms: float
    up_mbit_s: float
    down_mbit_s: float

    def document(self) -> dict[str, float]:
        """For summary.json."""
        return {name: round(value, 2) for name, value in asdict(self).items()}


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


def measure(links: Links, link: str, far_port: int, bits_per_second: float) -> Measured:
    """Measure one link from its machine's end. Raises OSError: the connection failed."""
    return measure_at((HOST, links.forward(link, far_port)), bits_per_second)


def measure_at(address: tuple[str, int], bits_per_second: float) -> Measured:
    """Measure the link whose near end is at this address. Raises OSError: the connection failed."""
    count = int(SECONDS * bits_per_second / 8)
    with socket.create_connection(address, PATIENCE_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _exchange(connection, 0, 0)
        empty = statistics.median(_exchange(connection, 0, 0) for _ in range(PINGS))
        up, down = _exchange(connection, count, 0), _exchange(connection, 0, count)
    return Measured(1e3 * empty, 8e-6 * count / (up - empty), 8e-6 * count / (down - empty))


def _exchange(connection: socket.socket, sent: int, wanted: int) -> float:
    """Seconds until so many bytes were sent and so many have come back, and a byte of acknowledgement."""
    start = time.monotonic()
    connection.sendall(struct.pack("<QQ", sent, wanted))
    for at in range(0, sent, len(PIECE)):
        connection.sendall(PIECE[: sent - at])
    _drain(connection, wanted + 1)
    return time.monotonic() - start


def _drain(connection: socket.socket, count: int) -> bytes:
    """Read exactly so many bytes; the last of them. Raises ConnectionError: there are fewer."""
    data = b""
    while count:
        data = connection.recv(min(count, len(PIECE)))
        if not data:
            raise ConnectionError("the other end closed the connection")
        count -= len(data)
    return data


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
        while True:
            try:
                header = connection.recv(16, socket.MSG_WAITALL)
                if len(header) < 16:
                    return
                count, wanted = struct.unpack("<QQ", header)
                if count:
                    _drain(connection, count)
                for at in range(0, wanted, len(PIECE)):
                    connection.sendall(PIECE[: wanted - at])
                connection.sendall(b".")
            except OSError:
                return


if __name__ == "__main__":
    print(json.dumps(measure_at((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])).document()))
