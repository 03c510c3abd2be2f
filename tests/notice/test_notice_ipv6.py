"""Notices over IPv6, on the loopback interface: bound, dialled, through a broker, with CURVE keys, and beside IPv4."""

import socket
from pathlib import Path

import pytest
import zmq

from tests.notice.conftest import Ends
from tests.support.answers import closed_port
from tests.support.ipv6 import needs_ipv6
from tests.support.notices import DIGEST, RUN, BrokerProcess, Keys, hear, hears_nothing, port_of, public
from vllm_delta_sync.errors import NoticeError
from vllm_delta_sync.notice import Notice, NoticePublisher, curve

pytestmark = needs_ipv6

IPV6 = "tcp://[::1]:*"


def announced(ends: Ends, address: str, *keys: Path) -> NoticePublisher:
    """A publisher there that has announced version 3."""
    publisher = ends.publisher(address, *keys, repeat_seconds=0.2)
    publisher.send(Notice(RUN, 3, DIGEST))
    return publisher


def test_a_publisher_on_an_ipv6_address_is_heard(ends: Ends) -> None:
    address = announced(ends, IPV6).address
    assert address.startswith("tcp://[::1]:")
    hear(ends.subscriber(address, RUN), 3)
    with pytest.raises(NoticeError, match="is in use; stop the other process"):
        NoticePublisher(address)


@pytest.mark.parametrize("bound", ["tcp://*:*", "tcp://[::]:*"])
def test_all_interfaces_are_those_of_ipv4_and_ipv6(ends: Ends, bound: str) -> None:
    address = announced(ends, bound).address
    for dialled in (f"tcp://127.0.0.1:{port_of(address)}", f"tcp://[::1]:{port_of(address)}", address):
        hear(ends.subscriber(dialled, RUN), 3)


def test_an_ipv4_address_stays_one(ends: Ends) -> None:
    address = announced(ends, "tcp://127.0.0.1:*").address
    assert address.startswith("tcp://127.0.0.1:")
    hears_nothing(ends.subscriber(f"tcp://[::1]:{port_of(address)}", RUN), 0.5)


def test_a_name_is_looked_up_for_both(ends: Ends) -> None:
    """A name with addresses of both kinds leads to servers that listen on either."""
    address = announced(ends, "tcp://127.0.0.1:*").address
    hear(ends.subscriber(f"tcp://localhost:{port_of(address)}", RUN), 3)
    subscriber = ends.subscriber(f"tcp://localhost:{closed_port()}", RUN)
    families: list[int] = []
    while families[-2:] != [1, 0]:
        subscriber.receive(0.1)
        families.append(int(subscriber._socket.getsockopt(zmq.IPV6)))
    assert families[0] == 0


def test_a_server_that_starts_late_is_found_by_name(ends: Ends) -> None:
    port = closed_port()
    subscriber = ends.subscriber(f"tcp://localhost:{port}", RUN)
    while not subscriber._connection.monitor.unreachable:
        subscriber.receive(0.05)
    announced(ends, f"tcp://127.0.0.1:{port}")
    hear(subscriber, 3)


def test_a_broker_between_ipv6_addresses(ends: Ends) -> None:
    broker = BrokerProcess(IPV6, IPV6)
    try:
        announced(ends, f"connect:{broker.publishers}")
        hear(ends.subscriber(broker.subscribers, RUN), 3)
    finally:
        broker.end()


@pytest.mark.parametrize("bound", [IPV6, "tcp://*:*"])
def test_allow_lists_hold_over_ipv6(ends: Ends, bound: str, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    trainer, server, stranger = (keys.make(name) for name in ("trainer", "server", "stranger"))
    publisher = announced(ends, bound, trainer, keys.allow("allowed", server))
    address = f"tcp://[::1]:{port_of(publisher.address)}"
    hear(ends.subscriber(address, RUN, curve.client_keys(server, public(trainer))), 3)
    hears_nothing(ends.subscriber(address, RUN, curve.client_keys(stranger, public(trainer))), 1.5)


def test_an_interface_by_name(ends: Ends) -> None:
    hear(ends.subscriber(announced(ends, f"tcp://{socket.if_indextoname(1)}:*").address, RUN), 3)
