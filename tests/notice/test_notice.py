"""Notices over real sockets: what was announced last reaches whoever is there, whatever happens in between."""

import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import rfc8785
import zmq

from tests.notice.conftest import Ends
from tests.support.answers import closed_port
from tests.support.notices import DIGEST, LOOPBACK, RUN, Keys, Process, hear, port_of, process, public
from tests.support.proxy import TcpProxy
from tests.support.running import eventually, run_python
from vllm_delta_sync.errors import NoticeError
from vllm_delta_sync.notice import Notice, NoticePublisher, NoticeSubscriber
from vllm_delta_sync.notice.sockets import HEARTBEAT_TIMEOUT_MS, MAX_FRAME_BYTES
from vllm_delta_sync.notice.subscriber import MAX_DRAIN

PATIENCE = 120.0
POLL_MS = 120_000
OTHER = "f" * 32
REPEAT_SECONDS = 0.2


def notice(version: int, run: str = RUN) -> Notice:
    return Notice(run, version, DIGEST)


@pytest.fixture
def publisher(ends: Ends) -> NoticePublisher:
    return ends.publisher(LOOPBACK, repeat_seconds=REPEAT_SECONDS)


@pytest.fixture
def silent(ends: Ends) -> NoticePublisher:
    """Repeats nothing for longer than a test listens in vain."""
    return ends.publisher(LOOPBACK, repeat_seconds=2)


@pytest.fixture
def subscriber(ends: Ends, silent: NoticePublisher) -> NoticeSubscriber:
    """Has heard of version 0 of the silent one."""
    opened = ends.subscriber(silent.address, RUN)
    silent.send(notice(0))
    hear(opened, 0)
    return opened


@pytest.fixture
def proxied(ends: Ends, publisher: NoticePublisher) -> Iterator[tuple[TcpProxy, NoticeSubscriber]]:
    """A subscriber behind a bad network, that has heard of version 1."""
    with TcpProxy(port_of(publisher.address)) as proxy:
        subscriber = ends.subscriber(f"tcp://127.0.0.1:{proxy.port}", RUN)
        publisher.send(notice(1))
        hear(subscriber, 1)
        yield proxy, subscriber


# What arrives


def test_a_notice_arrives(silent: NoticePublisher, subscriber: NoticeSubscriber) -> None:
    silent.send(notice(7))
    hear(subscriber, 7)
    began = time.monotonic()
    assert subscriber.receive(0.3) is None
    assert 0.25 < time.monotonic() - began < PATIENCE
    assert subscriber.malformed == 0


def test_bytes_on_the_wire(silent: NoticePublisher) -> None:
    silent.send(Notice(RUN, 12, "00ff"))
    with zmq.Context() as context, context.socket(zmq.SUB) as peer:
        peer.connect(silent.address)
        peer.setsockopt_string(zmq.SUBSCRIBE, "")
        assert peer.poll(POLL_MS)
        assert peer.recv_multipart() == [RUN.encode(), b'{"manifest":"00ff","run":"%b","version":12}' % RUN.encode()]


def test_other_runs_are_not_heard(ends: Ends, silent: NoticePublisher, subscriber: NoticeSubscriber) -> None:
    # A topic matches by its beginning in ZeroMQ.
    for run in (OTHER, RUN + "b"):
        silent.send(notice(3, run))
    silent.send(notice(1))
    assert subscriber.receive(PATIENCE) == notice(1)
    assert subscriber.malformed == 0
    # Each run has its last notice, which whoever comes late is told.
    silent.send(notice(2))
    for run, version in ((RUN, 2), (OTHER, 3), (RUN, 2)):
        assert ends.subscriber(silent.address, run).receive(PATIENCE) == notice(version, run)


def test_the_last_is_repeated_about_every_second(ends: Ends) -> None:
    publisher = ends.publisher(LOOPBACK)
    subscriber = ends.subscriber(publisher.address, RUN)
    publisher.send(notice(7))
    hear(subscriber, 7)
    began = time.monotonic()
    for _ in range(2):
        assert subscriber.receive(PATIENCE) == notice(7)
    assert time.monotonic() - began > 1.0


def test_any_thread_may_send(silent: NoticePublisher, subscriber: NoticeSubscriber) -> None:
    def send(number: int) -> None:
        for turn in range(200):
            silent.send(notice(number * 1000 + turn))

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(send, number) for number in range(1, 5)]:
            future.result()

    def heard() -> bool:
        # Sent again until it arrives: a subscriber whose queue is still full loses a notice.
        silent.send(notice(9999))
        found = subscriber.receive(0.05)
        return found is not None and found.version == 9999

    eventually(heard)
    assert subscriber.malformed == 0


# What is no notice


class RawPublisher:
    """A peer that sends whatever it likes."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.XPUB)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.subscriber = NoticeSubscriber(self.address, "run-a")
        self.wait_for_subscriber()

    def wait_for_subscriber(self) -> None:
        assert self.socket.poll(POLL_MS)
        self.socket.recv()

    def send_good(self, version: int) -> None:
        self.socket.send_multipart([b"run-a", b'{"manifest":"","run":"run-a","version":%d}' % version])
        assert self.subscriber.receive(PATIENCE) == Notice("run-a", version, "")

    def close(self) -> None:
        self.subscriber.close()
        self.socket.close(linger=0)
        self.context.term()


@pytest.fixture
def raw() -> Iterator[RawPublisher]:
    opened = RawPublisher()
    yield opened
    opened.close()


MALFORMED: dict[str, list[bytes]] = {
    "one frame": [b"run-a"],
    "three frames": [b"run-a", b'{"manifest":"","run":"run-a","version":1}', b""],
    "empty": [b"run-a", b""],
    "no json": [b"run-a", b"\xff\xfe"],
    "no object": [b"run-a", b"[1,2,3]"],
    "deep": [b"run-a", b"[" * 2000 + b"]" * 2000],
    "not canonical": [b"run-a", b'{"run": "run-a", "version": 1, "manifest": ""}'],
    "duplicate key": [b"run-a", b'{"manifest":"","run":"run-a","run":"run-a","version":1}'],
    "missing field": [b"run-a", b'{"run":"run-a","version":1}'],
    "unknown field": [b"run-a", b'{"manifest":"","more":1,"run":"run-a","version":1}'],
    "another run": [b"run-a", b'{"manifest":"","run":"run-b","version":1}'],
    "no version": [b"run-a", b'{"manifest":"","run":"run-a","version":"1"}'],
    "true": [b"run-a", b'{"manifest":"","run":"run-a","version":true}'],
    "fraction": [b"run-a", b'{"manifest":"","run":"run-a","version":1.5}'],
    "negative": [b"run-a", b'{"manifest":"","run":"run-a","version":-1}'],
    "too large a version": [b"run-a", b'{"manifest":"","run":"run-a","version":10000000000}'],
    "no manifest": [b"run-a", b'{"manifest":null,"run":"run-a","version":1}'],
    "oversized": [b"run-a", rfc8785.dumps({"manifest": "x" * 5000, "run": "run-a", "version": 1})],
}


def test_malformed_messages_are_counted_and_ignored(raw: RawPublisher) -> None:
    for number, (name, frames) in enumerate(MALFORMED.items(), 1):
        raw.socket.send_multipart(frames)
        raw.send_good(number)
        assert raw.subscriber.malformed == number, name


def test_a_huge_message_is_never_buffered(raw: RawPublisher) -> None:
    raw.socket.send_multipart([b"run-a", b"x" * (MAX_FRAME_BYTES + 1)])
    # ZeroMQ cuts the connection, and the subscriber comes back by itself.
    for seconds in (0.3, 2):
        assert raw.subscriber.receive(seconds) is None
        raw.wait_for_subscriber()
    raw.send_good(8)


def test_a_flood_does_not_hold_a_receiver(raw: RawPublisher) -> None:
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            for _ in range(MAX_DRAIN):
                raw.socket.send_multipart([b"run-a", b"nonsense"])

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        began = time.monotonic()
        assert raw.subscriber.receive(0.5) is None
        assert time.monotonic() - began < PATIENCE
        assert raw.subscriber.malformed > 0
    finally:
        stop.set()
        thread.join()


# Addresses


def test_either_end_may_come_first(ends: Ends, silent: NoticePublisher) -> None:
    silent.close()
    subscriber = ends.subscriber(silent.address, RUN)
    ends.publisher(silent.address).send(notice(1))
    hear(subscriber, 1)


@pytest.mark.parametrize("first", ["publisher", "subscriber"])
def test_either_may_come_first_when_the_publisher_dials(ends: Ends, first: str) -> None:
    """Where the two meet is a plain XSUB/XPUB pair here."""
    with zmq.Context() as context, context.socket(zmq.XSUB) as sources:
        sources.linger = 0
        port = sources.bind_to_random_port("tcp://127.0.0.1") if first == "subscriber" else closed_port()
        publisher = ends.publisher(f"connect:tcp://127.0.0.1:{port}")
        assert publisher.address == f"connect:tcp://127.0.0.1:{port}"
        publisher.send(notice(4))
        if first == "publisher":
            sources.bind(f"tcp://127.0.0.1:{port}")
        sources.send(b"\x01")
        assert sources.poll(POLL_MS)
        assert sources.recv_multipart()[0] == RUN.encode()


def test_the_bound_address_is_reported(ends: Ends, silent: NoticePublisher) -> None:
    host, port = silent.address.removeprefix("tcp://").split(":")
    assert (host, int(port) > 0) == ("127.0.0.1", True)
    assert ends.publisher("tcp://*:*").address.startswith("tcp://0.0.0.0:")
    with pytest.raises(
        NoticeError, match=f"'{silent.address}' is in use; stop the other process or give another"
    ) as caught:
        NoticePublisher(silent.address)
    assert (caught.value.kind, caught.value.exit_code) == ("notice", 4)


def test_addresses_that_are_none() -> None:
    bound = ["", "5555", "tcp://127.0.0.1", "http://127.0.0.1:1", "tcp://192.0.2.1:5555", "tcp://*:65536"]
    bound += ["tcp://[::1]", "tcp://[::1]:70000", "tcp://[2001:db8::1]:5555", "tcp://[::1:5555"]
    bound += ["tcp://127.0.0.1:-1", "tcp://127.0.0.1:1x", "tcp://127.0.0.1:5555\r"]
    dialled = ["", "5555", "tcp://*:1", "tcp://h:70000", "tcp://h:-1"]
    for address in [*bound, *(f"connect:{text}" for text in dialled)]:
        with pytest.raises(NoticeError) as caught:
            NoticePublisher(address)
        assert repr(address.removeprefix("connect:")) in str(caught.value)
    for address in ("", "5555", "tcp://127.0.0.1", "tcp://*:5555", "tcp://127.0.0.1:70000"):
        with pytest.raises(NoticeError) as caught:
            NoticeSubscriber(address, RUN)
        assert repr(address) in str(caught.value)


# Ends


def test_closed_frees_the_address_and_refuses_use(silent: NoticePublisher) -> None:
    subscriber = NoticeSubscriber(silent.address, RUN)
    for each in (silent, subscriber):
        each.close()
        each.close()
    with pytest.raises(NoticeError, match="version 3"):
        silent.send(notice(3))
    with pytest.raises(NoticeError, match="cannot receive"):
        subscriber.receive(0.1)
    NoticePublisher(silent.address).close()


def test_closing_sends_what_waits(silent: NoticePublisher, subscriber: NoticeSubscriber) -> None:
    silent.send(notice(2))
    silent.close()
    hear(subscriber, 2)


def test_closing_is_prompt_whenever_it_comes() -> None:
    for turn in range(20):
        publisher = NoticePublisher(LOOPBACK, repeat_seconds=3600)
        publisher.send(notice(turn))
        began = time.monotonic()
        publisher.close()
        assert time.monotonic() - began < PATIENCE


EXIT = """
import sys
from pathlib import Path
from vllm_delta_sync.notice import Notice, NoticePublisher, NoticeSubscriber, curve
own, allowed = (Path(sys.argv[2]), Path(sys.argv[3])) if len(sys.argv) > 2 else (None, None)
publisher = NoticePublisher(sys.argv[1], own, allowed)
subscriber = NoticeSubscriber(publisher.address, "run-a", curve.client_keys(own, allowed))
publisher.send(Notice("run-a", 0, ""))
assert subscriber.receive(120) is not None
for version in range(1000):
    publisher.send(Notice("run-a", version, ""))
"""


@pytest.mark.parametrize("with_keys", [False, True], ids=["plain", "with keys"])
def test_an_interpreter_ends_though_nobody_closed_anything(tmp_path: Path, with_keys: bool) -> None:
    key = Keys(tmp_path).make("key")
    keys = [str(key), str(public(key))] if with_keys else []
    assert run_python("-c", EXIT, LOOPBACK, *keys, seconds=PATIENCE).stderr == ""


# Processes that stand still, and networks that fail


def test_a_stalled_subscriber_delays_nobody_and_ends_on_the_newest(ends: Ends, publisher: NoticePublisher) -> None:
    quick = ends.subscriber(publisher.address, RUN)
    with (
        process("tests.support.notices", "listen", publisher.address, RUN) as stalled,
        socket.create_connection(("127.0.0.1", port_of(publisher.address))),  # connected, and silent for ever
    ):
        publisher.send(notice(1))
        stalled.hear("1")
        stalled.running.send_signal(signal.SIGSTOP)
        longest = 0.0
        for version in range(2, 30_002):
            began = time.monotonic()
            publisher.send(notice(version))
            longest = max(longest, time.monotonic() - began)
            if version % 10_000 == 1:
                hear(quick, version)
        # To a subscriber that is waited for, a send would take until the heartbeats give it up.
        assert longest < HEARTBEAT_TIMEOUT_MS / 1000 / 2
        stalled.running.send_signal(signal.SIGCONT)
        expect_settled(stalled, "30001")


def expect_settled(listener: Process, last: str) -> None:
    """That version is heard, and none after it for longer than two repetitions."""
    listener.hear(last)
    time.sleep(3 * REPEAT_SECONDS)
    listener.running.send_signal(signal.SIGTERM)
    listener.running.wait(PATIENCE)
    with pytest.raises(queue.Empty):
        listener.line(0.1)


def test_a_publisher_that_was_killed_comes_back_on_the_same_port(ends: Ends) -> None:
    with process("tests.support.notices", "announce", LOOPBACK, RUN) as announcer:
        address = announcer.line()
        subscriber = ends.subscriber(address, RUN)
        announcer.write("1")
        hear(subscriber, 1)
        announcer.running.kill()
        announcer.running.wait(PATIENCE)
        with process("tests.support.notices", "announce", address, RUN) as again:
            again.write("2")
            hear(subscriber, 2)


def test_a_stalled_connection_ends_on_the_newest(
    publisher: NoticePublisher, proxied: tuple[TcpProxy, NoticeSubscriber]
) -> None:
    proxy, subscriber = proxied
    proxy.stall()
    for version in range(2, 5000):
        publisher.send(notice(version))
    assert subscriber.receive(3 * REPEAT_SECONDS) is None
    proxy.resume()
    hear(subscriber, version)
    assert subscriber.receive(PATIENCE) == notice(version)


@pytest.mark.slow
def test_a_connection_that_is_dead_for_good_is_given_up(
    publisher: NoticePublisher, proxied: tuple[TcpProxy, NoticeSubscriber]
) -> None:
    """Neither end is told: only that nothing comes any more shows it."""
    proxy, subscriber = proxied
    proxy.stall()
    publisher.send(notice(2))
    assert subscriber.receive(15) is None
    assert proxy.connections > 1
    proxy.reset()
    proxy.resume()
    hear(subscriber, 2)
