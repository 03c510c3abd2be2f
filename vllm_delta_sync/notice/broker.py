"""A meeting point for publishers and receivers that cannot reach each other: both connect to it.

It believes nothing and knows nothing of runs: a topic and a short message go in on one side and out on the other. What
came last on a topic is kept, and given to whoever subscribes.
"""

from pathlib import Path

import zmq

from vllm_delta_sync.errors import NoticeError, SettingsError
from vllm_delta_sync.notice import curve
from vllm_delta_sync.notice.messages import MAX_NOTICE_BYTES, MAX_TOPIC_BYTES, LastValues
from vllm_delta_sync.notice.sockets import (
    LINGER_MS,
    MAX_FRAME_BYTES,
    MAX_REQUEST_BYTES,
    SERVER_FAILURES,
    HandshakeMonitor,
    LogThrottle,
    PollWaker,
    Socket,
    bind,
    check_port,
    open_socket,
    reason,
    wait_ms,
)
from vllm_delta_sync.redaction import guarded_logger

logger = guarded_logger(__name__)

MAX_TOPICS = 1024
MAX_TURN = 256
"""Messages of one side that are looked at before the other side's turn."""
PUBLISHERS_QUEUE = 256
REPEAT_SECONDS = 2.0
"""Later than publishers repeat: only what a publisher that is gone has left behind."""


class Broker:
    """Passes notices from one port to another. One thread opens, runs and closes it; ``stop`` is for any.

    Attributes:
        publishers, subscribers: the addresses as bound.
        passed: messages passed on. dropped: messages that were no notices by their form.
        wakeup: file descriptor for ``signal.set_wakeup_fd``, so that no signal waits for ``run``'s poll.
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
            publishers, subscribers: ``tcp://*:5556``, ``tcp://127.0.0.1:*`` for any free port, ``ipc:///path``.
            key: file with the own secret CURVE certificate; needs the other two.
            allowed_publishers, allowed_subscribers: public certificates, each as a directory or one file.

        Raises:
            NoticeError: an address cannot be bound. SettingsError: a key is missing or cannot be used.
        """
        check_port(publishers)
        check_port(subscribers)
        self.passed = self.dropped = 0
        self._quiet = LogThrottle(logger)
        self._last = LastValues(MAX_TOPICS, REPEAT_SECONDS)
        self._stopped = False
        lists = _keys(key, allowed_publishers, allowed_subscribers, self._quiet)
        self._context = zmq.Context()
        self._wake = PollWaker()
        self.wakeup = self._wake.sender
        self._gate: curve.CurveAuthenticator | None = None
        self._watches: list[HandshakeMonitor] = []
        self._sources = open_socket(self._context, zmq.XSUB, MAX_FRAME_BYTES)
        self._sources.setsockopt(zmq.RCVHWM, PUBLISHERS_QUEUE)
        self._sinks = open_socket(self._context, zmq.XPUB, MAX_REQUEST_BYTES)
        self._sinks.setsockopt(zmq.XPUB_VERBOSE, 1)
        try:
            if lists is not None:
                own, sources, sinks = lists
                self._gate = curve.CurveAuthenticator(self._context, own, self._quiet)
                # Two domains: whoever may listen may not announce.
                self._gate.guard(self._sources, "publishers", sources)
                self._gate.guard(self._sinks, "subscribers", sinks)
            self.publishers = self._open(self._sources, publishers)
            self.subscribers = self._open(self._sinks, subscribers)
            self._sources.send(b"\x01")
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        """Pass notices on until ``stop``.

        Raises:
            NoticeError: a socket broke.
        """
        poller = zmq.Poller()
        for each in (self._sources, self._sinks, self._wake.fd, *(watch.socket for watch in self._watches)):
            poller.register(each, zmq.POLLIN)
        if self._gate is not None:
            poller.register(self._gate.socket, zmq.POLLIN)
        try:
            while True:
                # In this order: whoever wakes us has said before what for.
                self._wake.clear()
                if self._stopped:
                    return
                busy = self._turn()
                poller.poll(0 if busy else wait_ms(self._last.next_at()))
        except zmq.ZMQError as error:
            raise NoticeError(f"the broker's sockets failed: {reason(error)}; start it again") from error

    def stop(self) -> None:
        """End ``run``; from any thread, and from signal handlers."""
        self._stopped = True
        self._wake.set()

    def close(self) -> None:
        """Free both addresses."""
        for watch in self._watches:
            watch.close()
        self._sources.close(linger=0)
        self._sinks.close(linger=LINGER_MS)
        if self._gate is not None:
            self._gate.close()
        self._context.term()
        self._wake.close()

    def _open(self, socket: Socket, address: str) -> str:
        watch = HandshakeMonitor(socket, self._quiet, address, SERVER_FAILURES)
        self._watches.append(watch)
        watch.address = bind(socket, address)
        return watch.address

    def _turn(self) -> bool:
        """Do whatever can be done without waiting; whether there is more."""
        if self._gate is not None:
            self._gate.serve()
        for watch in self._watches:
            watch.read()
        requests = _read(self._sinks)
        for frames in requests:
            # The rest of what a subscriber might send is nobody's business.
            if frames[0][:1] == b"\x01":
                self._last.wanted(frames[0][1:])
        messages = _read(self._sources)
        for frames in messages:
            self._pass_on(frames)
        for frames in self._last.due():
            self._sinks.send_multipart(frames, zmq.DONTWAIT)
        return len(requests) == MAX_TURN or len(messages) == MAX_TURN

    def _pass_on(self, frames: list[bytes]) -> None:
        if len(frames) != 2 or not 0 < len(frames[0]) <= MAX_TOPIC_BYTES or len(frames[1]) > MAX_NOTICE_BYTES:
            self.dropped += 1
            self._quiet.warn("a publisher sends what is no notice by its form; it is dropped")
            return
        self.passed += 1
        self._last.put(frames)
        self._sinks.send_multipart(frames, zmq.DONTWAIT)


def _read(socket: Socket) -> list[list[bytes]]:
    found: list[list[bytes]] = []
    for _ in range(MAX_TURN):
        try:
            found.append(socket.recv_multipart(zmq.DONTWAIT))
        except zmq.Again:
            break
    return found


def _keys(
    key: Path | None, publishers: Path | None, subscribers: Path | None, quiet: LogThrottle
) -> tuple[curve.KeyPair, curve.AllowList, curve.AllowList] | None:
    given = {"--key": key, "--allowed-publishers": publishers, "--allowed-subscribers": subscribers}
    if all(value is None for value in given.values()):
        return None
    if key is None or publishers is None or subscribers is None:
        missing = next(name for name, value in given.items() if value is None)
        raise SettingsError(
            f"{missing} is missing: a broker with CURVE needs its own secret certificate, and the public certificates "
            "of those who may announce and of those who may listen"
        )
    return (
        curve.load_secret(key, "--key"),
        curve.AllowList(publishers, "--allowed-publishers", quiet),
        curve.AllowList(subscribers, "--allowed-subscribers", quiet),
    )
