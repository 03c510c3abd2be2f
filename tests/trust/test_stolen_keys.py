"""A trusted key is stolen, and what it signed served: once its word ends, servers leave that by themselves."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.chains import Chain
from tests.support.trusted import Trusted, keyring_at
from trainer_side.epochs import check_tail, find_tail
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import open_run
from vllm_delta_sync.engine.planning.trusted_head import TrustedHead
from vllm_delta_sync.engine.staging.reconstruct import newest_good_manifest
from vllm_delta_sync.errors import DeltaSyncError, SignatureError
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.format.canonical_json import dump_canonical
from vllm_delta_sync.format.documents import KeyEntry, KeyValidity
from vllm_delta_sync.maintenance.keys import change_keys
from vllm_delta_sync.settings import Settings
from vllm_delta_sync.trust import Keyring


class Theft(Trusted):
    """Two trusted keys. The trainer's was stolen and has signed versions 4 and 5, which are served; the second one
    goes on from version 3."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.second = keyring_at(root / "second.key")
        both = f"{root / 'trainer.key.pub'},{root / 'second.key.pub'}"
        super().__init__(root, trusted_keys=both, **settings)

    def steal(self) -> Chain:
        """The honest run, which lies beside the thief's."""
        self.serves(3)
        honest = self.copied(self.second)
        self.chain.grow(1)
        self.serves(4)
        self.chain.grow(1)
        self.serves(5)
        return honest

    def list_it(self, chain: Chain, revoked: bool = True) -> None:
        """The second key says that the trainer's word holds up to version 3."""
        last = KeyValidity(version=3, manifest=chain.manifests[3].digest)
        chain.key_file(1, [KeyEntry(key=self.trainer.public or "", last=last, revoked=revoked)])
        chain.head(3)

    def put_honest(self, honest: Chain) -> None:
        """The thief's versions are gone, and the honest publisher goes on in their place."""
        self.put(honest.folder)
        honest.folder, honest.bucket, honest.url = self.folder, open_bucket(str(self.folder)), str(self.folder)
        self.chain = honest
        self.server.chain = honest


def told(world: Theft) -> str:
    """What is wrong, by the next look and by the status after it."""
    with pytest.raises(SignatureError) as caught:
        world.receiver.advance()
    assert world.receiver.status()["last_error"] == {"kind": "signature", "message": caught.value.message}
    return caught.value.message


@pytest.mark.parametrize(
    ("honest_versions", "undo_bytes", "revoked"),
    [(0, 1 << 20, True), (0, 0, False), (1, 0, True), (2, 1 << 20, True), (3, 0, True)],
)
def test_what_a_stolen_key_signed_is_left_once_its_word_ends(
    tmp_path: Path, honest_versions: int, undo_bytes: int, revoked: bool
) -> None:
    """Undone or rebuilt; also for another version of its number."""
    world = Theft(tmp_path, undo_bytes=undo_bytes)
    honest = world.steal()
    world.list_it(honest, revoked)
    world.put_honest(honest)
    if honest_versions:
        world.chain.grow(honest_versions)
    world.serves(3 + honest_versions)
    assert not world.receiver.status()["holding"]
    world.chain.grow(2)
    world.serves(5 + honest_versions)
    world.start()
    world.serves(5 + honest_versions)


@pytest.mark.parametrize("undo_bytes", [1 << 20, 0], ids=["undone", "rebuilt"])
def test_what_a_stolen_key_signed_is_left_while_it_lies_in_the_bucket(tmp_path: Path, undo_bytes: int) -> None:
    world = Theft(tmp_path, undo_bytes=undo_bytes)
    world.steal()
    world.chain.keyring = world.second
    world.list_it(world.chain)
    with pytest.raises(SignatureError, match="revoked after version 3"):
        world.receiver.advance()
    world.server.serves(3)
    world.chain.grow(1, base=3)
    world.serves(6)


@pytest.mark.parametrize("target", ["5", "tag:best"])
def test_what_a_stolen_key_signed_is_left_where_a_version_is_named(tmp_path: Path, target: str) -> None:
    world = Theft(tmp_path)
    honest = world.steal()
    world.tag("best", 5, world.trainer)
    world.settings["target"] = target
    world.start()
    world.serves(5)
    world.list_it(honest)
    world.put_honest(honest)
    with pytest.raises(DeltaSyncError):
        world.receiver.advance()
    assert world.receiver.served_version in (0, 3)
    world.chain.grow(2)
    world.tag("best", 5, world.second)
    world.serves(5)


def test_where_nothing_honest_can_be_served_it_is_said_and_heals(tmp_path: Path) -> None:
    world = Theft(tmp_path, undo_bytes=0)
    honest = world.steal()
    world.list_it(honest)
    world.put_honest(honest)
    lost = world.folder / world.chain.manifests[2].objects[0].key
    true = lost.read_bytes()
    lost.unlink()
    thiefs = world.receiver.served_version
    for _ in range(4):
        with pytest.raises(SignatureError, match="or restart this server") as caught:
            world.receiver.advance()
        status = world.receiver.status()
        assert status["last_error"] == {"kind": "signature", "message": caught.value.message}
        assert (thiefs, status["served"], status["state"], world.receiver.can_repair) == (5, None, "refused", True)
    assert [line for line in world.server.port.log if line.startswith("label")][-1] == "label None"
    lost.write_bytes(true)
    world.serves(3)


def test_where_no_version_is_believed_any_more_it_is_said(tmp_path: Path) -> None:
    """Not even version 0; the undo log knows what was served before, for whoever trusts that."""
    world = Theft(tmp_path)
    honest = world.steal()
    honest.key_file(1, [KeyEntry(key=world.trainer.public or "", revoked=True)])
    world.put_honest(honest)
    assert "Roll back to a version that you trust with POST /delta_sync/rollback (`undo` has 4, 3, 0)" in told(world)
    assert world.receiver.served_version == 5
    world.receiver.rollback(3)
    world.server.serves(3)


def test_weights_changed_from_outside_are_not_brought_back_to_a_thiefs(tmp_path: Path) -> None:
    world = Theft(tmp_path)
    honest = world.steal()
    world.server.models[0].norm.data.zero_()
    assert not world.receiver.verify()["verdict"]
    world.list_it(honest)
    world.put_honest(honest)
    world.receiver.repair()
    world.server.serves(3)


@pytest.mark.parametrize("how", ["live", "restarted", "run.json anew", "no head"])
def test_revoked_root_does_not_take_it_back(tmp_path: Path, how: str) -> None:
    world = Theft(tmp_path)
    world.serves(3)
    true = world.copied()
    world.chain.keyring = world.second
    world.list_it(world.chain)
    head = world.folder / keys.HEAD_KEY
    if how == "no head":
        # The list is remembered where no version was believed as well.
        hidden = head.read_bytes()
        head.write_bytes(b"{}")
        (world.folder / "versions").rename(tmp_path / "versions")
        with pytest.raises(DeltaSyncError):
            world.receiver.advance()
        (tmp_path / "versions").rename(world.folder / "versions")
        head.write_bytes(hidden)
    else:
        world.serves(3)
    world.chain.keyring = world.trainer
    world.chain.key_file(2, [])
    world.chain.grow(1)
    if how == "run.json anew":
        info = json.loads((world.folder / keys.RUN_KEY).read_bytes())
        again = keys.RunInfo.from_bytes(dump_canonical({**info, "note": "x", "signature": None}))
        (world.folder / keys.RUN_KEY).write_bytes(world.trainer.signed(again).to_bytes())
    elif how != "live":
        world.start()
    for _ in range(2):
        with pytest.raises(SignatureError, match=r"revoked before; restore the keys\.json with sequence 1 "):
            world.receiver.advance()
        assert world.receiver.served_version in (None, 3)
    settings = Settings(bucket=world.chain.url, **world.settings)
    cold, witness = (
        open_run(world.chain.url, settings.keyring()),
        TrustedHead(settings, settings.keyring(), writes=False),
    )
    with pytest.raises(SignatureError, match="revoked before"):
        newest_good_manifest(cold, trusted_head=witness)
    world.put(true.folder)
    world.chain.manifests.pop()
    world.chain.bits.pop()
    world.chain.keyring = world.second
    world.list_it(world.chain)
    world.chain.grow(1)
    world.serves(4)


def test_however_many_versions_a_thief_has_made_the_last_honest_one_is_found(tmp_path: Path) -> None:
    """More than the bad ones that a look passes over otherwise."""
    world = Theft(tmp_path, undo_bytes=0)
    world.serves(3)
    world.chain.grow(70)
    world.serves(73)
    keyring = Keyring.load([tmp_path / "trainer.key.pub", tmp_path / "second.key.pub"], tmp_path / "second.key")
    changed = change_keys(world.chain.bucket, keyring, revoke=[world.trainer.public or ""], version=3)
    assert changed.head == 3
    with pytest.raises(SignatureError, match="revoked after version 3"):
        world.receiver.advance()
    world.server.holds(world.chain.bits[3])
    found = find_tail(open_run(world.chain.url, keyring))
    assert (found.version, None if found.manifest is None else found.manifest.version) == (73, 3)
    check_tail(open_run(world.chain.url, keyring), found)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_last_word_that_falls_itself_leads_to_the_one_before(tmp_path: Path, restarted: bool) -> None:
    """Key a signs 4 and 5, key b signs 6; b is revoked after 5, then a after 3, and the server has missed both."""
    world = Trusted(tmp_path)
    world.serves(3)
    a, b = keyring_at(tmp_path / "a.key"), keyring_at(tmp_path / "b.key")
    listed = [KeyEntry(key=ring.public or "") for ring in (a, b)]
    world.chain.key_file(1, listed)
    for ring, versions in ((a, 2), (b, 1)):
        world.chain.keyring = ring
        world.chain.grow(versions)
    world.serves(6)
    world.receiver.hold()
    world.chain.keyring = world.trainer
    words = [KeyValidity(version=version, manifest=world.chain.manifests[version].digest) for version in (3, 5)]
    world.chain.key_file(
        3, [KeyEntry(key=entry.key, last=word, revoked=True) for entry, word in zip(listed, words, strict=True)]
    )
    world.chain.head(3)
    if restarted:
        world.start()
    world.receiver.release()
    with pytest.raises(SignatureError, match="revoked after version 3"):
        world.receiver.advance()
    world.server.holds(world.chain.bits[3])
    mark = world.receiver.status()["trust"]["last_seen"]
    assert (mark["version"], mark["manifest"]) == (3, words[0].manifest)
