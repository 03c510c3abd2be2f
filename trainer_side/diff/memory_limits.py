"""``MemoryUse``: bytes by kind. ``MemoryLimits``: what a version may take beside the baseline, by the model's size."""

from dataclasses import dataclass
from typing import Self

from vllm_delta_sync.codec.merge_spool import SPOOL_ELEMENTS
from vllm_delta_sync.format.table import TensorTable

SHARE = 16
"""The log may take one part in so many of the model, and so may decoded changes, whose encoding takes as much twice
more. Together that is a quarter of the model, or half of it with a copy of a tensor that is a quarter."""
LEAST_BYTES = 4 * 1024 * 1024
"""Models so small that the shares are below this get it: a file costs more than the memory."""
BLOCKS = 256
"""A block of an object that is written in pieces has at most one in this many of the model's elements …"""
LEAST_BLOCK_ELEMENTS = 64 * 1024
"""… and at least so many, if they changed."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes by kind of memory.

    Attributes:
        host: pageable host memory. pinned: host memory that CUDA devices copy from directly, not counted in ``host``.
        device: of all devices. disk: in temporary files, which may be mapped into memory.
    """

    host: int = 0
    pinned: int = 0
    device: int = 0
    disk: int = 0

    def __add__(self, other: "MemoryUse") -> "MemoryUse":
        return MemoryUse(
            self.host + other.host, self.pinned + other.pinned, self.device + other.device, self.disk + other.disk
        )

    def __str__(self) -> str:
        kinds = ((self.host, "host"), (self.pinned, "pinned"), (self.device, "device"), (self.disk, "disk"))
        return ", ".join(f"{size / 1e9:.2f} GB {kind}" for size, kind in kinds if size) or "nothing"


@dataclass(frozen=True)
class MemoryLimits:
    """Limits for one process that publishes.

    Attributes:
        log_bytes: of the changes that wait for encoding, and for a revert; what is more goes to a temporary file.
        loaded_bytes: of decoded changes; a version with more is encoded in pieces, to temporary files.
        block_elements: changed elements that are encoded at once, if it is encoded in pieces.
    """

    log_bytes: int
    loaded_bytes: int
    block_elements: int

    @classmethod
    def of(cls, table: TensorTable) -> Self:
        share = max(LEAST_BYTES, table.full_bytes // SHARE)
        return cls(share, share, min(SPOOL_ELEMENTS, max(LEAST_BLOCK_ELEMENTS, table.total // BLOCKS)))
