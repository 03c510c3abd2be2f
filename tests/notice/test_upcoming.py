"""Messages that name the objects of the next version: who hears them, which are ignored, and what they cannot cost."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.notices import DIGEST, LOOPBACK, RUN, BrokerProcess, hear
from vllm_delta_sync.format.canonical_json import dump_canonical, load_canonical
from vllm_delta_sync.notice import Notice, NoticePublisher, NoticeSubscriber, Upcoming
from vllm_delta_sync.notice.messages import MAX_UPCOMING, NoticeVerifier, encode, parse
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keys import generate

OBJECTS = (("ab" * 32, 1000), ("cd" * 32, 7))


def upcoming(*objects: tuple[str, int]) -> Upcoming:
    return Upcoming(RUN, objects or OBJECTS)


@pytest.fixture(params=["publisher", "broker"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[NoticePublisher, str]]:
    """A publisher, and the address where what it sends is heard."""
    if request.param == "publisher":
        publisher = NoticePublisher(LOOPBACK, repeat_seconds=0.05)
        yield publisher, publisher.address
        publisher.close()
    else:
        broker = BrokerProcess()
        publisher = NoticePublisher(f"connect:{broker.publishers}", repeat_seconds=0.05)
        yield publisher, broker.subscribers
        publisher.close()
        broker.end()


def test_named_objects_are_heard_and_hide_no_notice(ends: tuple[NoticePublisher, str]) -> None:
    """Also by a subscriber that comes later: the last message of each kind is repeated."""
    publisher, address = ends
    heard: list[Upcoming] = []
    publisher.send(Notice(RUN, 1, DIGEST))
    publisher.send(upcoming())
    subscriber = NoticeSubscriber(address, RUN, on_upcoming=heard.append)
    while not heard:
        subscriber.receive(0.05)
    hear(subscriber, 1)
    assert set(heard) == {upcoming()}
    assert (subscriber.malformed, subscriber.rejected) == (0, 0)
    subscriber.close()


def test_a_subscriber_that_does_not_care_hears_notices(ends: tuple[NoticePublisher, str]) -> None:
    publisher, address = ends
    publisher.send(upcoming())
    publisher.send(Notice(RUN, 2, DIGEST))
    subscriber = NoticeSubscriber(address, RUN)
    hear(subscriber, 2)
    subscriber.close()


@pytest.mark.parametrize(
    "objects",
    [
        None, {}, "", [], [["ab" * 32]], [["ab" * 32, 1, 1]], [["AB" * 32, 1]], [["ab" * 31, 1]], [["../" * 8, 1]],
        [["ab" * 32, 0]], [["ab" * 32, -1]], [["ab" * 32, True]], [["ab" * 32, "1"]], [["ab" * 32, 2**51]],
        [[1, 1]], [["ab" * 32, 1]] * (MAX_UPCOMING + 1),
    ],
)  # fmt: skip
def test_malformed_objects_are_ignored_and_counted(objects: Any) -> None:
    publisher = NoticePublisher(LOOPBACK)
    heard: list[Upcoming] = []
    subscriber = NoticeSubscriber(publisher.address, RUN, on_upcoming=heard.append)
    try:
        topic = encode(upcoming(), None)[0]
        publisher._outbox.append([topic, dump_canonical({"run": RUN, "objects": objects})])
        publisher.send(Notice(RUN, 3, DIGEST))
        hear(subscriber, 3)
        assert (heard, subscriber.malformed) == ([], 1)
    finally:
        subscriber.close()
        publisher.close()


class Counting(Keyring):
    """Counts signatures checked."""

    checked = 0

    def check_bytes(self, *arguments: Any, **named: Any) -> None:
        self.checked += 1
        super().check_bytes(*arguments, **named)


def test_where_notices_are_signed_only_a_trusted_key_names_objects(tmp_path: Path) -> None:
    for name in ("key", "stranger"):
        generate(tmp_path / name)
    signing, stranger = (Keyring.load(signing_key=tmp_path / name) for name in ("key", "stranger"))
    trusting = Counting(signing.trusted)
    verifier = NoticeVerifier(trusting)

    def believed(*frames: list[bytes]) -> Upcoming | None:
        return verifier.upcoming([parse(one, RUN) for one in frames])

    signed, forged = encode(upcoming(), signing), encode(upcoming(("ef" * 32, 1)), stranger)
    assert believed(signed) == upcoming()
    assert believed(encode(upcoming(), None)) is None
    assert believed(forged) is None
    # The signature of another message, and of a message of the other kind.
    other = dump_canonical({**_value(forged), "signature": _value(signed)["signature"]})
    assert believed([signed[0], other]) is None
    moved = dump_canonical(
        {**_value(signed), "signature": _value(encode(Notice(RUN, 1, DIGEST), signing))["signature"]}
    )
    assert believed([signed[0], moved]) is None
    assert verifier.rejected == 4
    # A flood costs one check for each batch.
    trusting.checked = 0
    believed(*[signed] * 500)
    assert trusting.checked == 1


def _value(frames: list[bytes]) -> dict[str, Any]:
    value = load_canonical(frames[1], "notice")
    assert isinstance(value, dict)
    return value
