"""Notices: "version n is there, look now". A hint over ZeroMQ; losing one costs latency and nothing else.

A message has two frames: the run id as topic, and ``{"manifest", "run", "version"}`` as canonical JSON.
Anybody who reaches the port can send one, so a notice is never trusted: receivers look into the bucket and
believe only that.
"""

import errno
import threading
import time
from dataclasses import asdict, dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_delta_sync.errors import FormatError, NoticeError
from vllm_delta_sync.wire.canonical import dump_canonical, load_canonical
from vllm_delta_sync.wire.limits import MAX_VERSION

MAX_NOTICE_BYTES = 4096
"""Larger messages are ignored."""
MAX_FRAME_BYTES = 64 * 1024
"""ZeroMQ cuts the connection to a peer that sends more in one frame, before it buffers it."""
RECONNECT_S = 1.0
"""Least time between two connections that a subscriber starts itself."""
MAX_DRAIN = 1000
"""Messages looked at in one go, so that a flood cannot hold a receiver."""
QUEUE_MESSAGES = 16
HEARTBEAT_MS = 10_000
HEARTBEAT_TIMEOUT_MS = 30_000


@dataclass(frozen=True, slots=True)
class Notice:
    """Version ``version`` of ``run`` is durable; ``manifest`` is the SHA-256 of its manifest, in hex."""

    run: str
    version: int
    manifest: str


class NoticePublisher:
    """The trainer's end: binds a PUB socket that never blocks the sender.

    Each subscriber has a queue of 16 notices; one that does not keep up loses notices, and nobody waits for
    it. Any thread may call any method; calls take turns on a lock. Not to be used across ``os.fork``.
    """

    def __init__(self, address: str) -> None:
        """Bind ``address``: ``tcp://*:5555``, ``tcp://127.0.0.1:*`` for any free port, ``ipc:///path``.

        Raises:
            NoticeError: the address is taken, not one of this machine's, or no address at all.
        """
        _check_port(address)
        self._lock = threading.Lock()
        self._context, self._socket = _open(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise NoticeError(_bind_failure(address, error)) from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """The address as bound: the real port in place of ``*``, and ``0.0.0.0`` for all interfaces."""

    def send(self, notice: Notice) -> None:
        """Send to whoever is subscribed now; returns at once.

        Raises:
            NoticeError: the publisher is closed, or the socket broke.
        """
        frames = [notice.run.encode(), dump_canonical(asdict(notice))]
        with self._lock:
            try:
                self._socket.send_multipart(frames, zmq.DONTWAIT)
            except zmq.ZMQError as error:
                raise NoticeError(
                    f"cannot send notice of version {notice.version} on {self.address}: {_reason(error)}; "
                    "receivers find it by polling"
                ) from error

    def close(self) -> None:
        """Drop what is unsent and free the address. May be called twice."""
        with self._lock:
            self._socket.close(linger=0)
            self._context.term()


class NoticeSubscriber:
    """The receiver's end: connects in the background, and reconnects while somebody calls ``receive``.

    Any thread may call any method; calls take turns on a lock, so ``close`` waits for a ``receive`` under
    way. ``malformed`` counts messages on this run's topic that were ignored.
    """

    def __init__(self, address: str, run: str) -> None:
        """Connect to ``address``, such as ``tcp://trainer:5555``. Nobody need be there yet.

        Raises:
            NoticeError: ``address`` cannot be connected to by its form.
        """
        _check_port(address)
        self.address = address
        self.malformed = 0
        self._run = run
        self._lock = threading.Lock()
        self._context, self._socket = _open(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, run)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._lost = False
        self._connected_at = time.monotonic()
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise NoticeError(
                f"cannot connect to notice address {address!r}: {_reason(error)}; "
                "write tcp://HOST:PORT with the trainer's host and port"
            ) from error

    def receive(self, timeout_s: float) -> Notice | None:
        """Return the notice of the newest version that is waiting, or None after ``timeout_s`` seconds.

        Raises:
            NoticeError: the subscriber is closed, or the socket broke.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            if self._socket.closed:
                raise NoticeError(f"cannot receive notices from {self.address}: the subscriber is closed")
            try:
                while True:
                    newest = self._wait(deadline)
                    if newest is not None or time.monotonic() >= deadline:
                        return newest
            except zmq.ZMQError as error:
                raise NoticeError(
                    f"cannot receive notices from {self.address}: {_reason(error)}; new versions are found by polling"
                ) from error

    def close(self) -> None:
        """Disconnect. May be called twice."""
        with self._lock:
            if not self._socket.closed:
                self._socket.disable_monitor()
                self._monitor.close(linger=0)
                self._socket.close(linger=0)
            self._context.term()

    def _wait(self, deadline: float) -> Notice | None:
        """Wait for something to happen, until ``deadline`` at most, and return what notice came of it."""
        until = min(deadline, self._connected_at + RECONNECT_S) if self._lost else deadline
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(max(0, round((until - time.monotonic()) * 1000))))
        newest = self._drain() if self._socket in ready else None
        if self._monitor in ready:
            recv_monitor_message(self._monitor)
            self._lost = True
        if self._lost and time.monotonic() >= self._connected_at + RECONNECT_S:
            self._reconnect()
        return newest

    def _reconnect(self) -> None:
        # ZeroMQ reconnects after a lost connection, but gives up for good after a frame that was too large.
        try:
            self._socket.disconnect(self.address)
        except zmq.ZMQError as error:
            if error.errno != errno.ENOENT:
                raise
        self._socket.connect(self.address)
        self._lost = False
        self._connected_at = time.monotonic()

    def _drain(self) -> Notice | None:
        newest: Notice | None = None
        for _ in range(MAX_DRAIN):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            notice = self._parse(frames)
            if notice is not None and (newest is None or notice.version >= newest.version):
                newest = notice
        return newest

    def _parse(self, frames: list[bytes]) -> Notice | None:
        # Topics match by their beginning: run "a" hears run "ab" too, which is no fault.
        if frames[0] != self._run.encode():
            return None
        try:
            if len(frames) != 2:
                raise FormatError(f"notice has {len(frames)} frames, not 2")
            return _parse_notice(frames[1], self._run)
        except FormatError:
            self.malformed += 1
            return None


def _parse_notice(data: bytes, run: str) -> Notice:
    value = load_canonical(data, "notice", MAX_NOTICE_BYTES)
    if not isinstance(value, dict) or value.keys() != {"manifest", "run", "version"}:
        raise FormatError("notice is not an object of manifest, run and version")
    version, manifest = value["version"], value["manifest"]
    if value["run"] != run or not isinstance(manifest, str):
        raise FormatError("notice names another run than its topic, or no manifest")
    if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version <= MAX_VERSION:
        raise FormatError(f"notice has version {version!r}, which is no version")
    return Notice(run, version, manifest)


def _open(kind: int) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    # A context of its own: closing one publisher never waits for another's sockets.
    context = zmq.Context()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    # A peer that vanished without closing (a cut network, a suspended machine) is noticed and reconnected.
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    return context, socket


def _check_port(address: str) -> None:
    """Refuse a port beyond 65535, of which ZeroMQ silently takes the lower 16 bits."""
    port = address.rpartition(":")[2]
    if address.startswith("tcp://") and port.isdecimal() and int(port) > 65535:
        raise NoticeError(f"notice address {address!r} has the port {port}; ports end at 65535")


def _bind_failure(address: str, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        return f"notice address {address!r} is taken; stop what uses it, or give another port, such as tcp://*:5556"
    return (
        f"cannot bind notice address {address!r}: {_reason(error)}; "
        "give tcp://*:PORT, or tcp://ADDRESS:PORT with an address of this machine"
    )


def _reason(error: zmq.ZMQError) -> str:
    return zmq.strerror(error.errno or 0)
