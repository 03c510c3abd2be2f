"""``NoticeSubscriber``: receives notices in a receiver."""

import logging
import threading
import time

import zmq

from vllm_delta_sync.errors import FormatError, NoticeError
from vllm_delta_sync.logs import LogThrottle, guarded_logger
from vllm_delta_sync.notice import curve
from vllm_delta_sync.notice.messages import Message, Notice, NoticeVerifier, parse
from vllm_delta_sync.notice.sockets import (
    MAX_FRAME_BYTES,
    ReconnectingSocket,
    check_port,
    error_text,
    open_socket,
    received,
)
from vllm_delta_sync.trust.keyring import Keyring

MAX_DRAIN = 1000
"""Messages handled per batch, so that a flood cannot block a receiver."""


class NoticeSubscriber:
    """Receives the notices of one run. Connects in the background, and reconnects during calls of ``receive``.

    Any thread may call any method; a lock serializes the calls, so ``close`` waits for a running ``receive``.

    Attributes:
        malformed: number of malformed messages of this run, which are ignored.
    """

    def __init__(
        self,
        address: str,
        run: str,
        keys: tuple[curve.KeyPair, bytes] | None = None,
        keyring: Keyring | None = None,
        log: logging.Logger | None = None,
    ) -> None:
        """Connect to ``address``, as ``tcp://trainer:5555`` or ``tcp://[::1]:5555``. The publisher may start later.

        Args:
            keys: see ``curve.client_keys``.
            keyring: if it has trusted keys, notices not signed by one of them are ignored.
            log: logger for failed handshakes.

        Raises:
            NoticeError: ``address`` is malformed.
        """
        check_port(address)
        self.address = address
        self.malformed = 0
        self._run = run
        self._lock = threading.Lock()
        self._verifier = NoticeVerifier(keyring)
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.SUB, MAX_FRAME_BYTES)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, run)
        try:
            if keys is not None:
                curve.set_client_keys(self._socket, *keys)
            self._connection = ReconnectingSocket(self._socket, address, LogThrottle(log or guarded_logger(__name__)))
        except BaseException:
            self._socket.close(linger=0)
            self._context.term()
            raise

    @property
    def rejected(self) -> int:
        """Number of notices that were ignored because no trusted key signed them."""
        return self._verifier.rejected

    def receive(self, timeout_s: float) -> Notice | None:
        """Return the queued notice of the newest version; None if none arrives within ``timeout_s`` seconds.

        Publishers repeat the last notice, so the same one is returned many times.

        Raises:
            NoticeError: the subscriber is closed, or the socket failed.
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
                    f"cannot receive notices from {self.address}: {error_text(error)}; the receiver polls instead"
                ) from error

    def close(self) -> None:
        """Disconnect. May be called twice."""
        with self._lock:
            if not self._socket.closed:
                self._connection.monitor.close()
                self._socket.close(linger=0)
            self._context.term()

    def _wait(self, deadline: float) -> Notice | None:
        """Wait for one event, until ``deadline`` at most, and return the newest notice it brought, if any."""
        monitor = self._connection.monitor
        until = min(deadline, self._connection.due())
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(monitor.socket, zmq.POLLIN)
        ready = dict(poller.poll(max(0, round((until - time.monotonic()) * 1000))))
        messages = self._drain() if self._socket in ready else []
        newest = self._verifier.newest(messages)
        if monitor.socket in ready:
            monitor.read()
        self._connection.reconnect_if_due()
        return newest

    def _drain(self) -> list[Message]:
        found: list[Message] = []
        for frames in received(self._socket, MAX_DRAIN):
            # Subscriptions match by prefix: run "a" receives notices of run "ab" too.
            if frames[0] != self._run.encode():
                continue
            try:
                found.append(parse(frames, self._run))
            except FormatError:
                self.malformed += 1
        return found
