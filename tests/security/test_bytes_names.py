"""Names that would move a terminal's cursor, forge a line of a log, or turn text around."""

import json
import logging
from hashlib import sha256
from pathlib import Path

import pytest

from tests.security.build import NEXT, container, edit, next_changed, plain, tag
from tests.security.reader import Reader
from tests.support.forge import forge
from tests.support.samples import CREATED, RUN
from tests.support.written import Written
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.cli.text import clean
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.wire.canonical import dump_canonical
from vllm_delta_sync.wire.manifest import version_key

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
HTML = '<img src=x onerror="alert(1)">'


@pytest.mark.parametrize("name", NAMES)
def test_in_the_table(name: str, reader: Reader, tmp_path: Path) -> None:
    """Such a name is none, so it reaches nobody from there."""
    rows = [{"name": NAMES[name], "dtype": "U8", "shape": [1]}]
    data = dump_canonical({"format_version": 1, "tensors": rows})
    info = {"format_version": 1, "run": RUN, "created_at": CREATED, "total": 1, "full_bytes": 1}
    bucket = open_bucket(tmp_path / "run")
    bucket.put("tensors.json", data)
    bucket.put("run.json", dump_canonical({**info, "tensors": sha256(data).hexdigest()}))
    assert "not printable" in reader.refused("head", tmp_path / "run", kind="format")


def test_halves_of_surrogate_pairs(reader: Reader, written: Written) -> None:
    path = written.folder / "versions/0000000004.json"
    for text in (
        b'"\\ud800"',
        b'"\\udfff\\ud800"',
        b'{"\\ud800":1}',
        b'"\xed\xa0\x80"',
        b'"\xf4\x90\x80\x80"',
        b'"\xc0\xaf"',
    ):
        good = written.writer.manifests[4].to_bytes()
        path.write_bytes(good[:-1] + b',"zzz":' + text + b"}")
        reader.refused("head", written.folder, kind="format")


FIELDS = {
    "requires": lambda fields, text: fields.update(requires=["packed", text]),
    "kind": lambda fields, text: fields.update(kind=text),
    "created_at": lambda fields, text: fields.update(created_at=text),
    "run": lambda fields, text: fields.update(run=text),
    "fingerprint": lambda fields, text: fields.update(fingerprint=text),
    "a tensor's name": lambda fields, text: fields.update(tensor_fingerprints={text: 5}),
    "a long name": lambda fields, text: fields.update(tensor_fingerprints={text * 100_000: 5}),
    "base": lambda fields, text: fields.update(base={"location": text, "model": text}),
    "a key": lambda fields, text: fields["objects"][0].update(key=text),
}


@pytest.mark.parametrize("field", FIELDS)
def test_in_what_errors_say(field: str, reader: Reader, written: Written) -> None:
    """Programs log errors as they are. ``refused`` looks at how long they are, and at each character of them."""
    for text in NAMES.values():
        forgery = forge(written.folder, lambda fields, text=text: FIELDS[field](fields, text))  # type: ignore[misc]
        reader.refused("head", written.folder, kind=("format", "limit", "unsupported", "chain", "tensor"))
        forgery.remove()


def test_entries_of_an_object(reader: Reader, written: Written) -> None:
    for text in [*NAMES.values(), HTML]:
        next_changed(written, lambda arrays, metadata, text=text: arrays.update({text: plain(b"x")}))  # type: ignore[misc]
        reader.refused("changes", written.folder, NEXT, kind="tensor")
        (written.folder / version_key(NEXT)).unlink()


@pytest.mark.parametrize("member", ["codec", "compression", "run"])
def test_metadata_of_an_object(member: str, reader: Reader, written: Written) -> None:
    for text in NAMES.values():
        next_changed(written, lambda arrays, metadata, text=text: metadata.update({member: text}))  # type: ignore[misc]
        reader.refused("changes", written.folder, NEXT, kind=("unsupported", "chain", "format"))
        (written.folder / version_key(NEXT)).unlink()


def test_entries_of_a_checkpoint(reader: Reader, tmp_path: Path) -> None:
    for text in NAMES.values():
        entry = {"dtype": text, "shape": [1], "data_offsets": [0, 1]}
        for header in ({text: entry}, {text: {**entry, "dtype": "U8", "shape": [2]}}, {text: 5}):
            (tmp_path / "model.safetensors").write_bytes(container(json.dumps(header).encode(), b"x"))
            reader.refused("checkpoint", tmp_path, kind="format")


@pytest.mark.parametrize("name", NAMES)
def test_what_the_command_prints(name: str, reader: Reader, written: Written) -> None:
    """Texts that a version may have, and that people are shown: nothing in them begins a line or hides."""
    text = NAMES[name]
    version = json.loads((written.folder / version_key(4)).read_bytes())
    version.update(codec=text, compression=text)
    (written.folder / version_key(4)).write_bytes(dump_canonical(version))
    digest = sha256((written.folder / version_key(4)).read_bytes()).hexdigest()
    edit(written.folder, "HEAD.json", lambda head: head.update(manifest=digest))
    tag(written, 3)
    edit(written.folder, "tags/kept.json", lambda value: value.update(branch=f"file:///{text}"))
    url = str(written.folder)
    commands = [
        ["log", "--bucket", url],
        ["inspect", url],
        ["inspect", url, "--version", "4"],
        ["verify", "--bucket", url],
        ["tag", "--bucket", url, "--list"],
    ]
    for command in commands:
        for arguments in (command, [*command, "--json"]):
            outcome = reader("cli", *arguments)
            if outcome.kind == "[SystemExit]":
                continue
            _, out, err = outcome.result
            for line in (out + err).split("\n"):
                assert line.isprintable(), (arguments, line)
                assert not line.startswith(FORGED)


def test_a_log_line_is_one_line(written: Written, caplog: pytest.LogCaptureFixture) -> None:
    """What a reader logs when it looks for another way."""
    written.writer.fold(0, 4)
    with caplog.at_level(logging.INFO):
        for text in NAMES.values():
            next_changed(written, lambda arrays, metadata, text=text: arrays.update({text: plain(b"x")}))  # type: ignore[misc]
            with pytest.raises(DeltaSyncError):
                list(open_run(str(written.folder)).tensors())
            (written.folder / version_key(NEXT)).unlink()
    assert caplog.records
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_clean_is_what_it_says() -> None:
    for text in [*NAMES.values(), "\ud800", HTML]:
        assert clean(text).isprintable()
    assert clean(HTML) == HTML
