"""A bad network: a TCP proxy on the loopback interface that cuts, resets, stalls, throttles and delays.

with TcpProxy(server_port) as proxy:
    client.connect(("127.0.0.1", proxy.port))
    proxy.stall()
"""

import select
import socket
import struct
import threading
import time
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"
CHUNK_BYTES = 64 * 1024
JOIN_SECONDS = 120
STEP_SECONDS = 0.01


class TcpProxy:
    """Forwards each connection to ``target_port``; threads of its own.

    Attributes:
        port: where clients connect; stays the same. connections: how many were accepted.
        forwarded: bytes passed on, both ways together.
    """

    def __init__(self, target_port: int, target_host: str = HOST, host: str = HOST) -> None:
        self._host = host
        self._target = (target_host, target_port)
        self._lock = threading.Lock()
        self._open: set[_End] = set()
        self._flowing = threading.Event()
        self._flowing.set()
        self._rate: float | None = None
        self._delay = 0.0
        self._delayed = 0
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self.port = 0
        self.connections = 0
        self.forwarded = 0
        self._listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def cut(self) -> None:
        """End all connections, and refuse new ones until ``resume``."""
        self._stop_listening()
        self._end_all(abruptly=False)

    def reset(self) -> None:
        """End all connections with RST; new ones are welcome."""
        self._end_all(abruptly=True)

    def stall(self) -> None:
        """Pass nothing on until ``resume``; connections stay, and new ones are accepted and stand still too."""
        self._flowing.clear()

    def throttle(self, bytes_per_s: float) -> None:
        """Pass so much on at most, in each direction of each connection, until ``resume``."""
        self._rate = bytes_per_s

    def delay(self, seconds: float, connections: int) -> None:
        """Have the next so many connections wait before they begin, so that later ones overtake them."""
        with self._lock:
            self._delay, self._delayed = seconds, connections

    def resume(self) -> None:
        """A good network again."""
        self._rate = None
        self.delay(0.0, 0)
        self._flowing.set()
        if self._listener is None:
            self._listen()

    def close(self) -> None:
        """End everything."""
        self._stop_listening()
        self._end_all(abruptly=False)

    def _listen(self) -> None:
        listener = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self._host, self.port))
        listener.listen()
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._acceptor = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        self._acceptor.start()

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None and self._acceptor is not None:
            # Closing alone does not end an accept in another thread.
            listener.shutdown(socket.SHUT_RDWR)
            self._acceptor.join(JOIN_SECONDS)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                wait = self._delay if self._delayed else 0.0
                self._delayed = max(0, self._delayed - 1)
                end = _End()
                self._open.add(end)
            threading.Thread(target=self._carry, args=(client, wait, end), daemon=True).start()

    def _carry(self, client: socket.socket, wait: float, end: "_End") -> None:
        """The life of one connection; only this thread closes its sockets."""
        sockets = [client]
        try:
            if not end.came.wait(wait):
                sockets.append(socket.create_connection(self._target, timeout=JOIN_SECONDS))
                for each in sockets:
                    each.setblocking(False)
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                back = threading.Thread(target=self._pump, args=(sockets[1], client, end), daemon=True)
                back.start()
                self._pump(client, sockets[1], end)
                back.join()
        except OSError:
            pass
        finally:
            for each in sockets:
                if end.abrupt:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.close()
            with self._lock:
                self._open.discard(end)

    def _pump(self, source: socket.socket, sink: socket.socket, end: "_End") -> None:
        try:
            while not end.came.is_set():
                if not select.select([source], [], [], STEP_SECONDS)[0]:
                    continue
                rate = self._rate
                data = source.recv(CHUNK_BYTES if rate is None else max(1, min(CHUNK_BYTES, int(rate / 20))))
                if rate is not None:
                    end.came.wait(len(data) / rate)
                while not self._flowing.wait(STEP_SECONDS) and not end.came.is_set():
                    pass
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                while data and not end.came.is_set():
                    if select.select([], [sink], [], STEP_SECONDS)[1]:
                        sent = sink.send(data)
                        data = data[sent:]
                        with self._lock:
                            self.forwarded += sent
        except OSError:
            # One side is gone: so is the other.
            end.came.set()

    def _end_all(self, abruptly: bool) -> None:
        with self._lock:
            ends = list(self._open)
        for end in ends:
            end.abrupt = abruptly
            end.came.set()
        deadline = time.monotonic() + JOIN_SECONDS
        while time.monotonic() < deadline:
            with self._lock:
                if self._open.isdisjoint(ends):
                    return
            time.sleep(0.002)


class _End:
    """Of one connection: whether it came, and how."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.abrupt = False
