"""The receiver's end of notices."""

import logging
import threading
import time
from collections.abc import Callable

import zmq

from vllm_delta_sync.errors import FormatError, NoticeError
from vllm_delta_sync.notice import curve
from vllm_delta_sync.notice.messages import Message, Notice, NoticeVerifier, parse
from vllm_delta_sync.notice.sockets import (
    MAX_FRAME_BYTES,
    LogThrottle,
    ReconnectingSocket,
    check_port,
    open_socket,
    reason,
)
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.trust.keyring import Keyring

MAX_DRAIN = 1000
"""Messages looked at in one go, so that a flood cannot hold a receiver."""


class NoticeSubscriber:
    """Connects in the background, and reconnects while somebody calls ``receive``.

    Any thread may call any method; calls take turns on a lock, so ``close`` waits for a ``receive`` under
    way. ``malformed`` counts messages on this run's topic that were ignored.
    """

    def __init__(
        self,
        address: str,
        run: str,
        keys: tuple[curve.KeyPair, bytes] | None = None,
        keyring: Keyring | None = None,
        allowed: Callable[[], frozenset[str]] | None = None,
        log: logging.Logger | None = None,
    ) -> None:
        """Connect to ``address``, such as ``tcp://trainer:5555``. Nobody need be there yet.

        Args:
            keys: see ``curve.client_keys``.
            keyring: with trusted keys, notices that are not signed by one of them are ignored.
            allowed: public signing keys that are in use now; None: the trusted keys.
            log: where to say that a server cannot be talked to.

        Raises:
            NoticeError: ``address`` cannot be connected to by its form.
        """
        check_port(address)
        self.address = address
        self.malformed = 0
        self._run = run
        self._lock = threading.Lock()
        self._believer = NoticeVerifier(keyring, allowed)
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.SUB, MAX_FRAME_BYTES)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, run)
        try:
            if keys is not None:
                curve.as_client(self._socket, *keys)
            self._link = ReconnectingSocket(self._socket, address, LogThrottle(log or guarded_logger(__name__)))
        except BaseException:
            self._socket.close(linger=0)
            self._context.term()
            raise

    @property
    def rejected(self) -> int:
        """Notices that were ignored because nobody trusted vouches for them."""
        return self._believer.rejected

    def receive(self, timeout_s: float) -> Notice | None:
        """Return the notice of the newest version that is waiting, or None after ``timeout_s`` seconds.

        The same notice comes again and again.

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
                    f"cannot receive notices from {self.address}: {reason(error)}; new versions are found by polling"
                ) from error

    def close(self) -> None:
        """Disconnect. May be called twice."""
        with self._lock:
            if not self._socket.closed:
                self._link.watch.close()
                self._socket.close(linger=0)
            self._context.term()

    def _wait(self, deadline: float) -> Notice | None:
        """Wait for something to happen, until ``deadline`` at most, and return what notice came of it."""
        watch = self._link.watch
        until = min(deadline, self._link.due())
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(watch.socket, zmq.POLLIN)
        ready = dict(poller.poll(max(0, round((until - time.monotonic()) * 1000))))
        newest = self._believer.newest(self._drain()) if self._socket in ready else None
        if watch.socket in ready:
            watch.read()
        self._link.tend()
        return newest

    def _drain(self) -> list[Message]:
        found: list[Message] = []
        for _ in range(MAX_DRAIN):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            # Topics match by their beginning: run "a" hears run "ab" too, which is no fault.
            if frames[0] != self._run.encode():
                continue
            try:
                found.append(parse(frames, self._run))
            except FormatError:
                self.malformed += 1
        return found
