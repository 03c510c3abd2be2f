"""Signed notices: who has trusted keys believes nobody else, and counts what it ignores."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.notice.conftest import Ends
from tests.support.notices import DIGEST, LOOPBACK, RUN, hear
from vllm_delta_sync.format.base_document import Signature, dump_canonical, load_canonical
from vllm_delta_sync.notice import Notice, NoticeSubscriber
from vllm_delta_sync.notice.messages import MAX_CHECKS, NoticeVerifier, encode, parse
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keys import generate


class Counting(Keyring):
    """Counts signatures made and checked."""

    made = checked = 0

    def sign_bytes(self, kind: str, data: bytes) -> Signature | None:
        self.made += 1
        return super().sign_bytes(kind, data)

    def check_bytes(self, kind: str, data: bytes, signature: Signature | None, what: str) -> None:
        self.checked += 1
        super().check_bytes(kind, data, signature, what)


class Site:
    """A publisher that signs, a subscriber that trusts it, and what else can be sent to that one."""

    def __init__(self, root: Path) -> None:
        generate(root / "trainer")
        self.signing = Keyring.load(signing_key=root / "trainer")
        self.trusting = Counting(self.signing.trusted)
        self.stranger = Keyring(signer=Ed25519PrivateKey.generate())
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.XPUB)
        self.socket.sndhwm = 0
        self.socket.linger = 0
        address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.subscriber = NoticeSubscriber(address, RUN, keyring=self.trusting)
        assert self.socket.poll(120_000)

    def send(self, frames: list[bytes]) -> None:
        self.socket.send_multipart(frames)

    def close(self) -> None:
        self.subscriber.close()
        self.socket.close()
        self.context.term()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    opened = Site(tmp_path)
    yield opened
    opened.close()


def notice(version: int) -> Notice:
    return Notice(RUN, version, DIGEST)


def changed(frames: list[bytes], **values: object) -> list[bytes]:
    """A message with other fields, and the signature that it had."""
    return [frames[0], dump_canonical({**load_canonical(frames[1], "notice"), **values})]


def test_signed_once_and_repeated(ends: Ends, site: Site) -> None:
    signing = Counting(site.signing.trusted, Ed25519PrivateKey.generate())
    trusting = Counting([str(signing.public)])
    publisher = ends.publisher(LOOPBACK, keyring=signing, repeat_seconds=0.05)
    subscriber = ends.subscriber(publisher.address, RUN, keyring=trusting)
    for version in (1, 2):
        publisher.send(notice(version))
        hear(subscriber, version)
        for _ in range(5):
            assert subscriber.receive(120) == notice(version)
    assert signing.made == 2
    # Nor is what was believed looked into again.
    assert trusting.checked <= 4
    assert (subscriber.rejected, subscriber.malformed) == (0, 0)


def test_what_is_not_vouched_for_is_ignored_and_counted(site: Site) -> None:
    signed, stolen = encode(notice(5), site.signing), encode(notice(6), site.signing)
    signature = load_canonical(stolen[1], "notice")["signature"]
    forged = {
        "unsigned": encode(notice(100), None),
        "by a stranger": encode(notice(101), site.stranger),
        "another version": changed(stolen, version=102),
        "another manifest": changed(stolen, manifest="00" * 32),
        "a signature of nothing": changed(stolen, signature={**signature, "value": "0" * 128}),
        "a key that is none": changed(stolen, signature={**signature, "key": "0" * 64}),
    }
    for number, frames in enumerate(forged.values(), 1):
        site.send(frames)
        site.send(signed)
        assert site.subscriber.receive(120) == notice(5)
        while site.subscriber.receive(0.05) is not None:
            continue
        assert site.subscriber.rejected == number
    assert site.subscriber.malformed == 0


@pytest.mark.parametrize(
    "signature",
    [None, "", [], {}, {"key": "0" * 64}, {"key": "0" * 64, "value": "0" * 127}, {"key": "G" * 64, "value": "0" * 128},
     {"key": "0" * 64, "more": 1, "value": "0" * 128}],
)  # fmt: skip
def test_what_is_no_signature_is_malformed(site: Site, signature: object) -> None:
    site.send(changed(encode(notice(9), site.signing), signature=signature))
    site.send(encode(notice(2), site.signing))
    hear(site.subscriber, 2)
    assert (site.subscriber.malformed, site.subscriber.rejected) == (1, 0)


def test_the_newest_of_several_counts() -> None:
    """In whatever order they come."""
    messages = [parse(encode(notice(version), None), RUN) for version in (5, 9, 6)]
    assert NoticeVerifier(Keyring()).newest(messages) == notice(9)


def test_another_runs_signed_notice_is_no_news_of_this(site: Site) -> None:
    other = encode(Notice("f" * 32, 50, DIGEST), site.signing)
    site.send([RUN.encode(), other[1]])
    site.send(changed([RUN.encode(), other[1]], run=RUN))
    site.send(encode(notice(2), site.signing))
    hear(site.subscriber, 2)
    assert (site.subscriber.malformed, site.subscriber.rejected) == (1, 1)


def test_without_trusted_keys_a_signature_is_no_matter(ends: Ends, site: Site) -> None:
    publisher = ends.publisher(LOOPBACK, keyring=site.signing)
    for keyring in (None, Keyring()):
        subscriber = ends.subscriber(publisher.address, RUN, keyring=keyring)
        publisher.send(notice(3))
        hear(subscriber, 3)


def test_a_flood_of_forgeries_costs_few_checks(site: Site) -> None:
    """With the right key's name, so that each has to be looked into."""
    template = encode(notice(5), site.signing)
    messages = [parse(changed(template, version=number), RUN) for number in range(100, 1100)]
    believer = NoticeVerifier(site.trusting)
    began = time.thread_time()
    assert believer.newest(messages) is None
    assert time.thread_time() - began < 5
    assert site.trusting.checked == MAX_CHECKS
    assert believer.rejected == 1000
    assert believer.newest([parse(template, RUN)]) == notice(5)
