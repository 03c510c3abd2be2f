"""Hostile bytes around good ones: a flaw in one place, and digests, sums and sizes that fit it everywhere else."""

import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from tests.security.reader import Reader
from tests.support.forge import arrays_of, forge
from tests.support.samples import CREATED, RUN
from tests.support.written import Written
from vllm_delta_sync.format.base_document import dump_canonical
from vllm_delta_sync.format.documents import Tag, tag_key
from vllm_delta_sync.format.safetensors_file import Container, write_container

Arrays = dict[str, tuple[str, np.ndarray]]
Metadata = dict[str, Any]
NEXT = 5
"""The version after those of the fixture ``written``."""


def next_object(written: Written, data: bytes) -> None:
    """Commit a next version whose one object is ``data``."""
    forge(written.folder, change_data=lambda good: data)


def rewritten(change: Callable[[Arrays, Metadata], object]) -> Callable[[bytes], bytes]:
    """Edits entries and metadata of an object."""

    def rewrite(good: bytes) -> bytes:
        parsed = Container(good)
        arrays, metadata = arrays_of(parsed), json.loads(parsed.metadata["delta_sync"])
        change(arrays, metadata)
        return write_container(arrays, {"delta_sync": dump_canonical(metadata).decode()})

    return rewrite


def next_changed(
    written: Written,
    change: Callable[[Arrays, Metadata], object],
    fields: Callable[[Metadata], object] = lambda _: None,
) -> None:
    """Commit a next version, with entries and metadata of its object, and its manifest, changed."""
    forge(written.folder, change_data=rewritten(change), change_fields=fields)


def plain(data: bytes | list[int]) -> tuple[str, np.ndarray]:
    return "U8", np.array(list(data), np.uint8)


def edit(folder: Path, key: str, change: Callable[[Any], object]) -> None:
    """Change a document, and write it in canonical form (of which this is a fast way for names of plain letters)."""
    value = json.loads((folder / key).read_bytes())
    change(value)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    (folder / key).write_bytes(text.encode())


def make_huge(path: Path) -> None:
    """A file of a tebibyte, which takes no room."""
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.truncate(path, 2**40)


def respell(folder: Path, key: str, old: str, new: str) -> None:
    """Replace some text of a document, which must be there."""
    text = (folder / key).read_text()
    assert old in text, (key, old)
    (folder / key).write_bytes(text.replace(old, new, 1).encode("utf-8", "surrogatepass"))


def untouched(reader: Reader, written: Written) -> None:
    """The versions before the attack are read as they were written."""
    rows = zip(written.writer.table, written.writer.bits[NEXT - 2], strict=True)
    expected = {spec.name: sha256(bits.tobytes()).hexdigest() for spec, bits in rows}
    tag(written, NEXT - 2)
    assert reader.reads("tensors", written.folder, "tag:kept") == expected


def refused_by_all(reader: Reader, written: Written, scratch: Path, kind: str | tuple[str, ...]) -> list[str]:
    """The next version is refused however it is read, those before it are read as they were → messages."""
    doors = (("changes", NEXT), ("pieces", NEXT, scratch), ("tensors",), ("verify",))
    messages = [reader.refused(door, written.folder, *rest, kind=kind) for door, *rest in doors]
    untouched(reader, written)
    return messages


def claiming(size: int) -> Callable[[Metadata], None]:
    """A manifest whose object has so many bytes, it says."""

    def claim(fields: Metadata) -> None:
        fields["objects"][0]["bytes"] = fields["payload_bytes"] = size

    return claim


def tag(written: Written, version: int) -> None:
    """Call a version ``kept``, so that it can be read whatever is wrong with the head."""
    document = Tag(
        run=RUN, name="kept", version=version, manifest=written.writer.manifests[version].digest, created_at=CREATED
    )
    path = written.folder / tag_key("kept")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(document.to_bytes())
