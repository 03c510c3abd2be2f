"""Documents that claim absurd amounts, versions that lie far away, and directories full of strangers' files."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tests.security.build import NEXT, Arrays, Metadata, edit, next_changed, plain, untouched
from tests.security.reader import Reader
from tests.support.forge import forge
from tests.support.written import Written
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.errors import FormatError
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire.manifest import HEAD_KEY, Manifest, object_key, version_key

STRAYS = 100_000
FAR = 9_999_999_999


def of_objects(count: int, size: int) -> list[dict[str, object]]:
    digests = (f"{number:064x}" for number in range(count))
    return [{"key": object_key(digest), "bytes": size, "sha256": digest, "rank": 0} for digest in digests]


def test_more_objects_than_a_version_may_have(reader: Reader, written: Written) -> None:
    forge(written.folder)
    edit(
        written.folder, version_key(NEXT), lambda fields: fields.update(objects=of_objects(65_537, 0), payload_bytes=0)
    )
    assert "bytes, more than the" in reader.refused("head", written.folder, kind="limit")
    with pytest.raises(FormatError, match="65536"):
        Manifest.from_bytes((written.folder / version_key(NEXT)).read_bytes())
    untouched(reader, written)


def test_one_object_many_times(reader: Reader, written: Written) -> None:
    rows = of_objects(1, 10) * 1000
    forge(written.folder, lambda fields: fields.update(objects=rows, payload_bytes=10_000))
    assert "listed twice" in reader.refused("head", written.folder, kind="format")


@pytest.mark.parametrize("size", [2**53 - 1, 2**40, 10**8])
def test_an_object_that_claims_to_be_large(size: int, reader: Reader, written: Written, tmp_path: Path) -> None:
    def claim(fields: Metadata) -> None:
        fields["objects"][0]["bytes"] = fields["payload_bytes"] = size

    forgery = forge(written.folder, claim)
    # And its file is as large as it says, on a disk that has not to give any room for that.
    os.truncate(forgery.files[1], min(size, 2**40))
    for door in (("tensors", written.folder), ("verify", written.folder), ("changes", written.folder, NEXT)):
        assert "object_limit" in reader.refused(*door, kind="limit")
    reader.refused("pieces", written.folder, NEXT, tmp_path, kind=("limit", "digest"))
    assert "object_limit" in reader.reads("findings", written.folder)[0][2]
    untouched(reader, written)


def test_sizes_whose_sum_is_beyond_every_number(reader: Reader, written: Written) -> None:
    forge(written.folder, lambda fields: fields.update(objects=of_objects(3, 2**53 - 1), payload_bytes=2**53 - 1))
    assert "payload_bytes" in reader.refused("head", written.folder, kind="format")


@pytest.mark.parametrize("key", ["run.json", "tensors.json", HEAD_KEY, version_key(4)])
def test_a_document_of_a_tebibyte(key: str, reader: Reader, written: Written) -> None:
    os.truncate(written.folder / key, 2**40)
    for door in ("head", "verify"):
        assert key in reader.refused(door, written.folder, kind="limit")


def test_a_manifest_of_a_tebibyte_below_the_head(reader: Reader, written: Written) -> None:
    os.truncate(written.folder / version_key(2), 2**40)
    assert reader.reads("head", written.folder) == 4
    reader.refused("tensors", written.folder, kind=("limit", "chain"))
    assert version_key(2) in {key for key, _, _ in reader.reads("findings", written.folder)}


def test_documents_beside_the_chain_of_a_tebibyte(reader: Reader, written: Written) -> None:
    names = [side.tag_key("x"), side.anchor_key(4), side.fold_key(0, 4), side.claim_key(1), side.RETENTION_KEY]
    for key in names:
        (written.folder / key).parent.mkdir(exist_ok=True)
        (written.folder / key).touch()
        os.truncate(written.folder / key, 2**40)
    assert reader.reads("head", written.folder) == 4
    assert reader.reads("tensors", written.folder)
    assert set(names) <= {key for key, _, _ in reader.reads("findings", written.folder)}
    untouched(reader, written)


def test_errors_without_end(reader: Reader, written: Written) -> None:
    """A hundred thousand wrong members are one error, and no list of all of them."""
    names = {f"{number:07x}": 0 for number in range(100_000)}
    forge(written.folder)
    edit(written.folder, version_key(NEXT), lambda fields: fields.update(tensor_fingerprints=names))
    assert "tensor_fingerprints" in reader.refused("head", written.folder, kind="format")


def test_head_far_away(reader: Reader, written: Written) -> None:
    edit(written.folder, HEAD_KEY, lambda head: head.update(version=FAR))
    reader.refused("head", written.folder, kind="not_found")
    reader.refused("verify", written.folder, kind=("not_found", "chain"))
    assert HEAD_KEY in {key for key, _, _ in reader.reads("findings", written.folder)}
    assert open_run(str(written.folder)).reachable_head()[0].version == 4
    untouched(reader, written)


@pytest.mark.parametrize("version", [100_000, FAR])
def test_a_manifest_far_away(version: int, reader: Reader, written: Written) -> None:
    """Nobody looks for the ten billion versions that would have to be before it."""
    good = (written.folder / version_key(4)).read_bytes()
    for data in (b"{}", good):
        (written.folder / version_key(version)).write_bytes(data)
        assert reader.reads("head", written.folder) == 4
        reader.refused("verify", written.folder, kind=("chain", "format"))
        assert version_key(version) in {key for key, _, _ in reader.reads("findings", written.folder)}
    untouched(reader, written)


def test_breaks_without_end(reader: Reader, written: Written) -> None:
    breaks = [{"version": number, "base_version": None} for number in range(1, 5000)]
    forge(written.folder, lambda fields: fields.update(breaks=breaks))
    assert "breaks" in reader.refused("head", written.folder, kind="format")


BLOCKS: dict[str, tuple[str, object]] = {
    "forty thousand": ("format", [{"dtype": "BF16"}] * 40_000),
    "three": ("format", [{"dtype": "BF16", "kind": "sparse"}] * 3),
    "none": ("tensor", []),
    "no dtype": ("format", [{"kind": "sparse"}]),
    "no kind": ("format", [{"dtype": "BF16"}]),
    "another dtype": ("tensor", [{"dtype": "F64", "kind": "sparse"}]),
    "an unknown dtype": ("format", [{"dtype": "O", "kind": "sparse"}]),
    "an unknown kind": ("unsupported", [{"dtype": "BF16", "kind": "round"}]),
    "tiles of another codec": ("format", [{"dtype": "BF16", "kind": "tiles"}]),
    "a number": ("format", 2**53 - 1),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str, reader: Reader, written: Written, tmp_path: Path) -> None:
    kind, blocks = BLOCKS[name]
    next_changed(written, lambda arrays, metadata: metadata.update(blocks=blocks))
    reader.refused("changes", written.folder, NEXT, kind=kind)
    reader.refused("pieces", written.folder, NEXT, tmp_path, kind=kind)
    untouched(reader, written)


def far_gap(arrays: Arrays, metadata: Metadata) -> None:
    arrays["@0.gaps"], arrays["@0.escapes"] = plain([255]), plain([255] * 8)


def past_the_end(arrays: Arrays, metadata: Metadata) -> None:
    arrays["@0.gaps"], arrays["@0.escapes"] = plain([255]), plain([0, 0, 1, 0, 0, 0, 0, 0])


def wrapping(arrays: Arrays, metadata: Metadata) -> None:
    # 255 more than this is 4 once it has gone around.
    arrays["@0.gaps"], arrays["@0.escapes"] = plain([255]), plain((2**64 - 251).to_bytes(8, "little"))


def count_of(number: int) -> object:
    return lambda arrays, metadata: arrays.update({"@0.counts": ("U64", np.array([number], np.uint64))})


def raw(indices: list[int]) -> object:
    def change(arrays: Arrays, metadata: Metadata) -> None:
        for name in [name for name in arrays if name.startswith("@0.")]:
            del arrays[name]
        metadata.update(codec="raw", compression="none", blocks=[])
        arrays["a.weight.indices"] = ("I64", np.array(indices, np.int64))
        arrays["a.weight.values"] = ("BF16", np.zeros(len(indices), np.uint16))

    return change


POSITIONS = {
    "beyond the tensor": past_the_end,
    "far beyond": far_gap,
    "around 2^64": wrapping,
    "a count of 2^64 - 1": count_of(2**64 - 1),
    "a count of 2^63": count_of(2**63),
    "a count of 0": count_of(0),
    "a count above the tensor": count_of(20_001),
    "raw, beyond the tensor": raw([20_000]),
    "raw, negative": raw([-1]),
    "raw, 2^63 - 1": raw([2**63 - 1]),
    "raw, down": raw([5, 4]),
    "raw, twice": raw([5, 5]),
    "raw, none": raw([]),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions(name: str, reader: Reader, written: Written) -> None:
    next_changed(written, POSITIONS[name], lambda fields: fields.update(requires=["packed", "raw"]))  # type: ignore[arg-type]
    assert "version 5" in reader.refused("changes", written.folder, NEXT, kind="format")
    for door in ("tensors", "verify"):
        reader.refused(door, written.folder, kind="format")
    untouched(reader, written)


def test_two_objects_of_one_version_that_overlap(reader: Reader, written: Written) -> None:
    """Both move element 5. Each for itself is good."""

    forgery = forge(written.folder, lambda fields: fields.update(changed=2))
    end = 8 + int.from_bytes(forgery.data[:8], "little")
    other = end.to_bytes(8, "little") + forgery.data[8:end] + b" " * 8 + forgery.data[end:]
    digest = sha256(other).hexdigest()
    (written.folder / object_key(digest)).write_bytes(other)
    rows = [*forgery.manifest["objects"], {"key": object_key(digest), "bytes": len(other), "sha256": digest, "rank": 1}]
    size = sum(row["bytes"] for row in rows)
    edit(written.folder, version_key(NEXT), lambda fields: fields.update(objects=rows, payload_bytes=size))
    reader.refused("tensors", written.folder, kind="fingerprint")
    untouched(reader, written)


@pytest.fixture(scope="module")
def crowded(template: Written) -> Iterator[Path]:
    """A run with strangers' files in every directory that is listed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as parent:
        yield crowd(template, Path(parent) / "run")


def crowd(template: Written, folder: Path) -> Path:
    shutil.copytree(template.folder, folder)
    for name in ("versions", "anchors", "folds", "tags"):
        (folder / name).mkdir(exist_ok=True)
        descriptor = os.open(folder / name, os.O_RDONLY)
        for number in range(STRAYS // 4):
            os.close(os.open(f"stray-{number}", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
        os.close(descriptor)
    deep = folder / "versions"
    for _ in range(200):
        deep /= "d"
        deep.mkdir()
    (deep / "0000000009.json").touch()
    return folder


def test_the_head_does_not_list(crowded: Path, reader: Reader) -> None:
    assert reader.reads("head", crowded) == 4
    assert reader("head", crowded).seconds < 0.5


@pytest.mark.parametrize("door", ["tensors", "findings"])
def test_what_lists_takes_time_for_each_file_once(door: str, crowded: Path, reader: Reader) -> None:
    outcome = reader(door, crowded)
    assert outcome.kind is None
    assert outcome.result or door == "findings"


def test_a_lost_head_among_them(crowded: Path, reader: Reader) -> None:
    (crowded / HEAD_KEY).rename(crowded / "gone.json")
    try:
        assert reader.reads("head", crowded) == 4
    finally:
        (crowded / "gone.json").rename(crowded / HEAD_KEY)


def test_many_manifests_that_are_none(reader: Reader, written: Written) -> None:
    """Who looks for the head goes past them: they are read once each, and are small."""
    for number in range(NEXT, 1000):
        (written.folder / version_key(number)).write_bytes(b"{}")
    outcome = reader("head", written.folder)
    assert outcome.kind == "format", outcome
    assert outcome.seconds < 5
    untouched(reader, written)
