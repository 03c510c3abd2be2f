"""Hostile versions and the real receiver on real modules: refused while staged, and no bit of what is served moves."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
import zstandard

from tests.security.build import Arrays, Metadata, plain, rewritten
from tests.support.forge import Forgery, forge
from tests.support.hostile import HEADERS
from tests.support.world import World
from tests.support.written import Written
from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.client import open_run
from vllm_delta_sync.errors import LimitError
from vllm_delta_sync.format.manifest import ObjectRef, object_key
from vllm_delta_sync.run.objects import read_object


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A receiver that serves version 1."""
    world = World(tmp_path_factory.mktemp("receiver"))
    world.train(1)
    world.receiver.advance()
    yield world
    world.close()


def bomb(arrays: Arrays, metadata: Metadata) -> None:
    """Tables of 256 MiB that no tile needs, in 8 kB."""
    metadata["compression"] = "zstd"
    arrays["@0.tables"] = plain(zstandard.ZstdCompressor().compress(bytes(2**28)))


def of_fields(change: Callable[[Metadata], object]) -> Callable[[Path], Forgery]:
    def edit(fields: Metadata) -> None:
        change(fields)

    return lambda root: forge(root, edit)


def of_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], Forgery]:
    return lambda root: forge(root, change_data=change)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_zero(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


CASES: dict[str, tuple[str, Callable[[Path], Forgery]]] = {
    "header of 2^63 bytes": ("limit", of_bytes(lambda good: HEADERS["length of 2^63"][1])),
    "deep header": ("format", of_bytes(lambda good: HEADERS["nested deep"][1])),
    "zip bomb": ("format", of_bytes(rewritten(bomb))),
    "metadata of another version": ("chain", of_bytes(rewritten(lambda a, m: m.update(version=9)))),
    "name with an escape": ("tensor", of_bytes(rewritten(lambda a, m: a.update({"\x1b[2J": plain(b"x")})))),
    "key that leads up": ("format", of_fields(lambda f: f["objects"][0].update(key="../../etc/passwd"))),
    "negative size": ("format", of_fields(lambda f: f["objects"][0].update(bytes=-1))),
    "fewer elements than it carries": ("format", of_fields(lambda f: f.update(changed=0))),
    "pipe": ("store", lambda root: forge(root, damage=fifo)),
    "link to a device": ("store", lambda root: forge(root, damage=to_zero)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_version(name: str, world: World) -> None:
    kind, write = CASES[name]
    forgery = write(Path(world.url))
    try:
        error = world.expect_fails(kind)
        assert error.message.isprintable()
        assert world.receiver.served_version == 1
    finally:
        forgery.remove()


def test_afterwards_it_follows_as_before(world: World) -> None:
    """Last: an honest version after all of those."""
    world.train(2)
    world.receiver.advance()
    assert world.receiver.served_version == 2
    world.expect_exact()


def test_the_cache_makes_no_room_for_what_no_object_of_the_model_can_be(written: Written, tmp_path: Path) -> None:
    """Else one line in a manifest would throw out all that is cached, and fill the disk up to the cache's limit."""
    run = open_run(str(written.folder), cache=ObjectCache(tmp_path / "cache", 2**29))
    good = written.writer.manifests[2].objects[0]
    read = partial(read_object, run)
    assert read(good)
    digest = sha256(b"").hexdigest()
    with pytest.raises(LimitError, match="object_limit"):
        read(ObjectRef(key=object_key(digest), bytes=2**29, sha256=digest))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [good.sha256]
