"""``Broker``: forwards notices between publishers and receivers that cannot reach each other; both connect to it.

The broker verifies no signatures and knows no runs: it forwards short messages by topic. It keeps the last message of
each topic and repeats it, also for subscribers that come when its publisher has gone.
"""

from pathlib import Path

import zmq

from vllm_delta_sync.errors import NoticeError
from vllm_delta_sync.logs import LogThrottle, guarded_logger
from vllm_delta_sync.notice import curve
from vllm_delta_sync.notice.messages import MAX_NOTICE_BYTES, MAX_TOPIC_BYTES, LastValues
from vllm_delta_sync.notice.sockets import (
    LINGER_MS,
    MAX_FRAME_BYTES,
    MAX_REQUEST_BYTES,
    SERVER_FAILURES,
    HandshakeMonitor,
    PollWaker,
    Socket,
    bind,
    check_port,
    error_text,
    open_socket,
    received,
    wait_ms,
)

logger = guarded_logger(__name__)

MAX_TOPICS = 1024
MAX_BATCH = 256
"""Messages that are handled before it is looked whether others wait for this thread."""
PUBLISHERS_QUEUE = 256
REPEAT_SECONDS = 2.0
"""Interval longer than that of publishers, so only the messages of absent publishers are repeated."""


class Broker:
    """Forwards notices from one port to another. One thread opens, runs and closes it; any thread may call ``stop``.

    Attributes:
        publishers, subscribers: the addresses as bound.
        passed: number of forwarded messages. dropped: number of malformed messages.
        wakeup: file descriptor for ``signal.set_wakeup_fd``, so that a signal interrupts the poll of ``run``.
    """

    def __init__(
        self,
        publishers: str,
        subscribers: str,
        key: Path | None = None,
        allowed_publishers: Path | None = None,
        allowed_subscribers: Path | None = None,
    ) -> None:
        """Bind both addresses.

        Args:
            publishers, subscribers: ``tcp://*:5556`` (IPv4 and IPv6), ``tcp://127.0.0.1:*`` for any free port,
                ``tcp://[::1]:5556``, ``ipc:///path``.
            key: file with the broker's secret CURVE certificate; requires the other two.
            allowed_publishers, allowed_subscribers: public certificates, each as a directory or one file.

        Raises:
            NoticeError: an address cannot be bound. SettingsError: a key is missing or cannot be used.
        """
        check_port(publishers)
        check_port(subscribers)
        self.passed = self.dropped = 0
        self._log = LogThrottle(logger)
        self._last = LastValues(MAX_TOPICS, REPEAT_SECONDS)
        self._stopped = False
        lists = _keys(key, allowed_publishers, allowed_subscribers, self._log)
        self._context = zmq.Context()
        self._wake = PollWaker()
        self.wakeup = self._wake.sender
        self._authenticator: curve.CurveAuthenticator | None = None
        self._monitors: list[HandshakeMonitor] = []
        self._publisher_socket = open_socket(self._context, zmq.SUB, MAX_FRAME_BYTES)
        self._publisher_socket.setsockopt(zmq.RCVHWM, PUBLISHERS_QUEUE)
        self._publisher_socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._subscriber_socket = open_socket(self._context, zmq.PUB, MAX_REQUEST_BYTES)
        try:
            if lists is not None:
                own, sources, sinks = lists
                self._authenticator = curve.CurveAuthenticator(self._context, own, self._log)
                # Two domains, because subscribers must not announce versions.
                self._authenticator.require_keys(self._publisher_socket, "publishers", sources)
                self._authenticator.require_keys(self._subscriber_socket, "subscribers", sinks)
            self.publishers = self._open(self._publisher_socket, publishers)
            self.subscribers = self._open(self._subscriber_socket, subscribers)
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        """Forward notices until ``stop``.

        Raises:
            NoticeError: a socket failed.
        """
        poller = zmq.Poller()
        for each in (self._publisher_socket, self._wake.fd, *(monitor.socket for monitor in self._monitors)):
            poller.register(each, zmq.POLLIN)
        if self._authenticator is not None:
            poller.register(self._authenticator.socket, zmq.POLLIN)
        try:
            while True:
                # Clear first: ``stop`` sets the flag before it wakes this thread.
                self._wake.clear()
                if self._stopped:
                    return
                busy = self._run_once()
                poller.poll(0 if busy else wait_ms(self._last.next_at()))
        except zmq.ZMQError as error:
            raise NoticeError(f"the broker's sockets failed: {error_text(error)}; start it again") from error

    def stop(self) -> None:
        """End ``run``; from any thread, and from signal handlers."""
        self._stopped = True
        self._wake.set()

    def close(self) -> None:
        """Close the sockets and free both addresses."""
        for monitor in self._monitors:
            monitor.close()
        self._publisher_socket.close(linger=0)
        self._subscriber_socket.close(linger=LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()
        self._wake.close()

    def _open(self, socket: Socket, address: str) -> str:
        monitor = HandshakeMonitor(socket, self._log, address, SERVER_FAILURES)
        self._monitors.append(monitor)
        monitor.address = bind(socket, address)
        return monitor.address

    def _run_once(self) -> bool:
        """Do all work that needs no waiting; return whether messages may be left."""
        if self._authenticator is not None:
            self._authenticator.serve()
        for monitor in self._monitors:
            monitor.read()
        messages = list(received(self._publisher_socket, MAX_BATCH))
        for frames in messages:
            self._pass_on(frames)
        for frames in self._last.due():
            self._subscriber_socket.send_multipart(frames, zmq.DONTWAIT)
        return len(messages) == MAX_BATCH

    def _pass_on(self, frames: list[bytes]) -> None:
        if len(frames) != 2 or not 0 < len(frames[0]) <= MAX_TOPIC_BYTES or len(frames[1]) > MAX_NOTICE_BYTES:
            self.dropped += 1
            self._log.warn("a publisher sends malformed notices; they are dropped")
            return
        self.passed += 1
        self._last.put(frames)
        self._subscriber_socket.send_multipart(frames, zmq.DONTWAIT)


def _keys(
    key: Path | None, publishers: Path | None, subscribers: Path | None, log: LogThrottle
) -> tuple[curve.KeyPair, curve.AllowList, curve.AllowList] | None:
    given = curve.all_or_none(
        {"--key": key, "--allowed-publishers": publishers, "--allowed-subscribers": subscribers},
        "a broker with CURVE needs its own secret certificate, and the public certificates of all publishers and of "
        "all subscribers",
    )
    if not given:
        return None
    own, publishers, subscribers = given
    return (
        curve.load_secret(own, "--key"),
        curve.AllowList(publishers, "--allowed-publishers", log),
        curve.AllowList(subscribers, "--allowed-subscribers", log),
    )
