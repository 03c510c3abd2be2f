"""Hostile objects and checkpoints: one error each, within little memory and time, whatever reads them."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import zstandard

from tests.codec.tiling import block
from tests.security.build import (
    NEXT,
    Arrays,
    Metadata,
    claiming,
    edit,
    next_changed,
    next_object,
    plain,
    refused_by_all,
    untouched,
)
from tests.security.reader import Reader
from tests.support import reference_tiles as reference
from tests.support.forge import forge, parts_of_tables
from tests.support.hostile import EMPTY, FRAMES, HEADERS, MAGIC, container, entry
from tests.support.samples import CREATED, RUN, RunWriter, random_bits, ref_of
from tests.support.written import TABLE, Written
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.client import open_run
from vllm_delta_sync.codec.tiles.grid import grid_of
from vllm_delta_sync.errors import LimitError
from vllm_delta_sync.format.base_document import dump_canonical
from vllm_delta_sync.format.manifest import ObjectRef, object_key, version_key
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.run.objects import read_object

Change = Callable[[Arrays, Metadata], object]


# Headers


@pytest.mark.parametrize("name", ["length of 2^63", "nested deep", "same bytes twice", "shape of 2^60", "NaN"])
def test_a_header_in_an_object(name: str, reader: Reader, written: Written, tmp_path: Path) -> None:
    kind, data = HEADERS[name]
    next_object(written, data)
    assert all("version 5" in message for message in refused_by_all(reader, written, tmp_path, kind))


def test_metadata_of_a_megabyte_in_an_object(reader: Reader, written: Written, tmp_path: Path) -> None:
    next_object(written, container(b'{"__metadata__":{"a":"%s"}}' % (b"x" * 2**20)))
    refused_by_all(reader, written, tmp_path, "format")


def test_headers_in_a_checkpoint(reader: Reader, tmp_path: Path) -> None:
    for kind, data in HEADERS.values():
        (tmp_path / "model.safetensors").write_bytes(data)
        assert "model.safetensors" in reader.refused("checkpoint", tmp_path, kind=kind)


@pytest.mark.parametrize(
    "item",
    [b"{},", pytest.param(b"[],", marks=pytest.mark.slow), pytest.param(b"0,", marks=pytest.mark.slow)],
    ids=["objects", "lists", "numbers"],
)
def test_a_header_of_a_hundred_megabytes(item: bytes, reader: Reader, tmp_path: Path) -> None:
    """Parsed, it would take up to thirty times its bytes; what is allowed here is the file mapped, and two copies."""
    text = b'{"a":[' + item * ((99 << 20) // len(item)) + item[:-1] + b"]}"
    (tmp_path / "model.safetensors").write_bytes(container(text))
    reader.refused("checkpoint", tmp_path, kind=("limit", "format"), spare=3 * 2**27)


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map":{},"weight_map":{"a":"model.safetensors"}}',
        '{"metadata":{"total_size":1,"total_size":2},"weight_map":{"a":"model.safetensors"}}',
        '{"weight_map":{"a":"x","\\u0061":"y"}}',
    ],
)
def test_members_twice_in_the_index_of_a_checkpoint(text: str, reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(container(b'{"a":%s}' % entry(), b"x"))
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "duplicate key" in reader.refused("checkpoint", tmp_path, kind="format")


# Compressed tables


def compressed(frame: bytes) -> Change:
    """The object in zstd, with another frame as its tables."""

    def change(arrays: Arrays, metadata: Metadata) -> None:
        metadata["compression"] = "zstd"
        arrays["@0.tables"] = plain(frame)

    return change


def needs_zstd(fields: Metadata) -> None:
    fields["requires"] = ["plain", "zstd"]


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        ("declares 2^60", "limit"),
        ("window of 2 GiB", "limit"),
        ("twenty thousand frames", "format"),
        ("empty blocks without end", "format"),
    ],
)
def test_a_frame_that_lies(frame: str, kind: str, reader: Reader, written: Written, tmp_path: Path) -> None:
    next_changed(written, compressed(FRAMES[frame][2]), needs_zstd)
    refused_by_all(reader, written, tmp_path, kind)


TABLES = {
    "ratio bomb": zstandard.ZstdCompressor().compress(bytes(2**28)),
    "a hundred megabytes": zstandard.ZstdCompressor().compress(bytes(10**8)),
    "one byte": zstandard.ZstdCompressor().compress(b"\0"),
    "none": EMPTY,
    "frames of nothing": EMPTY * 1000,
}


@pytest.mark.parametrize("frame", TABLES)
def test_tables_that_no_tile_needs(frame: str, reader: Reader, written: Written, tmp_path: Path) -> None:
    """They are refused for their size, before they are decompressed."""
    next_changed(written, compressed(TABLES[frame]), needs_zstd)
    refused_by_all(reader, written, tmp_path, ("format", "limit"))


def huge_run(folder: Path, numel: int, changed: int, count: int, tables: bytes) -> Path:
    """A run of one tensor, whose version 1 says that it changes some elements, and carries ``count`` without a bit."""
    table = TensorTable([TensorSpec("huge", "BF16", (numel,))])
    bucket = open_bucket(folder)
    RunWriter(bucket, table)
    data = block(table, tables, b"", [count], how="zstd")
    ref = ref_of(data)
    bucket.put(ref.key, data)
    manifest = {
        "format_version": 2,
        "requires": ["plain", "zstd"],
        "run": RUN,
        "version": 1,
        "step": 1,
        "kind": "delta",
        "base_version": 0,
        "parent": "0" * 64,
        "objects": [ref.model_dump()],
        "changed": changed,
        "total": table.total,
        "payload_bytes": len(data),
        "full_bytes": table.full_bytes,
        "fingerprint": "0" * 32,
        "created_at": CREATED,
    }
    bucket.put(version_key(1), dump_canonical(manifest))
    return folder


def empty_tables(numel: int) -> bytes:
    """Of a tensor of which no tile changed: a kilobyte that stands for any number of tiles."""
    return zstandard.ZstdCompressor().compress(bytes(reference.SIZES_AT + 4 * grid_of((numel,)).tiles))


NO_TILE = empty_tables(2**33)
LYING_FRAME = MAGIC + b"\xc0\x50" + (2**33).to_bytes(8, "little") + b"\x01\0\0"
HUGE: dict[str, tuple[tuple[int, int, int, bytes], str, str]] = {
    "carries more than it says": ((2**33, 1, 10**8, NO_TILE), "format", "carry 100000000 elements"),
    # Each changed element takes a bit, at least.
    "more changes than bits": ((2**33, 10**8, 10**8, NO_TILE), "format", ""),
    "every element in no bits": ((2**33, 2**33, 2**33, NO_TILE), "format", ""),
    "a frame beyond its bytes": ((2**33, 1, 1, LYING_FRAME), "limit", "MAX_ZSTD_RATIO"),
    "billions of tiles, few tables": (
        (2**48, 1, 1, zstandard.ZstdCompressor().compress(bytes(10**6))),
        "format",
        "too few for the tiles",
    ),
}
"""Elements of the tensor, how many change, how many are carried, tables; the error's kind, and what it says."""


@pytest.mark.parametrize("name", HUGE)
def test_a_small_object_that_stands_for_a_huge_change(name: str, reader: Reader, tmp_path: Path) -> None:
    run, kind, said = HUGE[name]
    url = huge_run(tmp_path / "run", *run)
    for door in (("changes", url, 1), ("pieces", url, 1, tmp_path)):
        assert said in reader.refused(*door, kind=kind)


# Blocks, positions and sizes


def of_blocks(blocks: object) -> Change:
    return lambda arrays, metadata: metadata.update(blocks=blocks)


def of_stream(symbol: int, bits: int, stream: bytes) -> Change:
    """The changed tile has another stream of so many bits, in which one symbol has a code, of one bit."""

    def change(arrays: Arrays, metadata: Metadata) -> None:
        tables = arrays["@0.tables"][1]
        lengths, numbers = parts_of_tables(tables)
        lengths[:] = 0
        lengths[reference.PLAIN, 0, symbol] = 1
        number = (1 << 31 | bits).to_bytes(4, "little")
        numbers[:, numbers.any(axis=0)] = np.frombuffer(number, np.uint8)[:, None]
        arrays["@0.streams"] = plain(stream)

    return change


def of_count(number: int) -> Change:
    return lambda arrays, metadata: arrays.update({"@0.counts": ("U64", np.array([number], np.uint64))})


def raw(index: int) -> Change:

    def change(arrays: Arrays, metadata: Metadata) -> None:
        for name in [name for name in arrays if name.startswith("@0.")]:
            del arrays[name]
        metadata.update(codec="raw", compression="none", blocks=[])
        arrays["a.weight.indices"] = ("I64", np.array([index], np.int64))
        arrays["a.weight.values"] = ("BF16", np.zeros(1, np.uint16))

    return change


def nested(arrays: Arrays, metadata: Metadata) -> None:
    for _ in range(40):
        metadata["zzz"] = [metadata.get("zzz", 0)]


CHANGES: dict[str, tuple[str, Change]] = {
    "forty thousand blocks": ("format", of_blocks([{"dtype": "BF16"}] * 40_000)),
    "a block of another dtype": ("tensor", of_blocks([{"dtype": "F64", "kind": "tiles"}])),
    "a block of an unknown kind": ("unsupported", of_blocks([{"dtype": "BF16", "kind": "round"}])),
    "blocks as a number": ("format", of_blocks(2**53 - 1)),
    "metadata that nest": ("format", nested),
    "a gap of 2^21": ("format", of_stream(249, 20, bytes(3))),
    "more changes than the tile has elements": ("format", of_stream(0, 2**16, bytes(2**13))),
    "a stream of 2^31 - 1 bits": ("format", of_stream(0, 2**31 - 1, b"\0")),
    "a count of 2^64 - 1": ("format", of_count(2**64 - 1)),
    "a count of 2^63": ("format", of_count(2**63)),
    "raw, negative": ("format", raw(-1)),
    "raw, 2^63 - 1": ("format", raw(2**63 - 1)),
}
"""Large ones, and one of each error; others are in ``codec/test_delta_hostile.py`` and ``test_tiles_hostile.py``."""


@pytest.mark.parametrize("name", CHANGES)
def test_an_object_that_says_too_much(name: str, reader: Reader, written: Written, tmp_path: Path) -> None:
    kind, change = CHANGES[name]
    next_changed(written, change, lambda fields: fields.update(requires=["plain", "raw"]))
    if name.startswith("raw"):
        reader.refused("changes", written.folder, NEXT, kind=kind)
        reader.refused("tensors", written.folder, kind=kind)
    else:
        refused_by_all(reader, written, tmp_path, kind)


@pytest.mark.parametrize("size", [2**53 - 1, 10**8])
def test_an_object_that_claims_to_be_large(size: int, reader: Reader, written: Written, tmp_path: Path) -> None:
    forgery = forge(written.folder, claiming(size))
    # And its file is as large as it says, on a disk that has not to give any room for that.
    os.truncate(forgery.files[1], min(size, 2**40))
    for door in (("tensors", written.folder), ("verify", written.folder), ("changes", written.folder, NEXT)):
        assert "object_limit" in reader.refused(*door, kind="limit")
    reader.refused("pieces", written.folder, NEXT, tmp_path, kind=("limit", "digest"))
    assert "object_limit" in reader.reads("findings", written.folder)[0][2]
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


# Pickles


class Payload:
    """Makes a directory when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def of_pickle(mark: Path) -> bytes:
    return pickle.dumps({"model.weight": Payload(mark)})


def of_torch(mark: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", of_pickle(mark))
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def of_numpy(mark: Path) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Payload(mark)], dtype=object), allow_pickle=True)
    return buffer.getvalue()


PICKLES: list[Callable[[Path], bytes]] = [of_pickle, of_torch, of_numpy]
NAMES = ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.pkl", "model.ckpt", "weights.npy"]


def test_the_payload_runs_where_it_is_unpickled(tmp_path: Path) -> None:
    """Else the tests below would show nothing."""
    pickle.loads(of_pickle(tmp_path / "first"))  # noqa: S301
    np.load(io.BytesIO(of_numpy(tmp_path / "second")), allow_pickle=True)
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}


@pytest.mark.parametrize("form", PICKLES)
def test_a_pickle_is_never_opened_as_one(
    form: Callable[[Path], bytes], reader: Reader, written: Written, tmp_path: Path
) -> None:
    mark, base = tmp_path / "it-ran", tmp_path / "base"
    data = form(mark)
    refusals = ("format", "limit")
    # In a checkpoint, under every name that weights have.
    base.mkdir()
    for name in NAMES:
        (base / name).write_bytes(data)
    (base / "pytorch_model.bin.index.json").write_text('{"weight_map":{"model.weight":"pytorch_model.bin"}}')
    assert "only safetensors" in reader.refused("checkpoint", base, kind="not_found")
    for name in (NAMES[0], "model.safetensors"):
        (base / name).write_bytes(data)
        (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.weight": name}}))
        assert name in reader.refused("checkpoint", base, kind=refusals)
    writer = RunWriter(open_bucket(tmp_path / "reference"), TABLE)
    writer.reference(random_bits(TABLE, np.random.default_rng(1)), str(base))
    reader.refused("tensors", tmp_path / "reference", kind="base")
    # Beside a run, where nothing asks for it.
    for name in [*NAMES, "conftest.py", "sitecustomize.py", "config.json", "modeling.py"]:
        (written.folder / name).write_bytes(data)
    assert reader.reads("findings", written.folder) == []
    # As an object, and as a document.
    next_object(written, data)
    refused_by_all(reader, written, tmp_path, refusals)
    for key in (version_key(NEXT), "run.json"):
        (written.folder / key).write_bytes(data)
        assert key in reader.refused("head", written.folder, kind="format")
    assert not mark.exists()


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
