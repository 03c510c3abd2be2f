"""What was announced last reaches whoever is there, whatever happens to the network or to the ends."""

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.support.notices import DIGEST, LOOPBACK, RUN, Keys, Process, hear, hears_nothing, port_of, process, public
from tests.support.proxy import TcpProxy
from vllm_delta_sync.errors import NoticeError
from vllm_delta_sync.notice import Notice, NoticePublisher, NoticeSubscriber
from vllm_delta_sync.notice.sockets import HEARTBEAT_TIMEOUT_MS

PATIENCE = 120.0


@pytest.fixture
def publisher() -> Iterator[NoticePublisher]:
    opened = NoticePublisher(LOOPBACK)
    yield opened
    opened.close()


@pytest.fixture
def silent() -> Iterator[NoticePublisher]:
    """Repeats nothing by the clock."""
    opened = NoticePublisher(LOOPBACK, repeat_seconds=3600)
    yield opened
    opened.close()


@pytest.fixture
def proxied(publisher: NoticePublisher) -> Iterator[tuple[TcpProxy, NoticeSubscriber]]:
    """A subscriber behind a bad network, that has heard of version 1."""
    with TcpProxy(port_of(publisher.address)) as proxy:
        subscriber = NoticeSubscriber(f"tcp://127.0.0.1:{proxy.port}", RUN)
        publisher.send(Notice(RUN, 1, DIGEST))
        hear(subscriber, 1)
        yield proxy, subscriber
        subscriber.close()


def test_whoever_comes_late_is_told(silent: NoticePublisher) -> None:
    silent.send(Notice(RUN, 6, DIGEST))
    silent.send(Notice(RUN, 7, DIGEST))
    for _ in range(3):
        subscriber = NoticeSubscriber(silent.address, RUN)
        assert subscriber.receive(120) == Notice(RUN, 7, DIGEST)
        subscriber.close()


def test_each_run_has_its_last(silent: NoticePublisher) -> None:
    other = "f" * 32
    silent.send(Notice(RUN, 7, DIGEST))
    silent.send(Notice(other, 3, DIGEST))
    for run, version in ((RUN, 7), (other, 3)):
        subscriber = NoticeSubscriber(silent.address, run)
        hear(subscriber, version)
        subscriber.close()


def test_the_last_is_repeated_about_every_second(publisher: NoticePublisher) -> None:
    subscriber = NoticeSubscriber(publisher.address, RUN)
    publisher.send(Notice(RUN, 7, DIGEST))
    hear(subscriber, 7)
    began = time.monotonic()
    for _ in range(3):
        assert subscriber.receive(120) == Notice(RUN, 7, DIGEST)
    assert time.monotonic() - began > 1.5
    subscriber.close()


def test_a_storm_of_subscriptions_is_answered_together(silent: NoticePublisher) -> None:
    silent.send(Notice(RUN, 7, DIGEST))
    with zmq.Context() as context, context.socket(zmq.SUB) as witness, context.socket(zmq.XSUB) as stormy:
        witness.setsockopt(zmq.RCVHWM, 0)
        witness.connect(silent.address)
        witness.setsockopt_string(zmq.SUBSCRIBE, RUN)
        assert witness.poll(120_000)
        stormy.setsockopt(zmq.SNDHWM, 0)
        stormy.connect(silent.address)
        began = time.monotonic()
        for _ in range(5000):
            stormy.send(b"\x01" + RUN.encode())
            stormy.send(b"\x00" + RUN.encode())
        while stormy.poll(300):
            stormy.recv_multipart()
        seconds = time.monotonic() - began
        heard = 0
        while witness.poll(0):
            witness.recv_multipart()
            heard += 1
        assert 0 < heard < 3 + seconds / 0.02


@pytest.mark.parametrize("first", ["publisher", "subscriber"])
def test_either_may_come_first_when_the_publisher_dials(first: str) -> None:
    """Where the two meet is a plain XSUB/XPUB pair here."""
    with zmq.Context() as context, context.socket(zmq.XSUB) as sources:
        sources.linger = 0
        port = sources.bind_to_random_port("tcp://127.0.0.1") if first == "subscriber" else None
        if port is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        publisher = NoticePublisher(f"connect:tcp://127.0.0.1:{port}")
        assert publisher.address == f"connect:tcp://127.0.0.1:{port}"
        publisher.send(Notice(RUN, 4, DIGEST))
        if first == "publisher":
            sources.bind(f"tcp://127.0.0.1:{port}")
        sources.send(b"\x01")
        assert sources.poll(120_000)
        assert sources.recv_multipart()[0] == RUN.encode()
        publisher.close()


@pytest.mark.parametrize("address", ["connect:", "connect:5555", "connect:tcp://*:1", "connect:tcp://h:70000"])
def test_addresses_that_cannot_be_dialled(address: str) -> None:
    with pytest.raises(NoticeError) as raised:
        NoticePublisher(address)
    assert repr(address.removeprefix("connect:")) in str(raised.value)


def test_closing_sends_what_waits() -> None:
    publisher = NoticePublisher(LOOPBACK)
    subscriber = NoticeSubscriber(publisher.address, RUN)
    publisher.send(Notice(RUN, 1, DIGEST))
    hear(subscriber, 1)
    publisher.send(Notice(RUN, 2, DIGEST))
    publisher.close()
    hear(subscriber, 2)
    subscriber.close()


def test_closing_is_prompt_whenever_it_comes() -> None:
    for turn in range(20):
        publisher = NoticePublisher(LOOPBACK, repeat_seconds=3600)
        publisher.send(Notice(RUN, turn, DIGEST))
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
    command = [sys.executable, "-c", EXIT, LOOPBACK, *([str(key), str(public(key))] if with_keys else [])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_stalled_subscriber_delays_nobody_and_ends_on_the_newest(publisher: NoticePublisher) -> None:
    quick = NoticeSubscriber(publisher.address, RUN)
    with (
        process("tests.support.notices", "listen", publisher.address, RUN) as stalled,
        socket.create_connection(("127.0.0.1", port_of(publisher.address))),  # connected, and silent for ever
    ):
        publisher.send(Notice(RUN, 1, DIGEST))
        stalled.hear("1")
        stalled.running.send_signal(signal.SIGSTOP)
        longest = 0.0
        for version in range(2, 30_002):
            began = time.monotonic()
            publisher.send(Notice(RUN, version, DIGEST))
            longest = max(longest, time.monotonic() - began)
            if version % 10_000 == 1:
                hear(quick, version)
        # To a subscriber that is waited for, a send would take until the heartbeats give it up.
        assert longest < HEARTBEAT_TIMEOUT_MS / 1000 / 2
        stalled.running.send_signal(signal.SIGCONT)
        expect_settled(stalled, "30001")
    quick.close()


def expect_settled(listener: Process, last: str) -> None:
    """That version is heard, and none after it for longer than two repetitions."""
    listener.hear(last)
    time.sleep(2.5)
    listener.running.send_signal(signal.SIGTERM)
    listener.running.wait(120)
    with pytest.raises(queue.Empty):
        listener.line(0.1)


@pytest.mark.slow
def test_a_publisher_that_stands_still_goes_on(publisher: NoticePublisher) -> None:
    with process("tests.support.notices", "announce", LOOPBACK, RUN) as announcer:
        subscriber = NoticeSubscriber(announcer.line(), RUN)
        announcer.write("1")
        hear(subscriber, 1)
        os.kill(announcer.running.pid, signal.SIGSTOP)
        announcer.write("2")
        hears_nothing(subscriber)
        os.kill(announcer.running.pid, signal.SIGCONT)
        hear(subscriber, 2)
        subscriber.close()


def test_a_publisher_that_was_killed_comes_back_on_the_same_port() -> None:
    with process("tests.support.notices", "announce", LOOPBACK, RUN) as announcer:
        address = announcer.line()
        subscriber = NoticeSubscriber(address, RUN)
        announcer.write("1")
        hear(subscriber, 1)
        announcer.running.kill()
        announcer.running.wait(120)
        with process("tests.support.notices", "announce", address, RUN) as again:
            again.write("2")
            hear(subscriber, 2)
        subscriber.close()


def test_connections_that_are_reset_heal(
    publisher: NoticePublisher, proxied: tuple[TcpProxy, NoticeSubscriber]
) -> None:
    proxy, subscriber = proxied
    for version in range(2, 7):
        proxy.reset()
        publisher.send(Notice(RUN, version, DIGEST))
        hear(subscriber, version)
    assert proxy.connections >= 5


def test_a_stalled_connection_ends_on_the_newest(
    publisher: NoticePublisher, proxied: tuple[TcpProxy, NoticeSubscriber]
) -> None:
    proxy, subscriber = proxied
    proxy.stall()
    for version in range(2, 5000):
        publisher.send(Notice(RUN, version, DIGEST))
    assert subscriber.receive(1.5) is None
    proxy.resume()
    hear(subscriber, 4999)
    assert subscriber.receive(120) == Notice(RUN, 4999, DIGEST)


@pytest.mark.slow
def test_a_throttled_connection_ends_on_the_newest(
    publisher: NoticePublisher, proxied: tuple[TcpProxy, NoticeSubscriber]
) -> None:
    proxy, subscriber = proxied
    proxy.throttle(8000)
    for version in range(2, 200):
        publisher.send(Notice(RUN, version, DIGEST))
        time.sleep(0.002)
    hear(subscriber, 199)


@pytest.mark.slow
def test_connections_that_overtake_each_other(publisher: NoticePublisher) -> None:
    """The one that was tried first gets through last."""
    publisher.send(Notice(RUN, 5, DIGEST))
    with TcpProxy(port_of(publisher.address)) as proxy:
        proxy.delay(2.0, 1)
        early, late = (NoticeSubscriber(f"tcp://127.0.0.1:{proxy.port}", RUN) for _ in range(2))
        for each in (late, early):
            hear(each, 5)
            each.close()


@pytest.mark.slow
def test_a_connection_that_is_dead_for_good_is_given_up(
    publisher: NoticePublisher, proxied: tuple[TcpProxy, NoticeSubscriber]
) -> None:
    """Neither end is told: only that nothing comes any more shows it."""
    proxy, subscriber = proxied
    proxy.stall()
    publisher.send(Notice(RUN, 2, DIGEST))
    assert subscriber.receive(15) is None
    assert proxy.connections > 1
    proxy.reset()
    proxy.resume()
    hear(subscriber, 2)
