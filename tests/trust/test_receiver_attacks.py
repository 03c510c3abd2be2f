"""A receiver with trusted keys, and a stranger who can write whatever he wants into the bucket."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.chains import Chain, Server
from tests.support.collision import same_fingerprint
from tests.support.forge import FORGERIES
from tests.support.trusted import Trusted
from vllm_delta_sync.client import open_run
from vllm_delta_sync.engine.planning.trusted_head import TrustedHead
from vllm_delta_sync.engine.protocol import A, ClaimedVersion, Poll, Progress, RankFailure, RankRequest
from vllm_delta_sync.engine.staging.reconstruct import newest_good_manifest
from vllm_delta_sync.errors import BaseUnavailableError, FormatError, NotFoundError, SignatureError
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.format.base_document import dump_canonical
from vllm_delta_sync.format.fingerprint import fingerprint_tensor
from vllm_delta_sync.settings import Settings
from vllm_delta_sync.tensors.state import ModelState
from vllm_delta_sync.trust import Keyring

Attack = Callable[[Trusted], None]


def grown(name: str, versions: int = 1, until: int | None = None) -> Attack:
    """The run goes on, signed by the trainer, a stranger or nobody; from a version on, history is another one."""

    def attack(world: Trusted) -> None:
        other = world.copied(Keyring() if name == "nobody" else getattr(world, name), until)
        other.grow(versions)
        world.put(other.folder)

    return attack


def other_run(world: Trusted, keyring: Keyring) -> Chain:
    other = Chain(world.root, "other", seed=1, keyring=keyring)
    other.inside(other.fresh())
    other.grow(7)
    return other


def unsigned_beyond_the_head(world: Trusted) -> None:
    head = (world.folder / keys.HEAD_KEY).read_bytes()
    grown("nobody")(world)
    (world.folder / keys.HEAD_KEY).write_bytes(head)


def changed_after_it_was_signed(world: Trusted) -> None:
    grown("trainer")(world)
    path = world.folder / keys.version_key(4)
    path.write_bytes(path.read_bytes().replace(b'"step":40', b'"step":41'))


def of_another_run(world: Trusted) -> None:
    other = other_run(world, world.trainer)
    shutil.copytree(other.folder / "objects", world.folder / "objects", dirs_exist_ok=True)
    shutil.copy(other.folder / keys.version_key(4), world.folder / keys.version_key(4))


def of_another_version(world: Trusted) -> None:
    shutil.copy(world.folder / keys.version_key(2), world.folder / keys.version_key(4))


def head_of_another_run(world: Trusted) -> None:
    shutil.copy(other_run(world, world.trainer).folder / keys.HEAD_KEY, world.folder / keys.HEAD_KEY)


def older_head_and_newer_manifests_deleted(world: Trusted) -> None:
    shutil.copy(world.copied(until=1).folder / keys.HEAD_KEY, world.folder / keys.HEAD_KEY)
    for version in (2, 3):
        (world.folder / keys.version_key(version)).unlink()


def all_manifests_deleted(world: Trusted) -> None:
    shutil.rmtree(world.folder / "versions")
    (world.folder / keys.HEAD_KEY).unlink()


def unsigned_run_info(world: Trusted) -> None:
    path = world.folder / keys.RUN_KEY
    path.write_bytes(FORGERIES["unsigned"](world.chain.info, world.stranger))


ATTACKS: dict[str, tuple[Attack, str]] = {
    "unsigned": (grown("nobody"), "signature"),
    "unsigned beyond the head": (unsigned_beyond_the_head, "signature"),
    "by a stranger": (grown("stranger", 2), "signature"),
    "changed after it was signed": (changed_after_it_was_signed, "signature"),
    "of another run": (of_another_run, "chain"),
    "of another version": (of_another_version, "chain"),
    "head of another run": (head_of_another_run, "chain"),
    "older head and newer manifests deleted": (older_head_and_newer_manifests_deleted, "replay"),
    "newer manifests deleted": (lambda world: (world.folder / keys.version_key(3)).unlink(), "replay"),
    "all manifests deleted": (all_manifests_deleted, "replay"),
    "put back": (lambda world: world.put(world.copied(until=1).folder), "replay"),
    "forked at the served version": (grown("trainer", 1, until=2), "fork"),
    "forked at the served version and gone on": (grown("trainer", 3, until=2), "fork"),
    "forked behind it": (grown("trainer", 5, until=0), "fork"),
    "forked behind it, as long": (grown("trainer", 3, until=0), "fork"),
    "signed run in its place": (lambda world: world.put(other_run(world, world.trainer).folder), "chain"),
    "stranger's run in its place": (lambda world: world.put(other_run(world, world.stranger).folder), "signature"),
    "run.json without its signature": (unsigned_run_info, "signature"),
}


RESTARTED = [name for name, (_, kind) in ATTACKS.items() if kind != "signature"] + ["unsigned"]
"""Those that a server which has just started can know from what it remembers, and one more."""


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_refused_and_what_it_did_heals(tmp_path: Path, name: str) -> None:
    attack, kind = ATTACKS[name]
    world = Trusted(tmp_path, ranks=2)
    world.serves(3)
    true = world.copied()
    attack(world)
    servers = [world.server]
    if name in RESTARTED:
        world.start()
        servers.append(world.server)
    for world.server in servers * 2:
        world.refused(kind)
    # The truth is back, and has gone on.
    world.put(true.folder)
    world.chain.grow(2)
    for world.server in servers:
        world.serves(5)


def test_run_json_signed_anew_is_refused(tmp_path: Path) -> None:
    world = Trusted(tmp_path)
    world.serves(3)
    path = world.folder / keys.RUN_KEY
    true = path.read_bytes()
    again = keys.RunInfo.from_bytes(dump_canonical({**json.loads(true), "note": "x", "signature": None}))
    path.write_bytes(world.trainer.signed(again).to_bytes())
    assert "run.json" in world.refused("fork").message
    path.write_bytes(true)
    world.chain.grow(1)
    world.serves(4)


def test_faster_neighbour_is_no_replay(tmp_path: Path) -> None:
    """A version that comes while this server looks is seen first by another one on its machine."""
    world = Trusted(tmp_path)
    world.serves(3)
    other = Server(world.chain, world.chain.bits[0], 1, **world.settings)
    other.receiver.advance()

    def overtake(run: Any) -> None:
        look = run.reachable_head

        def overtaken(known: int | None = None) -> Any:
            found = look(known)
            world.chain.grow(1)
            other.receiver.advance()
            return found

        run.reachable_head = overtaken

    run = world.receiver.history.run
    overtake(run)
    world.receiver.advance()
    assert (world.receiver.served_version, other.receiver.served_version) == (3, 4)
    del run.reachable_head
    world.serves(4)
    settings = Settings(bucket=world.chain.url, **world.settings)
    cold = open_run(world.chain.url, settings.keyring())
    overtake(cold)
    assert newest_good_manifest(cold, trusted_head=TrustedHead(settings, settings.keyring(), writes=False)).version == 4


def test_fault_that_is_over_does_not_refuse_what_was_loaded(tmp_path: Path) -> None:
    """The manifest of what the loader left behind cannot be read while the weights are proven."""
    world = Trusted(tmp_path)
    world.chain = chain = Chain(tmp_path, "by reference", base=True, keyring=world.trainer)
    chain.grow(3)
    world.server = Server(chain, chain.bits[2], 1, **world.settings)
    weights = ((spec.name, chain.bits[2][tensor].copy()) for tensor, spec in enumerate(chain.table))
    state = ModelState(chain.table, weights)
    loaded = ClaimedVersion(chain.run, chain.url, 2, list(state.fingerprints))
    world.server.models[0].delta_sync_loaded = loaded
    path = world.folder / keys.version_key(2)
    true = path.read_bytes()
    path.write_bytes(b"{}")
    for _ in range(2):
        with pytest.raises(FormatError):
            world.receiver.advance()
        assert world.receiver.status()["state"] != "refused"
    path.write_bytes(true)
    world.serves(3)


# What somebody has forged for it: weights, keys, tags, runs


@contextmanager
def swapped_for_ranks(world: Trusted, operation: str, key: str, data: bytes) -> Iterator[None]:
    """An object is another one for as long as ranks do something, and never when their controller looks."""
    port, path = world.server.port, world.folder / key
    true, call = path.read_bytes(), port.call

    def swapping(request: RankRequest[A]) -> list[A | RankFailure]:
        if request.operation == operation:
            path.write_bytes(data)
        answers = call(request)
        if isinstance(request, Poll) and not any(isinstance(one, Progress) and one.running for one in answers):
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
    with swapped_for_ranks(world, "identify", swapped, (other.folder / swapped).read_bytes()):
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


def test_forged_weights_with_the_right_fingerprint(tmp_path: Path) -> None:
    """The fingerprint cannot tell them from the true ones; what is signed can."""
    world = Trusted(tmp_path, ranks=2)
    world.chain.grow(1)
    forged = world.copied(world.stranger)
    tensor = [spec.name for spec in forged.table].index("q.weight")
    bits = [array.copy() for array in forged.bits[4]]
    bits[tensor] = same_fingerprint("q.weight", bits[tensor])
    assert fingerprint_tensor("q.weight", bits[tensor]) == fingerprint_tensor("q.weight", forged.bits[4][tensor])
    assert (bits[tensor] != forged.bits[4][tensor]).any()
    forged.bits[4] = bits
    forged.merge(0, 4)
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
    # Receivers that require signatures see neither the merged delta nor the anchor.
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
            world.receiver.repair()
        assert world.receiver.status()["state"] == "refused"
    world.put(true.folder)
    world.receiver.repair()
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
    with pytest.raises(BaseUnavailableError):
        server.receiver.advance()
    server.holds(left.bits[1])
    path.write_bytes(true)
    world.put(whole.folder)
    server.receiver.advance()
    server.serves(1)
