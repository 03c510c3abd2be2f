"""The trainer's end of notices."""

import threading
import time
from collections import deque
from pathlib import Path

import zmq

from vllm_delta_sync.errors import NoticeError, SettingsError
from vllm_delta_sync.notice import curve
from vllm_delta_sync.notice.messages import REPEAT_SECONDS, LastValues, Notice, encode
from vllm_delta_sync.notice.sockets import (
    LINGER_MS,
    MAX_REQUEST_BYTES,
    QUEUE_MESSAGES,
    SERVER_FAILURES,
    HandshakeMonitor,
    LogThrottle,
    PollWaker,
    ReconnectingSocket,
    bind,
    check_port,
    open_socket,
    reason,
    wait_ms,
)
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.trust.keyring import Keyring

logger = guarded_logger(__name__)

CONNECT_PREFIX = "connect:"
DOMAIN = "subscribers"
RUNS = 16
"""Runs whose last notice is repeated."""
MAX_REQUESTS = 256
STORM_SECONDS = 0.01
CLOSE_SECONDS = 5.0


class NoticePublisher:
    """Announces versions from a thread of its own; whoever calls ``send`` never waits for it, nor for subscribers.

    Each subscriber has a queue of 16 notices; one that does not keep up loses notices. The last notice of a run is
    sent again to whoever subscribes, and about every second. Any thread may call any method. Not to be used across
    ``os.fork``.

    Attributes:
        address: as bound: the real port in place of ``*``, ``0.0.0.0`` for all interfaces; as given when connecting.
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
            address: to bind: ``tcp://*:5555``, ``tcp://127.0.0.1:*`` for any free port, ``ipc:///path``. To connect:
                ``connect:tcp://broker:5556``; nobody need be there yet.
            key: file with the own secret CURVE certificate; needs ``allowed``.
            allowed: public certificates, as a directory or one file: of the subscribers that may come, or when
                connecting the broker's own.
            keyring: signs each notice, if it has a signing key.

        Raises:
            NoticeError: the address is taken, not one of this machine's, or no address at all.
            SettingsError: only one of ``key`` and ``allowed`` is given, or they cannot be used.
        """
        dials = address.startswith(CONNECT_PREFIX)
        check_port(address.removeprefix(CONNECT_PREFIX))
        self._keyring = keyring
        self._quiet = LogThrottle(logger)
        self._lock = threading.Lock()
        self._waiting: deque[list[bytes]] = deque(maxlen=QUEUE_MESSAGES)
        self._last = LastValues(RUNS, repeat_seconds)
        self._end: str | None = None
        own, others = _keys(key, allowed, self._quiet)
        self._context = zmq.Context()
        self._wake = PollWaker()
        self._gate: curve.CurveAuthenticator | None = None
        self._link: ReconnectingSocket | None = None
        self._watch: HandshakeMonitor | None = None
        self._socket = open_socket(self._context, zmq.XPUB, MAX_REQUEST_BYTES)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        try:
            if dials:
                if own is not None and others is not None:
                    curve.as_client(self._socket, own, _only(others))
                self._link = ReconnectingSocket(self._socket, address.removeprefix(CONNECT_PREFIX), self._quiet)
                self._watch = self._link.watch
                self.address = address
            else:
                if own is not None and others is not None:
                    self._gate = curve.CurveAuthenticator(self._context, own, self._quiet)
                    self._gate.guard(self._socket, DOMAIN, others)
                self._watch = HandshakeMonitor(self._socket, self._quiet, address, SERVER_FAILURES)
                self.address = self._watch.address = bind(self._socket, address)
        except BaseException:
            self._shut()
            raise
        self._thread = threading.Thread(target=self._run, name="delta-sync-notices", daemon=True)
        self._thread.start()

    def send(self, notice: Notice) -> None:
        """Have it sent to whoever is subscribed; returns at once.

        Raises:
            NoticeError: the publisher is closed, or the socket broke.
        """
        frames = encode(notice, self._keyring)
        with self._lock:
            if self._end is not None:
                raise NoticeError(
                    f"cannot send notice of version {notice.version} on {self.address}: {self._end}; "
                    "receivers find it by polling"
                )
            self._waiting.append(frames)
            self._wake.set()

    def close(self) -> None:
        """Send what waits, to those who take it within a tenth of a second, and free the address.

        May be called twice.
        """
        with self._lock:
            if self._end is None:
                self._end = "the publisher is closed"
                self._wake.set()
        self._thread.join(CLOSE_SECONDS)

    # The thread

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (self._socket, self._wake.fd, self._watch and self._watch.socket, self._gate and self._gate.socket):
            if each is not None:
                poller.register(each, zmq.POLLIN)
        try:
            while True:
                # In this order: whoever wakes us has said before what for.
                self._wake.clear()
                ended = self._end is not None
                self._turn()
                if ended:
                    break
                until = min(self._last.next_at(), float("inf") if self._link is None else self._link.due())
                poller.poll(wait_ms(until))
        except zmq.ZMQError as error:
            text = reason(error)
            self._quiet.warn(f"no more notices on {self.address}, receivers poll: {text}")
            with self._lock:
                self._end = self._end or text
        finally:
            with self._lock:
                self._end = self._end or "its thread has ended"
                self._shut()

    def _turn(self) -> None:
        """Do whatever can be done without waiting."""
        if self._gate is not None:
            self._gate.serve()
        if self._watch is not None:
            self._watch.read()
        if self._link is not None:
            self._link.tend()
        for _ in range(MAX_REQUESTS):
            try:
                request = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                break
            if request[:1] == b"\x01":
                self._last.wanted(request[1:])
        else:
            # A storm of subscriptions: the trainer needs this interpreter more than strangers do.
            time.sleep(STORM_SECONDS)
        while self._waiting:
            frames = self._waiting.popleft()
            self._last.put(frames)
            self._socket.send_multipart(frames, zmq.DONTWAIT)
        for frames in self._last.due():
            self._socket.send_multipart(frames, zmq.DONTWAIT)

    def _shut(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._socket.close(linger=LINGER_MS)
        if self._gate is not None:
            self._gate.close()
        self._context.term()
        self._wake.close()


def open_notices(
    address: str, key: str | Path | None = None, allowed: str | Path | None = None, keyring: Keyring | None = None
) -> NoticePublisher | None:
    """A publisher; None, and a warning, if the address cannot be used: nobody depends on notices.

    Raises:
        SettingsError: as ``NoticePublisher``.
    """
    try:
        return NoticePublisher(address, key, allowed, keyring)
    except NoticeError as error:
        logger.warning("publishing without notices, receivers poll: %s", error)
        return None


def _keys(
    key: str | Path | None, allowed: str | Path | None, quiet: LogThrottle
) -> tuple[curve.KeyPair | None, curve.AllowList | None]:
    if key is None and allowed is None:
        return None, None
    if key is None or allowed is None:
        missing = "notice_key" if key is None else "notice_allowed"
        raise SettingsError(
            f"{missing} is missing: encrypted notices need notice_key, the own secret certificate, and "
            "notice_allowed, the public certificates of those who may listen"
        )
    return curve.load_secret(Path(key)), curve.AllowList(Path(allowed), "notice_allowed", quiet)


def _only(others: curve.AllowList) -> bytes:
    keys = others.keys
    if len(keys) != 1:
        raise SettingsError(
            f"notice_allowed {str(others)!r} has {len(keys)} keys; to connect to a broker, give its public certificate"
        )
    return next(iter(keys))
