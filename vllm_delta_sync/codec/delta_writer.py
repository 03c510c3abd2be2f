"""``encode`` serializes changes as a delta object: the entries of a codec in a safetensors container."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.codec import full, raw
from vllm_delta_sync.codec.delta_object import FINGERPRINTS, METADATA_KEY, BlockEntries, DeltaContext
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.base_document import dump_canonical
from vllm_delta_sync.format.codecs import BASE_CODECS, RELATIVE_CODECS, Codec
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.limits import FORMAT_VERSION
from vllm_delta_sync.format.safetensors_file import write_container
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.changes import BaseLookup, Changes, Sparse


def encode(
    changes: Changes,
    table: TensorTable,
    codec: Codec,
    compression: Compression,
    context: DeltaContext,
    old: BaseLookup | None = None,
) -> bytes:
    """Serialize changes as one safetensors object (docs/FORMAT.md, Delta objects).

    ``plain`` and ``tiled`` take relative groups, ``raw`` absolute ones. ``raw`` is never compressed: other
    programs read it directly.

    Args:
        old: the bits at the base version; only codec ``tiled`` needs them.

    Raises:
        UsageError: the groups do not suit the codec, tensor names clash with the codec's suffixes, or codec ``tiled``
            has no base bits.
    """
    if any(group.relative != (codec in RELATIVE_CODECS) for group in changes.sparse):
        raise UsageError(f"codec {codec!r} takes {'ULP distances' if codec in RELATIVE_CODECS else 'absolute values'}")
    blocks = BlockEntries()
    encode_sparse(blocks, changes.sparse, table, codec, compression, old)
    if codec in RELATIVE_CODECS and compression == "zstd":
        full.encode(blocks, changes.full, table, compression)
    else:
        # Any safetensors reader can read a tensor under its own name.
        for tensor in changes.full:
            spec = table[tensor.id]
            blocks.arrays[spec.name] = (spec.dtype, tensor.bits.reshape(spec.shape))
    blocks.arrays[FINGERPRINTS] = ("U64", fingerprint_lanes(changes.fingerprints))
    return write_container(blocks.arrays, {METADATA_KEY: metadata_text(codec, compression, context, blocks.rows)})


def encode_sparse(
    blocks: BlockEntries,
    groups: list[Sparse],
    table: TensorTable,
    codec: Codec,
    compression: Compression,
    old: BaseLookup | None,
) -> None:
    """Append the entries of changed elements."""
    if codec == "raw":
        blocks.arrays |= raw.encode(groups, table)
        return
    if codec not in RELATIVE_CODECS:
        raise UsageError(f"codec {codec!r} is unknown to the encoder; use tiled, plain or raw")
    if codec in BASE_CODECS and old is None:
        raise UsageError(f"codec {codec!r} needs the bits of the base version; pass old")
    from vllm_delta_sync.codec.tiles import coder

    coder.encode(blocks, groups, table, compression, old if codec in BASE_CODECS else None)


def fingerprint_lanes(fingerprints: Mapping[int, Fingerprint]) -> npt.NDArray[np.uint64]:
    """(k, 2) low and high lane of each tensor's fingerprint change, ascending by id."""
    lanes = [(fingerprints[tensor].low, fingerprints[tensor].high) for tensor in sorted(fingerprints)]
    return np.array(lanes, "<u8").reshape(len(lanes), 2)


def metadata_text(codec: Codec, compression: Compression, context: DeltaContext, rows: list[dict[str, Any]]) -> str:
    """The ``delta_sync`` metadata of an object; ``rows``: its ``blocks``."""
    metadata = {
        "format_version": FORMAT_VERSION,
        "run": context.run,
        "version": context.version,
        "base_version": context.base_version,
        "codec": codec,
        "compression": compression if codec in RELATIVE_CODECS else "none",
        "blocks": rows,
    }
    return dump_canonical(metadata).decode()
