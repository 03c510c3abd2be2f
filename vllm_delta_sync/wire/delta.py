"""Delta objects: choose a codec, wrap its entries in a container, and read them back as hostile input."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vllm_delta_sync.errors import ChainError, FormatError, TensorMismatchError, UnsupportedError, UsageError
from vllm_delta_sync.wire import packed, raw
from vllm_delta_sync.wire.canonical import check_format_version, dump_canonical, load_canonical
from vllm_delta_sync.wire.changes import Changes, Full
from vllm_delta_sync.wire.compression import COMPRESSIONS, Compression
from vllm_delta_sync.wire.container import Buffer, Container, aligned, write_container
from vllm_delta_sync.wire.fingerprint import Fingerprint
from vllm_delta_sync.wire.limits import FORMAT_VERSION
from vllm_delta_sync.wire.table import TensorTable

Codec = Literal["packed", "raw"]
CODECS = ("packed", "raw")
FEATURES = frozenset({"raw", "packed", "zstd"})
"""What a manifest may list in ``requires`` for this reader to accept it."""

METADATA_KEY = "delta_sync"
_IDS = "@fingerprints.ids"
_VALUES = "@fingerprints.values"


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
    return sorted({codec, *(("zstd",) if compression == "zstd" and codec == "packed" else ())})


def encode(
    changes: Changes, table: TensorTable, codec: Codec, compression: Compression, context: DeltaContext
) -> bytes:
    """Serialize changes as one safetensors object (docs/FORMAT.md, Delta objects).

    ``packed`` takes relative groups, ``raw`` absolute ones. ``raw`` is never compressed: it is the interchange
    layout that others read directly.

    Raises:
        UsageError: the groups do not suit the codec, or tensor names clash with the codec's suffixes.
    """
    if any(group.relative != (codec == "packed") for group in changes.sparse):
        raise UsageError(f"codec {codec!r} takes {'ULP distances' if codec == 'packed' else 'absolute values'}")
    if codec == "packed":
        arrays, blocks = packed.encode(changes.sparse, compression)
    else:
        arrays, blocks = raw.encode(changes.sparse, table), []
    for tensor in changes.full:
        spec = table[tensor.id]
        arrays[spec.name] = (spec.dtype, tensor.bits.reshape(spec.shape))
    ids = sorted(changes.fingerprints)
    lanes = [(changes.fingerprints[tensor].low, changes.fingerprints[tensor].high) for tensor in ids]
    arrays[_IDS] = ("U32", np.array(ids, "<u4"))
    arrays[_VALUES] = ("U64", np.array(lanes, "<u8").reshape(len(ids), 2))
    metadata = {
        "format_version": FORMAT_VERSION,
        "run": context.run,
        "version": context.version,
        "base_version": context.base_version,
        "codec": codec,
        "compression": compression if codec == "packed" else "none",
        "blocks": blocks,
    }
    return write_container(arrays, {METADATA_KEY: dump_canonical(metadata).decode()})


def decode(data: Buffer, table: TensorTable, context: DeltaContext) -> Changes:
    """Parse and verify a delta object; what it returns is safe to apply to tensors of ``table``.

    Raises:
        FormatError, LimitError: malformed, or positions outside their tensor.
        UnsupportedError: a codec or compression of a later release.
        ChainError: the object belongs to another run, version or base version.
        TensorMismatchError: a tensor that the table has not, or another dtype or shape.
    """
    what = f"delta object of version {context.version}"
    container = Container(data, what)
    metadata = _metadata(container, context, what)
    full_names = [name for name in container.entries if name in table]
    if metadata["codec"] == "packed":
        groups = packed.decode(container, table, metadata["blocks"], metadata["compression"], what, context.changed)
        known = packed.entry_names([group.element for group in groups])
    else:
        groups = raw.decode(container, table, what)
        known = raw.entry_names(table, container)
    if set(full_names) & known:
        raise FormatError(f"{what}: the table has tensors named like entries of codec {metadata['codec']!r}")
    unknown = set(container.entries) - known - set(full_names) - {_IDS, _VALUES}
    if unknown:
        raise TensorMismatchError(
            f"{what}: entry {min(unknown)[:120]!r} is no tensor of this run's table and no part of codec "
            f"{metadata['codec']!r}; the object belongs to another model"
        )
    full = [_full(container, table, name, what) for name in full_names]
    changes = Changes(groups, full)
    touched = [int(tensor) for group in groups for tensor in group.ids] + [tensor.id for tensor in full]
    if len(set(touched)) != len(touched):
        raise FormatError(f"{what}: a tensor is carried twice")
    changes.fingerprints = _fingerprints(container, set(touched), what)
    return changes


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
    return value


def _full(container: Container, table: TensorTable, name: str, what: str) -> Full:
    spec, entry = table.by_name(name), container.entries[name]
    if entry.dtype.name != spec.dtype or entry.shape != spec.shape:
        raise TensorMismatchError(
            f"{what}: tensor {name!r} is {entry.dtype.name} {list(entry.shape)}, "
            f"the run's table says {spec.dtype} {list(spec.shape)}"
        )
    return Full(table.index(name), aligned(container.bits(name)))


def _fingerprints(container: Container, touched: set[int], what: str) -> dict[int, Fingerprint]:
    ids = container.bits(_IDS)
    values = container.bits(_VALUES)
    if container.entries[_IDS].dtype.name != "U32" or container.entries[_VALUES].dtype.name != "U64":
        raise FormatError(f"{what}: fingerprint entries are not U32 and U64")
    if container.entries[_VALUES].shape != (ids.size, 2) or ids.tolist() != sorted(touched):
        raise FormatError(
            f"{what}: fingerprints do not list exactly the {len(touched)} tensors carried, in ascending order"
        )
    lanes = values.reshape(-1, 2).tolist()
    return {tensor: Fingerprint(low, high) for tensor, (low, high) in zip(ids.tolist(), lanes, strict=True)}
