"""What the sockets of publishers, subscribers and brokers have in common."""

import errno
import logging
import os
import time
from collections.abc import Mapping

import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_delta_sync.errors import NoticeError

MAX_FRAME_BYTES = 64 * 1024
"""ZeroMQ cuts the connection to a peer that sends more in one frame, before it buffers it."""
MAX_REQUEST_BYTES = 2048
"""The same for peers that have nothing to send but subscriptions and what CURVE needs."""
QUEUE_MESSAGES = 16
KERNEL_BYTES = 64 * 1024
"""Of each connection, so that few old notices wait there for a subscriber that stands still."""
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
RECONNECT_S = 1.0
"""Least time between two connections to an address that we start ourselves."""
LINGER_MS = 100
QUIET_SECONDS = 60.0
QUIET_ENTRIES = 64
MAX_EVENTS = 256

FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
CLIENT_FAILURES: Mapping[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused our key: it is not on the allow-list there, or this is the port for the "
    "other kind of client",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "speaks otherwise: one side has CURVE keys and the other has none, or it is "
    "no port for notices",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "hung up before it was known who we are: the server key given here is not "
    "its key, one side has CURVE keys and the other has none, or it is no port for notices",
}
SERVER_FAILURES: Mapping[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "a client was refused: it has another server key than ours, or one side has "
    "CURVE keys and the other has none",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "a client hung up before it was known who it is: it may have no CURVE key, "
    "or speak something else",
}

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


class LogThrottle:
    """A log in which the same thing is said once a minute at most, and few different ones."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: dict[str, float] = {}

    def warn(self, text: str, subject: str | None = None) -> None:
        """Warn, unless that was said within the last minute, or something else about the same subject."""
        subject = subject or text
        now = time.monotonic()
        self._said = {said: at for said, at in self._said.items() if now - at < QUIET_SECONDS}
        if subject not in self._said and len(self._said) < QUIET_ENTRIES:
            self._said[subject] = now
            self._log.warning("%s", text)


class PollWaker:
    """Ends another thread's poll. ``fd`` is what to poll, whatever is written to ``sender`` ends it."""

    def __init__(self) -> None:
        self.fd, self.sender = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self.sender, False)

    def set(self) -> None:
        """From any thread, and from signal handlers."""
        try:
            os.write(self.sender, b"!")
        except BlockingIOError:
            pass

    def clear(self) -> None:
        """Make ``fd`` unreadable."""
        try:
            while os.read(self.fd, 4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.sender)


class HandshakeMonitor:
    """Tells the log of handshakes that fail on a socket; made before it binds or connects.

    Attributes:
        socket: to be polled; ``read`` when it is readable. lost: whether a connection ended, or never began.
    """

    def __init__(self, watched: Socket, quiet: LogThrottle, address: str, failures: Mapping[int, str]) -> None:
        self._watched = watched
        self._quiet = quiet
        self._failures = failures
        self.address = address
        self.lost = False
        self.socket = watched.get_monitor_socket(zmq.EVENT_DISCONNECTED | FAILURES)

    def read(self) -> None:
        """Take note of what happened."""
        for _ in range(MAX_EVENTS):
            try:
                event = recv_monitor_message(self.socket, zmq.DONTWAIT)
            except zmq.Again:
                return
            self.lost = True
            failure = self._failures.get(event["event"])
            if failure is not None:
                # One server fails in several ways, by chance; a server's clients may be many.
                subject = self.address if self._failures is CLIENT_FAILURES else None
                self._quiet.warn(f"no notices over {self.address}: {failure}", subject)

    def close(self) -> None:
        """Before the socket is closed."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)


class ReconnectingSocket:
    """A socket that connects to an address, and again when ZeroMQ itself has given up."""

    def __init__(self, socket: Socket, address: str, quiet: LogThrottle) -> None:
        """Connect, in the background.

        Raises:
            NoticeError: the address cannot be connected to by its form.
        """
        self._socket = socket
        self.address = address
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self.watch = HandshakeMonitor(socket, quiet, address, CLIENT_FAILURES)
        self._connected_at = time.monotonic()
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            self.watch.close()
            raise NoticeError(
                f"cannot connect to notice address {address!r}: {reason(error)}; "
                "write tcp://HOST:PORT with the host and port of the trainer or the broker"
            ) from error

    def due(self) -> float:
        """When ``tend`` has something to do, by the monotonic clock; infinity if it has not."""
        return self._connected_at + RECONNECT_S if self.watch.lost else float("inf")

    def tend(self) -> None:
        """Connect again, if that is due."""
        if time.monotonic() < self.due():
            return
        # ZeroMQ reconnects after a lost connection, but gives up for good after a frame that was too large or a key
        # that was refused.
        try:
            self._socket.disconnect(self.address)
        except zmq.ZMQError as error:
            if error.errno != errno.ENOENT:
                raise
        self._socket.connect(self.address)
        self.watch.lost = False
        self._connected_at = time.monotonic()


def open_socket(context: Context, kind: int, max_frame_bytes: int) -> Socket:
    """A socket whose queues are short, and which notices that a peer vanished."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, QUEUE_MESSAGES)
    for option in (zmq.SNDBUF, zmq.RCVBUF):
        socket.setsockopt(option, KERNEL_BYTES)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    # A peer that vanished without closing (a cut network, a suspended machine) is noticed and reconnected.
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HEARTBEAT_TIMEOUT_MS)
    return socket


def bind(socket: Socket, address: str) -> str:
    """Bind; the address as bound: the real port in place of ``*``, and ``0.0.0.0`` for all interfaces.

    Raises:
        NoticeError: the address is taken, not one of this machine's, or no address at all.
    """
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            text = f"notice address {address!r} is taken; stop what uses it, or give another port, such as tcp://*:5556"
        else:
            text = (
                f"cannot bind notice address {address!r}: {reason(error)}; "
                "give tcp://*:PORT, or tcp://ADDRESS:PORT with an address of this machine"
            )
        raise NoticeError(text) from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def check_port(address: str) -> None:
    """Refuse a port beyond 65535, of which ZeroMQ silently takes the lower 16 bits."""
    port = address.rpartition(":")[2]
    if address.startswith("tcp://") and port.isdecimal() and int(port) > 65535:
        raise NoticeError(f"notice address {address!r} has the port {port}; ports end at 65535")


def wait_ms(until: float) -> int | None:
    """Milliseconds to poll until a moment of the monotonic clock, rounded up; None for ever."""
    return None if until == float("inf") else max(0, int((until - time.monotonic()) * 1000) + 1)


def reason(error: zmq.ZMQError) -> str:
    """What ZeroMQ says of an error."""
    return zmq.strerror(error.errno or 0)
