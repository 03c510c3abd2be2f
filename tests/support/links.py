"""Slow links on a fast machine: TCP connections that pass through a line of given rate and delay, in userspace.

A link joins one machine to the others. It has two ways, up and down; each sends bytes one after the other at the link's
rate, whatever connection they belong to, and delivers them a fixed time later. A new connection waits one round trip
before its first byte, as a handshake would have it; where asked for, it starts slowly, as TCP does. Not imitated: loss,
TLS, headers of packets. No rights are needed.

The links run in a process of their own, which ``Links`` starts and talks to.
"""

import asyncio
import contextlib
import multiprocessing
import threading
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

HOST = "127.0.0.1"
CHUNK_BYTES = 16 * 1024
QUEUE_SECONDS = 0.02
"""Bytes that stand in line, in time: enough for the line never to be idle because this process woke up late."""
UNDERWAY_CHUNKS = 512
"""Of one connection: where the receiving end does not read, the sending one is held up."""
FIRST_WINDOW_BYTES = 14_600
"""Ten packets: what TCP sends before it has heard anything (RFC 6928)."""
IDLE_SECONDS = 1.0
"""After so long without traffic a connection starts slowly again."""

Passed = dict[str, int]
"""Bytes that a link has passed: ``up`` and ``down``."""


class Way:
    """One direction of a link.

    Attributes:
        passed: bytes sent so far. delay: seconds on the way.
    """

    def __init__(self, bytes_per_second: float, delay_seconds: float) -> None:
        self.passed = 0
        self.delay = delay_seconds
        self._rate = bytes_per_second
        self._free = 0.0

    async def room(self) -> None:
        """Wait until no more than ``QUEUE_SECONDS`` stand in line."""
        while (excess := self._free - time.monotonic() - QUEUE_SECONDS) > 0:
            await asyncio.sleep(excess)

    def send(self, count: int) -> float:
        """Put so many bytes in line; the time at which they arrive."""
        self._free = max(self._free, time.monotonic()) + count / self._rate
        self.passed += count
        return self._free + self.delay


class Window:
    """What one direction of a connection may have under way: it grows by all that is acknowledged."""

    def __init__(self) -> None:
        self._size = FIRST_WINDOW_BYTES
        self._underway = 0
        self._acknowledged: deque[tuple[float, int]] = deque()
        self._sent = 0.0

    async def room(self) -> int:
        """Wait until something may be sent; how many bytes."""
        while True:
            now = time.monotonic()
            self._settle(now)
            if self._underway < self._size:
                return self._size - self._underway
            await asyncio.sleep(self._acknowledged[0][0] - now)

    def send(self, count: int, acknowledged: float) -> None:
        """So many bytes are under way until that time."""
        now = time.monotonic()
        self._settle(now)
        if not self._underway and now - self._sent > IDLE_SECONDS:
            self._size = FIRST_WINDOW_BYTES
        self._sent = now
        self._underway += count
        self._acknowledged.append((acknowledged, count))

    def _settle(self, now: float) -> None:
        while self._acknowledged and self._acknowledged[0][0] <= now:
            count = self._acknowledged.popleft()[1]
            self._underway -= count
            self._size += count


@dataclass(frozen=True)
class Link:
    """A machine's connection to all others. ``up`` leaves the machine, ``down`` comes to it."""

    up: Way
    down: Way
    round_trip: float
    slow_start: bool

    @classmethod
    def make(cls, bytes_per_second: float, round_trip_seconds: float, slow_start: bool) -> "Link":
        """A link that is the same both ways; half a round trip each."""
        ways = Way(bytes_per_second, round_trip_seconds / 2), Way(bytes_per_second, round_trip_seconds / 2)
        return cls(*ways, round_trip_seconds, slow_start)

    async def forward(self, target: tuple[str, int], inward: bool = False, host: str = HOST) -> int:
        """Pass connections on to an address; the port of ``host`` at which clients find it.

        Args:
            inward: the target is the machine at the end of this link, and clients are elsewhere; otherwise the clients
                are that machine.
        """
        there, back = (self.down, self.up) if inward else (self.up, self.down)

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(self.round_trip)
            try:
                far_reader, far_writer = await asyncio.open_connection(*target, limit=CHUNK_BYTES)
            except OSError:
                writer.close()
                return
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(_pump(reader, far_writer, there, self._window()))
                    both.create_task(_pump(far_reader, writer, back, self._window()))
            except* OSError:
                pass  # one end is gone: so is the other
            finally:
                writer.close()
                far_writer.close()

        server = await asyncio.start_server(carry, host, 0, limit=CHUNK_BYTES)
        return int(server.sockets[0].getsockname()[1])

    def _window(self) -> Window | None:
        return Window() if self.slow_start else None


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way, window: Window | None) -> None:
    """Carry one direction of a connection until its end."""
    underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(UNDERWAY_CHUNKS)
    async with asyncio.TaskGroup() as group:
        group.create_task(_deliver(underway, writer))
        while True:
            await way.room()
            data = await reader.read(CHUNK_BYTES if window is None else min(CHUNK_BYTES, await window.room()))
            arrives = way.send(len(data))
            if window is not None:
                window.send(len(data), arrives + way.delay)
            await underway.put((arrives, data))
            if not data:
                return


async def _deliver(underway: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    while True:
        arrives, data = await underway.get()
        await asyncio.sleep(max(0.0, arrives - time.monotonic()))
        if not data:
            with contextlib.suppress(OSError):
                writer.write_eof()
            return
        writer.write(data)
        await writer.drain()


class Links:
    """All links, in a process that ends with this one; any thread may ask.

    Attributes:
        process: the links' own.
    """

    def __init__(self, bits_per_second: float, round_trip_seconds: float, slow_start: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        made = (theirs, bits_per_second / 8, round_trip_seconds, slow_start)
        self.process = context.Process(target=_serve, args=made, daemon=True)
        self.process.start()
        theirs.close()
        self._lock = threading.Lock()

    def forward(self, link: str, port: int, *, host: str = HOST, target: str = HOST, inward: bool = False) -> int:
        """A port of ``host`` through which this link's machine reaches ``port`` of ``target``.

        A link is made when it is first named.

        Args:
            inward: the other way round: through which others reach it on the link's machine.

        Raises:
            RuntimeError: the process is gone.
        """
        return int(self._ask((link, (target, port), inward, host)))

    def passed(self) -> dict[str, Passed]:
        """Bytes so far, of every link. Raises RuntimeError: the process is gone."""
        answer: dict[str, Passed] = self._ask(None)
        return answer

    def _ask(self, question: tuple[Any, ...] | None) -> Any:
        with self._lock:
            try:
                self._pipe.send(question)
                return self._pipe.recv()
            except (EOFError, OSError) as error:
                raise RuntimeError("the process of the links is gone") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.join()
        self._pipe.close()


def difference(after: dict[str, Passed], before: dict[str, Passed]) -> dict[str, Passed]:
    """Bytes that passed between two calls of ``Links.passed``."""
    none = {"up": 0, "down": 0}
    return {name: {way: ways[way] - before.get(name, none)[way] for way in ways} for name, ways in after.items()}


def _serve(pipe: Connection, bytes_per_second: float, round_trip: float, slow_start: bool) -> None:
    """Answer questions until the other end of the pipe is gone."""
    links: dict[str, Link] = {}
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    with contextlib.suppress(EOFError):
        while True:
            question = pipe.recv()
            if question is None:
                pipe.send({name: {"up": link.up.passed, "down": link.down.passed} for name, link in links.items()})
                continue
            name, target, inward, host = question
            links.setdefault(name, Link.make(bytes_per_second, round_trip, slow_start))
            work = links[name].forward(target, inward, host)
            pipe.send(asyncio.run_coroutine_threadsafe(work, loop).result())
