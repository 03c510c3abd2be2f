"""Delta objects as an attacker or a broken disk would have them: one error of the right kind, and nothing else."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.forge import arrays_of
from tests.support.reference_tiles import CLASSES, SIZES_AT
from tests.support.samples import CONTEXT, changes_between
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_reader import decode
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.errors import (
    ChainError,
    DeltaSyncError,
    FormatError,
    LimitError,
    TensorMismatchError,
    UnsupportedError,
)
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.safetensors_file import Container, write_container
from vllm_delta_sync.format.table import TensorSpec, TensorTable

TABLE = TensorTable(
    [
        TensorSpec("a", "BF16", (1000,)),
        TensorSpec("b", "BF16", (1000,)),
        TensorSpec("c", "F32", (10,)),
        TensorSpec("huge", "BF16", (2**24, 2**23)),
    ]
)
SMALL = TensorTable([*TABLE][:3])
Arrays = dict[str, tuple[str, np.ndarray]]
Metadata = dict[str, Any]


def parts(codec: Codec) -> tuple[Arrays, Metadata]:
    """Entries and metadata of a good object: 3 and 17 changed elements of a and b, c in full."""
    old = [np.zeros(spec.numel, spec.element.uint) for spec in SMALL]
    new = [bits.copy() for bits in old]
    new[0][[3, 300, 999]] = [1, 0x8000, 0x7FC1]
    new[1][[*range(16), 999]] = 5
    new[2][:] = np.arange(10)
    container = Container(encode(changes_between(SMALL, old, new, codec, [2]), SMALL, codec, "none", CONTEXT))
    return arrays_of(container), json.loads(container.metadata["delta_sync"])


def build(arrays: Arrays, metadata: Metadata | str) -> bytes:
    # Not by rfc8785, which takes seconds for a million blocks.
    text = metadata if isinstance(metadata, str) else json.dumps(metadata, sort_keys=True, separators=(",", ":"))
    return write_container(arrays, {"delta_sync": text})


def refused(data: bytes, error: type[DeltaSyncError], match: str = "delta object of version 1") -> None:
    with pytest.raises(error, match=match) as caught:
        decode(data, TABLE, CONTEXT)
    assert type(caught.value) is error


def i32(*values: int) -> tuple[str, np.ndarray]:
    return "I32", np.array(values, np.int32)


def u8(*values: int) -> tuple[str, np.ndarray]:
    return "U8", np.array(values, np.uint8)


def u32(*values: int) -> tuple[str, np.ndarray]:
    return "U32", np.array(values, np.uint32)


def u64(*values: int) -> tuple[str, np.ndarray]:
    return "U64", np.array(values, np.uint64)


@pytest.mark.parametrize("codec", ["plain", "raw"])
def test_the_starting_point_is_good(codec: Codec) -> None:
    arrays, metadata = parts(codec)
    assert decode(build(arrays, metadata), TABLE, CONTEXT).changed == 30


def test_an_object_with_more_elements_than_its_manifest_says_is_refused() -> None:
    """Those of blocks, which may expand to many."""
    data = build(*parts("plain"))
    assert decode(data, TABLE, replace(CONTEXT, changed=20)).changed == 30
    with pytest.raises(FormatError, match="20 elements"):
        decode(data, TABLE, replace(CONTEXT, changed=19))


def of_blocks(*blocks: Any) -> dict[str, Any]:
    return {"blocks": list(blocks)}


METADATA: dict[type[DeltaSyncError], list[dict[str, Any]]] = {
    ChainError: [{"run": "0" * 32}, {"version": 2}, {"base_version": 1}],
    UnsupportedError: [
        {"format_version": 3}, {"codec": "packed"}, {"compression": "lz4"},
        of_blocks({"dtype": "BF16", "kind": "later"}), of_blocks({"dtype": "BF16", "kind": "sparse"}),
    ],
    LimitError: [of_blocks(*[0] * 1_000_001)],
    TensorMismatchError: [
        {"codec": "raw", "blocks": []}, of_blocks(),
        of_blocks({"dtype": "F16", "kind": "tiles"}), of_blocks({"dtype": "F32", "kind": "tiles"}),
    ],
    FormatError: [
        {"run": 5}, {"version": True}, {"version": "1"}, {"base_version": None}, {"base_version": False},
        {"format_version": True}, {"format_version": None}, {"codec": ["plain"]}, {"codec": "raw"},
        {"compression": None}, {"blocks": None}, {"blocks": {}}, of_blocks(5), of_blocks({}),
        of_blocks({"dtype": "BF16"}), of_blocks({"kind": "tiles"}), of_blocks({"dtype": "BF16", "kind": 0}),
        of_blocks({"dtype": "BF16", "kind": "full"}), of_blocks({"dtype": "Q4", "kind": "tiles"}),
        of_blocks(*[{"dtype": "BF16", "kind": "tiles"}] * 2),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("error", "change"), [(error, each) for error in METADATA for each in METADATA[error]])
def test_metadata(error: type[DeltaSyncError], change: dict[str, Any]) -> None:
    arrays, metadata = parts("plain")
    refused(build(arrays, {**metadata, **change}), error)


@pytest.mark.parametrize("name", ["run", "version", "base_version", "format_version", "codec", "compression", "blocks"])
def test_metadata_without_a_field(name: str) -> None:
    arrays, metadata = parts("plain")
    refused(build(arrays, {key: value for key, value in metadata.items() if key != name}), FormatError)


def test_metadata_of_a_later_release_may_say_more() -> None:
    arrays, metadata = parts("plain")
    assert decode(build(arrays, {**metadata, "later": 1}), TABLE, CONTEXT).changed == 30


@pytest.mark.parametrize(
    "text", ["", "[]", "5", "{", '{"a":NaN}', '{"run": 1}', '{"a":1,"a":1}', "[" * 99, '"\\ud800"']
)
def test_metadata_that_is_not_canonical_json(text: str) -> None:
    refused(build(parts("plain")[0], text), FormatError)


def test_no_metadata_at_all() -> None:
    refused(write_container(parts("plain")[0], {}), FormatError)
    refused(write_container(parts("plain")[0], {"format": "pt"}), FormatError)


TILES: list[tuple[str, Callable[[Arrays], object], type[DeltaSyncError]]] = [
    ("ids missing", lambda a: a.pop("@0.ids"), FormatError),
    ("counts missing", lambda a: a.pop("@0.counts"), FormatError),
    ("tables missing", lambda a: a.pop("@0.tables"), FormatError),
    ("streams missing", lambda a: a.pop("@0.streams"), FormatError),
    ("plane of a full block", lambda a: a.update({"@0.bits.0": u8(0)}), TensorMismatchError),
    ("mask of an old release", lambda a: a.update({"@0.mask": u8(0)}), TensorMismatchError),
    ("block too many", lambda a: a.update({"@1.ids": a["@0.ids"]}), TensorMismatchError),
    ("unknown entry", lambda a: a.update({"@0.extra": u8(1)}), TensorMismatchError),
    ("unknown tensor", lambda a: a.update({"d": ("F32", np.zeros(10, np.uint32))}), TensorMismatchError),
    ("ids as U64", lambda a: a.update({"@0.ids": u64(0, 1)}), FormatError),
    ("ids as F32", lambda a: a.update({"@0.ids": ("F32", np.array([0, 1], np.uint32))}), FormatError),
    ("counts as I64", lambda a: a.update({"@0.counts": ("I64", np.array([3, 17], np.uint64))}), FormatError),
    ("tables as I8", lambda a: a.update({"@0.tables": ("I8", a["@0.tables"][1])}), FormatError),
    ("streams as I8", lambda a: a.update({"@0.streams": ("I8", a["@0.streams"][1])}), FormatError),
    ("ids descending", lambda a: a.update({"@0.ids": u32(1, 0)}), FormatError),
    ("ids repeated", lambda a: a.update({"@0.ids": u32(0, 0)}), FormatError),
    ("id not in the table", lambda a: a.update({"@0.ids": u32(0, 4)}), TensorMismatchError),
    ("id of 2^32 - 1", lambda a: a.update({"@0.ids": u32(0, 2**32 - 1)}), TensorMismatchError),
    ("id of another dtype", lambda a: a.update({"@0.ids": u32(0, 2)}), TensorMismatchError),
    ("id of a tensor with more tiles", lambda a: a.update({"@0.ids": u32(0, 3)}), FormatError),
    ("no ids", lambda a: a.update({"@0.ids": u32(), "@0.counts": u64()}), FormatError),
    ("fewer counts", lambda a: a.update({"@0.counts": u64(3)}), FormatError),
    ("count of 0", lambda a: a.update({"@0.counts": u64(20, 0)}), FormatError),
    ("count above the tensor", lambda a: a.update({"@0.counts": u64(3, 1001)}), FormatError),
    ("count of 2^40", lambda a: a.update({"@0.ids": u32(0, 3), "@0.counts": u64(3, 2**40)}), FormatError),
    ("count of 2^63", lambda a: a.update({"@0.counts": u64(3, 2**63)}), FormatError),
    ("count of 2^64 - 1", lambda a: a.update({"@0.counts": u64(3, 2**64 - 1)}), FormatError),
    ("counts shifted", lambda a: a.update({"@0.counts": u64(2, 18)}), FormatError),
    ("tables empty", lambda a: a.update({"@0.tables": u8()}), FormatError),
    (
        "codes of nothing",
        lambda a: a["@0.tables"][1].__setitem__(slice(CLASSES, SIZES_AT), 0),
        FormatError,
    ),
    ("streams empty", lambda a: a.update({"@0.streams": u8()}), FormatError),
    ("full of another dtype", lambda a: a.update({"c": ("I32", a["c"][1])}), TensorMismatchError),
    ("full of another shape", lambda a: a.update({"c": ("F32", a["c"][1].reshape(2, 5))}), TensorMismatchError),
    ("full and in tiles", lambda a: a.update({"b": ("BF16", np.zeros(1000, np.uint16))}), FormatError),
    ("full missing", lambda a: a.pop("c"), FormatError),
    ("fingerprints missing", lambda a: a.pop("@fingerprints"), FormatError),
    ("fingerprint too few", lambda a: a.update({"@fingerprints": ("U64", np.zeros((2, 2), "<u8"))}), FormatError),
    ("fingerprint too many", lambda a: a.update({"@fingerprints": ("U64", np.zeros((4, 2), "<u8"))}), FormatError),
    ("fingerprints as F64", lambda a: a.update({"@fingerprints": ("F64", np.zeros((3, 2), "<u8"))}), FormatError),
    ("fingerprints flat", lambda a: a.update({"@fingerprints": u64(1, 2, 3, 4, 5, 6)}), FormatError),
]


RAW: list[tuple[str, Callable[[Arrays], object], type[DeltaSyncError]]] = [
    ("values missing", lambda a: a.pop("a.values"), FormatError),
    ("indices missing", lambda a: a.pop("a.indices"), TensorMismatchError),
    ("indices of no tensor", lambda a: a.update({"d.indices": i32(1)}), TensorMismatchError),
    ("values of no tensor", lambda a: a.update({"d.values": i32(1)}), TensorMismatchError),
    ("entry of a block", lambda a: a.update({"@0.ids": u32(0)}), TensorMismatchError),
    ("indices as U32", lambda a: a.update({"a.indices": u32(3, 300, 999)}), TensorMismatchError),
    ("indices as F32", lambda a: a.update({"a.indices": ("F32", a["a.indices"][1])}), TensorMismatchError),
    ("values of another dtype", lambda a: a.update({"a.values": ("F16", a["a.values"][1])}), TensorMismatchError),
    ("one index fewer", lambda a: a.update({"a.indices": i32(3, 300)}), FormatError),
    ("no index", lambda a: a.update({"a.indices": i32(), "a.values": ("BF16", np.zeros(0, np.uint16))}), FormatError),
    ("index out of range", lambda a: a.update({"a.indices": i32(3, 300, 1000)}), FormatError),
    ("index negative", lambda a: a.update({"a.indices": i32(-1, 300, 999)}), FormatError),
    ("index of -2^63", lambda a: a.update({"a.indices": ("I64", np.array([-(2**63), 0, 1]))}), FormatError),
    ("index of 2^63 - 1", lambda a: a.update({"a.indices": ("I64", np.array([0, 1, 2**63 - 1]))}), FormatError),
    ("indices unsorted", lambda a: a.update({"a.indices": i32(300, 3, 999)}), FormatError),
    ("index twice", lambda a: a.update({"a.indices": i32(3, 3, 999)}), FormatError),
    ("full and sparse", lambda a: a.update({"b": ("BF16", np.zeros(1000, np.uint16))}), FormatError),
    ("full of another shape", lambda a: a.update({"c": ("F32", a["c"][1].reshape(5, 2))}), TensorMismatchError),
    ("fingerprints missing", lambda a: a.pop("@fingerprints"), FormatError),
]


ENTRIES = [*(("plain", *row) for row in TILES), *(("raw", *row) for row in RAW)]


@pytest.mark.parametrize(("codec", "case", "change", "error"), ENTRIES, ids=[f"{row[0]}: {row[1]}" for row in ENTRIES])
def test_entries(codec: Codec, case: str, change: Callable[[Arrays], object], error: type[DeltaSyncError]) -> None:
    arrays, metadata = parts(codec)
    change(arrays)
    refused(build(arrays, metadata), error, match=".")


def test_raw_has_no_compression_and_no_blocks() -> None:
    arrays, metadata = parts("raw")
    refused(build(arrays, {**metadata, "compression": "zstd"}), FormatError)
    refused(build(arrays, {**metadata, "blocks": [{"dtype": "BF16", "kind": "tiles"}]}), FormatError)


def test_a_frame_that_declares_a_tebibyte_is_refused_before_allocation() -> None:
    arrays, metadata = parts("plain")
    frame = b"\x28\xb5\x2f\xfd\xc0\x00" + (2**40).to_bytes(8, "little") + b"\x01\x00\x00"
    arrays["@0.tables"] = u8(*frame)
    arrays["@0.ids"], arrays["@0.counts"] = u32(0, 3), u64(3, 2**40)
    refused(build(arrays, {**metadata, "compression": "zstd"}), LimitError, match="MAX_ZSTD_RATIO")


@pytest.mark.parametrize("codec", ["plain", "tiled"])
def test_a_full_block_that_declares_more_than_it_can_hold(codec: str) -> None:
    metadata = parts("raw")[1]
    frame = b"\x28\xb5\x2f\xfd\xc0\x00" + (2**47).to_bytes(8, "little") + b"\x01\x00\x00"
    entries = {"@0.ids": u32(3), "@0.bits.0": u8(*frame), "@0.bits.1": u8(*frame)}
    blocks = [{"dtype": "BF16", "kind": "full"}]
    whole = {**metadata, "codec": codec, "compression": "zstd", "blocks": blocks}
    entries["@fingerprints"] = ("U64", np.zeros((1, 2), np.uint64))
    old = (lambda tensor: None) if codec == "tiled" else None
    with pytest.raises(LimitError, match="MAX_ZSTD_RATIO"):
        decode(build(entries, whole), TABLE, CONTEXT, old)  # type: ignore[arg-type]
    limited = DeltaContext(CONTEXT.run, CONTEXT.version, CONTEXT.base_version, 5)
    with pytest.raises(FormatError, match=f"blocks carry {2**47} elements, the manifest says 5"):
        decode(build(entries, whole), TABLE, limited, old)  # type: ignore[arg-type]


def test_a_table_whose_names_look_like_the_codecs_entries() -> None:
    clash = TensorTable([TensorSpec("a", "BF16", (4,)), TensorSpec("a.indices", "I32", (1,))])
    arrays: Arrays = {
        "a.indices": i32(3),
        "a.values": ("BF16", np.array([7], np.uint16)),
        "@fingerprints": ("U64", np.zeros((2, 2), np.uint64)),
    }
    with pytest.raises(TensorMismatchError, match=r"'a\.values'"):
        decode(build(arrays, parts("raw")[1]), clash, CONTEXT)
