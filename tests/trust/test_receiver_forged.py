"""A receiver with trusted keys, and weights, keys, tags and runs that somebody has forged for it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.chains import Chain, Server
from tests.support.collision import same_fingerprint
from tests.support.trusted import Trusted, keyring_at
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.errors import NotFoundError, ReplayError, SettingsError, SignatureError
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire import manifest as keys
from vllm_delta_sync.wire.documents import KeyEntry, LastWord
from vllm_delta_sync.wire.fingerprint import fingerprint_tensor


@contextmanager
def swapped_for_ranks(world: Trusted, operation: str, key: str, data: bytes) -> Iterator[None]:
    """An object is another one for as long as ranks do something, and never when their controller looks."""
    port, path = world.server.port, world.folder / key
    true, call = path.read_bytes(), port.call

    def swapping(method: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        if method == "start" and arguments["operation"] == operation:
            path.write_bytes(data)
        answers = call(method, arguments)
        if method == "poll" and not any(answer.get("running") for answer in answers):
            path.write_bytes(true)
        return answers

    port.call = swapping  # type: ignore[method-assign]
    try:
        yield
    finally:
        port.call = call  # type: ignore[method-assign]


@pytest.mark.parametrize("swapped", [keys.RUN_KEY, keys.TABLE_KEY])
def test_run_swapped_between_controller_and_rank(tmp_path: Path, swapped: str) -> None:
    """A signed one, too: what a rank reads is what its controller has read, or nothing."""
    world = Trusted(tmp_path)
    other = Chain(tmp_path, "other", seed=1, keyring=world.trainer)
    if swapped == keys.TABLE_KEY:
        (other.folder / keys.TABLE_KEY).write_bytes(b"[]")
    with swapped_for_ranks(world, "prove", swapped, (other.folder / swapped).read_bytes()):
        world.refused("digest", "format")
    assert world.receiver.status()["state"] != "refused"
    world.serves(3)


def test_tensors_swapped_before_the_start(tmp_path: Path) -> None:
    world = Trusted(tmp_path)
    path = world.folder / keys.TABLE_KEY
    true = path.read_bytes()
    path.write_bytes(true.replace(b"[50,", b"[49,"))
    world.refused("digest")
    path.write_bytes(true)
    world.serves(3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_forged_weights_with_the_right_fingerprint(tmp_path: Path, ranks: int) -> None:
    """The fingerprint cannot tell them from the true ones; what is signed can."""
    world = Trusted(tmp_path, ranks)
    world.chain.grow(1)
    forged = world.copied(world.stranger)
    tensor = [spec.name for spec in forged.table].index("q.weight")
    bits = [array.copy() for array in forged.bits[4]]
    bits[tensor] = same_fingerprint("q.weight", bits[tensor])
    assert fingerprint_tensor("q.weight", bits[tensor]) == fingerprint_tensor("q.weight", forged.bits[4][tensor])
    assert (bits[tensor] != forged.bits[4][tensor]).any()
    forged.bits[4] = bits
    forged.fold(0, 4)
    forged.beside_it(4)
    true = world.copied()
    world.put(forged.folder)
    # Nobody's word is asked for: what the stranger wrote is served, and passes for the version.
    trusting = Trusted.__new__(Trusted)
    trusting.__dict__.update(world.__dict__, settings={})
    trusting.start()
    trusting.receiver.advance()
    assert trusting.receiver.verify()["verdict"]
    trusting.server.holds(bits)
    # The folded range and the anchor do not exist for whoever asks for signatures.
    world.serves(4)
    # Nor when there is nothing else.
    world.start()
    world.chain.lose(1, 2, 3, 4)
    world.refused("not_found")
    world.put(true.folder)
    world.serves(4)


def forged_anchor(world: Trusted, keyring: Keyring) -> None:
    """Only an anchor is left to rebuild version 3 from, whose weights are others with the right fingerprint."""
    forged = world.copied(keyring)
    forged.bits[3] = [array.copy() for array in forged.bits[3]]
    forged.bits[3][0] = same_fingerprint(forged.table[0].name, forged.bits[3][0])
    forged.beside_it(3)
    world.put(forged.folder)
    world.chain.lose(1, 2, 3)


def test_forged_anchor_is_not_used_for_a_repair(tmp_path: Path) -> None:
    """Ranks look for what they rebuild from by themselves."""
    world = Trusted(tmp_path)
    world.serves(3)
    true = world.copied()
    forged_anchor(world, world.stranger)
    world.server.models[0].norm.data.zero_()
    assert not world.receiver.verify()["verdict"]
    for _ in range(2):
        with pytest.raises((NotFoundError, SignatureError)):
            world.receiver.mend()
        assert world.receiver.status()["state"] == "refused"
    world.put(true.folder)
    world.receiver.mend()
    world.server.serves(3)


def test_revoked_key_is_not_believed_by_ranks_either(tmp_path: Path) -> None:
    """Not even while they are shown the list of keys as it was before."""
    world = Trusted(tmp_path)
    stolen = keyring_at(tmp_path / "stolen.key")
    older = world.chain.key_file(1, [KeyEntry(key=stolen.public or "")])
    world.serves(3)
    world.chain.key_file(2, [KeyEntry(key=stolen.public or "", revoked=True)])
    true = world.copied()
    forged_anchor(world, stolen)
    world.server.models[0].norm.data.zero_()
    assert not world.receiver.verify()["verdict"]
    with swapped_for_ranks(world, "repair", side.KEYS_KEY, older.to_bytes()), pytest.raises(ReplayError):
        world.receiver.mend()
    with pytest.raises((NotFoundError, SignatureError)):
        world.receiver.mend()
    world.put(true.folder)
    world.receiver.mend()
    world.server.serves(3)


@pytest.mark.parametrize("target", ["2", "tag:best"])
def test_forked_version_behind_the_head(tmp_path: Path, target: str) -> None:
    """Whoever asks for a version is given the one that the head goes on from."""
    world = Trusted(tmp_path, target=target)
    true = world.copied()
    fork = world.copied(until=1)
    fork.grow(1)
    for key in (keys.version_key(2), fork.manifests[2].objects[0].key):
        shutil.copy(fork.folder / key, world.folder / key)
    world.tag("best", 2, world.trainer, fork.manifests[2].digest)
    world.refused("fork")
    world.put(true.folder)
    world.tag("best", 2, world.trainer)
    world.serves(2)


def test_tag_moved_by_a_stranger(tmp_path: Path) -> None:
    world = Trusted(tmp_path, target="tag:best")
    world.tag("best", 2, world.trainer)
    world.serves(2)
    for keyring in (world.stranger, Keyring()):
        world.tag("best", 3, keyring)
        world.refused("signature")
    world.tag("best", 3, world.trainer)
    world.serves(3)


def test_keys_that_are_listed_and_revoked(tmp_path: Path) -> None:
    """What a key wrote up to its last word stays readable, for a fresh server too; what it writes later does not."""
    world = Trusted(tmp_path)
    helper = keyring_at(tmp_path / "helper.key")
    entry = KeyEntry(key=helper.public or "")
    world.chain.keyring = helper
    world.chain.grow(2)
    world.refused("signature")
    world.chain.keyring = world.trainer
    world.chain.key_file(1, [entry])
    world.serves(5)
    last = LastWord(version=5, manifest=world.chain.manifests[5].digest)
    world.chain.key_file(2, [entry.model_copy(update={"last": last, "revoked": True})])
    stolen = world.copied(helper)
    stolen.grow(2)
    true = world.copied()
    world.put(stolen.folder)
    world.refused("signature")
    # Another version 4 and 5, with a signature of the time when it was good.
    forked = world.copied(helper, until=3)
    forked.grow(2)
    world.put(forked.folder)
    world.refused("fork", "signature")
    world.put(true.folder)
    world.chain.head(5)
    world.chain.grow(1)
    world.serves(6)
    shutil.rmtree(tmp_path / "state")
    world.start()
    world.serves(6)


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
def test_stolen_key_whose_versions_were_served(tmp_path: Path, restarted: bool) -> None:
    """Once it is revoked, and the trainer has gone on behind what it wrote, servers come back by themselves."""
    world = Trusted(tmp_path)
    stolen = keyring_at(tmp_path / "stolen.key")
    world.chain.key_file(1, [KeyEntry(key=stolen.public or "")])
    world.chain.keyring = stolen
    world.chain.grow(2)
    world.serves(5)
    world.chain.keyring = world.trainer
    last = LastWord(version=3, manifest=world.chain.manifests[3].digest)
    world.chain.key_file(2, [KeyEntry(key=stolen.public or "", last=last, revoked=True)])
    if restarted:
        world.start()
    with pytest.raises(SignatureError):
        world.receiver.advance()
    assert world.receiver.served_version in (0, 3)
    world.chain.grow(1, base=3)
    world.chain.grow(1)
    world.serves(7)


def test_branch_of_a_run_that_a_stranger_signed(tmp_path: Path) -> None:
    """The history of the run that it comes from must be signed as well."""
    world = Trusted(tmp_path)
    source, path = world.chain, world.folder / keys.RUN_KEY
    branch = source.branch("branch", 2, seed=5)
    branch.grow(2)
    true = path.read_bytes()
    path.write_bytes(world.stranger.signed(source.info).to_bytes())
    source.lose(0)
    world.server = Server(branch, source.bits[0], **world.settings)
    with pytest.raises(NotFoundError, match="branches from"):
        world.receiver.advance()
    assert world.receiver.served_version is None
    world.server.holds(source.bits[0])
    path.write_bytes(true)
    world.receiver.advance()
    world.server.serves(2)


def test_unreadable_key_is_an_error_at_the_start(tmp_path: Path) -> None:
    world = Trusted(tmp_path)
    (tmp_path / "trainer.key.pub").write_text("no key")
    with pytest.raises(SettingsError, match="no public key"):
        world.start()


def test_signed_manifest_says_nothing_without_trust(tmp_path: Path) -> None:
    world = Trusted(tmp_path)
    with pytest.raises(SignatureError, match="not trusted"):
        open_run(world.chain.url, Keyring([world.stranger.public or ""]))


def test_way_back_through_a_run_that_a_stranger_signed(tmp_path: Path) -> None:
    """A server that comes from another branch reads its history only if that is signed."""
    world = Trusted(tmp_path)
    left, right = (world.chain.branch(name, 2, seed) for name, seed in (("left", 5), ("right", 6)))
    left.grow(1)
    right.grow(1)
    server = Server(left, world.chain.bits[0], **world.settings)
    server.reaches(1, commits=2)
    whole = world.copied()
    world.chain.lose(0)
    path = left.folder / keys.RUN_KEY
    true = path.read_bytes()
    path.write_bytes(world.stranger.signed(left.info).to_bytes())
    server.follow(right, **world.settings)
    with pytest.raises(NotFoundError):
        server.receiver.advance()
    server.holds(left.bits[1])
    path.write_bytes(true)
    world.put(whole.folder)
    server.receiver.advance()
    server.serves(1)
