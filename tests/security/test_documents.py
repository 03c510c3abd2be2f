"""Hostile documents: numbers, amounts, nests, members twice and names that no publisher writes are one error each."""

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.security.build import NEXT, Metadata, edit, make_huge, next_changed, plain, respell, tag, untouched
from tests.security.reader import Reader
from tests.support.forge import forge
from tests.support.hostile import container
from tests.support.samples import CREATED, RUN, RunWriter
from tests.support.written import Written
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import open_run
from vllm_delta_sync.errors import DeltaSyncError, DigestError, FormatError
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format.base_document import dump_canonical
from vllm_delta_sync.format.limits import MAX_JSON_BYTES
from vllm_delta_sync.format.manifest import HEAD_KEY, Manifest, object_key, version_key
from vllm_delta_sync.format.table import TensorSpec, TensorTable

DIGEST = "ab" * 32
FAR = 9_999_999_999
KEYS = ["run.json", "tensors.json", HEAD_KEY, version_key(4)]


# Numbers

NUMBERS = {
    "10^400": "1" + "0" * 400,
    "10^5000": "1" + "0" * 5000,
    "2^64": str(2**64),
    "2^53": str(2**53),
    "-1": "-1",
    "-2^63": str(-(2**63)),
    "-0": "-0",
    "a float": "1e3",
    "a whole float": "4.0",
    "a huge float": "1e999",
    "NaN": "NaN",
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
SOME = ("2^64", "-1", "a whole float", "true", "a string")


@pytest.mark.parametrize(
    "field", ["version", "step", "epoch", "changed", "total", "payload_bytes", "base_version", "bytes"]
)
def test_numbers_in_a_manifest(field: str, reader: Reader, written: Written) -> None:
    forgery = forge(written.folder, lambda fields: fields.setdefault("epoch", 0))
    value = len(forgery.data) if field == "bytes" else forgery.manifest[field]
    path = written.folder / version_key(NEXT)
    good = path.read_bytes()
    for name in NUMBERS if field == "version" else SOME:
        path.write_bytes(good)
        respell(written.folder, version_key(NEXT), f'"{field}":{value}', f'"{field}":{NUMBERS[name]}')
        assert version_key(NEXT) in reader.refused("head", written.folder, kind=("format", "limit"))
    reader.refused("verify", written.folder, kind="format")
    untouched(reader, written)


@pytest.mark.parametrize(
    ("key", "field"), [(HEAD_KEY, "version"), ("run.json", "format_version"), ("run.json", "total")]
)
def test_numbers_in_other_documents(key: str, field: str, reader: Reader, written: Written) -> None:
    value = {"version": 4, "format_version": 2, "total": written.writer.table.total}[field]
    good = (written.folder / key).read_bytes()
    for name in SOME:
        (written.folder / key).write_bytes(good)
        respell(written.folder, key, f'"{field}":{value}', f'"{field}":{NUMBERS[name]}')
        # A version of the format that is a number is one of a later release.
        assert key in reader.refused("head", written.folder, kind=("format", "limit", "unsupported"))


SHAPES: dict[str, list[object]] = {
    "product of 2^64": [2**32, 2**32],
    "product that overflows to 0": [2**48, 2**48, 2**48, 2**48],
    "one above the limit": [2**48 + 1],
    "a million dimensions": [1] * 1_000_000,
    "negative": [-1],
    "negative by negative": [-(2**24), -(2**24)],
    "zero by negative": [0, -1],
    "zero by 2^53": [0, 2**53 - 1],
    "a float": [1.5],
    "true": [True],
    "nested": [[1]],
}


def run_of_table(folder: Path, *rows: dict[str, object]) -> Path:
    """A run with any tensors.json, and a run.json that fits it."""
    data = dump_canonical({"format_version": 2, "tensors": rows})
    info = {"format_version": 2, "requires": [], "run": RUN, "created_at": CREATED, "total": 1, "full_bytes": 1}
    bucket = open_bucket(folder)
    bucket.put("tensors.json", data)
    bucket.put("run.json", dump_canonical({**info, "tensors": sha256(data).hexdigest()}))
    return folder


def test_shapes(reader: Reader, tmp_path: Path) -> None:
    for name, shape in SHAPES.items():
        url = run_of_table(tmp_path / "run", {"name": "w", "dtype": "U8", "shape": shape})
        message = reader.refused("head", url, kind=("format", "limit"))
        assert "shape" in message or "dimension" in message or "elements" in message, name
    rows: list[dict[str, object]] = [{"name": f"w{n:02}", "dtype": "F64", "shape": [2**48]} for n in range(40)]
    assert "MAX_MODEL_BYTES" in reader.refused("head", run_of_table(tmp_path / "run", *rows), kind="limit")


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


FOLDS: dict[str, tuple[str, dict[str, object]]] = {
    "back": (side.merged_delta_key(4, 0), {"first": 4, "last": 0}),
    "of nothing": (side.merged_delta_key(4, 4), {"first": 4, "last": 4}),
    "of 10^10 versions": (side.merged_delta_key(0, FAR), {"first": 0, "last": FAR}),
    "of other versions": (side.merged_delta_key(0, 4), {"first": 0, "last": 2**53 - 1}),
    "of 2^53 elements": (side.merged_delta_key(0, 4), {"first": 0, "last": 4, "changed": 2**53 - 1}),
    "of 2^53 bytes": (side.merged_delta_key(0, 4), {"first": 0, "last": 4, "payload_bytes": 2**53 - 1}),
}


def test_numbers_in_folded_ranges_and_anchors(reader: Reader, written: Written, tmp_path: Path) -> None:
    """They are hints: readers go by the versions themselves."""
    for key, fields in FOLDS.values():
        document: dict[str, object] = {
            "format_version": 2,
            "requires": [],
            "run": RUN,
            "created_at": CREATED,
            "first_manifest": DIGEST,
            "last_manifest": DIGEST,
            "objects": [],
            "changed": 0,
            "payload_bytes": 0,
            "first_fingerprint": "0" * 32,
            "last_fingerprint": "0" * 32,
            "reversible": True,
            **fields,
        }
        written.bucket.put(key, dump_canonical(document))
        assert key in {found for found, _, _ in reader.reads("findings", written.folder)}
        untouched(reader, written)
        written.bucket.delete(key)
    for field, number in (("payload_bytes", 2**53 - 1), ("version", FAR)):
        written.writer.beside(4, tmp_path)
        edit(written.folder, side.anchor_key(4), lambda value: value.update({field: number}))  # noqa: B023 - called here
        assert [found for found, _, _ in reader.reads("findings", written.folder)] == [side.anchor_key(4)]
        untouched(reader, written)
        (written.folder / side.anchor_key(4)).unlink()


def test_a_record_of_ten_billion_removed_versions(reader: Reader, written: Written) -> None:
    """The record is not signed, so trusted keys do not keep it out."""
    document = {"format_version": 2, "run": RUN, "created_at": CREATED, "head": 4, "kept": [[0, 4]]}
    written.bucket.put(side.RETENTION_KEY, dump_canonical({**document, "gone": [[5, FAR]]}))
    untouched(reader, written)
    (written.folder / written.object_of(2)).unlink()
    written.writer.merge(0, 4)
    assert reader.reads("cli", "repair", "--bucket", str(written.folder))[0] == 0
    assert reader.reads("findings", written.folder) == []


# Amounts


def of_objects(count: int, size: int) -> list[dict[str, object]]:
    digests = (f"{number:064x}" for number in range(count))
    return [{"key": object_key(digest), "bytes": size, "sha256": digest, "rank": 0} for digest in digests]


def test_more_objects_than_a_version_may_have(reader: Reader, written: Written) -> None:
    forge(written.folder)
    rows = of_objects(65_537, 0)
    edit(written.folder, version_key(NEXT), lambda fields: fields.update(objects=rows, payload_bytes=0))
    assert "bytes, more than the" in reader.refused("head", written.folder, kind="limit")
    with pytest.raises(FormatError, match="65536"):
        Manifest.from_bytes((written.folder / version_key(NEXT)).read_bytes())
    untouched(reader, written)


AMOUNTS: dict[str, dict[str, Any]] = {
    "listed twice": {"objects": of_objects(1, 10) * 1000, "payload_bytes": 10_000},
    # A sum that is beyond every number.
    "payload_bytes": {"objects": of_objects(3, 2**53 - 1), "payload_bytes": 2**53 - 1},
    # A hundred thousand wrong members are one error, and no list of all of them.
    "tensor_fingerprints": {"tensor_fingerprints": {f"{number:07x}": 0 for number in range(100_000)}},
    "breaks": {"breaks": [{"version": number, "base_version": None} for number in range(1, 5000)]},
}


@pytest.mark.parametrize("named", AMOUNTS)
def test_amounts_in_a_manifest(named: str, reader: Reader, written: Written) -> None:
    forge(written.folder)
    edit(written.folder, version_key(NEXT), lambda fields: fields.update(AMOUNTS[named]))
    assert named in reader.refused("head", written.folder, kind="format")


def test_wrong_fingerprints_of_an_anchor_are_one_error(reader: Reader, written: Written, tmp_path: Path) -> None:
    written.writer.beside(4, tmp_path)
    edit(written.folder, side.anchor_key(4), lambda fields: fields.update(AMOUNTS["tensor_fingerprints"]))
    assert "tensor_fingerprints" in reader.refused("anchor", written.folder, 4, kind="format")
    untouched(reader, written)


@pytest.mark.parametrize("key", KEYS)
def test_a_document_of_a_tebibyte(key: str, reader: Reader, written: Written) -> None:
    make_huge(written.folder / key)
    for door in ("head", "verify"):
        assert key in reader.refused(door, written.folder, kind="limit")


def test_documents_of_a_tebibyte_that_nobody_needs(reader: Reader, written: Written) -> None:
    names = [side.tag_key("x"), side.anchor_key(4), side.merged_delta_key(0, 4), side.claim_key(1), side.RETENTION_KEY]
    for key in names:
        make_huge(written.folder / key)
    untouched(reader, written)
    # Below the head, one that is needed for older versions alone.
    make_huge(written.folder / version_key(2))
    assert reader.reads("head", written.folder) == 4
    reader.refused("tensors", written.folder, kind=("limit", "chain"))
    assert {*names, version_key(2)} <= {key for key, _, _ in reader.reads("findings", written.folder)}


def test_a_manifest_far_away(reader: Reader, written: Written) -> None:
    """Nobody looks for the ten billion versions that would have to be before it."""
    for data in (b"{}", (written.folder / version_key(4)).read_bytes()):
        (written.folder / version_key(FAR)).write_bytes(data)
        assert reader.reads("head", written.folder) == 4
        reader.refused("verify", written.folder, kind=("chain", "format"))
        assert version_key(FAR) in {key for key, _, _ in reader.reads("findings", written.folder)}
    untouched(reader, written)


@pytest.fixture(params=[4_000, pytest.param(100_000, marks=pytest.mark.slow)])
def crowded(request: pytest.FixtureRequest, template: Written) -> Iterator[Path]:
    """A run with strangers' files in every directory that is listed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as parent:
        folder = Path(parent) / "run"
        shutil.copytree(template.folder, folder)
        for name in ("versions", "anchors", "merged_deltas", "tags"):
            (folder / name).mkdir(exist_ok=True)
            for number in range(request.param // 4):
                (folder / name / f"stray-{number}").touch()
        deep = folder.joinpath("versions", *["d"] * 200)
        deep.mkdir(parents=True)
        (deep / "0000000009.json").touch()
        yield folder


def test_strangers_files_are_passed_over(crowded: Path, reader: Reader) -> None:
    """The head does not list; what lists looks at each file once."""
    outcome = reader("head", crowded)
    assert (outcome.result, outcome.seconds < 0.5) == (4, True), outcome
    assert reader.reads("tensors", crowded)
    assert reader.reads("findings", crowded) == []
    (crowded / HEAD_KEY).unlink()
    assert reader.reads("head", crowded) == 4


# Nests and members twice

MANY = MAX_JSON_BYTES // 3 - 1000
NESTS: dict[str, Callable[[], bytes]] = {
    "lists": lambda: b"[" * 100_000 + b"]" * 100_000,
    "objects": lambda: b'{"a":' * 100_000 + b"0" + b"}" * 100_000,
    "lists without an end": lambda: b"[" * 1_000_000,
    "one too many": lambda: b"[" * 16 + b"]" * 16,
    "behind a string of brackets": lambda: b'["]]]]]]]]]]]]]]]]]",' + b"[" * 16 + b"]" * 17,
    "behind an escaped quote": lambda: b'["\\"]]]]]]]]]]]]]]]]]",' + b"[" * 16 + b"]" * 17,
}


def put(folder: Path, key: str, data: bytes) -> None:
    """Write a document; a tensors.json with a run.json that fits it, since no other one is parsed."""
    (folder / key).write_bytes(data)
    if key == "tensors.json":
        edit(folder, "run.json", lambda fields: fields.update(tensors=sha256(data).hexdigest()))


def with_member(good: bytes, value: bytes) -> bytes:
    """A document with one more member, which readers do not know."""
    return good[:-1] + b',"zzz":' + value + b"}"


@pytest.mark.parametrize("key", KEYS)
def test_documents_that_nest(key: str, reader: Reader, written: Written) -> None:
    good = (written.folder / key).read_bytes()
    for nest in NESTS.values() if key == version_key(4) else (NESTS["lists"],):
        put(written.folder, key, with_member(good, nest()))
        assert key in reader.refused("head", written.folder, kind=("format", "limit"))
    put(written.folder, key, good)
    untouched(reader, written)


@pytest.mark.parametrize(
    "item", [b"[],", *(pytest.param(item, marks=pytest.mark.slow) for item in (b"{},", b"0,", b'"",'))]
)
def test_documents_of_many_values(item: bytes, reader: Reader, written: Written) -> None:
    """64 MiB of them would take gigabytes, and half a minute."""
    value = b"[" + item * MANY + item[:-1] + b"]"
    for key, match in ((version_key(4), "bytes, more than the"), ("tensors.json", "MAX_JSON_VALUES")):
        good = (written.folder / key).read_bytes()
        put(written.folder, key, with_member(good, value))
        assert match in reader.refused("head", written.folder, kind="limit")
        if key != "tensors.json":
            (written.folder / HEAD_KEY).unlink()
            assert match in reader.refused("head", written.folder, kind="limit")
            (written.folder / key).write_bytes(good)


def test_a_table_that_does_not_fit_the_signed_run_is_not_parsed(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes seconds, and many times its bytes of memory."""
    path = written.folder / "tensors.json"
    path.write_bytes(with_member(path.read_bytes(), b"0"))
    monkeypatch.setattr(TensorTable, "from_bytes", lambda data: pytest.fail("it was parsed"))
    with pytest.raises(DigestError, match=r"tensors\.json has SHA-256"):
        open_run(str(written.folder))


def test_a_long_string_is_no_nest(reader: Reader, written: Written) -> None:
    """Brackets in strings are text. A million of them, and a million quotes, are read in one pass."""
    forge(written.folder)
    path = written.folder / version_key(NEXT)
    path.write_bytes(dump_canonical({**json.loads(path.read_bytes()), "zzz": '[{"\\' * 250_000}))
    assert reader.reads("head", written.folder) == NEXT


def doubled(text: str, start: int) -> str:
    """The first member of the object that begins there stands twice, the first time with another value."""
    name = text[start + 1 : text.index(":", start)]
    return f"{text[: start + 1]}{name}:0,{text[start + 1 :]}"


def test_members_that_stand_twice(reader: Reader, written: Written, tmp_path: Path) -> None:
    """At every level of every document: two readers would believe two things."""
    written.writer.merge(0, 4)
    written.writer.beside(3, tmp_path)
    tag(written, 2)
    doors: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(KEYS, ("head",)),
        version_key(0): ("tensors", 0),
        side.anchor_key(3): ("anchor", 3),
        side.merged_delta_key(0, 4): ("merged", 0, 4),
        side.tag_key("kept"): ("tensors", "tag:kept"),
    }
    for key, (door, *rest) in doors.items():
        good = (written.folder / key).read_text()
        starts = [found.start() for found in re.finditer(r'\{"', good)]
        # The first and the last of many rows stand for all of them.
        for start in {*starts[:3], starts[-1]}:
            put(written.folder, key, doubled(good, start).encode())
            message = reader.refused(door, written.folder, *rest, kind="format")
            assert "duplicate key" in message
            assert key in message
        put(written.folder, key, good.encode())
    untouched(reader, written)


# Names that would move a terminal's cursor, forge a line of a log, or turn text around

FORGED = "WARNING forged"
NAMES = {
    "a line": f"x\n{FORGED}",
    "a return": f"x\r{FORGED}",
    "clear the screen": f"\x1b[2J\x1b[H{FORGED}",
    "title of the window": "\x1b]0;owned\x07",
    "C1 escape": f"\x9b2J{FORGED}",
    "backspaces": "x\b\b\b",
    "right to left": "\u202egnp.exe",
    "isolates": "\u2066x\u2069",
    "zero width": "we\u200bight",
    "byte order mark": "\ufeffweight",
    "line separator": f"x\u2028{FORGED}",
    "next line": f"x\u0085{FORGED}",
    "private use": "\ue000",
    "not assigned": "\u0378",
    "zero byte": "x\0y",
    "delete": "x\x7f",
}
ALL_NAMES = "".join(NAMES.values())
HTML = '<img src=x onerror="alert(1)">'


def test_names_in_the_table(reader: Reader, tmp_path: Path) -> None:
    """Such a name is none, so it reaches nobody from there."""
    for name in NAMES.values():
        url = run_of_table(tmp_path / "run", {"name": name, "dtype": "U8", "shape": [1]})
        assert "not printable" in reader.refused("head", url, kind="format")


def test_halves_of_surrogate_pairs(reader: Reader, written: Written) -> None:
    good = written.writer.manifests[4].to_bytes()
    for text in (b'"\\ud800"', b'{"\\ud800":1}', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'"\xc0\xaf"'):
        (written.folder / version_key(4)).write_bytes(with_member(good, text))
        reader.refused("head", written.folder, kind="format")


FIELDS: dict[str, Callable[[Metadata, str], object]] = {
    "kind": lambda fields, text: fields.update(kind=text),
    "requires": lambda fields, text: fields.update(requires=["plain", text]),
    "created_at": lambda fields, text: fields.update(created_at=text),
    "run": lambda fields, text: fields.update(run=text),
    "fingerprint": lambda fields, text: fields.update(fingerprint=text),
    "a tensor's name": lambda fields, text: fields.update(tensor_fingerprints={text: 5}),
    "a long name": lambda fields, text: fields.update(tensor_fingerprints={text * 100_000: 5}),
    "base": lambda fields, text: fields.update(base={"location": text, "model": text}),
    "a key": lambda fields, text: fields["objects"][0].update(key=text),
}


@pytest.mark.parametrize("field", FIELDS)
def test_names_in_what_errors_say(field: str, reader: Reader, written: Written) -> None:
    """Programs log errors as they are. ``refused`` looks at how long they are, and at each character of them."""
    texts = NAMES.values() if field == "kind" else (NAMES["clear the screen"], ALL_NAMES)
    for text in texts:
        forgery = forge(written.folder, lambda fields: FIELDS[field](fields, text))  # noqa: B023 - called here
        reader.refused("head", written.folder, kind=("format", "limit", "unsupported", "chain", "tensor"))
        forgery.remove()


def test_names_in_objects_and_checkpoints(reader: Reader, written: Written, tmp_path: Path) -> None:
    for text in [*NAMES.values(), HTML]:
        next_changed(written, lambda arrays, metadata: arrays.update({text: plain(b"x")}))  # noqa: B023 - called here
        reader.refused("changes", written.folder, NEXT, kind="tensor")
        (written.folder / version_key(NEXT)).unlink()
    for member in ("codec", "compression", "run"):
        next_changed(written, lambda arrays, metadata: metadata.update({member: ALL_NAMES}))  # noqa: B023
        reader.refused("changes", written.folder, NEXT, kind=("unsupported", "chain", "format"))
        (written.folder / version_key(NEXT)).unlink()
    good = {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}
    for header in ({ALL_NAMES: {**good, "dtype": ALL_NAMES}}, {ALL_NAMES: good}, {ALL_NAMES: 5}):
        (tmp_path / "model.safetensors").write_bytes(container(json.dumps(header).encode(), b"x"))
        reader.refused("checkpoint", tmp_path, kind="format")


@pytest.mark.parametrize("text", [NAMES["a line"], ALL_NAMES])
def test_names_that_commands_print(text: str, reader: Reader, written: Written) -> None:
    """Texts that a version may have, and that people are shown: nothing in them begins a line or hides."""
    version = json.loads((written.folder / version_key(4)).read_bytes())
    version.update(codec=text, compression=text)
    (written.folder / version_key(4)).write_bytes(dump_canonical(version))
    digest = sha256((written.folder / version_key(4)).read_bytes()).hexdigest()
    edit(written.folder, HEAD_KEY, lambda head: head.update(manifest=digest))
    tag(written, 3)
    edit(written.folder, "tags/kept.json", lambda value: value.update(branch=f"file:///{text}"))
    url, shown = str(written.folder), 0
    for command in (
        ["log", "--bucket", url],
        ["inspect", "--bucket", url, "--version", "4"],
        ["verify", "--bucket", url],
        ["tag", "list", "--bucket", url],
        ["tag", "list", "--bucket", url, "--json"],
    ):
        _, out, err = reader.reads("cli", *command)
        shown += len(out + err)
        for line in (out + err).split("\n"):
            assert line.isprintable(), (command, line)
            assert not line.startswith(FORGED)
    assert shown > 500


def test_a_log_line_is_one_line(written: Written, caplog: pytest.LogCaptureFixture) -> None:
    """What a reader logs when it looks for another way."""
    written.writer.merge(0, 4)
    next_changed(written, lambda arrays, metadata: arrays.update({ALL_NAMES: plain(b"x")}))
    with caplog.at_level(logging.INFO), pytest.raises(DeltaSyncError):
        list(open_run(str(written.folder)).tensors())
    assert caplog.records
    assert all(record.getMessage().isprintable() for record in caplog.records)
