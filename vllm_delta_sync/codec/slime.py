"""slime's folders of weights: ``DIR/weight_v000007/`` is a whole checkpoint, or a delta on the version before.

What the format is, from the code that writes and reads it:

- THUDM/slime at 624b824 (2026-08-21): ``update_weight_from_disk_delta.py`` and ``utils/disk_delta.py`` write deltas,
  ``update_weight_from_disk.py`` whole checkpoints, ``docker/patch/latest/sglang-pull_weights.patch`` reads both;
  ``docs/en/advanced/delta-weight-sync.md`` describes them.
- sgl-project/sglang, ``python/sglang/srt/weight_sync/local_checkpoint.py`` at 01d5bfe, of pull request 30366 to the
  branch ``sglang-miles``: the reader behind ``/pull_weights``. Pull request 30367 to ``main`` is open, and release
  0.5.23 has no such endpoint.
- radixark/miles at 31f1ca9, ``utils/disk_delta.py``: as slime.
- modal-projects/stitch at a250dc3, ``src/stitch/types.py`` and ``stores/s3.py``: also needs ``version`` in the index of
  a whole checkpoint.
- vllm-project/vime at 410f2c0, ``backends/vllm_utils/checkpoint_receiver.py``: copies whole checkpoints.
- modelexpress 0.7.0 from PyPI, ``modelexpress_rl/inference/receiver.py``: ``xor`` with ``adler32`` only.

A delta is a checkpoint by its files: ``model.safetensors.index.json`` and what it names. Each changed tensor is one
zstd frame (U8) under its own name, whose content is ``new ^ old`` (``xor``), or the number of changed bytes, their
positions and their new values (``overwrite``; numbers and positions are little-endian uint32). The ``__metadata__`` of
a file has, by tensor, a checksum of all its new bytes. Version 0 is the checkpoint that the engine was started from.
Readers take higher numbers only, and read each delta after the version that it builds on.
"""

import importlib
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from vllm_delta_sync.codec.zstd import declared_size, decompress
from vllm_delta_sync.errors import FingerprintError, FormatError, UnsupportedError
from vllm_delta_sync.format.base_document import load_json
from vllm_delta_sync.format.limits import check_limit

Bytes = npt.NDArray[np.uint8]

FOLDER = re.compile(r"weight_v([0-9]{1,10})")
XOR, OVERWRITE = "xor", "overwrite"
CHECKSUM = "adler32"
"""Of the deltas that are written: the one checksum that each reader has."""
_CHECKSUMS = (CHECKSUM, "xxh3-128", "blake3")


def folder_name(version: int) -> str:
    return f"weight_v{version:06d}"


@dataclass(frozen=True)
class SlimeIndex:
    """What the index of a delta says.

    Attributes:
        version, base: its number, and that of the version that it builds on.
        encoding: ``xor`` or ``overwrite``. checksum: the algorithm of the tensors' checksums.
        places: tensor → file.
    """

    version: int
    base: int
    encoding: str
    checksum: str
    places: dict[str, str]

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> "SlimeIndex | None":
        """Parse an index; None if it is that of a whole checkpoint.

        Raises:
            FormatError: it is malformed. UnsupportedError: an encoding, compression or checksum is not known.
        """
        document = load_json(data, what)
        fields = document.get("metadata") if isinstance(document, dict) else None
        if not isinstance(fields, dict) or "delta_encoding" not in fields:
            return None
        places = document.get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise FormatError(f"{what}: 'weight_map' does not map tensors to files")
        for field, known in (
            ("delta_encoding", (XOR, OVERWRITE)),
            ("compression_format", ("zstd",)),
            ("checksum_format", _CHECKSUMS),
        ):
            if fields.get(field) not in known:
                raise UnsupportedError(
                    f"{what}: {field} is {str(fields.get(field))[:80]!r}, and only {', '.join(known)} can be read; set "
                    "slime's --update-weight-delta-encoding and --update-weight-delta-checksum to one that can be, or "
                    "its --update-weight-mode to full"
                )
        version, base = (_number(fields, field, what) for field in ("version", "base_version"))
        if not base < version:
            raise FormatError(f"{what}: version {version} builds on base_version {base}, which is not before it")
        return cls(version, base, fields["delta_encoding"], fields["checksum_format"], places)

    def to_bytes(self) -> bytes:
        fields = {
            "version": f"{self.version:06d}",
            "base_version": f"{self.base:06d}",
            "delta_encoding": self.encoding,
            "compression_format": "zstd",
            "checksum_format": self.checksum,
        }
        return json.dumps({"metadata": fields, "weight_map": self.places}, indent=2, sort_keys=True).encode()


def _number(fields: Mapping[str, Any], field: str, what: str) -> int:
    value = fields.get(field)
    if (type(value) is int and 0 <= value < 10**10) or (isinstance(value, str) and re.fullmatch("[0-9]{1,10}", value)):
        return int(value)
    raise FormatError(f"{what}: {field} is {str(value)[:80]!r}, not a number of a version")


def checksum(algorithm: str, data: Bytes) -> str:
    """Return a checksum of (n,) bytes, in hex.

    Raises:
        UnsupportedError: the package for the algorithm is not installed.
    """
    if algorithm == "adler32":
        return f"{zlib.adler32(data.data):08x}"
    package = "xxhash" if algorithm == "xxh3-128" else "blake3"
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise UnsupportedError(
            f"checksums are {algorithm}, and {package} is not installed; run pip install 'vllm-delta-sync[slime]'"
        ) from error
    hasher = module.xxh3_128() if package == "xxhash" else module.blake3()
    hasher.update(data.data)
    digest: str = hasher.hexdigest()
    return digest


def encode_xor(old: Bytes, new: Bytes) -> bytes | None:
    """Return the zstd frame of a changed tensor, from all its (n,) bytes; None if it did not change."""
    changed = old ^ new
    return zstandard.ZstdCompressor(level=1).compress(changed.data) if changed.any() else None


def decode(encoding: str, frame: Bytes, old: Bytes, what: str) -> Bytes:
    """Return all (n,) new bytes of a tensor, from its frame and its (n,) old bytes.

    Raises:
        FormatError: the frame does not hold changes of so many bytes. LimitError: it declares more; nothing was
            allocated.
    """
    if encoding == XOR:
        changed = decompress(frame, old.size, "zstd", what)
        return changed ^ old
    size = check_limit(f"{what}: bytes of changes", declared_size(frame, "zstd", what), 4 + 5 * old.size, "the tensor")
    content = decompress(frame, size, "zstd", what)
    count = int.from_bytes(content[:4].tobytes(), "little")
    if size != 4 + 5 * count:
        raise FormatError(f"{what}: {count} changes do not take {size} bytes")
    positions = content[4 : 4 + 4 * count].view("<u4")
    if count and int(positions.max()) >= old.size:
        raise FormatError(f"{what}: position {int(positions.max())} lies outside the tensor's {old.size} bytes")
    new = old.copy()
    new[positions] = content[4 + 4 * count :]
    return new


def check_sum(algorithm: str, new: Bytes, declared: str | None, what: str) -> None:
    """Raise FingerprintError unless a tensor's new bytes have the declared checksum."""
    found = checksum(algorithm, new)
    if found != declared:
        raise FingerprintError(
            f"{what}: the new bytes have {algorithm} {found}, and {str(declared)[:64]} is declared: the delta is "
            "damaged, or was made against other weights; go on from a whole checkpoint (--update-weight-mode full)"
        )
