"""``NoticePublisher``: announces versions from the trainer. ``NoticeSender``: what it shares with the broker."""

import threading
from collections import deque
from pathlib import Path

import zmq

from vllm_delta_sync.errors import NoticeError, SettingsError
from vllm_delta_sync.logs import LogThrottle, guarded_logger
from vllm_delta_sync.notice import curve
from vllm_delta_sync.notice.messages import REPEAT_SECONDS, LastValues, Notice, encode
from vllm_delta_sync.notice.sockets import (
    LINGER_MS,
    MAX_REQUEST_BYTES,
    QUEUE_MESSAGES,
    SERVER_FAILURES,
    HandshakeMonitor,
    PollWaker,
    ReconnectingSocket,
    Socket,
    bind,
    check_port,
    error_text,
    open_socket,
    wait_ms,
)
from vllm_delta_sync.trust.keyring import Keyring

logger = guarded_logger(__name__)

CONNECT_PREFIX = "connect:"
DOMAIN = "subscribers"
RUNS = 32
"""Number of topics whose last message is repeated: two for each run."""
CLOSE_SECONDS = 5.0


class NoticeSender:
    """A socket that sends and repeats messages by topic, and what its thread polls and serves beside it.

    Args:
        topics, repeat_seconds: see ``LastValues``.
    """

    def __init__(self, topics: int, repeat_seconds: float, log: LogThrottle) -> None:
        self._log = log
        self._last = LastValues(topics, repeat_seconds)
        self._context = zmq.Context()
        self._wake = PollWaker()
        self._authenticator: curve.CurveAuthenticator | None = None
        self._monitors: list[HandshakeMonitor] = []
        self._socket = open_socket(self._context, zmq.PUB, MAX_REQUEST_BYTES)

    def _admit(self, socket: Socket, domain: str, own: curve.KeyPair, allowed: curve.AllowList) -> None:
        """Admit only clients with an allowed key to a socket; call this before it binds."""
        if self._authenticator is None:
            self._authenticator = curve.CurveAuthenticator(self._context, own, self._log)
        self._authenticator.require_keys(socket, domain, allowed)

    def _bind(self, socket: Socket, address: str) -> str:
        """Bind a socket, whose failed handshakes are logged; returns as ``bind``."""
        monitor = HandshakeMonitor(socket, self._log, address, SERVER_FAILURES)
        self._monitors.append(monitor)
        monitor.address = bind(socket, address)
        return monitor.address

    def _poller(self, *sockets: Socket) -> zmq.Poller:
        """Return a poller of these sockets, and of all that may wake the thread."""
        poller = zmq.Poller()
        authenticator = [] if self._authenticator is None else [self._authenticator.socket]
        for each in (self._wake.fd, *sockets, *authenticator, *(monitor.socket for monitor in self._monitors)):
            poller.register(each, zmq.POLLIN)
        return poller

    def _serve(self) -> None:
        """Answer handshakes, handle events of connections, and repeat what is due."""
        if self._authenticator is not None:
            self._authenticator.serve()
        for monitor in self._monitors:
            monitor.read()
        for frames in self._last.due():
            self._socket.send_multipart(frames, zmq.DONTWAIT)

    def _send_frames(self, frames: list[bytes]) -> None:
        self._last.put(frames)
        self._socket.send_multipart(frames, zmq.DONTWAIT)

    def _close_sockets(self, *others: Socket) -> None:
        for monitor in self._monitors:
            monitor.close()
        for socket in others:
            socket.close(linger=0)
        self._socket.close(linger=LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()
        self._wake.close()


class NoticePublisher(NoticeSender):
    """Announces versions from a background thread, so that ``send`` never waits for subscribers.

    Each subscriber has a queue of 16 notices; a slow subscriber loses notices. The last notice of a run is sent again
    about every second. Any thread may call any method. Do not use it across ``os.fork``.

    Attributes:
        address: when bound, with the actual port in place of ``*`` and ``0.0.0.0`` for all interfaces; when connecting,
            as given.
    """

    def __init__(
        self,
        address: str,
        key: str | Path | None = None,
        allowed: str | Path | None = None,
        keyring: Keyring | None = None,
        repeat_seconds: float = REPEAT_SECONDS,
    ) -> None:
        """Bind an address, or connect to a broker.

        Args:
            address: to bind: ``tcp://*:5555`` (IPv4 and IPv6), ``tcp://[::1]:5555``, ``tcp://127.0.0.1:*`` for any free
                port, ``ipc:///path``. To connect: ``connect:tcp://broker:5556``; the broker may start later.
            key: file with the publisher's secret CURVE certificate; requires ``allowed``.
            allowed: public certificates, as a directory or one file: those of all subscribers, or when connecting, the
                broker's.
            keyring: signs each notice, if it has a signing key.

        Raises:
            NoticeError: the address is in use, not one of this machine's, or malformed.
            SettingsError: only one of ``key`` and ``allowed`` is given, or a certificate is invalid.
        """
        connects = address.startswith(CONNECT_PREFIX)
        check_port(address.removeprefix(CONNECT_PREFIX))
        self._keyring = keyring
        self._lock = threading.Lock()
        self._outbox: deque[list[bytes]] = deque(maxlen=QUEUE_MESSAGES)
        self._end_reason: str | None = None
        self._connection: ReconnectingSocket | None = None
        log = LogThrottle(logger)
        keys = _keys(key, allowed, log)
        super().__init__(RUNS, repeat_seconds, log)
        try:
            if connects:
                if keys is not None:
                    curve.set_client_keys(self._socket, keys[0], _single_key(keys[1]))
                self._connection = ReconnectingSocket(self._socket, address.removeprefix(CONNECT_PREFIX), log)
                self._monitors.append(self._connection.monitor)
                self.address = address
            else:
                if keys is not None:
                    self._admit(self._socket, DOMAIN, *keys)
                self.address = self._bind(self._socket, address)
        except BaseException:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._run, name="delta-sync-notices", daemon=True)
        self._thread.start()

    def send(self, notice: Notice) -> None:
        """Send a notice to all subscribers, in the background.

        Raises:
            NoticeError: the publisher is closed, or the socket failed.
        """
        frames = encode(notice, self._keyring)
        with self._lock:
            if self._end_reason is not None:
                raise NoticeError(
                    f"cannot send notice of version {notice.version} on {self.address}: {self._end_reason}; receivers "
                    "find it by polling"
                )
            self._outbox.append(frames)
            self._wake.set()

    def close(self) -> None:
        """Send queued notices for up to a tenth of a second, then free the address. May be called twice."""
        with self._lock:
            if self._end_reason is None:
                self._end_reason = "the publisher is closed"
                self._wake.set()
        self._thread.join(CLOSE_SECONDS)

    # The thread

    def _run(self) -> None:
        poller = self._poller()
        try:
            while True:
                # Clear first: callers set ``_end_reason`` or fill ``_outbox`` before they wake this thread.
                self._wake.clear()
                ended = self._end_reason is not None
                self._run_once()
                if ended:
                    break
                until = min(self._last.next_at(), float("inf") if self._connection is None else self._connection.due())
                poller.poll(wait_ms(until))
        except zmq.ZMQError as error:
            text = error_text(error)
            self._log.warn(f"no more notices on {self.address}, receivers poll: {text}")
            with self._lock:
                self._end_reason = self._end_reason or text
        finally:
            with self._lock:
                self._end_reason = self._end_reason or "its thread has ended"
                self._close_sockets()

    def _run_once(self) -> None:
        """Do all work that needs no waiting."""
        self._serve()
        if self._connection is not None:
            self._connection.reconnect_if_due()
        while self._outbox:
            self._send_frames(self._outbox.popleft())


def open_notices(
    address: str, key: str | Path | None = None, allowed: str | Path | None = None, keyring: Keyring | None = None
) -> NoticePublisher | None:
    """Return a publisher, or log a warning and return None if the address cannot be used: notices are optional.

    Raises:
        SettingsError: as ``NoticePublisher``.
    """
    try:
        return NoticePublisher(address, key, allowed, keyring)
    except NoticeError as error:
        logger.warning("publishing without notices, receivers poll: %s", error)
        return None


def _keys(
    key: str | Path | None, allowed: str | Path | None, log: LogThrottle
) -> tuple[curve.KeyPair, curve.AllowList] | None:
    given = curve.all_or_none(
        {"notice_key": key, "notice_allowed": allowed},
        "encrypted notices need notice_key, the publisher's secret certificate, and notice_allowed, the public "
        "certificates of the subscribers",
    )
    return (curve.load_secret(given[0]), curve.AllowList(given[1], "notice_allowed", log)) if given else None


def _single_key(others: curve.AllowList) -> bytes:
    keys = others.keys
    if len(keys) != 1:
        raise SettingsError(
            f"notice_allowed {str(others)!r} has {len(keys)} keys; to connect to a broker, give its public certificate"
        )
    return next(iter(keys))
