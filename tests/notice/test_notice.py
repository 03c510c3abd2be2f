"""Notices over real sockets on the loopback interface."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import rfc8785
import zmq

from tests.support.notices import hear
from vllm_delta_sync.errors import NoticeError
from vllm_delta_sync.notice import Notice, NoticePublisher, NoticeSubscriber
from vllm_delta_sync.notice.sockets import MAX_FRAME_BYTES
from vllm_delta_sync.notice.subscriber import MAX_DRAIN

WAIT = 120.0

LOOPBACK = "tcp://127.0.0.1:*"
DIGEST = "ab" * 32


@pytest.fixture
def publisher() -> Iterator[NoticePublisher]:
    # What is repeated by the clock is tested in test_notice_last.py.
    opened = NoticePublisher(LOOPBACK, repeat_seconds=3600)
    yield opened
    opened.close()


@pytest.fixture
def subscriber(publisher: NoticePublisher) -> Iterator[NoticeSubscriber]:
    opened = NoticeSubscriber(publisher.address, "run-a")
    wait_subscribed(publisher, opened)
    yield opened
    opened.close()


def wait_subscribed(publisher: NoticePublisher, subscriber: NoticeSubscriber, run: str = "run-a") -> None:
    """Send version 0 until it arrives, then take what is still on its way."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        publisher.send(Notice(run, 0, DIGEST))
        if subscriber.receive(0.05) is not None:
            while subscriber.receive(0.2) is not None:
                continue
            return
    pytest.fail(f"no notice arrived within {WAIT} s")


class RawPublisher:
    """A peer that sends whatever it likes."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.XPUB)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def wait_for_subscriber(self) -> None:
        assert self.socket.poll(120_000)
        self.socket.recv()

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


@pytest.fixture
def raw() -> Iterator[RawPublisher]:
    opened = RawPublisher()
    yield opened
    opened.close()


@pytest.fixture
def raw_subscriber(raw: RawPublisher) -> Iterator[NoticeSubscriber]:
    opened = NoticeSubscriber(raw.address, "run-a")
    raw.wait_for_subscriber()
    yield opened
    opened.close()


def test_a_notice_arrives(publisher: NoticePublisher, subscriber: NoticeSubscriber) -> None:
    publisher.send(Notice("run-a", 7, DIGEST))
    assert subscriber.receive(120) == Notice("run-a", 7, DIGEST)
    assert subscriber.receive(0) is None
    assert subscriber.malformed == 0


def test_bytes_on_the_wire(publisher: NoticePublisher) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as peer:
        peer.connect(publisher.address)
        peer.setsockopt_string(zmq.SUBSCRIBE, "")
        deadline = time.monotonic() + WAIT
        while not peer.poll(50) and time.monotonic() < deadline:
            publisher.send(Notice("run-a", 12, "00ff"))
        assert peer.recv_multipart() == [b"run-a", b'{"manifest":"00ff","run":"run-a","version":12}']


def test_waiting_ends_in_time(subscriber: NoticeSubscriber) -> None:
    start = time.monotonic()
    assert subscriber.receive(0.3) is None
    assert 0.25 < time.monotonic() - start < WAIT


def test_other_runs_are_not_heard(publisher: NoticePublisher, subscriber: NoticeSubscriber) -> None:
    publisher.send(Notice("run-b", 3, DIGEST))
    # A topic matches by its beginning in ZeroMQ.
    publisher.send(Notice("run-ab", 4, DIGEST))
    assert subscriber.receive(0.3) is None
    assert subscriber.malformed == 0
    publisher.send(Notice("run-a", 1, DIGEST))
    assert subscriber.receive(120) == Notice("run-a", 1, DIGEST)


def test_several_subscribers(publisher: NoticePublisher, subscriber: NoticeSubscriber) -> None:
    other = NoticeSubscriber(publisher.address, "run-a")
    try:
        wait_subscribed(publisher, other)
        while subscriber.receive(0.2) is not None:
            continue
        publisher.send(Notice("run-a", 3, DIGEST))
        for each in (subscriber, other):
            assert each.receive(120) == Notice("run-a", 3, DIGEST)
    finally:
        other.close()


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


def test_malformed_messages_are_counted_and_ignored(raw: RawPublisher, raw_subscriber: NoticeSubscriber) -> None:
    for number, (name, frames) in enumerate(MALFORMED.items(), 1):
        raw.socket.send_multipart(frames)
        raw.socket.send_multipart([b"run-a", b'{"manifest":"","run":"run-a","version":%d}' % number])
        assert raw_subscriber.receive(WAIT) == Notice("run-a", number, ""), name
        assert raw_subscriber.malformed == number, name


def test_any_thread_may_send(publisher: NoticePublisher, subscriber: NoticeSubscriber) -> None:
    def send(number: int) -> None:
        for turn in range(200):
            publisher.send(Notice("run-a", number * 1000 + turn, DIGEST))

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(send, number) for number in range(1, 5)]:
            future.result()
    publisher.send(Notice("run-a", 9999, DIGEST))
    hear(subscriber, 9999)
    assert subscriber.malformed == 0


def test_a_huge_message_is_never_buffered(raw: RawPublisher, raw_subscriber: NoticeSubscriber) -> None:
    raw.socket.send_multipart([b"run-a", b"x" * (MAX_FRAME_BYTES + 1)])
    assert raw_subscriber.receive(0.3) is None
    # ZeroMQ cuts the connection, and the subscriber comes back by itself.
    raw.wait_for_subscriber()
    assert raw_subscriber.receive(2) is None
    raw.wait_for_subscriber()
    raw.socket.send_multipart([b"run-a", b'{"manifest":"","run":"run-a","version":8}'])
    assert raw_subscriber.receive(120) == Notice("run-a", 8, "")


def test_a_flood_does_not_hold_a_receiver(raw: RawPublisher, raw_subscriber: NoticeSubscriber) -> None:
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            for _ in range(MAX_DRAIN):
                raw.socket.send_multipart([b"run-a", b"nonsense"])

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        start = time.monotonic()
        assert raw_subscriber.receive(0.5) is None
        assert time.monotonic() - start < WAIT
        assert raw_subscriber.malformed > 0
    finally:
        stop.set()
        thread.join()


def test_a_subscriber_may_come_first() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    subscriber = NoticeSubscriber(address, "run-a")
    publisher = NoticePublisher(address)
    try:
        wait_subscribed(publisher, subscriber)
    finally:
        publisher.close()
        subscriber.close()


def test_the_bound_address_is_reported(publisher: NoticePublisher) -> None:
    host, port = publisher.address.removeprefix("tcp://").split(":")
    assert (host, int(port) > 0) == ("127.0.0.1", True)
    everywhere = NoticePublisher("tcp://*:*")
    assert everywhere.address.startswith("tcp://0.0.0.0:")
    everywhere.close()


def test_a_taken_address(publisher: NoticePublisher) -> None:
    with pytest.raises(NoticeError) as raised:
        NoticePublisher(publisher.address)
    assert (raised.value.kind, raised.value.exit_code) == ("notice", 4)
    assert f"'{publisher.address}' is taken; stop what uses it, or give another port" in str(raised.value)


@pytest.mark.parametrize(
    "address", ["", "5555", "tcp://127.0.0.1", "http://127.0.0.1:1", "tcp://192.0.2.1:5555", "tcp://*:65536"]
)
def test_addresses_that_cannot_be_bound(address: str) -> None:
    with pytest.raises(NoticeError) as raised:
        NoticePublisher(address)
    assert repr(address) in str(raised.value)


@pytest.mark.parametrize("address", ["", "5555", "tcp://127.0.0.1", "tcp://*:5555", "tcp://127.0.0.1:70000"])
def test_addresses_that_cannot_be_connected_to(address: str) -> None:
    with pytest.raises(NoticeError) as raised:
        NoticeSubscriber(address, "run-a")
    assert repr(address) in str(raised.value)


def test_closed_frees_the_address_and_refuses_use(publisher: NoticePublisher) -> None:
    subscriber = NoticeSubscriber(publisher.address, "run-a")
    for each in (publisher, subscriber):
        each.close()
        each.close()
    with pytest.raises(NoticeError, match="version 3"):
        publisher.send(Notice("run-a", 3, DIGEST))
    with pytest.raises(NoticeError, match="cannot receive"):
        subscriber.receive(0.1)
    NoticePublisher(publisher.address).close()
