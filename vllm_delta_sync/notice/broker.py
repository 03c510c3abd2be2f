"""``Broker``: forwards notices between publishers and receivers that cannot reach each other; both connect to it.

The broker verifies no signatures and knows no runs: it forwards short messages by topic. It keeps the last message of
each topic and repeats it, also for subscribers that come when its publisher has gone.
"""

from pathlib import Path

import zmq

from vllm_delta_sync.errors import NoticeError
from vllm_delta_sync.logs import LogThrottle, guarded_logger
from vllm_delta_sync.notice import curve
from vllm_delta_sync.notice.messages import MAX_NOTICE_BYTES, MAX_TOPIC_BYTES
from vllm_delta_sync.notice.publisher import NoticeSender
from vllm_delta_sync.notice.sockets import MAX_FRAME_BYTES, check_port, error_text, open_socket, received, wait_ms

logger = guarded_logger(__name__)

MAX_TOPICS = 1024
MAX_BATCH = 256
"""Messages that are handled before it is looked whether others wait for this thread."""
PUBLISHERS_QUEUE = 256
REPEAT_SECONDS = 2.0
"""Interval longer than that of publishers, so only the messages of absent publishers are repeated."""


class Broker(NoticeSender):
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
        self._stopped = False
        log = LogThrottle(logger)
        keys = _keys(key, allowed_publishers, allowed_subscribers, log)
        super().__init__(MAX_TOPICS, REPEAT_SECONDS, log)
        self.wakeup = self._wake.sender
        self._publisher_socket = open_socket(self._context, zmq.SUB, MAX_FRAME_BYTES)
        self._publisher_socket.setsockopt(zmq.RCVHWM, PUBLISHERS_QUEUE)
        self._publisher_socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            if keys is not None:
                own, sources, sinks = keys
                # Two domains, because subscribers must not announce versions.
                self._admit(self._publisher_socket, "publishers", own, sources)
                self._admit(self._socket, "subscribers", own, sinks)
            self.publishers = self._bind(self._publisher_socket, publishers)
            self.subscribers = self._bind(self._socket, subscribers)
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        """Forward notices until ``stop``.

        Raises:
            NoticeError: a socket failed.
        """
        poller = self._poller(self._publisher_socket)
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
        self._close_sockets(self._publisher_socket)

    def _run_once(self) -> bool:
        """Do all work that needs no waiting; return whether messages may be left."""
        self._serve()
        messages = list(received(self._publisher_socket, MAX_BATCH))
        for frames in messages:
            self._pass_on(frames)
        return len(messages) == MAX_BATCH

    def _pass_on(self, frames: list[bytes]) -> None:
        if len(frames) != 2 or not 0 < len(frames[0]) <= MAX_TOPIC_BYTES or len(frames[1]) > MAX_NOTICE_BYTES:
            self.dropped += 1
            self._log.warn("a publisher sends malformed notices; they are dropped")
            return
        self.passed += 1
        self._send_frames(frames)


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
