"""Delta objects: choose a codec, wrap its entries in a container, and read them back as hostile input."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.codec import full_tensors, packed, raw
from vllm_delta_sync.codec.blocks import TILES_PARTS, Arrays, Block, OpenedBlock, open_blocks, parse_blocks
from vllm_delta_sync.codec.zstd import COMPRESSIONS, Compression
from vllm_delta_sync.errors import ChainError, FormatError, TensorMismatchError, UnsupportedError, UsageError
from vllm_delta_sync.format.canonical_json import check_format_version, dump_canonical, load_canonical
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.limits import FORMAT_VERSION
from vllm_delta_sync.format.safetensors_file import Buffer, Container, aligned, write_container
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.base_bits import Old
from vllm_delta_sync.tensors.changes import Changes, Full, Sparse

Codec = Literal["packed", "context", "raw"]
CODECS = ("packed", "context", "raw")
RELATIVE = ("packed", "context")
"""Codecs that carry ULP distances; the other one carries new bits."""

METADATA_KEY = "delta_sync"
FINGERPRINTS = "@fingerprints"


@dataclass(frozen=True)
class DeltaContext:
    """Which step of which run an object belongs to; a reader refuses one that says otherwise.

    Attributes:
        changed: elements that its document says all its objects carry, None where nothing says so.
    """

    run: str
    version: int
    base_version: int
    changed: int | None = None


def required_features(codec: Codec, compression: Compression) -> list[str]:
    """The ``requires`` list of a delta manifest."""
    return sorted({codec, *(("zstd",) if compression == "zstd" and codec != "raw" else ())})


def encode(
    changes: Changes,
    table: TensorTable,
    codec: Codec,
    compression: Compression,
    context: DeltaContext,
    old: Old | None = None,
) -> bytes:
    """Serialize changes as one safetensors object (docs/FORMAT.md, Delta objects).

    ``packed`` and ``context`` take relative groups, ``raw`` absolute ones. ``raw`` is never compressed: it is the
    interchange layout that others read directly.

    Args:
        old: the bits that the changes start from. Codec ``context`` needs it, the others do not look at it.

    Raises:
        UsageError: the groups do not suit the codec, tensor names clash with the codec's suffixes, or codec ``context``
            has no old bits.
    """
    if any(group.relative != (codec in RELATIVE) for group in changes.sparse):
        raise UsageError(f"codec {codec!r} takes {'ULP distances' if codec in RELATIVE else 'absolute values'}")
    arrays, rows = _encode_sparse(changes.sparse, table, codec, compression, old)
    if codec in RELATIVE and compression == "zstd":
        entries, more = full_tensors.encode(changes.full, table, compression, len(rows))
        arrays, rows = arrays | entries, rows + more
    else:
        # Under its own name anybody can read it.
        for tensor in changes.full:
            spec = table[tensor.id]
            arrays[spec.name] = (spec.dtype, tensor.bits.reshape(spec.shape))
    arrays[FINGERPRINTS] = ("U64", fingerprint_lanes(changes.fingerprints))
    return write_container(arrays, {METADATA_KEY: metadata_text(codec, compression, context, rows)})


def fingerprint_lanes(fingerprints: Mapping[int, Fingerprint]) -> npt.NDArray[np.uint64]:
    """(k, 2) low and high of each tensor's change, ascending by id."""
    lanes = [(fingerprints[tensor].low, fingerprints[tensor].high) for tensor in sorted(fingerprints)]
    return np.array(lanes, "<u8").reshape(len(lanes), 2)


def metadata_text(codec: Codec, compression: Compression, context: DeltaContext, rows: list[dict[str, Any]]) -> str:
    """The ``delta_sync`` metadata of an object with these ``blocks``."""
    metadata = {
        "format_version": FORMAT_VERSION,
        "run": context.run,
        "version": context.version,
        "base_version": context.base_version,
        "codec": codec,
        "compression": "none" if codec == "raw" else compression,
        "blocks": rows,
    }
    return dump_canonical(metadata).decode()


def _encode_sparse(
    groups: list[Sparse], table: TensorTable, codec: Codec, compression: Compression, old: Old | None
) -> tuple[Arrays, list[dict[str, Any]]]:
    if codec == "packed":
        return packed.encode(groups, table, compression)
    if codec == "raw":
        return raw.encode(groups, table), []
    if old is None:
        raise UsageError("codec 'context' codes changes by what was there before: pass the bits of the base version")
    from vllm_delta_sync.codec.context import coder

    return coder.encode(groups, table, compression, old)


def decode(data: Buffer, table: TensorTable, context: DeltaContext, old: Old | None = None) -> Changes:
    """Parse and verify a delta object; what it returns is safe to apply to tensors of ``table``.

    Args:
        old: the bits at the base version. Codec ``context`` needs it, the others do not look at it.

    Raises:
        FormatError, LimitError: malformed, or positions outside their tensor.
        UnsupportedError: a codec or compression of a later release, or codec ``context`` and no old bits.
        ChainError: the object belongs to another run, version or base version.
        TensorMismatchError: a tensor that the table has not, or another dtype or shape.
    """
    what = f"delta object of version {context.version}"
    container = Container(data, what)
    metadata = _metadata(container, context, what)
    named = [_named(container, table, name, what) for name in container.entries if name in table]
    touched = [tensor.id for tensor in named]
    if metadata["codec"] == "raw":
        changes, known = Changes(raw.decode(container, table, what), named), raw.entry_names(table, container)
        touched += [int(tensor) for group in changes.sparse for tensor in group.ids]
    else:
        blocks = parse_blocks(metadata["blocks"], what)
        opened, known = open_blocks(container, table, blocks, context.changed, what), entry_names(blocks)
        touched += [int(tensor) for item in opened for tensor in item.directory.ids]
        changes = _decode_blocks(container, table, metadata, opened, old, what)
        changes.full = named + changes.full
    check_entries(container, table, known, metadata["codec"], what)
    if len(set(touched)) != len(touched):
        raise FormatError(f"{what}: a tensor is carried twice")
    changes.fingerprints = _fingerprints(container, set(touched), what)
    return changes


def _decode_blocks(
    container: Container,
    table: TensorTable,
    metadata: dict[str, Any],
    opened: list[OpenedBlock],
    old: Old | None,
    what: str,
) -> Changes:
    compression = metadata["compression"]
    changes = Changes()
    for item in opened:
        last = item.directory.ids.size
        if item.block.kind == "full":
            changes.full += full_tensors.FullReader(container, item, compression).read()
        elif item.block.kind != "tiles":
            changes.sparse.append(packed.BlockReader(container, table, item, compression).take(last))
        elif old is None:
            raise UnsupportedError(
                f"{what} has codec 'context', which is read with the bits of version {metadata['base_version']} at "
                "hand; there are none here"
            )
        else:
            from vllm_delta_sync.codec.context.coder import ContextBlock

            tiles = ContextBlock.open(container, table, item.block, item.directory, compression, item.what)
            changes.sparse.append(tiles.take(0, last, old))
    changes.sparse = [group for group in changes.sparse if group.ids.size]
    return changes


def entry_names(blocks: list[Block]) -> set[str]:
    """The entry names of all blocks of an object of a relative codec, no more and no fewer."""
    tiles = [block for block in blocks if block.kind == "tiles"]
    names = full_tensors.entry_names(block for block in blocks if block.kind == "full")
    names |= packed.entry_names([block for block in blocks if block.kind in ("sparse", "dense")])
    return names | {f"{block.name}.{part}" for block in tiles for part in TILES_PARTS}


def check_entries(container: Container, table: TensorTable, known: set[str], codec: str, what: str) -> None:
    """Raise unless all entries are tensors of the table, or ``known`` and not both, or fingerprints."""
    tensors = {name for name in container.entries if name in table}
    if tensors & known:
        raise FormatError(f"{what}: the table has tensors named like entries of codec {codec!r}")
    unknown = set(container.entries) - known - tensors - {FINGERPRINTS}
    if unknown:
        raise TensorMismatchError(
            f"{what}: entry {min(unknown)[:120]!r} is no tensor of this run's table and no part of codec {codec!r}; "
            "the object belongs to another model"
        )


def codec_of(data: Buffer, context: DeltaContext) -> Codec:
    """Which codec a delta object has.

    Raises:
        FormatError, LimitError, UnsupportedError, ChainError: see ``decode``.
    """
    what = f"delta object of version {context.version}"
    codec: Codec = _metadata(Container(data, what), context, what)["codec"]
    return codec


def _metadata(container: Container, context: DeltaContext, what: str) -> dict[str, Any]:
    text = container.metadata.get(METADATA_KEY)
    if text is None:
        raise FormatError(f"{what}: metadata has no {METADATA_KEY!r}; this is not a delta object")
    value = load_canonical(text.encode(), f"{what} metadata")
    if not isinstance(value, dict):
        raise FormatError(f"{what}: metadata is not a JSON object")
    check_format_version(value, what)
    for name, kind in (
        ("run", str),
        ("version", int),
        ("base_version", int),
        ("codec", str),
        ("compression", str),
    ):
        if type(value.get(name)) is not kind:
            raise FormatError(f"{what}: field {name!r} is missing or not of type {kind.__name__}")
    if not isinstance(value.get("blocks"), list):
        raise FormatError(f"{what}: field 'blocks' is missing or not a list")
    for name in ("run", "version", "base_version"):
        if value[name] != getattr(context, name):
            raise ChainError(
                f"{what}: field {name!r} is {str(value[name])[:40]!r}, the manifest says {getattr(context, name)!r}"
            )
    codec, compression = value["codec"], value["compression"]
    if codec not in CODECS or compression not in COMPRESSIONS:
        raise UnsupportedError(
            f"{what}: codec {codec[:40]!r} with compression {compression[:40]!r} is unknown here; upgrade to read it"
        )
    if codec == "raw" and (compression != "none" or value["blocks"]):
        raise FormatError(f"{what}: codec 'raw' has no compression and no blocks")
    if codec == "packed" and any(isinstance(row, dict) and row.get("kind") == "tiles" for row in value["blocks"]):
        raise FormatError(f"{what}: codec 'packed' has no blocks of kind 'tiles'")
    return value


def _named(container: Container, table: TensorTable, name: str, what: str) -> Full:
    spec, entry = table.by_name(name), container.entries[name]
    if entry.dtype.name != spec.dtype or entry.shape != spec.shape:
        raise TensorMismatchError(
            f"{what}: tensor {name!r} is {entry.dtype.name} {list(entry.shape)}, "
            f"the run's table says {spec.dtype} {list(spec.shape)}"
        )
    return Full(table.index(name), aligned(container.bits(name)))


def _fingerprints(container: Container, touched: set[int], what: str) -> dict[int, Fingerprint]:
    lanes = container.bits(FINGERPRINTS)
    entry = container.entries[FINGERPRINTS]
    if entry.dtype.name != "U64" or entry.shape != (len(touched), 2):
        raise FormatError(
            f"{what}: fingerprints are {entry.dtype.name} {list(entry.shape)}; U64 and a pair for each of the "
            f"{len(touched)} tensors carried expected"
        )
    pairs = zip(sorted(touched), lanes.reshape(-1, 2).tolist(), strict=True)
    return {tensor: Fingerprint(low, high) for tensor, (low, high) in pairs}
