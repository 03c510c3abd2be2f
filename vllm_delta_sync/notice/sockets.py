"""Sockets of publishers, subscribers and brokers: options, reconnecting, handshake failures."""

import errno
import os
import re
import time
from collections.abc import Iterator, Mapping

import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_delta_sync.errors import NoticeError
from vllm_delta_sync.logs import LogThrottle

MAX_FRAME_BYTES = 64 * 1024
"""ZeroMQ disconnects a peer that sends a larger frame, before it buffers the frame."""
MAX_REQUEST_BYTES = 2048
"""The same for peers that send only subscriptions and CURVE handshakes."""
QUEUE_MESSAGES = 16
KERNEL_BYTES = 64 * 1024
"""Kernel buffers of a connection; small, so that few old notices queue up for a stalled subscriber."""
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
RECONNECT_S = 1.0
"""Minimum time between two of our own reconnections to an address."""
LINGER_MS = 100
MAX_EVENTS = 256

FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
ATTEMPTS = zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED
CLIENT_FAILURES: Mapping[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused our key: it is not on the allow-list there, or this is the port for the "
    "other kind of client",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the peer uses another protocol: one side has CURVE keys and the other has "
    "none, or this is not a port for notices",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the peer hung up during the handshake: the server key given here is not "
    "its key, one side has CURVE keys and the other has none, or this is not a port for notices",
}
SERVER_FAILURES: Mapping[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "a client was refused: it has another server key than ours, or one side has "
    "CURVE keys and the other has none",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "a client hung up during the handshake: it may have no CURVE key, "
    "or use another protocol",
}

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


class PollWaker:
    """Ends another thread's poll: that thread polls ``fd``, and any byte written to ``sender`` wakes it."""

    def __init__(self) -> None:
        self.fd, self.sender = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self.sender, False)

    def set(self) -> None:
        """Wake the polling thread; safe in any thread and in signal handlers."""
        try:
            os.write(self.sender, b"!")
        except BlockingIOError:
            pass

    def clear(self) -> None:
        """Drain ``fd``, so that the next poll waits."""
        try:
            while os.read(self.fd, 4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.sender)


class HandshakeMonitor:
    """Logs failed handshakes of a socket. Create it before the socket binds or connects.

    Attributes:
        socket: poll it, and call ``read`` when it is readable. lost: whether a connection ended or failed to start.
        unreachable: whether the last attempt to connect failed; always False without ``attempts``.
    """

    def __init__(
        self, socket: Socket, log: LogThrottle, address: str, failures: Mapping[int, str], attempts: bool = False
    ) -> None:
        """Args: attempts: also follow the attempts to connect."""
        self._socket = socket
        self._log = log
        self._failures = failures
        self.address = address
        self.lost = self.unreachable = False
        self.socket = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | FAILURES | (ATTEMPTS if attempts else 0))

    def read(self) -> None:
        """Handle pending events."""
        for _ in range(MAX_EVENTS):
            try:
                event = recv_monitor_message(self.socket, zmq.DONTWAIT)
            except zmq.Again:
                return
            if event["event"] & ATTEMPTS:
                self.unreachable = event["event"] == zmq.EVENT_CONNECT_RETRIED
                continue
            self.lost = True
            failure = self._failures.get(event["event"])
            if failure is not None:
                # One server may fail in several ways by chance, so throttle by its address. A server has many clients,
                # so throttle by text.
                subject = self.address if self._failures is CLIENT_FAILURES else None
                self._log.warn(f"no notices over {self.address}: {failure}", subject)

    def close(self) -> None:
        """Stop monitoring; call this before the socket is closed."""
        self._socket.disable_monitor()
        self.socket.close(linger=0)


class ReconnectingSocket:
    """A socket that connects to an address, and reconnects when ZeroMQ itself no longer tries.

    Of a host name ZeroMQ tries one address only, so it is looked up as IPv4 and as IPv6 in turns until one answers.
    """

    def __init__(self, socket: Socket, address: str, log: LogThrottle) -> None:
        """Connect, in the background; raises NoticeError if the address is malformed."""
        self._socket = socket
        self.address = address
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        families = _families(address)
        self._is_name = len(families) > 1
        self.monitor = HandshakeMonitor(socket, log, address, CLIENT_FAILURES, attempts=self._is_name)
        self._connected_at = time.monotonic()
        try:
            socket.setsockopt(zmq.IPV6, families[0])
            socket.connect(address)
        except zmq.ZMQError as error:
            self.monitor.close()
            raise NoticeError(
                f"cannot connect to notice address {address!r}: {error_text(error)}; "
                "write tcp://HOST:PORT with the host and port of the trainer or the broker"
            ) from error

    def due(self) -> float:
        """Return when ``reconnect_if_due`` has to reconnect, by the monotonic clock; infinity if not at present."""
        wanted = self.monitor.lost or self.monitor.unreachable
        return self._connected_at + RECONNECT_S if wanted else float("inf")

    def reconnect_if_due(self) -> None:
        """Reconnect, if that is due."""
        if time.monotonic() < self.due():
            return
        # ZeroMQ reconnects after a lost connection, but never after a refused key or a frame that was too large.
        try:
            self._socket.disconnect(self.address)
        except zmq.ZMQError as error:
            if error.errno != errno.ENOENT:
                raise
        if self.monitor.unreachable:
            self._socket.setsockopt(zmq.IPV6, 1 - int(self._socket.getsockopt(zmq.IPV6)))
        self._socket.connect(self.address)
        self.monitor.lost = self.monitor.unreachable = False
        self._connected_at = time.monotonic()


def open_socket(context: Context, kind: int, max_frame_bytes: int) -> Socket:
    """Open a socket with short queues that detects vanished peers."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, QUEUE_MESSAGES)
    for option in (zmq.SNDBUF, zmq.RCVBUF):
        socket.setsockopt(option, KERNEL_BYTES)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    # Detect and reconnect peers that vanish without closing: a network failure, a suspended machine.
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HEARTBEAT_TIMEOUT_MS)
    return socket


def received(socket: Socket, most: int) -> Iterator[list[bytes]]:
    """Yield the messages that have arrived, at most ``most``; each may be answered before the next one is read."""
    for _ in range(most):
        try:
            message = socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
        yield message


def bind(socket: Socket, address: str) -> str:
    """Bind a socket; ``tcp://*`` means all interfaces, for IPv4 and, where the system has it, IPv6.

    Returns:
        The address with the actual port in place of ``*``, and ``0.0.0.0`` for all interfaces.

    Raises:
        NoticeError: the address is in use, not one of this machine's, or malformed.
    """
    *others, last = _families(address)
    for ipv6 in (*others, last):
        socket.setsockopt(zmq.IPV6, ipv6)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno == errno.ENODEV and ipv6 != last:
                continue  # an interface without an IPv4 address
            if error.errno == zmq.EADDRINUSE:
                text = (
                    f"notice address {address!r} is in use; stop the other process or give another port (tcp://*:5556)"
                )
            else:
                text = (
                    f"cannot bind notice address {address!r}: {error_text(error)}; "
                    "give tcp://*:PORT, or tcp://ADDRESS:PORT with an address of this machine, IPv6 as tcp://[::1]:PORT"
                )
            raise NoticeError(text) from error
        break
    bound = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    # Any client can connect to 0.0.0.0; one that does not ask for IPv6 cannot use [::].
    return bound.replace("//[::]:", "//0.0.0.0:") if address.startswith("tcp://*:") else bound


def _families(address: str) -> tuple[int, ...]:
    """Return the values of ZMQ_IPV6 to try for an address, in this order.

    With ZMQ_IPV6, a name means only its IPv6 addresses if it has any, an IPv4 address is shown as ``[::ffff:…]``, and
    ``*`` means IPv4 too. So it is set only where it is needed.
    """
    # A tcp address may begin with the address to connect from: SOURCE;HOST:PORT.
    host = address.removeprefix("tcp://").rpartition(";")[2].rpartition(":")[0]
    if not address.startswith("tcp://") or re.fullmatch(r"[0-9.]+", host):
        return (0,)
    return (1,) if host == "*" or ":" in host else (0, 1)


def check_port(address: str) -> None:
    """Refuse what is no port: of ``70000`` ZeroMQ would silently use the lower 16 bits, and 65535 for ``-1``."""
    port = address.rpartition(":")[2]
    known = port == "*" or (re.fullmatch("[0-9]{1,5}", port) and int(port) <= 65535)
    if address.startswith("tcp://") and not known:
        raise NoticeError(f"notice address {address!r} does not end in a port of at most 65535; write tcp://HOST:PORT")


def wait_ms(until: float) -> int | None:
    """Return the milliseconds to poll until a time of the monotonic clock, rounded up; None to poll forever."""
    return None if until == float("inf") else max(0, int((until - time.monotonic()) * 1000) + 1)


def error_text(error: zmq.ZMQError) -> str:
    """Return ZeroMQ's text of an error."""
    return zmq.strerror(error.errno or 0)
