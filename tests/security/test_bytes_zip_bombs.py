"""Compressed planes that lie, and planes that keep their word and are too large all the same."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from tests.security.build import NEXT, Arrays, Metadata, next_changed, plain, untouched
from tests.security.reader import Reader
from tests.support.samples import CREATED, RUN, RunWriter
from tests.support.written import Written
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.wire.canonical import dump_canonical
from vllm_delta_sync.wire.container import write_container
from vllm_delta_sync.wire.manifest import object_key, version_key
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

MAGIC = b"\x28\xb5\x2f\xfd"
GOOD = zstandard.ZstdCompressor().compress(b"\x05")
EMPTY = zstandard.ZstdCompressor().compress(b"")
SKIPPABLE = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip"


def declaring(size: int, blocks: bytes = b"\x01\0\0") -> bytes:
    """A frame with an 8-byte content size."""
    return MAGIC + b"\xe0" + size.to_bytes(8, "little") + blocks


def with_dictionary(data: bytes) -> bytes:
    training: list[Any] = [bytes([number % 251]) * 40 + b"abcdefgh" for number in range(400)]
    dictionary = zstandard.train_dictionary(2048, training)
    return zstandard.ZstdCompressor(dict_data=dictionary).compress(data)


def undeclared(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


FRAMES: dict[str, tuple[str, bytes]] = {
    "declares 2^60": ("format", declaring(2**60)),
    "declares 2^64 - 2": ("format", declaring(2**64 - 2)),
    "declares nothing": ("format", undeclared(b"\x05")),
    "declares one, holds two": ("format", MAGIC + b"\x20\x01" + b"\x11\0\0" + b"\x05\x05"),
    "declares one, holds 128 kB": ("format", MAGIC + b"\x20\x01" + (0x10000 << 3 | 3).to_bytes(3, "little") + b"\x05"),
    "declares two, holds one": ("format", MAGIC + b"\x20\x02" + b"\x09\0\0" + b"\x05"),
    "window of 2 GiB": ("limit", MAGIC + b"\xc0" + bytes([21 << 3]) + (1).to_bytes(8, "little") + b"\x09\0\0\x05"),
    "window of 2^41": ("format", MAGIC + b"\xc0" + b"\xff" + (1).to_bytes(8, "little") + b"\x09\0\0\x05"),
    "a frame before": ("format", EMPTY + GOOD),
    "a frame after": ("format", GOOD + GOOD),
    "a hundred thousand frames": ("format", GOOD + EMPTY * 20_000),
    "a skippable frame before": ("format", SKIPPABLE + GOOD),
    "a skippable frame after": ("format", GOOD + SKIPPABLE),
    "a dictionary": ("format", with_dictionary(b"\x05")),
    "bytes after": ("format", GOOD + b"\0"),
    "cut": ("format", GOOD[:-1]),
    "magic alone": ("format", MAGIC),
    "no frame": ("format", b"\x05"),
    "nothing": ("format", b""),
    "a gzip file": ("format", b"\x1f\x8b\x08\0\0\0\0\0\0\x03"),
    "a reserved block": ("format", MAGIC + b"\x20\x01" + b"\x0f\0\0" + b"\x05"),
    "empty blocks without end": ("format", MAGIC + b"\x20\x01" + b"\0\0\0" * 20_000),
}


def compressed(name: str, frame: bytes) -> Callable[[Arrays, Metadata], None]:
    """The object with its planes in zstd, and one of them replaced."""

    def change(arrays: Arrays, metadata: Metadata) -> None:
        metadata["compression"] = "zstd"
        for entry in ("@0.gaps", "@0.low", "@0.escapes", "@0.codes", "@0.small", "@0.wide.0", "@0.wide.1"):
            packed = zstandard.ZstdCompressor().compress(arrays[entry][1].tobytes())
            arrays[entry] = plain(frame if entry == name else packed)

    return change


def needs_zstd(fields: Metadata) -> None:
    fields["requires"] = ["packed", "zstd"]


@pytest.mark.parametrize("plane", ["@0.gaps", "@0.codes"])
@pytest.mark.parametrize("frame", FRAMES)
def test_frames_that_lie(frame: str, plane: str, reader: Reader, written: Written, tmp_path: Path) -> None:
    kind, data = FRAMES[frame]
    next_changed(written, compressed(plane, data), needs_zstd)
    for door in (("changes", written.folder, NEXT), ("pieces", written.folder, NEXT, tmp_path)):
        reader.refused(*door, kind=kind)
    reader.refused("tensors", written.folder, kind=kind)
    untouched(reader, written)


ESCAPES = {
    "declares 2^60 escapes": declaring(2**60),
    "ratio bomb": zstandard.ZstdCompressor(level=19).compress(bytes(2**28)),
    "one byte for no escape": zstandard.ZstdCompressor().compress(b"\0"),
    "frames for no escape": EMPTY * 1000,
}


@pytest.mark.parametrize("frame", ESCAPES)
def test_escapes_that_nobody_needs(frame: str, reader: Reader, written: Written, tmp_path: Path) -> None:
    next_changed(written, compressed("@0.escapes", ESCAPES[frame]), needs_zstd)
    for door in (("changes", written.folder, NEXT), ("pieces", written.folder, NEXT, tmp_path)):
        reader.refused(*door, kind=("format", "limit"))


def huge_run(folder: Path, changed: int, frame: bytes, count: int) -> Path:
    """A run of 2^33 elements, whose version 1 says that it changes some of them, and carries ``count``."""
    table = TensorTable([TensorSpec("huge", "BF16", (2**33,))])
    bucket = open_bucket(folder)
    RunWriter(bucket, table)
    metadata = {
        "format_version": 1,
        "run": RUN,
        "version": 1,
        "base_version": 0,
        "codec": "packed",
        "compression": "zstd",
        "blocks": [{"dtype": "BF16", "kind": "sparse"}],
    }
    arrays: Arrays = {
        "@0.ids": ("U32", np.zeros(1, np.uint32)),
        "@0.counts": ("U64", np.array([count], np.uint64)),
        "@0.gaps": plain(frame),
        "@0.escapes": plain(EMPTY),
        "@0.low": plain(EMPTY),
        "@0.codes": plain(frame),
        "@0.small": plain(EMPTY),
        "@0.wide.0": plain(EMPTY),
        "@0.wide.1": plain(EMPTY),
        "@fingerprints": ("U64", np.zeros((1, 2), np.uint64)),
    }
    data = write_container(arrays, {"delta_sync": dump_canonical(metadata).decode()})
    digest = sha256(data).hexdigest()
    bucket.put(object_key(digest), data)
    manifest = {
        "format_version": 1,
        "requires": ["packed", "zstd"],
        "run": RUN,
        "version": 1,
        "step": 1,
        "kind": "delta",
        "base_version": 0,
        "parent": "0" * 64,
        "objects": [{"key": object_key(digest), "bytes": len(data), "sha256": digest, "rank": 0}],
        "changed": changed,
        "total": table.total,
        "payload_bytes": len(data),
        "full_bytes": table.full_bytes,
        "fingerprint": "0" * 32,
        "created_at": CREATED,
    }
    bucket.put(version_key(1), dump_canonical(manifest))
    return folder


def test_a_small_version_whose_object_carries_a_hundred_million_elements(reader: Reader, tmp_path: Path) -> None:
    """Planes of equal bytes keep their word: 10 kB of object, and a gigabyte once it is decoded."""
    count = 10**8
    frame = zstandard.ZstdCompressor().compress(bytes(count))
    assert len(frame) < 20_000
    url = huge_run(tmp_path / "run", 1, frame, count)
    assert "carry 100000000 elements" in reader.refused("changes", url, 1, kind="format")
    assert "carry 100000000 elements" in reader.refused("pieces", url, 1, tmp_path, kind="format")


def test_a_frame_that_declares_more_than_its_bytes_can_hold(reader: Reader, tmp_path: Path) -> None:
    frame = MAGIC + b"\xc0\x50" + (2**33).to_bytes(8, "little") + b"\x01\0\0"
    url = huge_run(tmp_path / "run", 2**33, frame, 2**33)
    assert "MAX_ZSTD_RATIO" in reader.refused("changes", url, 1, kind="limit")
    assert "MAX_ZSTD_RATIO" in reader.refused("pieces", url, 1, tmp_path, kind="limit")
