"""Several API servers of one engine: one leads and follows the run, the others show what it shows and pass on what
they are asked.

Two controllers would fight over the same weights. So one of the processes, whoever holds the lock (``siblings``), has
the receiver; each other one keeps a connection to it, over which come the leader's status, whenever it changes, and
answers to requests. If the leader ends, one that waited for the lock leads: its receiver asks the ranks what they hold,
as after any restart. If the leader hangs, it still leads: nobody could tell what it might yet do; a pause of its own
ends by itself (``lease``).
"""

import asyncio
import fcntl
import json
import multiprocessing
import os
import stat
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vllm_delta_sync.engine.commit.transaction import Answer, error_answer, raise_if_error
from vllm_delta_sync.engine.follow.service import ReceiverService
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.errors import BusyError, DeltaSyncError, EngineError

LONGEST_SOCKET_PATH = 100
"""What the address of a local socket may have, with some to spare."""


@dataclass(frozen=True)
class ApiServerGroup:
    """The API servers that one process started.

    Attributes:
        folder: where they meet. launch: what names them there. index: of this one. count: of all.
    """

    folder: Path
    launch: str
    index: int
    count: int

    @property
    def socket(self) -> Path:
        """Where the one that leads listens."""
        return self.folder / f"{self.launch}.sock"

    def open_lock(self) -> int:
        """A file descriptor for ``lock`` and ``try_lock``; closing it lets the lock go."""
        path = self.folder / f"{self.launch}.lock"
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def siblings_of(client: Any) -> ApiServerGroup | None:
    """Those of the process behind an engine client; None if it is alone.

    Raises:
        EngineError: there is no safe place to meet, or no way to know where.
    """
    count = int(getattr(client.engine_core, "client_count", 1))
    if count == 1:
        return None
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        raise EngineError(
            f"--api-server-count is {count}, and this process was not started by the one that started the others: two "
            "controllers would fight; use 1"
        )
    folder = _private_folder(Path(tempfile.gettempdir()) / f"delta-sync-{os.getuid()}")
    _sweep(folder)
    found = ApiServerGroup(folder, f"{parent.pid}-{_started(parent.pid)}", int(client.engine_core.client_index), count)
    if len(str(found.socket)) > LONGEST_SOCKET_PATH:
        raise EngineError(f"{str(found.socket)!r} is too long for a socket's address; set TMPDIR to a shorter one")
    return found


def lock(descriptor: int) -> None:
    """Wait until no other process holds the lock, and take it.

    A record lock: it belongs to the process, so that none which this one forks keeps it.
    """
    fcntl.lockf(descriptor, fcntl.LOCK_EX)


def try_lock(descriptor: int) -> bool:
    """Take the lock if no other process holds it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _private_folder(path: Path) -> Path:
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EngineError(
            f"{str(path)!r}, where API servers meet, is not a folder that only this user can enter; remove it, or set "
            "TMPDIR to another place"
        )
    return path


def _sweep(folder: Path) -> None:
    """Remove what servers left whose parent is gone."""
    for path in folder.iterdir():
        pid, _, started = path.stem.partition("-")
        if pid.isdecimal() and _started(int(pid)) != started:
            path.unlink(missing_ok=True)


def _started(pid: int) -> str:
    """When a process was started, in the kernel's units: its number may be another's later."""
    try:
        # The name, in brackets, may have blanks and brackets in it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "gone" if Path("/proc/self").exists() else "unknown"


LONGEST_LINE = 1 << 24
CONNECT_SECONDS = 0.05
"""How often a server that follows tries to reach the one that leads, while there is none."""
LEADER_SECONDS = 60.0
"""How long a server waits at its start for another, which has the lock, to begin to lead."""
NOBODY = "none of this server's processes leads at the moment; ask again"


class StatusView(Protocol):
    """What is known of a receiver, at once and from any thread."""

    @property
    def served_version(self) -> int | None:
        """See Receiver."""

    @property
    def served_run(self) -> str | None:
        """See Receiver."""

    def status(self) -> Answer:
        """See Receiver; and ``server``: the number of this one, ``role``: leader or follower, ``servers``: all."""


class LeaderElection:
    """The receiver of a server, here or in the API server that leads.

    Args:
        make: makes the receiver, once this process leads.
        siblings: None if this process is the only one.
    """

    def __init__(self, make: Callable[[], ReceiverService], siblings: ApiServerGroup | None) -> None:
        self._make = make
        self._siblings = siblings
        self._desk: LeaderServer | None = None
        self._follower: FollowerClient | None = None
        self._following: asyncio.Task[None] | None = None
        self._lock = -1

    @property
    def receiver(self) -> StatusView:
        """What is known of the receiver."""
        return self._part

    def request(self, action: str, argument: Any = None) -> "Future[Any]":
        """See ReceiverService.request; passed on to the server that leads, if it is another."""
        return self._part.request(action, argument)

    @property
    def _part(self) -> "LeaderServer | FollowerClient":
        part = self._desk or self._follower
        if part is None:
            raise EngineError("this server has not begun to follow yet")
        return part

    async def start(self) -> None:
        """Lead, or follow the one that does.

        Raises:
            DeltaSyncError: this process leads, and its settings cannot be used; or nobody leads.
        """
        if self._siblings is None:
            self._desk = await self._lead()
            return
        self._lock = self._siblings.open_lock()
        if try_lock(self._lock):
            self._desk = await self._lead()
            logger.info("API server %d of %d leads", self._siblings.index, self._siblings.count)
            return
        follower = self._follower = FollowerClient(self._siblings)
        self._following = asyncio.create_task(follower.follow())
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._wait, args=(loop,), name="delta-sync-lock", daemon=True).start()
        try:
            await asyncio.wait_for(follower.settled.wait(), LEADER_SECONDS)
        except TimeoutError:
            raise EngineError(f"none of this server's processes led within {LEADER_SECONDS:.0f} s") from None

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: wait for the lock, which is free once the process that leads is gone."""
        lock(self._lock)
        with suppress(RuntimeError):  # the loop is closed: this process is ending too
            asyncio.run_coroutine_threadsafe(self._succeed(), loop)

    async def _succeed(self) -> None:
        logger.warning("the API server that led is gone; process %d leads now", os.getpid())
        try:
            self._desk = await self._lead()
        except Exception as error:  # noqa: BLE001  whatever it is, somebody else must be able to lead
            logger.critical("process %d cannot lead: %s: %s", os.getpid(), type(error).__name__, error)
            os.close(self._lock)
            return
        if self._following is not None and self._follower is not None:
            self._following.cancel()
            self._follower.lost("the server that led is gone, and this one leads now; ask again")
            self._follower.settled.set()

    async def _lead(self) -> "LeaderServer":
        service = self._make()
        desk = LeaderServer(self._siblings, service)
        service.show = desk.status
        await desk.open()
        service.start()
        return desk


class LeaderServer:
    """In the server that leads: tells the others what it shows, and does what they pass on."""

    def __init__(self, siblings: ApiServerGroup | None, service: ReceiverService) -> None:
        self._siblings = siblings
        self._service = service
        self._others: dict[asyncio.StreamWriter, tuple[int, int]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._news: set[asyncio.Event] = set()
        self.request = service.request

    @property
    def served_version(self) -> int | None:
        """See Receiver."""
        return self._service.receiver.served_version

    @property
    def served_run(self) -> str | None:
        """See Receiver."""
        return self._service.receiver.served_run

    def status(self) -> Answer:
        """See Receiver; and which API servers there are, and who leads."""
        index = 0 if self._siblings is None else self._siblings.index
        pids = sorted([(index, os.getpid()), *self._others.values()])
        servers = [
            {"server": each, "pid": pid, "role": "leader" if each == index else "follower"} for each, pid in pids
        ]
        return {**self._service.receiver.status(), "server": index, "role": "leader", "servers": servers}

    async def open(self) -> None:
        """Listen to the others, if there are any."""
        if self._siblings is None:
            return
        self._siblings.socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self._siblings.socket, limit=LONGEST_LINE)
        loop = asyncio.get_running_loop()
        self._service.receiver.board.watch(lambda: _soon(loop, self._tell))

    def _tell(self) -> None:
        for news in self._news:
            news.set()

    def _view(self) -> Answer:
        return {"status": self.status(), "served": self.served_version, "run": self.served_run}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        news = asyncio.Event()
        news.set()
        telling: asyncio.Task[None] | None = None
        try:
            hello = json.loads(await reader.readline())
            self._others[writer] = int(hello["index"]), int(hello["pid"])
            self._news.add(news)
            self._tell()
            telling = asyncio.create_task(self._tell_one(writer, news))
            while line := await reader.readline():
                task = asyncio.create_task(self._answer(writer, json.loads(line)))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
        except (OSError, ValueError, KeyError) as error:
            logger.debug("an API server that follows: %s", error)
        except asyncio.CancelledError:
            # The process ends. Nobody waits for this task but asyncio, which would log it as an error.
            return
        finally:
            self._news.discard(news)
            if telling is not None:
                telling.cancel()
            self._others.pop(writer, None)
            self._tell()
            writer.close()

    async def _tell_one(self, writer: asyncio.StreamWriter, news: asyncio.Event) -> None:
        with suppress(OSError):
            while True:
                await news.wait()
                # What changes while this is being written goes with the next.
                news.clear()
                await _write(writer, {"view": self._view()})

    async def _answer(self, writer: asyncio.StreamWriter, asked: Answer) -> None:
        try:
            done = self.request(asked["action"], asked["argument"])
            outcome: Answer = {"result": await asyncio.wrap_future(done)}
        except DeltaSyncError as error:
            outcome = error_answer(error)
        except Exception as error:  # it is the asking server's to show
            logger.exception("a request that was passed on failed unexpectedly")
            outcome = error_answer(EngineError(f"unexpected {type(error).__name__}: {error}"))
        with suppress(OSError):
            # With what is shown now: whoever asked must not be shown less than it was answered.
            await _write(writer, {"id": asked["id"], "view": self._view(), **outcome})


class FollowerClient:
    """In a server that does not lead: what the one that does shows, and the way to it.

    Attributes:
        settled: once it is known who leads.
    """

    def __init__(self, siblings: ApiServerGroup) -> None:
        self._siblings = siblings
        self._view: Answer | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._loop = asyncio.get_running_loop()
        self._asked: dict[int, Future[Any]] = {}
        self._number = 0
        self._own = {"server": siblings.index, "role": "follower"}
        self.settled = asyncio.Event()

    @property
    def served_version(self) -> int | None:
        """See Receiver; None while nobody leads."""
        view = self._view
        return None if view is None else view["served"]

    @property
    def served_run(self) -> str | None:
        """See Receiver."""
        view = self._view
        return None if view is None else view["run"]

    def status(self) -> Answer:
        """See Receiver, as of its last change.

        Raises:
            BusyError: nobody leads at the moment.
        """
        view = self._view
        if view is None:
            raise BusyError(NOBODY)
        return {**view["status"], **self._own}

    def request(self, action: str, argument: Any) -> "Future[Any]":
        """See ReceiverService.request. The future gets a BusyError if nobody leads, and an EngineError if whoever led
        ended before it answered."""
        future: Future[Any] = Future()
        self._loop.call_soon_threadsafe(self._ask, action, argument, future)
        return future

    def _ask(self, action: str, argument: Any, future: "Future[Any]") -> None:
        if not future.set_running_or_notify_cancel():
            return
        if self._writer is None:
            future.set_exception(BusyError(NOBODY))
            return
        self._number += 1
        self._asked[self._number] = future
        self._writer.write(_line({"id": self._number, "action": action, "argument": argument}))

    async def follow(self) -> None:
        """Keep connected to whoever leads, until cancelled."""
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._siblings.socket, limit=LONGEST_LINE)
            except OSError:
                await asyncio.sleep(CONNECT_SECONDS)
                continue
            try:
                writer.write(_line({"index": self._siblings.index, "pid": os.getpid()}))
                self._writer = writer
                while line := await reader.readline():
                    self._take(json.loads(line))
            except (OSError, ValueError) as error:
                logger.debug("the way to the server that leads: %s", error)
            finally:
                writer.close()
                self.lost("the server that leads ended before it answered; ask again")
            await asyncio.sleep(CONNECT_SECONDS)

    def lost(self, reason: str) -> None:
        """There is nobody who leads: show nothing, and answer what was asked."""
        self._view = self._writer = None
        asked, self._asked = self._asked, {}
        for future in asked.values():
            future.set_exception(EngineError(reason))

    def _take(self, said: Answer) -> None:
        self._view = said["view"]
        self.settled.set()
        if "id" not in said:
            return
        future = self._asked.pop(said["id"])
        try:
            raise_if_error(said)
        except DeltaSyncError as error:
            future.set_exception(error)
            return
        result = said["result"]
        future.set_result({**result, **self._own} if "role" in result else result)


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop is closed: this process is ending
        loop.call_soon_threadsafe(call)


def _line(document: Answer) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


async def _write(writer: asyncio.StreamWriter, document: Answer) -> None:
    writer.write(_line(document))
    await writer.drain()
