"""A receiver with trusted keys, and a stranger who can write whatever he wants into the bucket."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.chains import Chain, Server
from tests.support.trusted import Trusted
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.config import Settings
from vllm_delta_sync.engine.loader import Loaded
from vllm_delta_sync.engine.rebuild import newest
from vllm_delta_sync.engine.witness import Witness
from vllm_delta_sync.errors import FormatError
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire import manifest as keys
from vllm_delta_sync.wire.canonical import dump_canonical
from vllm_delta_sync.wire.documents import KeyEntry
from vllm_delta_sync.wire.state import ModelState


def unsigned(world: Trusted) -> None:
    other = world.copied(Keyring())
    other.grow(1)
    world.put(other.folder)


def unsigned_beyond_the_head(world: Trusted) -> None:
    other = world.copied(Keyring())
    other.grow(1)
    shutil.copy(world.folder / keys.HEAD_KEY, other.folder / keys.HEAD_KEY)
    world.put(other.folder)


def by_a_stranger(world: Trusted) -> None:
    other = world.copied(world.stranger)
    other.grow(2)
    world.put(other.folder)


def changed_after_it_was_signed(world: Trusted) -> None:
    other = world.copied()
    other.grow(1)
    path = other.folder / keys.version_key(4)
    path.write_bytes(path.read_bytes().replace(b'"step":40', b'"step":41'))
    world.put(other.folder)


def of_another_run(world: Trusted) -> None:
    other = Chain(world.root, "other", seed=1, keyring=world.trainer)
    other.inside(other.fresh())
    other.grow(4)
    shutil.copytree(other.folder / "objects", world.folder / "objects", dirs_exist_ok=True)
    shutil.copy(other.folder / keys.version_key(4), world.folder / keys.version_key(4))


def of_another_version(world: Trusted) -> None:
    shutil.copy(world.folder / keys.version_key(2), world.folder / keys.version_key(4))


def head_of_another_run(world: Trusted) -> None:
    other = Chain(world.root, "other", seed=1, keyring=world.trainer)
    other.inside(other.fresh())
    shutil.copy(other.folder / keys.HEAD_KEY, world.folder / keys.HEAD_KEY)


def older_head_and_newer_manifests_deleted(world: Trusted) -> None:
    shutil.copy(world.copied(until=1).folder / keys.HEAD_KEY, world.folder / keys.HEAD_KEY)
    for version in (2, 3):
        (world.folder / keys.version_key(version)).unlink()


def newer_manifests_deleted(world: Trusted) -> None:
    (world.folder / keys.version_key(3)).unlink()


def all_manifests_deleted(world: Trusted) -> None:
    shutil.rmtree(world.folder / "versions")
    (world.folder / keys.HEAD_KEY).unlink()


def put_back(world: Trusted) -> None:
    world.put(world.copied(until=1).folder)


def forked(until: int, versions: int) -> Callable[[Trusted], None]:
    """Whoever has the key has written another history for the same versions."""

    def attack(world: Trusted) -> None:
        other = world.copied(until=until)
        other.grow(versions)
        world.put(other.folder)

    return attack


def signed_run_in_its_place(world: Trusted) -> None:
    other = Chain(world.root, "other", seed=1, keyring=world.trainer)
    other.inside(other.fresh())
    other.grow(7)
    world.put(other.folder)


def strangers_run_in_its_place(world: Trusted) -> None:
    other = Chain(world.root, "other", seed=1, keyring=world.stranger)
    other.inside(other.fresh())
    other.grow(7)
    world.put(other.folder)


def unsigned_run_info(world: Trusted) -> None:
    path = world.folder / keys.RUN_KEY
    fields = json.loads(path.read_bytes())
    path.write_bytes(keys.RunInfo.model_validate({**fields, "signature": None}).to_bytes())


def key_file_put_back(world: Trusted) -> None:
    world.chain.key_file(1, [])
    first = (world.folder / side.KEYS_KEY).read_bytes()
    world.chain.key_file(2, [])
    world.receiver.advance()
    (world.folder / side.KEYS_KEY).write_bytes(first)


def key_file_deleted(world: Trusted) -> None:
    key_file_put_back(world)
    (world.folder / side.KEYS_KEY).unlink()


def key_file_by_a_stranger(world: Trusted) -> None:
    other = world.copied(world.stranger)
    other.key_file(1, [KeyEntry(key=world.stranger.public or "")])
    other.grow(2)
    world.put(other.folder)


ATTACKS: dict[str, tuple[Callable[[Trusted], None], str]] = {
    "unsigned": (unsigned, "signature"),
    "unsigned beyond the head": (unsigned_beyond_the_head, "signature"),
    "by a stranger": (by_a_stranger, "signature"),
    "changed after it was signed": (changed_after_it_was_signed, "signature"),
    "of another run": (of_another_run, "chain"),
    "of another version": (of_another_version, "chain"),
    "head of another run": (head_of_another_run, "chain"),
    "older head and newer manifests deleted": (older_head_and_newer_manifests_deleted, "replay"),
    "newer manifests deleted": (newer_manifests_deleted, "replay"),
    "all manifests deleted": (all_manifests_deleted, "replay"),
    "put back": (put_back, "replay"),
    "forked at the served version": (forked(2, 1), "fork"),
    "forked at the served version and gone on": (forked(2, 3), "fork"),
    "forked behind it": (forked(0, 5), "fork"),
    "forked behind it, as long": (forked(0, 3), "fork"),
    "signed run in its place": (signed_run_in_its_place, "chain"),
    "stranger's run in its place": (strangers_run_in_its_place, "signature"),
    "run.json without its signature": (unsigned_run_info, "signature"),
    "key file put back": (key_file_put_back, "replay"),
    "key file deleted": (key_file_deleted, "replay"),
    "key file by a stranger": (key_file_by_a_stranger, "signature"),
}


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_refused_and_what_it_did_heals(tmp_path: Path, name: str, restarted: bool) -> None:
    attack, kind = ATTACKS[name]
    world = Trusted(tmp_path, ranks=2)
    world.serves(3)
    true = world.copied()
    attack(world)
    if restarted:
        world.start()
    world.refused(kind)
    world.refused(kind)
    # The truth is back, and has gone on.
    world.put(true.folder)
    world.chain.key_file(3, [])
    world.chain.grow(2)
    world.serves(5)


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
def test_object_swapped_for_another_of_its_size(tmp_path: Path, restarted: bool) -> None:
    world = Trusted(tmp_path)
    world.serves(3)
    world.chain.grow(1)
    path = world.folder / world.chain.manifests[4].objects[0].key
    true = path.read_bytes()
    world.chain.damage(world.chain.manifests[4])
    assert path.stat().st_size == len(true)
    if restarted:
        world.start()
    world.refused("digest")
    path.write_bytes(true)
    world.serves(4)


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


@pytest.mark.parametrize("rotated", [False, True], ids=["version", "key file"])
def test_faster_neighbour_is_no_replay(tmp_path: Path, rotated: bool) -> None:
    """A version, or a list of keys, that comes while this server looks is seen first by another one on its machine."""
    world = Trusted(tmp_path)
    world.serves(3)
    other = Server(world.chain, world.chain.bits[0], 1, **world.settings)
    other.receiver.advance()

    def overtake(run: Any) -> None:
        look = run.reachable_head

        def overtaken() -> Any:
            found = look()
            if rotated:
                world.chain.key_file(len(world.chain.manifests), [])
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
    assert newest(cold, witness=Witness(settings, settings.keyring(), writes=False)).version == 4


def test_fault_that_is_over_does_not_refuse_what_was_loaded(tmp_path: Path) -> None:
    """The manifest of what the loader left behind cannot be read while the weights are proven."""
    world = Trusted(tmp_path)
    world.chain = chain = Chain(tmp_path, "by reference", base=True, keyring=world.trainer)
    chain.grow(3)
    world.server = Server(chain, chain.bits[2], 1, **world.settings)
    weights = ((spec.name, chain.bits[2][tensor].copy()) for tensor, spec in enumerate(chain.table))
    state = ModelState(chain.table, weights)
    fingerprints = tuple(value.hex() for value in state.fingerprints)
    loaded = Loaded(chain.run, chain.url, 2, chain.manifests[2].digest, fingerprints)
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
