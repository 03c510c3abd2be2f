"""Keys, names, URLs and files that lead elsewhere: nothing outside of a bucket is read, shown or waited for."""

import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from tests.security.build import NEXT, edit, make_huge, untouched
from tests.security.reader import Reader
from tests.support.forge import forge
from tests.support.samples import RunWriter, random_bits, ref_of
from tests.support.written import TABLE, Written
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.bucket.ranged import PIECE_BYTES
from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.errors import NotFoundError, StoreError, UsageError
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format.manifest import HEAD_KEY, ObjectRef, version_key
from vllm_delta_sync.tensors.checkpoint import resolve_base

SECRET = "not-for-readers-7f3a"
DIGEST = "ab" * 32


# Keys

KEYS = {
    "up": "../../etc/passwd",
    "up, after a folder": "objects/../../secret.safetensors",
    "absolute": "/etc/passwd",
    "a URL": "file:///etc/passwd",
    "zero byte": f"objects/{DIGEST}\0.safetensors",
    "percent": "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "backslash": "..\\..\\secret",
    "empty": "",
    "a dot": ".",
    "very long": "objects/" + "a" * 100_000,
    "very deep": "a/" * 50_000,
    "look-alike letters": f"оbjects/{DIGEST}.safetensors",
    "look-alike digits": "objects/" + "０" * 64 + ".safetensors",
    "look-alike slash": f"objects∕{DIGEST}.safetensors",
    "a line more": f"objects/{DIGEST}.safetensors\n",
    "an escape": f"\x1b[2Jobjects/{DIGEST}.safetensors",
    "staging": "~staging/1-2",
    "home": "~/secret",
}
"""Keys that no bucket takes."""
ODD_KEYS = {
    "upper case": f"objects/{DIGEST.upper()}.safetensors",
    "another name": f"objects/{DIGEST}.bin",
    "another document": "run.json",
}
"""Keys that a bucket may have, and no object of a run."""


def of_key(key: str) -> Callable[[dict[str, list[dict[str, object]]]], None]:
    def change(value: dict[str, list[dict[str, object]]]) -> None:
        value["objects"][0]["key"] = key

    return change


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file outside of the bucket, where a key that leads up would find it."""
    path = tmp_path / "secret.safetensors"
    path.write_text(SECRET)
    return path


@pytest.mark.usefixtures("secret")
def test_keys_in_a_manifest(reader: Reader, written: Written) -> None:
    for name, key in {**KEYS, **ODD_KEYS}.items():
        forgery = forge(written.folder, of_key(key))
        for door in ("head", "tensors", "verify") if name == "up, after a folder" else ("head",):
            message = reader.refused(door, written.folder, kind="format")
            assert version_key(NEXT) in message
            assert "objects.0" in message
            assert SECRET not in message
        forgery.remove()
    untouched(reader, written)


@pytest.mark.usefixtures("secret")
def test_keys_in_folded_ranges_and_anchors(reader: Reader, written: Written, tmp_path: Path) -> None:
    written.writer.merge(0, 4)
    written.writer.beside(4, tmp_path)
    for name in ("up, after a folder", "zero byte", "upper case", "very long"):
        for key, door in ((side.merged_delta_key(0, 4), ("merged", 0, 4)), (side.anchor_key(4), ("anchor", 4))):
            edit(written.folder, key, of_key({**KEYS, **ODD_KEYS}[name]))
            message = reader.refused(door[0], written.folder, *door[1:], kind="format")
            assert key in message
            assert SECRET not in message
    # They are hints: the versions themselves lead to the head.
    assert {key for key, _, _ in reader.reads("findings", written.folder)} == {
        side.merged_delta_key(0, 4),
        side.anchor_key(4),
    }
    untouched(reader, written)


def test_the_digest_in_head(reader: Reader, written: Written) -> None:
    for digest in ("../../../../etc/passwd", DIGEST.upper(), DIGEST + "\n", "０" * 64, "", DIGEST[1:]):
        edit(written.folder, HEAD_KEY, lambda value: value.update(manifest=digest))  # noqa: B023 - called here
        assert "'manifest'" in reader.refused("head", written.folder, kind="format")
    untouched(reader, written)


def test_names_on_the_disk_that_no_key_has(reader: Reader, written: Written) -> None:
    """Files that somebody put there by hand are not listed, and are in nobody's way."""
    before = reader.reads("list", written.folder)
    names = [b"..%2f..%2fetc", b"\xff\xfe.json", b"0000000099.json\n", b"\x1b[2J.json", "0000000099.jsоn".encode()]
    names += [b"back\\slash", b" ", b"...json ", b"x" * 250 + b"\xe2\x80\xae"]
    for folder in ("versions", "objects", "anchors", "merged", "tags", "claims", "heartbeats", "."):
        (written.folder / folder).mkdir(exist_ok=True)
        for name in names:
            Path(os.fsdecode(os.path.join(os.fsencode(written.folder / folder), name))).write_bytes(b"{}")
    assert reader.reads("list", written.folder) == before
    assert reader.reads("head", written.folder) == NEXT - 1
    assert reader.reads("findings", written.folder) == []


# URLs, names and bases


def test_names_of_tags_and_receivers(reader: Reader, written: Written) -> None:
    names = ["../x", "..", ".", "/etc/passwd", "a/b", "a\\b", "a\0", "a\n", "%2e%2e", "", "a" * 101, "tаg", "-rf"]
    for name in [*names, "\x1b[2J"]:
        for key in (side.tag_key, side.heartbeat_key):
            with pytest.raises(UsageError) as caught:
                key(name)
            assert caught.value.message.isprintable()
        reader.refused("tensors", written.folder, f"tag:{name}", kind="usage")
        assert side.tag_of_key(f"tags/{name}.json") is None


BASES = {
    "a device": "/dev/zero",
    "a directory of the system": "/etc",
    "a process": "/proc/self",
    "a zero byte": "a\0b",
    "up": "../../../../../../etc",
    "a URL": "http://127.0.0.1:1/x",
    "an escape": "/nowhere\x1b[2J\nWARNING forged",
    "nothing": "",
    "a revision that leads up": "org/model@../../../etc",
}


@pytest.mark.parametrize("branch", [False, True], ids=["base", "branch"])
@pytest.mark.parametrize("name", BASES)
def test_a_version_0_that_lies_elsewhere(name: str, branch: bool, reader: Reader, tmp_path: Path) -> None:
    """In a checkpoint, or in a run that it says it is a branch of."""
    location = "s3://x/y" if branch and "revision" in name else BASES[name]
    writer = RunWriter(open_bucket(tmp_path / "run"), TABLE)
    writer.reference(random_bits(TABLE, np.random.default_rng(1)), location)
    if branch:
        (tmp_path / "run" / HEAD_KEY).unlink()
        source = {"run": "ab" * 16, "version": 0, "manifest": "cd" * 32}
        edit(tmp_path / "run", version_key(0), lambda value: value["base"].update(source))
    reader.refused("tensors", tmp_path / "run", kind=("base", "usage", "store") if branch else ("base", "usage"))


@pytest.mark.parametrize("revision", ["..", "../x", "/etc", "a/../../b", "a/.", "./a"])
def test_revisions_that_lead_elsewhere_are_none(revision: str) -> None:
    """They would become a path below the Hub's cache."""
    assert resolve_base(f"org/model@{revision}").model is None


def test_files_of_a_checkpoint(reader: Reader, tmp_path: Path) -> None:
    index, weights = tmp_path / "model.safetensors.index.json", tmp_path / "model.safetensors"
    for name in ("../x.safetensors", "/etc/passwd", "..", "a\0b", "a\nb", "\x1b[2J", "a" * 300, "no.such.file", "a\\b"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        reader.refused("checkpoint", tmp_path, kind=("format", "not_found", "store"))
    os.truncate(index, 2**40)
    assert "MAX_JSON_BYTES" in reader.refused("checkpoint", tmp_path, kind="limit")
    index.unlink()
    for path in (weights, index):
        os.mkfifo(path)
        reader.refused("checkpoint", tmp_path, kind="not_found")


# Directory buckets whose names are links, pipes, sockets and devices, or become so while they are read

Odd = Callable[[Path, Path], object]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory with a secret under every name that is read."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("HEAD.json", "0000000004.json", "x"):
        (folder / name).write_text(SECRET)
    return folder


def listening(path: Path, outside: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def device(path: Path, outside: Path) -> None:
    os.mknod(path, 0o20666, os.makedev(1, 5))


def makes_devices() -> bool:
    """Only root does, and not everywhere."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            device(Path(folder) / "device", Path(folder))
        except PermissionError:
            return False
        return True


ODD: dict[str, Odd] = {
    "linked": lambda path, outside: path.symlink_to(outside / "x"),
    "dangling": lambda path, outside: path.symlink_to(outside / "nothing"),
    "looping": lambda path, outside: path.symlink_to(path.name),
    "to zero": lambda path, outside: path.symlink_to("/dev/zero"),
    "pipe": lambda path, outside: os.mkfifo(path),
    "listening": listening,
    **({"device": device} if makes_devices() else {}),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("place", ["HEAD.json", "versions/0000000004.json", "run.json", "object"])
def test_an_object_that_is_no_file(place: str, odd: str, reader: Reader, written: Written, outside: Path) -> None:
    key = written.writer.manifests[4].objects[0].key if place == "object" else place
    (written.folder / key).unlink()
    ODD[odd](written.folder / key, outside)
    for door in ("tensors", "verify") if odd == "linked" else ("tensors",):
        message = reader.refused(door, written.folder, kind="store")
        assert key in message
        assert SECRET not in message
    assert key not in reader.reads("list", written.folder)
    if place in ("HEAD.json", "object"):
        untouched(reader, written)


@pytest.mark.parametrize("folder", ["versions", "objects"])
def test_a_directory_that_is_a_link(folder: str, reader: Reader, written: Written, tmp_path: Path) -> None:
    """Even one that leads to the right files: what it leads to later is somebody else's choice."""
    (written.folder / folder).rename(tmp_path / folder)
    (written.folder / folder).symlink_to(tmp_path / folder)
    assert "symbolic link" in reader.refused("tensors", written.folder, kind="store")
    assert not [key for key in reader.reads("list", written.folder) if key.startswith(folder)]


def test_names_that_are_listed(reader: Reader, written: Written, outside: Path) -> None:
    """They are left out, and hold nobody up."""
    for folder in ("anchors", "merged_deltas", "tags", "claims"):
        (written.folder / folder).mkdir()
        for number, odd in enumerate(ODD.values(), 1):
            name = f"0000000000-{number:010}.json" if folder == "merged_deltas" else f"{number:010}.json"
            odd(written.folder / folder / name, outside)
    assert reader.reads("head", written.folder) == 4
    assert reader.reads("findings", written.folder) == []
    untouched(reader, written)


@contextmanager
def swapping(swap: Callable[[], None]) -> Iterator[None]:
    """Somebody puts something else in a place and takes it back, over and over."""
    ended = threading.Event()

    def on_and_on() -> None:
        while not ended.is_set():
            swap()

    thread = threading.Thread(target=on_and_on)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_a_name_swapped_between_check_and_open(what: str, written: Written, outside: Path, tmp_path: Path) -> None:
    """What comes is the object, or an error; never what a link leads to, and no waiting for a pipe's writer."""
    key = "versions/0000000004.json" if what == "folder" else "HEAD.json"
    bucket, path, aside = open_bucket(written.folder), written.folder / key, tmp_path / "aside"
    good = bucket.get(key)

    def swap_file() -> None:
        for make in (
            lambda: ODD["pipe" if what == "pipe" else "linked"](aside, outside),
            lambda: aside.write_bytes(good),
        ):
            with suppress(FileNotFoundError):
                aside.unlink()
            make()
            aside.rename(path)

    def swap_folder() -> None:
        path.parent.rename(aside)
        path.parent.symlink_to(outside)
        path.parent.unlink()
        aside.rename(path.parent)

    outcomes = {"good": 0, "refused": 0}
    with swapping(swap_folder if what == "folder" else swap_file):
        # Until both were met: how often somebody gets in between is the machine's choice.
        for turn in range(200_000):
            if turn >= 1000 and min(outcomes.values()) > 0:
                break
            try:
                assert bucket.get(key) == good
                outcomes["good"] += 1
            except (StoreError, NotFoundError):
                outcomes["refused"] += 1
    assert min(outcomes.values()) > 0, outcomes


# The node's cache, with something else where an object should be

SMALL = bytes(range(256)) * 100
LARGE = bytes(range(256)) * 10_000
"""Downloaded by ranges, into a file that may be there already."""


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    for data in (SMALL, LARGE):
        LocalBucket(tmp_path / "stored").put(ref_of(data).key, data)
    return tmp_path / "stored"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path


def cached(reader: Reader, cache: Path, stored: Path, ref: ObjectRef) -> int:
    size: int = reader.reads("cached", cache, ref.key, ref.bytes, ref.sha256, stored)
    return size


def claims(path: Path, outside: Path) -> None:
    """Says that all of it is there, and nothing is."""
    part = path.with_suffix(".part")
    part.touch()
    os.truncate(part, len(LARGE))
    path.write_text(f"pieces of {PIECE_BYTES} of {len(LARGE)} {ref_of(LARGE).key}\n0\n")


IN_CACHE: dict[str, Odd] = {
    **{name: ODD[name] for name in ("to zero", "pipe", "linked")},
    "tebibyte": lambda path, outside: make_huge(path),
    "other bytes": lambda path, outside: path.write_bytes(LARGE[::-1]),
    "folder": lambda path, outside: path.mkdir(),
    "claims": claims,
}


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("odd", IN_CACHE)
def test_something_else_in_the_cache(
    odd: str, data: bytes, reader: Reader, cache: Path, stored: Path, outside: Path
) -> None:
    """Whatever it is, the object comes, and it is the right one; what a link leads to is neither read nor written."""
    ref = ref_of(data)
    for suffix in ("", ".part", ".pieces", ".lock"):
        IN_CACHE[odd](cache / (ref.sha256 + suffix), outside)
        assert cached(reader, cache, stored, ref) == cached(reader, cache, stored, ref) == len(data)
        for path in cache.iterdir():
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    assert (outside / "x").read_text() == SECRET


def test_a_size_that_nobody_has(reader: Reader, cache: Path, stored: Path) -> None:
    """A manifest's lie about a size allocates nothing, and is found out by what comes."""
    ref = ref_of(SMALL)
    assert "truncated" in reader.refused("cached", cache, ref.key, 2**53 - 1, ref.sha256, stored, kind="digest")
    assert sum(path.stat().st_blocks for path in cache.iterdir()) == 0


def test_directories_in_the_cache_cost_no_descriptors(cache: Path, stored: Path) -> None:
    bucket, refs = LocalBucket(stored), [ref_of(SMALL), ref_of(LARGE)]
    for ref in refs:
        (cache / ref.sha256).mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert [ObjectCache(cache, 2**30).get(ref, bucket) for ref in refs] == [SMALL, LARGE]
        assert [ObjectCache(cache, 2**30).open(ref, bucket) for ref in refs] == [None, None]
    assert len(os.listdir("/proc/self/fd")) == before
