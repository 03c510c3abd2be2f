"""Write versions that no publisher would: for tests of what a receiver refuses.

Everything around the flaw is right (digests, chain, counts), so that each case meets exactly the check it names.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.reference_tiles import CLASSES, PLAIN, SIZES_AT, SYMBOLS, TABLES
from tests.support.samples import flip
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.format.base_document import Document, dump_canonical
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_change
from vllm_delta_sync.format.manifest import Head, object_key, version_key
from vllm_delta_sync.format.safetensors_file import Container, write_container
from vllm_delta_sync.tensors.changes import Changes, Sparse
from vllm_delta_sync.trust import Keyring


@dataclass
class Forgery:
    """A forged version: what it consists of, and the files to remove to be rid of it."""

    manifest: dict[str, Any]
    data: bytes
    files: list[Path]

    def remove(self) -> None:
        for file in self.files:
            file.unlink(missing_ok=True)


def good_parts(run: Run) -> tuple[dict[str, Any], Changes]:
    """Manifest fields and changes of an honest next version: element 5 of the first tensor moves by one ULP.

    The declared change of fingerprint is right only if that element's bits are all zero, which no test model has;
    cases that must pass the receiver's arithmetic recompute it.
    """
    head = run.head()
    spec = run.table[0]
    positions, distances = np.array([5], np.int64), np.array([1], spec.element.uint)
    sparse = Sparse(spec.dtype, np.array([0], np.uint32), np.array([1], np.int64), positions, distances, True)
    zeros = np.zeros(1, spec.element.uint)
    change = fingerprint_change(spec.name, positions, zeros, zeros + 1)
    fields = {
        "format_version": 2,
        "requires": ["plain"],
        "run": head.run,
        "epoch": head.epoch,
        "version": head.version + 1,
        "step": head.step + 1,
        "kind": "delta",
        "base_version": head.version,
        "parent": head.digest,
        "base": None,
        "codec": "plain",
        "compression": "none",
        "changed": 1,
        "total": head.total,
        "full_bytes": head.full_bytes,
        "fingerprint": (head.model_fingerprint + change).hex(),
        "tensor_fingerprints": None,
        "created_at": "2026-01-01T00:00:00Z",
    }
    return fields, Changes([sparse], [], {0: change})


def forge(
    root: Path,
    change_fields: Callable[[dict[str, Any]], object] = lambda fields: None,
    change_data: Callable[[bytes], bytes] = lambda data: data,
    damage: Callable[[Path], None] = lambda path: None,
    changes: Callable[[Run, dict[str, Any], Changes], Changes] = lambda run, fields, changes: changes,
) -> Forgery:
    """Write a next version into the directory bucket ``root``.

    Args:
        change_fields: edits the manifest before it is written. change_data: edits the object before it is digested.
        damage: edits the stored object afterwards. changes: edits or replaces what is encoded.
    """
    run = open_run(str(root))
    fields, plain = good_parts(run)
    context = DeltaContext(fields["run"], fields["version"], fields["base_version"])
    data = change_data(encode(changes(run, fields, plain), run.table, fields["codec"], "none", context))
    digest = sha256(data).hexdigest()
    fields["objects"] = [{"key": object_key(digest), "bytes": len(data), "sha256": digest, "rank": 0}]
    fields["payload_bytes"] = len(data)
    change_fields(fields)
    object_path, manifest_path = root / object_key(digest), root / version_key(fields["version"])
    object_path.parent.mkdir(exist_ok=True)
    object_path.write_bytes(data)
    damage(object_path)
    manifest_path.write_bytes(dump_canonical(fields))
    return Forgery(fields, data, [manifest_path, object_path])


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def arrays_of(container: Container) -> dict[str, tuple[str, np.ndarray]]:
    """Copies of the entries of a container, as ``write_container`` takes them."""
    return {
        name: (entry.dtype.name, container.bits(name).reshape(entry.shape).copy())
        for name, entry in container.entries.items()
    }


def _set(name: str, dtype: str, array: np.ndarray) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        container = Container(data)
        return write_container({**arrays_of(container), name: (dtype, array)}, container.metadata)

    return change


def parts_of_tables(tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tables, 2, symbols) lengths of codes, and (4, tiles) planes of sizes: views of a block's tables."""
    return tables[CLASSES:SIZES_AT].reshape(TABLES, 2, SYMBOLS), tables[SIZES_AT:].reshape(4, -1)


def _out_of_range(data: bytes) -> bytes:
    """The changed tile has a gap of 2^21, which takes a code of one bit and 19 raw bits."""
    tables = Container(data).bits("@0.tables").copy()
    lengths, numbers = parts_of_tables(tables)
    lengths[:] = 0
    lengths[PLAIN, 0, 249] = 1
    numbers[0, numbers.any(axis=0)] = 20
    data = _set("@0.tables", "U8", tables)(data)
    return _set("@0.streams", "U8", np.zeros(3, np.uint8))(data)


def _header_bomb(data: bytes) -> bytes:
    return struct.pack("<Q", 2**62) + data[8:]


def _huge_shape(data: bytes) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["@0.streams"]["shape"] = [2**40, 2**40]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def _with_sum(run: Run, fields: dict[str, Any], changes: Changes) -> Changes:
    fields["fingerprint"] = (run.head().model_fingerprint + Fingerprint(1, 1)).hex()
    return changes


@dataclass(frozen=True)
class BadVersion:
    """A forged version and the error kind with which a receiver must refuse it."""

    name: str
    kind: str
    write: Callable[[Path], Forgery]


def _absurd_bytes(fields: dict[str, Any]) -> None:
    fields["objects"][0]["bytes"] = fields["payload_bytes"] = 2**50


def _bad(name: str, kind: str, **how: Any) -> BadVersion:
    return BadVersion(name, kind, lambda root: forge(root, **how))


BAD_VERSIONS = [
    _bad("corrupt object", "digest", damage=flip),
    _bad("truncated object", "digest", damage=_truncate),
    _bad("missing object", "not_found", damage=Path.unlink),
    _bad("made against other weights", "fingerprint"),
    _bad("sums contradict manifest", "fingerprint", changes=_with_sum),
    _bad("index out of range", "format", change_data=_out_of_range),
    _bad("unknown tensor", "tensor", change_data=_set("no.such.weight", "BF16", np.zeros(4, "<u2"))),
    _bad("unknown tensor id", "tensor", change_data=_set("@0.ids", "U32", np.array([4000], "<u4"))),
    _bad("wrong shape", "tensor", change_data=_set("model.norm.weight", "BF16", np.zeros(7, "<u2"))),
    _bad("wrong dtype", "tensor", change_data=_set("model.norm.weight", "F32", np.zeros(128, "<u4"))),
    _bad("header bomb", "limit", change_data=_header_bomb),
    _bad("absurd shape", "format", change_data=_huge_shape),
    _bad("absurd object size", "limit", change_fields=_absurd_bytes),
    _bad("wrong parent", "chain", change_fields=lambda fields: fields.update(parent="0" * 64)),
    _bad("another run", "chain", change_fields=lambda fields: fields.update(run="f" * 32)),
    _bad("unknown feature required", "unsupported", change_fields=lambda fields: fields["requires"].append("teleport")),
]


# Signed documents


def edited(document: Document, **fields: object) -> bytes:
    """A document with other fields, whose signature stays as it is."""
    return dump_canonical({**json.loads(document.to_bytes()), **fields})


def _with_another_signature(document: Document, stranger: Keyring) -> bytes:
    other = stranger.signed(Head(run="ab" * 16, version=0, manifest="0" * 64)).signature
    honest = document.signature
    assert honest is not None
    assert other is not None
    return edited(document, signature={"key": honest.key, "value": other.value})


FORGERIES: dict[str, Callable[[Document, Keyring], bytes]] = {
    "unsigned": lambda document, stranger: edited(document, signature=None),
    "stranger": lambda document, stranger: stranger.signed(document).to_bytes(),
    "changed": lambda document, stranger: edited(document, created_at="2026-01-02T03:04:59Z"),
    "another document's": _with_another_signature,
    "not a signature": lambda document, stranger: edited(document, signature={"key": "00" * 32, "value": "00" * 64}),
}
"""Ways to forge a signed document: each makes other bytes of it, given a key that is not trusted."""
