"""Formats of other projects, written from their published descriptions, for comparison only.

Names, indices and headers that any container needs are left out on their side, so sizes flatter them a little. None of
this is their code: sizes are comparable, speeds are those of plain numpy.
"""

from typing import NamedTuple

import numpy as np
import zstandard

from benchmarks.common.formats import Format, Patch, Update, join, split
from benchmarks.common.training_data import Bits, Weights


class Published(NamedTuple):
    """A figure that a project gives for itself: bytes per changed element, and at which changed share, in percent."""

    format: str
    bytes_per_changed: float
    share: float
    source: str


def compressed(data: bytes) -> bytes:
    """zstd at level 1, which all of these use."""
    return zstandard.ZstdCompressor(1).compress(data)


def decompressed(data: bytes) -> bytes:
    """Inverse of ``compressed``."""
    return zstandard.ZstdDecompressor().decompress(data)


def narrow(values: np.ndarray, *widths: int) -> np.ndarray:
    """Unsigned integers in the smallest of these widths, in bytes, that holds them all."""
    most = int(values.max(initial=0))
    width = next(width for width in widths if most < 1 << (8 * width))
    return values.astype(f"<u{width}")


def widened(data: bytes, count: int) -> np.ndarray:
    """(count,) int64 of what ``narrow`` gave."""
    width = len(data) // count if count else 1
    return np.frombuffer(data, f"<u{width}").astype(np.int64)


def changed_positions(old: Bits, new: Bits) -> np.ndarray:
    """(n,) int64 flat indices of elements whose bits differ."""
    return np.flatnonzero(old.reshape(-1) != new.reshape(-1))


class Gaps(Format):
    """Flat positions as distances between neighbours, in 16 bits or, for a whole tensor, 32; bits that replace.

    TRL's unreleased follow-up (pull request 5937) without compression, slime's ``deltas_zstd`` with it.
    """

    xor = False

    def __init__(self, name: str, compress: bool) -> None:
        self.name, self._compress = name, compress

    def encode(self, old: Weights, new: Weights) -> bytes:
        parts = []
        for name, before in old.items():
            positions = changed_positions(before, new[name])
            values = new[name].reshape(-1)[positions]
            if self.xor:
                values = values ^ before.reshape(-1)[positions]
            parts += [narrow(np.diff(positions, prepend=0), 2, 4, 8), values]
        data = join(parts)
        return compressed(data) if self._compress else data

    def decode(self, data: bytes, old: Weights) -> Patch:
        parts = split(decompressed(data) if self._compress else data)
        patch: Patch = {}
        for name, gaps, values in zip(old, parts[::2], parts[1::2], strict=True):
            bits = np.frombuffer(values, np.uint16)
            patch[name] = Update(np.cumsum(widened(gaps, bits.size)), bits, self.xor)
        return patch


class NemoXor(Gaps):
    """NVIDIA NeMo-RL's sparse refit: a range or gaps of 16, 32 or 64 bits, old xor new, zstd level 1 over it all."""

    xor = True

    def __init__(self) -> None:
        super().__init__("NeMo-RL xor", compress=True)


class SlimeXor(Format):
    """slime's and miles' delta on disk: each tensor's bytes xored with the old ones, zstd level 1, tensor by tensor."""

    name = "slime xor"

    def encode(self, old: Weights, new: Weights) -> bytes:
        frames = [compressed((bits ^ new[name]).tobytes()) for name, bits in old.items()]
        return join([np.frombuffer(frame, np.uint8) for frame in frames])

    def decode(self, data: bytes, old: Weights) -> Patch:
        frames = zip(old, split(data), strict=True)
        return {name: Update(None, np.frombuffer(decompressed(frame), np.uint16), True) for name, frame in frames}


class PulseCoo(Format):
    """PULSE, deployed in grail: rows and columns of a sparse matrix, sorted, as differences in the smallest integers
    that hold them, and the new bits; zstd level 1 over it all. A column starts over where a row begins."""

    name = "PULSE/grail COO"

    def encode(self, old: Weights, new: Weights) -> bytes:
        parts = []
        for name, before in old.items():
            positions = changed_positions(before, new[name])
            rows, columns = np.divmod(positions, before.shape[-1])
            jumps = np.diff(rows, prepend=0)
            steps = np.where(jumps == 0, np.diff(columns, prepend=0), columns)
            parts += [narrow(jumps, 1, 2, 4), narrow(steps, 1, 2, 4), new[name].reshape(-1)[positions]]
        return compressed(join(parts))

    def decode(self, data: bytes, old: Weights) -> Patch:
        parts = split(decompressed(data))
        patch: Patch = {}
        for index, (name, before) in enumerate(old.items()):
            bits = np.frombuffer(parts[3 * index + 2], np.uint16)
            jumps, steps = (widened(parts[3 * index + part], bits.size) for part in range(2))
            rows, sums = np.cumsum(jumps), np.cumsum(steps)
            starts = np.flatnonzero(np.append(True, jumps[1:] > 0)) if bits.size else np.empty(0, np.int64)
            lengths = np.diff(np.append(starts, bits.size))
            columns = sums - np.repeat(sums[starts] - steps[starts], lengths)
            patch[name] = Update(rows * before.shape[-1] + columns, bits)
        return patch


PUBLISHED = (
    Published("raw", 6.0, 1.0, "Hugging Face, TRL"),
    Published("u16 gap + bf16", 4.0, 1.0, "TRL pull request 5937"),
    Published("PULSE/grail COO", 1.54, 1.0, "PULSE, derived: 7 B at 99 %, 108 MB"),
    Published("NeMo-RL xor", 1.58, 3.0, "NeMo-RL: 1.51 to 1.58"),
)
"""slime publishes no figure of this kind."""
PUBLISHED_RATIOS = {
    "published, TRL's post: Qwen3-0.6B, at least": 34.0,
    "published, TRL's post: Qwen3-0.6B, at most": 60.0,
}
"""All weights over a version: 20 to 35 MB instead of 1.2 GB."""


def peer_formats() -> list[Format]:
    """Everybody else's."""
    return [Gaps("u16 gap + bf16", False), Gaps("u16 gap + bf16 + zstd", True), PulseCoo(), SlimeXor(), NemoXor()]
