"""CURVE keys: who is not on the list hears nothing, and both sides say why."""

import logging
import os
import shutil
from pathlib import Path

import pytest
import zmq
import zmq.auth

from tests.notice.conftest import Ends
from tests.support.exporting import file_size_limit
from tests.support.notices import DIGEST, LOOPBACK, RUN, Keys, hear, hears_nothing, public
from trainer_side import Publisher
from vllm_delta_sync.errors import ConflictError, SettingsError, StoreError
from vllm_delta_sync.notice import Notice, NoticePublisher, NoticeSubscriber, curve

SECONDS = 1.0


class Site:
    """A publisher with a key and an allow-list of one, which has announced version 1."""

    def __init__(self, root: Path, ends: Ends) -> None:
        self.keys, self.ends = Keys(root), ends
        self.trainer = self.keys.make("trainer")
        self.server = self.keys.make("server")
        self.allowed = self.keys.allow("allowed", self.server)
        self.publisher = self.publishing(1, self.trainer, self.allowed)

    def publishing(self, version: int, *keys: Path) -> NoticePublisher:
        """A publisher with these keys, which has announced a version."""
        publisher = self.ends.publisher(LOOPBACK, *keys, repeat_seconds=0.2)
        publisher.send(Notice(RUN, version, DIGEST))
        return publisher

    def subscriber(
        self, own: Path | None, server: Path | None, publisher: NoticePublisher | None = None
    ) -> NoticeSubscriber:
        keys = curve.client_keys(own, None if server is None else public(server))
        return self.ends.subscriber((publisher or self.publisher).address, RUN, keys)


@pytest.fixture
def site(tmp_path: Path, ends: Ends) -> Site:
    return Site(tmp_path, ends)


@pytest.mark.parametrize("case", ["not on the list", "no key", "wrong server key"])
def test_others_hear_nothing_and_both_ends_say_so_once(site: Site, caplog: pytest.LogCaptureFixture, case: str) -> None:
    stranger = site.keys.make("stranger")
    own, server, ours, theirs = {
        "not on the list": (stranger, site.trainer, ("refused key",), "not on the allow-list"),
        # The client hangs up; a publisher that reads what it had sent before it sees that, names the cause itself.
        "no key": (None, None, ("a client hung up", "one side has CURVE keys"), "one side has CURVE keys"),
        "wrong server key": (site.server, stranger, ("another server key",), "the server key given here is not"),
    }[case]
    with caplog.at_level(logging.WARNING):
        subscriber = site.subscriber(own, server)
        # Longer than some attempts to connect again.
        assert subscriber.receive(2.0) is None
    said = {
        name: [record.getMessage() for record in caplog.records if record.name.endswith(name)]
        for name in ("notice.publisher", "notice.subscriber")
    }
    assert len(said["notice.subscriber"]) == 1
    assert theirs in said["notice.subscriber"][0]
    assert sum(any(text in message for text in ours) for message in said["notice.publisher"]) in range(1, len(ours) + 1)
    assert len(said["notice.publisher"]) <= 2
    assert all(path.read_text().split('secret-key = "')[1][:40] not in caplog.text for path in (site.trainer, stranger))
    hear(site.subscriber(site.server, site.trainer), 1)


def test_a_client_with_a_key_at_a_publisher_without(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    assert site.subscriber(site.server, site.trainer, site.publishing(9)).receive(SECONDS) is None
    assert "one side has CURVE keys and the other has none" in caplog.text


def test_the_list_counts_as_it_is_now(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    late = site.keys.make("late")
    subscriber = site.subscriber(late, site.trainer)
    assert subscriber.receive(SECONDS) is None
    site.keys.allow("allowed", late)
    hear(subscriber, 1)
    # What is damaged in it is left out, and what is taken off it is let in no more.
    (site.allowed / "broken.pub").write_bytes(b"\xff\x00nonsense")
    hear(site.subscriber(site.server, site.trainer), 1)
    assert "a key is ignored" in caplog.text
    assert "broken.pub' is not a CURVE certificate" in caplog.text
    (site.allowed / "gone.pub").symlink_to("nowhere")
    hear(site.subscriber(site.server, site.trainer), 1)
    caplog.clear()
    (site.allowed / "server.pub").unlink()
    hears_nothing(site.subscriber(site.server, site.trainer), SECONDS)
    assert "refused key" in caplog.text
    shutil.rmtree(site.allowed)
    hears_nothing(site.subscriber(site.server, site.trainer), SECONDS)
    assert "new clients are refused" in caplog.text


def test_pyzmqs_own_certificates_are_understood(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "pyzmq"
    folder.mkdir()
    _, secret = zmq.auth.create_certificates(folder, "theirs")
    os.chmod(secret, 0o600)
    (site.allowed / "theirs.key").write_bytes((folder / "theirs.key").read_bytes())
    hear(site.subscriber(Path(secret), site.trainer), 1)


def test_generated_keys(tmp_path: Path) -> None:
    path = tmp_path / "key"
    shown = curve.generate(path)
    assert path.stat().st_mode & 0o777 == 0o600
    pair = curve.load_secret(path)
    assert (pair.public.decode(), zmq.curve_public(pair.secret)) == (shown, pair.public)
    assert pair.secret.decode() not in repr(pair)
    assert curve.load_public(public(path)) == pair.public
    assert zmq.auth.load_certificate(path) == (pair.public, pair.secret)
    assert zmq.auth.load_certificate(public(path)) == (pair.public, None)
    with pytest.raises(ConflictError, match="exists already"):
        curve.generate(path)
    path.unlink()
    with pytest.raises(ConflictError, match=r"key\.pub exists already"):
        curve.generate(path)
    public(path).unlink()
    with file_size_limit(0), pytest.raises(StoreError, match="TMPDIR"):
        curve.generate(path)
    assert not list(tmp_path.iterdir())
    assert not path.exists()
    with pytest.raises(StoreError, match="cannot be written"):
        curve.generate(tmp_path / "absent" / "key")


BROKEN = {
    "empty": (b"", "is not a CURVE certificate"),
    "binary": (bytes(range(256)), "is not a CURVE certificate"),
    "half a line": (b"public-key\n", "is not a CURVE certificate"),
    "short": (b'curve\n public-key = "abc"\n', "not 40 characters of Z85"),
    "no z85": (b'curve\n public-key = "' + b"~" * 40 + b'"\n', "not 40 characters of Z85"),
    "beyond 32 bits": (b'curve\n public-key = "' + b"#" * 40 + b'"\n', "not 40 characters of Z85"),
    "long": (b"#" * 20_000, "has more than"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_certificate(tmp_path: Path, name: str) -> None:
    data, text = BROKEN[name]
    path = tmp_path / "key"
    path.write_bytes(data)
    path.chmod(0o600)
    for load in (curve.load_secret, curve.load_public):
        with pytest.raises(SettingsError, match=text) as raised:
            load(path)
        assert repr(str(path)) in str(raised.value)


def test_secret_keys_that_are_refused(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    path, other = keys.make("key"), keys.make("other")
    for mode in (0o640, 0o604, 0o666):
        path.chmod(mode)
        with pytest.raises(SettingsError, match="is readable by other users; chmod 600 it"):
            curve.load_secret(path)
    path.chmod(0o600)
    copy = tmp_path / "copy"
    copy.write_bytes(public(path).read_bytes())
    copy.chmod(0o600)
    with pytest.raises(SettingsError, match="is a public certificate; give the secret one"):
        curve.load_secret(copy)
    with pytest.raises(SettingsError, match=r"is a secret certificate; give the public one \(key\.pub\)"):
        curve.load_public(path)
    with pytest.raises(SettingsError, match="cannot be read"):
        curve.load_secret(tmp_path / "absent")
    mine, theirs = curve.load_secret(path), curve.load_secret(other)
    path.write_text(path.read_text().replace(mine.public.decode(), theirs.public.decode()))
    with pytest.raises(SettingsError, match="does not belong to its secret key"):
        curve.load_secret(path)


def test_half_of_the_keys_is_refused(site: Site, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="notice_allowed is missing"):
        NoticePublisher(LOOPBACK, site.trainer)
    with pytest.raises(SettingsError, match="notice_key is missing"):
        NoticePublisher(LOOPBACK, None, site.allowed)
    with pytest.raises(SettingsError, match=r"notice_allowed .* cannot be read"):
        NoticePublisher(LOOPBACK, site.trainer, tmp_path / "absent")
    with pytest.raises(SettingsError, match="has 2 keys; to connect to a broker"):
        NoticePublisher("connect:tcp://127.0.0.1:1", site.trainer, site.keys.allow("two", site.server, site.trainer))
    with pytest.raises(SettingsError, match="notice_server_key is missing"):
        curve.client_keys(site.server, None)
    with pytest.raises(SettingsError, match="notice_key is missing"):
        curve.client_keys(None, public(site.server))
    with pytest.raises(SettingsError, match="notice_allowed is missing"):
        Publisher({}.items, str(tmp_path / "run"), notice=LOOPBACK, notice_key=site.trainer)


def test_a_list_may_be_one_file_or_empty(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    for allowed, hears in ((public(site.server), True), (site.keys.allow("empty"), False)):
        subscriber = site.subscriber(site.server, site.trainer, site.publishing(3, site.trainer, allowed))
        if hears:
            hear(subscriber, 3)
        else:
            hears_nothing(subscriber, SECONDS)
    assert "has no public certificates" in caplog.text
