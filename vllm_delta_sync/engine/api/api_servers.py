"""``LeaderElection``: one of an engine's API servers leads and has the receiver; the others forward to it.

Two receivers would conflict over the same weights. The API servers of one ``vllm serve`` are processes on one machine
with one parent. They meet in a folder that only their user can enter (``ApiServerGroup``). The process that holds the
lock there leads; the kernel releases the lock when that process ends. Each follower keeps a connection to the leader,
which sends its status at every change and every second, and answers to requests. If the leader ends, a follower takes
the lock and leads, and its receiver asks the ranks what they hold, as after a restart. A leader that hangs still leads,
because it may still act; its pause ends through the pause watchdog.
"""

import asyncio
import fcntl
import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.follow.service import MOVING, ReceiverService
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.observe.states import Answer
from vllm_delta_sync.errors import BusyError, DeltaSyncError, EngineError, error_kinds
from vllm_delta_sync.process_folders import PREFIX, hold_folder, remove_abandoned, temporary_directory

LONGEST_SOCKET_PATH = 100
"""Longest address of a local socket in bytes, with a margin."""
LONGEST_LINE = 1 << 24
"""Longest message between API servers, in bytes."""
CONNECT_SECONDS = 0.05
"""Interval between a follower's attempts to connect, or to lead, while there is no leader."""
LEADER_SECONDS = 60.0
"""Longest wait at start for the process with the lock to lead."""
VIEW_SECONDS = 1.0
"""Longest interval between two statuses that the leader sends: ages and counters in them change by themselves."""
NO_LEADER = "this server has no API server leader at the moment; retry"


@dataclass(frozen=True)
class ApiServerGroup:
    """The API servers that one process started.

    Attributes:
        folder: where they meet. index: of this server. count: of all servers.
    """

    folder: Path
    index: int
    count: int

    @property
    def socket(self) -> Path:
        """Where the leader listens."""
        return self.folder / "leader.sock"

    def open_lock(self) -> int:
        """Return a file descriptor to lock; closing it releases the lock."""
        return os.open(self.folder / "leader.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def find_api_server_group(client: Any) -> ApiServerGroup | None:
    """Return the group of the API server with this engine client; None if it is the only one.

    Raises:
        EngineError: there is no safe folder to meet in, or its name cannot be determined. StoreError: as
            ``temporary_directory``.
    """
    count = int(getattr(client.engine_core, "client_count", 1))
    if count == 1:
        return None
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        raise EngineError(
            f"--api-server-count is {count}, and this process has no parent that started the others, so two receivers "
            "would conflict; use 1"
        )
    folder = temporary_directory() / f"{PREFIX}{os.geteuid()}-{_name_process(parent.pid)}"
    found = ApiServerGroup(folder, int(client.engine_core.client_index), count)
    if len(str(found.socket)) > LONGEST_SOCKET_PATH:
        raise EngineError(f"{str(found.socket)!r} is too long for a socket's address; set TMPDIR to a shorter one")
    try:
        remove_abandoned(folder.parent)
        # The descriptor stays open until this process ends.
        hold_folder(folder)
    except OSError as error:
        raise EngineError(
            f"the folder where API servers meet cannot be used: {error}; or set TMPDIR to another folder"
        ) from error
    return found


def try_lock(descriptor: int) -> bool:
    """Take the lock if no other process holds it. It belongs to the process, so forked processes do not keep it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _name_process(pid: int) -> str:
    """Return a name for a process that no other one has that uses the same file system: containers share it."""
    try:
        # The name in the second field, in parentheses, may contain spaces and parentheses. The start time, in the
        # kernel's units, tells apart processes with the same id.
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{os.stat('/proc/self/ns/pid').st_ino}-{pid}-{started}"
    except OSError:
        return f"unknown-{pid}"


class LeaderElection:
    """Access to a server's receiver, in this process or in the leader.

    Args:
        make: creates the receiver once this process leads.
        group: None if this process is the only API server.
        stopping: set once this process is being stopped; it does not become the leader then.
    """

    def __init__(
        self, make: Callable[[], ReceiverService], group: ApiServerGroup | None, stopping: threading.Event
    ) -> None:
        self._make = make
        self._group = group
        self._stopping = stopping
        self._current: ReceiverService | FollowerClient | None = None
        self._lock = -1

    def request(self, action: str, argument: Any = None) -> "Future[Any]":
        """See ReceiverService.request; forwarded to the leader if that is another process."""
        return self._part.request(action, argument)

    @property
    def receiver(self) -> "Receiver | FollowerClient":
        """The receiver's state, readable at once from any thread."""
        return self._part.receiver

    @property
    def _part(self) -> "ReceiverService | FollowerClient":
        if self._current is None:
            raise EngineError("this server has not begun to follow yet")
        return self._current

    async def start(self) -> None:
        """Lead, or follow the leader.

        Raises:
            DeltaSyncError: this process leads and its settings cannot be used, or no process leads.
        """
        if self._group is None:
            self._current = await self._lead()
            return
        self._lock = self._group.open_lock()
        if try_lock(self._lock):
            self._current = await self._lead()
            logger.info("API server %d of %d leads", self._group.index, self._group.count)
            return
        follower = self._current = FollowerClient(self._group)
        self._following = asyncio.create_task(self._follow_or_lead(follower))
        try:
            await asyncio.wait_for(follower.leader_known.wait(), LEADER_SECONDS)
        except TimeoutError:
            raise EngineError(f"no API server of this server led within {LEADER_SECONDS:.0f} s") from None

    async def _follow_or_lead(self, follower: "FollowerClient") -> None:
        """Follow one leader after the other, until this process takes the lock, which the leader's end releases.

        Tried during a connection too: one to a process that could not lead, or has left a child, outlasts its lock.
        """
        following: asyncio.Task[None] | None = None
        while self._current is follower:
            if following is None or following.done():
                following = asyncio.create_task(follower.follow())
            await asyncio.wait({following}, timeout=VIEW_SECONDS)
            if self._lock >= 0 and not self._stopping.is_set() and try_lock(self._lock):
                following.cancel()
                await self._take_over(follower)
            elif following.done():
                await asyncio.sleep(CONNECT_SECONDS)

    async def _take_over(self, follower: "FollowerClient") -> None:
        logger.warning("the API server leader has ended; process %d leads now", os.getpid())
        try:
            self._current = await self._lead()
            follower.leader_known.set()
        except Exception as error:  # noqa: BLE001  after any failure, another process must be able to lead
            logger.critical("process %d cannot lead: %s: %s", os.getpid(), type(error).__name__, error)
            os.close(self._lock)
            self._lock = -1

    async def _lead(self) -> ReceiverService:
        service = self._make()
        await LeaderServer(self._group, service).open()
        service.start()
        return service


class LeaderServer:
    """In the leader: sends its status to the followers, and carries out what they forward.

    The status gets ``server`` (index of this API server), ``role`` (leader or follower) and ``servers`` (all).
    """

    def __init__(self, group: ApiServerGroup | None, service: ReceiverService) -> None:
        self._group = group
        self._service = service
        # Index and process of each follower, by the event that has the status sent to it.
        self._followers: dict[asyncio.Event, tuple[int, int]] = {}
        self._answer_tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        service.receiver.server_fields = self._fields

    def _fields(self) -> Answer:
        index = 0 if self._group is None else self._group.index
        pids = sorted([(index, os.getpid()), *self._followers.values()])
        servers = [
            {"server": each, "pid": pid, "role": "leader" if each == index else "follower"} for each, pid in pids
        ]
        return {"server": index, "role": "leader", "servers": servers}

    async def open(self) -> None:
        """Listen for followers, if there are other API servers."""
        if self._group is None:
            return
        self._group.socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self._group.socket, limit=LONGEST_LINE)
        loop = asyncio.get_running_loop()
        self._service.receiver.board.watch(lambda: call_soon(loop, self._notify_followers))

    def _notify_followers(self) -> None:
        for changed in self._followers:
            changed.set()

    def _view(self) -> Answer:
        receiver = self._service.receiver
        return {"status": receiver.status(), "served": receiver.served_version, "run": receiver.served_run}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        changed = asyncio.Event()
        sender: asyncio.Task[None] | None = None
        try:
            hello = json.loads(await reader.readline())
            self._followers[changed] = int(hello["index"]), int(hello["pid"])
            self._notify_followers()
            sender = asyncio.create_task(self._send_views(writer, changed))
            while line := await reader.readline():
                task = asyncio.create_task(self._answer(writer, json.loads(line)))
                self._answer_tasks.add(task)
                task.add_done_callback(self._answer_tasks.discard)
        except (OSError, ValueError, KeyError) as error:
            logger.debug("connection of an API server follower: %s", error)
        except asyncio.CancelledError:
            # The process ends. Only asyncio awaits this task, and would log the cancellation as an error.
            return
        finally:
            if sender is not None:
                sender.cancel()
            self._followers.pop(changed, None)
            self._notify_followers()
            writer.close()

    async def _send_views(self, writer: asyncio.StreamWriter, changed: asyncio.Event) -> None:
        with suppress(OSError):
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), VIEW_SECONDS)
                # Changes during the write are sent with the next view.
                changed.clear()
                await _write(writer, {"view": self._view()})

    async def _answer(self, writer: asyncio.StreamWriter, asked: Answer) -> None:
        try:
            done = self._service.request(asked["action"], asked["argument"])
            outcome: Answer = {"result": await asyncio.wrap_future(done)}
        except Exception as error:  # the follower shows it to its client
            if not isinstance(error, DeltaSyncError):
                logger.exception("a forwarded request failed unexpectedly")
                error = EngineError(f"unexpected {type(error).__name__}: {error}")
            outcome = {"error": {"kind": error.kind, "message": error.message}}
        with suppress(OSError):
            # With the current view: the follower must not show an older state than the answer.
            await _write(writer, {"id": asked["id"], "view": self._view(), **outcome})


class FollowerClient:
    """In a follower: the leader's status, and the connection for requests.

    Attributes:
        leader_known: set once a leader has sent its status, or this process leads.
    """

    def __init__(self, group: ApiServerGroup) -> None:
        self._group = group
        self._view: Answer | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, Future[Any]] = {}
        # Requests to serve another version: here before the leader's status shows them.
        self._moving: set[Future[Any]] = set()
        self._number = 0
        self._own_fields = {"server": group.index, "role": "follower"}
        self.leader_known = asyncio.Event()

    @property
    def receiver(self) -> "FollowerClient":
        """This one: it shows what the leader's receiver does."""
        return self

    @property
    def served_version(self) -> int | None:
        """See Receiver; None while there is no leader."""
        view = self._view
        return None if view is None else view["served"]

    @property
    def served_run(self) -> str | None:
        view = self._view
        return None if view is None else view["run"]

    def status(self) -> Answer:
        """See Receiver, as of its last change.

        Raises:
            BusyError: there is no leader at the moment.
        """
        view = self._view
        if view is None:
            raise BusyError(NO_LEADER)
        requested = bool(self._moving) or view["status"]["requested"]
        return {**view["status"], **self._own_fields, "requested": requested}

    def request(self, action: str, argument: Any) -> "Future[Any]":
        """See ReceiverService.request. The future gets a BusyError if there is no leader, and an EngineError if the
        leader ends before it answers."""
        future: Future[Any] = Future()
        if action in MOVING:
            self._moving.add(future)
            future.add_done_callback(self._moving.discard)
        self._loop.call_soon_threadsafe(self._send_request, action, argument, future)
        return future

    def _send_request(self, action: str, argument: Any, future: "Future[Any]") -> None:
        if not future.set_running_or_notify_cancel():
            return
        if self._writer is None:
            future.set_exception(BusyError(NO_LEADER))
            return
        self._number += 1
        self._pending[self._number] = future
        self._writer.write(_encode_line({"id": self._number, "action": action, "argument": argument}))

    async def follow(self) -> None:
        """Stay connected to the current leader until it ends; return at once if there is none."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._group.socket, limit=LONGEST_LINE)
        except OSError:
            return
        try:
            writer.write(_encode_line({"index": self._group.index, "pid": os.getpid()}))
            self._writer = writer
            while line := await reader.readline():
                self._handle_message(json.loads(line))
        except (OSError, ValueError, KeyError) as error:
            logger.debug("connection to the API server leader: %s", error)
        finally:
            writer.close()
            self._view = self._writer = None
            asked, self._pending = self._pending, {}
            for future in asked.values():
                future.set_exception(EngineError("the API server leader ended before it answered; retry"))

    def _handle_message(self, message: Answer) -> None:
        self._view = message["view"]
        self.leader_known.set()
        if "id" not in message:
            return
        future = self._pending.pop(message["id"])
        if "error" in message:
            error = message["error"]
            future.set_exception(error_kinds().get(error["kind"], EngineError)(error["message"]))
            return
        result = message["result"]
        future.set_result({**result, **self._own_fields} if "role" in result else result)


Serving = LeaderElection | ReceiverService
"""What answers requests about a receiver, in this process or in another one."""


def call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Make a call in an event loop, from any thread; nothing if the loop is closed."""
    with suppress(RuntimeError):  # the loop is closed: this process is ending
        loop.call_soon_threadsafe(call)


def _encode_line(document: Answer) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


async def _write(writer: asyncio.StreamWriter, document: Answer) -> None:
    writer.write(_encode_line(document))
    await writer.drain()
