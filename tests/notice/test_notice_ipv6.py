"""Notices over IPv6, on the loopback interface: bound, dialled, through a broker, with CURVE keys, and beside IPv4."""

import socket
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from tests.support.answers import closed_port
from tests.support.ipv6 import needs_ipv6
from tests.support.notices import DIGEST, RUN, BrokerProcess, Keys, hear, hears_nothing, port_of, public
from vllm_delta_sync.errors import NoticeError
from vllm_delta_sync.notice import Notice, NoticePublisher, NoticeSubscriber, curve

pytestmark = needs_ipv6

IPV6 = "tcp://[::1]:*"


def test_a_publisher_on_an_ipv6_address_is_heard() -> None:
    with closing(NoticePublisher(IPV6)) as publisher:
        assert publisher.address.startswith("tcp://[::1]:")
        publisher.send(Notice(RUN, 3, DIGEST))
        with closing(NoticeSubscriber(publisher.address, RUN)) as subscriber:
            hear(subscriber, 3)
        with pytest.raises(NoticeError, match="is in use; stop the other process"):
            NoticePublisher(publisher.address)


@pytest.mark.parametrize("bound", ["tcp://*:*", "tcp://[::]:*"])
def test_all_interfaces_are_those_of_ipv4_and_ipv6(bound: str) -> None:
    with closing(NoticePublisher(bound)) as publisher:
        publisher.send(Notice(RUN, 3, DIGEST))
        for host in ("127.0.0.1", "[::1]"):
            with closing(NoticeSubscriber(f"tcp://{host}:{port_of(publisher.address)}", RUN)) as subscriber:
                hear(subscriber, 3)
        with closing(NoticeSubscriber(publisher.address, RUN)) as subscriber:
            hear(subscriber, 3)


def test_an_ipv4_address_stays_one() -> None:
    with closing(NoticePublisher("tcp://127.0.0.1:*")) as publisher:
        assert publisher.address.startswith("tcp://127.0.0.1:")
        with closing(NoticeSubscriber(f"tcp://[::1]:{port_of(publisher.address)}", RUN)) as subscriber:
            publisher.send(Notice(RUN, 3, DIGEST))
            hears_nothing(subscriber, 0.5)


def test_a_name_is_looked_up_for_both() -> None:
    """A name with addresses of both kinds leads to servers that listen on either."""
    with closing(NoticePublisher("tcp://127.0.0.1:*")) as publisher:
        publisher.send(Notice(RUN, 3, DIGEST))
        with closing(NoticeSubscriber(f"tcp://localhost:{port_of(publisher.address)}", RUN)) as subscriber:
            hear(subscriber, 3)
    with closing(NoticeSubscriber(f"tcp://localhost:{closed_port()}", RUN)) as subscriber:
        families: list[int] = []
        while families[-2:] != [1, 0]:
            subscriber.receive(0.1)
            families.append(int(subscriber._socket.getsockopt(zmq.IPV6)))
        assert families[0] == 0


def test_a_server_that_starts_late_is_found_by_name() -> None:
    port = closed_port()
    with closing(NoticeSubscriber(f"tcp://localhost:{port}", RUN)) as subscriber:
        while not subscriber._connection.monitor.unreachable:
            subscriber.receive(0.05)
        with closing(NoticePublisher(f"tcp://127.0.0.1:{port}")) as publisher:
            publisher.send(Notice(RUN, 3, DIGEST))
            hear(subscriber, 3)


def test_a_broker_between_ipv6_addresses() -> None:
    broker = BrokerProcess(IPV6, IPV6)
    try:
        with closing(NoticePublisher(f"connect:{broker.publishers}")) as publisher:
            publisher.send(Notice(RUN, 3, DIGEST))
            with closing(NoticeSubscriber(broker.subscribers, RUN)) as subscriber:
                hear(subscriber, 3)
    finally:
        broker.end()


@pytest.mark.parametrize("bound", [IPV6, "tcp://*:*"])
def test_allow_lists_hold_over_ipv6(bound: str, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    trainer, server, stranger = (keys.make(name) for name in ("trainer", "server", "stranger"))
    with closing(NoticePublisher(bound, trainer, keys.allow("allowed", server))) as publisher:
        publisher.send(Notice(RUN, 3, DIGEST))
        address = f"tcp://[::1]:{port_of(publisher.address)}"
        for own, may in ((server, True), (stranger, False)):
            with closing(NoticeSubscriber(address, RUN, curve.client_keys(own, public(trainer)))) as subscriber:
                if may:
                    hear(subscriber, 3)
                else:
                    hears_nothing(subscriber, 1.5)


def test_an_interface_by_name() -> None:
    with closing(NoticePublisher(f"tcp://{socket.if_indextoname(1)}:*")) as publisher:
        publisher.send(Notice(RUN, 3, DIGEST))
        with closing(NoticeSubscriber(publisher.address, RUN)) as subscriber:
            hear(subscriber, 3)
