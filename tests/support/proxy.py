"""A bad network: a TCP proxy on the loopback interface that cuts, resets, stalls, throttles and delays.

with TcpProxy(server_port) as proxy:
    client.connect(("127.0.0.1", proxy.port))
    proxy.stall()
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any, Self

HOST = "127.0.0.1"
CHUNK_BYTES = 64 * 1024
JOIN_SECONDS = 120


class TcpProxy:
    """Forwards each connection to ``target_port``; in a thread of its own.

    Attributes:
        port: where clients connect; stays the same. connections: how many were accepted.
    """

    def __init__(self, target_port: int, host: str = HOST) -> None:
        self._host, self._target = host, (HOST, target_port)
        self._carried: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._rate: float | None = None
        self._delay, self._delayed = 0.0, 0
        self._abruptly = False
        self.port = self.connections = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.resume()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut(self) -> None:
        """End all connections, and refuse new ones until ``resume``."""
        self._run(self._end_all(listening=False))

    def reset(self) -> None:
        """End all connections with RST; new ones are welcome."""
        self._run(self._end_all(abruptly=True))

    def stall(self) -> None:
        """Pass nothing on until ``resume``; connections stay, and new ones are accepted and stand still too."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def throttle(self, bytes_per_s: float) -> None:
        """Pass so much on at most, in each direction of each connection, until ``resume``."""
        self._rate = bytes_per_s

    def delay(self, seconds: float, connections: int) -> None:
        """Have the next so many connections wait before they begin, so that later ones overtake them."""
        self._delay, self._delayed = seconds, connections

    def resume(self) -> None:
        """A good network again."""
        self._rate, self._delayed = None, 0
        self._run(self._listen())

    def close(self) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(JOIN_SECONDS)

    async def _listen(self) -> None:
        self._flowing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._carry, self._host, self.port, limit=CHUNK_BYTES)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _end_all(self, listening: bool = True, abruptly: bool = False) -> None:
        if self._server is not None and not listening:
            self._server.close()
            self._server = None
        self._abruptly = abruptly
        for task in self._carried:
            task.cancel()
        await asyncio.gather(*self._carried, return_exceptions=True)
        self._abruptly = False

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carried.add(task)
        self.connections += 1
        wait = self._delay if self._delayed else 0.0
        self._delayed = max(0, self._delayed - 1)
        writers = [writer]
        try:
            await asyncio.sleep(wait)
            far_reader, far_writer = await asyncio.open_connection(*self._target, limit=CHUNK_BYTES)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, far_writer))
                both.create_task(self._pump(far_reader, writer))
        except* (OSError, asyncio.CancelledError):
            pass  # one side is gone, or the proxy ends both: so is the other
        finally:
            self._carried.discard(task)
            for each in writers:
                if self._abruptly and not each.is_closing():
                    linger = struct.pack("ii", 1, 0)
                    each.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            rate = self._rate
            data = await reader.read(CHUNK_BYTES if rate is None else max(1, min(CHUNK_BYTES, int(rate / 20))))
            if rate is not None:
                await asyncio.sleep(len(data) / rate)
            await self._flowing.wait()
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()
