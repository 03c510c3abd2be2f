"""The broker as a process: it passes on, forgets nothing that is new, and lets nobody in at the wrong door."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.notice.conftest import Ends
from tests.support.notices import (
    DEADLINE_SECONDS,
    DIGEST,
    LOOPBACK,
    RUN,
    BrokerProcess,
    Keys,
    hear,
    hears_nothing,
    port_of,
    public,
)
from tests.support.proxy import TcpProxy
from tests.support.running import eventually, interruptible
from vllm_delta_sync import cli
from vllm_delta_sync.errors import NoticeError, SettingsError
from vllm_delta_sync.notice import Broker, Notice, NoticePublisher, NoticeSubscriber, curve
from vllm_delta_sync.notice.broker import MAX_TOPICS
from vllm_delta_sync.notice.messages import LastValues

OTHER = "f" * 32


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    """One for all tests that do not end it: what one of them has announced last, later ones may hear first."""
    started = BrokerProcess()
    yield started
    started.end()


@pytest.fixture
def publisher(ends: Ends, broker: BrokerProcess) -> NoticePublisher:
    return ends.publisher(f"connect:{broker.publishers}")


@pytest.fixture
def subscriber(ends: Ends, broker: BrokerProcess) -> NoticeSubscriber:
    return ends.subscriber(broker.subscribers, RUN)


def test_whoever_comes_late_is_told_what_a_publisher_that_is_gone_said(
    ends: Ends, broker: BrokerProcess, publisher: NoticePublisher, subscriber: NoticeSubscriber
) -> None:
    for run, version in ((RUN, 3), (OTHER, 8)):
        publisher.send(Notice(run, version, DIGEST))
    hear(subscriber, 3)
    # Only a notice that was received has certainly reached the broker.
    hear(ends.subscriber(broker.subscribers, OTHER), 8)
    publisher.close()
    for run, version in ((RUN, 3), (OTHER, 8), (RUN, 3)):
        hear(ends.subscriber(broker.subscribers, run), version)


def test_a_broker_that_was_killed_comes_back_on_the_same_ports(ends: Ends) -> None:
    broker = BrokerProcess()
    publisher, subscriber = ends.publisher(f"connect:{broker.publishers}"), ends.subscriber(broker.subscribers, RUN)
    publisher.send(Notice(RUN, 1, DIGEST))
    hear(subscriber, 1)
    broker.end()
    publisher.send(Notice(RUN, 2, DIGEST))
    hears_nothing(subscriber, 0.5)
    again = BrokerProcess(broker.publishers, broker.subscribers)
    hear(subscriber, 2)
    publisher.send(Notice(RUN, 3, DIGEST))
    hear(subscriber, 3)
    again.end()


def test_bad_networks_on_both_sides(ends: Ends, broker: BrokerProcess) -> None:
    with TcpProxy(port_of(broker.publishers)) as before, TcpProxy(port_of(broker.subscribers)) as behind:
        publisher = ends.publisher(f"connect:tcp://127.0.0.1:{before.port}")
        subscriber = ends.subscriber(f"tcp://127.0.0.1:{behind.port}", RUN)
        version = 0
        for proxy in (before, behind):
            for fault in (proxy.cut, proxy.stall, proxy.reset):
                version += 1
                publisher.send(Notice(RUN, version, DIGEST))
                hear(subscriber, version)
                fault()
                version += 1
                publisher.send(Notice(RUN, version, DIGEST))
                proxy.resume()
                hear(subscriber, version)


def test_what_is_no_notice_by_its_form_is_dropped(
    broker: BrokerProcess, publisher: NoticePublisher, subscriber: NoticeSubscriber
) -> None:
    # Before, the broker may not know yet that it subscribes.
    publisher.send(Notice(RUN, 1, DIGEST))
    hear(subscriber, 1)
    with zmq.Context() as context, context.socket(zmq.XPUB) as stranger, context.socket(zmq.SUB) as witness:
        witness.connect(broker.subscribers)
        witness.setsockopt_string(zmq.SUBSCRIBE, "")
        stranger.connect(broker.publishers)
        assert stranger.poll(120_000)
        for frames in ([b"one"], [b"a", b"b", b"c"], [b"", b"no topic"], [b"t" * 65, b"x"], [b"t", b"x" * 4097]):
            stranger.send_multipart(frames)
        stranger.send_multipart([RUN.encode(), b"nonsense of any kind"])
        seen: list[list[bytes]] = []
        while not seen or b'"version":' in seen[-1][-1]:  # notices are repeated
            assert witness.poll(120_000)
            seen.append(witness.recv_multipart())
        assert seen[-1] == [RUN.encode(), b"nonsense of any kind"]
        # Longer than ZeroMQ takes: the connection is cut, and nobody else's.
        stranger.send_multipart([RUN.encode(), b"x" * 100_000])
    publisher.send(Notice(RUN, 2, DIGEST))
    hear(subscriber, 2)
    assert subscriber.malformed >= 1


def test_subscribers_can_say_nothing(ends: Ends, broker: BrokerProcess, publisher: NoticePublisher) -> None:
    """At their own door; at the other one they do not speak the language."""
    with zmq.Context() as context, context.socket(zmq.XSUB) as stranger, context.socket(zmq.PUB) as announcer:
        stranger.connect(broker.subscribers)
        announcer.connect(broker.subscribers)
        stranger.send(b"\x01" + RUN.encode())
        for _ in range(100):
            stranger.send_multipart([RUN.encode(), b'{"manifest":"","run":"%b","version":77}' % RUN.encode()])
            announcer.send_multipart([RUN.encode(), b'{"manifest":"","run":"%b","version":78}' % RUN.encode()])
        publisher.send(Notice(RUN, 5, DIGEST))
        subscriber = ends.subscriber(broker.subscribers, RUN)
        hear(subscriber, 5)
        assert subscriber.receive(120) == Notice(RUN, 5, DIGEST)


def test_topics_are_bounded() -> None:
    last = LastValues(MAX_TOPICS, 0.0)
    for number in range(3 * MAX_TOPICS):
        last.put([b"%d" % number, b"x"])
        last.put([b"kept", b"%d" % number])
    kept = [frames[0] for frames in last.due()]
    assert len(kept) == MAX_TOPICS
    assert b"kept" in kept


def started(command: list[str]) -> "subprocess.Popen[str]":
    """A broker that has bound its ports."""
    with interruptible():  # children inherit it
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stdout.readline().startswith("publishers tcp://127.0.0.1:")
    return running


UNINTERRUPTED = """
import signal, sys, threading
from vllm_delta_sync.cli import main

threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
sys.exit(main())
"""
"""A broker whose poll no signal breaks off: the other thread gets them. So it is, by chance, for one that comes between
the last step of Python and the poll."""


@pytest.mark.parametrize(
    ("number", "code", "program"),
    [(signal.SIGTERM, 0, ["-m", "vllm_delta_sync.cli"]), (signal.SIGINT, 130, ["-c", UNINTERRUPTED])],
    ids=["usual", "no break"],
)
def test_signals_end_it_cleanly(number: signal.Signals, code: int, program: list[str]) -> None:
    running = started([sys.executable, *program, "broker", "--publishers", LOOPBACK, "--subscribers", LOOPBACK])
    running.send_signal(number)
    out, errors = running.communicate(timeout=DEADLINE_SECONDS)
    assert (running.returncode, out) == (code, "")
    assert "forwarded 0 notices, dropped 0 messages" in errors
    assert "Traceback" not in errors


def test_commands_that_are_refused(broker: BrokerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = Keys(tmp_path).make("key")
    free = ["--publishers", LOOPBACK, "--subscribers", LOOPBACK]
    cases = (
        (["--publishers", LOOPBACK], 2, "usage"),
        (["--publishers", broker.publishers, "--subscribers", LOOPBACK], 4, "notice"),
        (["--publishers", "tcp://*:70000", "--subscribers", LOOPBACK], 4, "notice"),
        ([*free, "--key", str(key)], 2, "settings"),
        ([*free, "--allowed-publishers", str(tmp_path)], 2, "settings"),
    )
    for arguments, code, kind in cases:
        assert cli.run(["broker", *arguments, "--json"]) == code
        assert json.loads(capsys.readouterr().out)["error"]["kind"] == kind


def test_a_port_that_is_taken_frees_the_other(broker: BrokerProcess) -> None:
    with pytest.raises(NoticeError, match="is in use"):
        Broker(LOOPBACK, broker.subscribers)
    with pytest.raises(SettingsError, match="--key is missing"):
        Broker(LOOPBACK, LOOPBACK, None, Path("a"), Path("b"))


# With keys


class Site:
    """A broker with a key, one publisher and one subscriber on its lists."""

    def __init__(self, root: Path, ends: Ends) -> None:
        self.keys, self.ends = Keys(root), ends
        self.own, self.trainer, self.server = (self.keys.make(name) for name in ("broker", "trainer", "server"))
        flags = ["--key", str(self.own)]
        flags += ["--allowed-publishers", str(self.keys.allow("publishers", self.trainer))]
        flags += ["--allowed-subscribers", str(self.keys.allow("subscribers", self.server))]
        self.broker = BrokerProcess(flags=flags)

    def publisher(self, key: Path | None) -> NoticePublisher:
        server = None if key is None else public(self.own)
        return self.ends.publisher(f"connect:{self.broker.publishers}", key, server)

    def subscriber(self, key: Path | None, door: str = "subscribers") -> NoticeSubscriber:
        keys = curve.client_keys(key, None if key is None else public(self.own))
        return self.ends.subscriber(getattr(self.broker, door), RUN, keys)


@pytest.fixture
def site(tmp_path: Path, ends: Ends) -> Iterator[Site]:
    opened = Site(tmp_path, ends)
    yield opened
    opened.broker.end()


def test_who_may_announce_and_who_may_listen(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Encrypted from end to end."""
    subscriber, true = site.subscriber(site.server), site.publisher(site.trainer)
    true.send(Notice(RUN, 1, DIGEST))
    hear(subscriber, 1)
    # The subscriber's key, a stranger's, and none.
    for version, key in enumerate((site.server, site.keys.make("stranger"), None), 2):
        caplog.clear()
        forger = site.publisher(key)
        for number in range(100, 150):
            forger.send(Notice(RUN, number, DIGEST))
        eventually(lambda: "no notices over tcp://127.0.0.1" in caplog.text)
        assert subscriber.receive(DEADLINE_SECONDS) == Notice(RUN, version - 1, DIGEST)
        true.send(Notice(RUN, version, DIGEST))
        hear(subscriber, version)
    refused = [site.subscriber(key) for key in (site.trainer, site.keys.make("x"), None)]
    refused.append(site.subscriber(site.server, "publishers"))
    hears_nothing(refused[0], 1.5)
    for each in refused:
        hears_nothing(each, 0.1)
