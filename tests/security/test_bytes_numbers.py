"""Numbers that a program adds, multiplies or allocates by: giant, negative, not whole, or spelled in another way."""

from hashlib import sha256
from pathlib import Path

import pytest

from tests.security.build import NEXT, edit, respell, untouched
from tests.security.reader import Reader
from tests.support.forge import forge
from tests.support.samples import CREATED, RUN, RunWriter
from tests.support.written import Written
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire.canonical import dump_canonical
from vllm_delta_sync.wire.manifest import HEAD_KEY, version_key
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

NUMBERS = {
    "10^400": "1" + "0" * 400,
    "10^5000": "1" + "0" * 5000,
    "2^64": str(2**64),
    "2^63": str(2**63),
    "2^53": str(2**53),
    "-1": "-1",
    "-2^63": str(-(2**63)),
    "-0": "-0",
    "a float": "1e3",
    "a whole float": "4.0",
    "a huge float": "1e999",
    "a tiny float": "1e-999",
    "NaN": "NaN",
    "Infinity": "Infinity",
    "-Infinity": "-Infinity",
    "true": "true",
    "null": "null",
    "a string": '"4"',
    "a list": "[4]",
    "hexadecimal": "0x4",
    "octal": "04",
    "a plus": "+4",
    "underscores": "1_0",
    "other digits": "４",
}


@pytest.mark.parametrize(
    "field", ["version", "step", "epoch", "changed", "total", "payload_bytes", "base_version", "bytes"]
)
def test_in_a_manifest(field: str, reader: Reader, written: Written) -> None:
    forgery = forge(written.folder, lambda fields: fields.setdefault("epoch", 0))
    value = len(forgery.data) if field == "bytes" else forgery.manifest[field]
    path = written.folder / version_key(NEXT)
    good = path.read_bytes()
    for spelling in NUMBERS.values():
        path.write_bytes(good)
        respell(written.folder, version_key(NEXT), f'"{field}":{value}', f'"{field}":{spelling}')
        assert version_key(NEXT) in reader.refused("head", written.folder, kind=("format", "limit"))
    reader.refused("verify", written.folder, kind="format")
    untouched(reader, written)


def test_as_the_version_of_head(reader: Reader, written: Written) -> None:
    path = written.folder / HEAD_KEY
    good = path.read_bytes()
    for spelling in NUMBERS.values():
        path.write_bytes(good)
        respell(written.folder, HEAD_KEY, '"version":4', f'"version":{spelling}')
        assert HEAD_KEY in reader.refused("head", written.folder, kind=("format", "limit"))
    untouched(reader, written)


@pytest.mark.parametrize("field", ["format_version", "total", "full_bytes"])
def test_in_run_json(field: str, reader: Reader, written: Written) -> None:
    value = {"format_version": 1, "total": written.writer.table.total, "full_bytes": written.writer.table.full_bytes}
    good = (written.folder / "run.json").read_bytes()
    for spelling in NUMBERS.values():
        (written.folder / "run.json").write_bytes(good)
        respell(written.folder, "run.json", f'"{field}":{value[field]}', f'"{field}":{spelling}')
        # A version of the format that is a number is one of a later release.
        reader.refused("head", written.folder, kind=("format", "unsupported"))


SHAPES: dict[str, list[object]] = {
    "product of 2^64": [2**32, 2**32],
    "product that overflows to 0": [2**48, 2**48, 2**48, 2**48],
    "product of 2^63": [2**40, 2**23],
    "one above the limit": [2**48 + 1],
    "a million dimensions": [1] * 1_000_000,
    "seventeen dimensions": [1] * 17,
    "negative": [-1],
    "negative by negative": [-(2**24), -(2**24)],
    "zero by negative": [0, -1],
    "zero by 2^60": [0, 2**53 - 1],
    "a float": [1.5],
    "a string": ["1"],
    "true": [True],
    "null": [None],
    "nested": [[1]],
}


def run_of_shape(folder: Path, rows: list[dict[str, object]]) -> Path:
    """A run with any tensors.json, and a run.json that fits it."""
    data = dump_canonical({"format_version": 1, "tensors": rows})
    info = {
        "format_version": 1,
        "requires": [],
        "run": RUN,
        "created_at": CREATED,
        "tensors": sha256(data).hexdigest(),
        "total": 1,
        "full_bytes": 1,
    }
    bucket = open_bucket(folder)
    bucket.put("tensors.json", data)
    bucket.put("run.json", dump_canonical(info))
    return folder


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, reader: Reader, tmp_path: Path) -> None:
    url = run_of_shape(tmp_path / "run", [{"name": "w", "dtype": "U8", "shape": SHAPES[name]}])
    message = reader.refused("head", url, kind=("format", "limit"))
    assert "shape" in message or "dimension" in message or "elements" in message


def test_many_tensors_that_are_too_many_bytes_together(reader: Reader, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"name": f"w{n:02}", "dtype": "F64", "shape": [2**48]} for n in range(40)]
    assert "MAX_MODEL_BYTES" in reader.refused("head", run_of_shape(tmp_path / "run", rows), kind="limit")


def test_zero_by_huge_takes_no_room(reader: Reader, tmp_path: Path) -> None:
    """It is no error: there are no elements. Nothing may multiply the other dimensions on its own."""
    table = TensorTable([TensorSpec("a", "BF16", (0, 2**48, 2**48)), TensorSpec("b", "F64", (2**48, 0, *[2**48] * 14))])
    written = Written(tmp_path / "run", 0, table=table)
    assert set(reader.reads("tensors", written.folder)) == {"a", "b"}
    assert reader.reads("verify", written.folder) == 1


def test_a_model_of_a_pebibyte(reader: Reader, tmp_path: Path) -> None:
    """Who claims to have one has to show its bytes before anybody makes room for it."""
    RunWriter(open_bucket(tmp_path / "run"), TensorTable([TensorSpec("w", "F64", (2**47,))]))
    assert reader.refused("tensors", tmp_path / "run", kind="not_found")


def beside(key: str, **fields: object) -> bytes:
    return dump_canonical({"format_version": 1, "requires": [], "run": RUN, "created_at": CREATED, **fields})


DIGEST = "ab" * 32
COUNTS: dict[str, tuple[str, dict[str, object]]] = {
    "a fold back": (side.fold_key(4, 0), {"first": 4, "last": 0}),
    "a fold of nothing": (side.fold_key(4, 4), {"first": 4, "last": 4}),
    "a fold of 10^10 versions": (side.fold_key(0, 9_999_999_999), {"first": 0, "last": 9_999_999_999}),
    "a fold of other versions": (side.fold_key(0, 4), {"first": 0, "last": 2**53 - 1}),
    "a fold of 2^53 elements": (side.fold_key(0, 4), {"first": 0, "last": 4, "changed": 2**53 - 1}),
    "a fold of 2^53 bytes": (side.fold_key(0, 4), {"first": 0, "last": 4, "payload_bytes": 2**53 - 1}),
}


@pytest.mark.parametrize("name", COUNTS)
def test_folded_ranges(name: str, reader: Reader, written: Written) -> None:
    key, fields = COUNTS[name]
    document: dict[str, object] = {
        "first_manifest": DIGEST,
        "last_manifest": DIGEST,
        "first_fingerprint": "0" * 32,
        "last_fingerprint": "0" * 32,
        "objects": [],
        "changed": 0,
        "payload_bytes": 0,
        "reversible": True,
        **fields,
    }
    written.bucket.put(key, beside(key, **document))
    assert reader.reads("head", written.folder) == 4
    assert reader.reads("tensors", written.folder)
    assert key in {found for found, _, _ in reader.reads("findings", written.folder)}
    untouched(reader, written)


@pytest.mark.parametrize("field", ["payload_bytes", "version"])
def test_anchors(field: str, reader: Reader, written: Written, tmp_path: Path) -> None:
    written.writer.beside(4, tmp_path)
    key = side.anchor_key(4)
    edit(written.folder, key, lambda value: value.update({field: 2**53 - 1 if field != "version" else 9_999_999_999}))
    assert reader.reads("tensors", written.folder)
    assert [found for found, _, _ in reader.reads("findings", written.folder)] == [key]
    untouched(reader, written)
