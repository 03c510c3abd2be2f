"""``compress`` and ``decompress``: bytes as zstd frames that declare their size, or uncompressed."""

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import zstandard

from vllm_delta_sync.errors import FormatError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.limits import check_limit

Compression = Literal["zstd", "none"]
COMPRESSIONS = ("zstd", "none")

_MAGIC = b"\x28\xb5\x2f\xfd"

# Bytes of a plane hardly depend on earlier ones, so searching for matches does not pay: a long minimum match leaves
# the work to Huffman coding, which any target_length but 0 would turn off.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=18, hash_log=12, min_match=7, target_length=0
)


def compress(plane: np.ndarray, compression: Compression) -> np.ndarray:
    """Compress (n,) uint8 → (m,) uint8: one zstd frame with its content size; the plane itself if ``none``."""
    if compression == "none":
        return plane
    return np.frombuffer(zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(plane.data), np.uint8)


def compress_pieces(pieces: Iterable[np.ndarray], size: int, compression: Compression) -> Iterator[bytes]:
    """Yield what ``compress`` returns for (size,) uint8 that come in pieces: a frame that expands to the same bytes."""
    if compression == "none":
        for piece in pieces:
            yield piece.tobytes()
        return
    frame = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compressobj(size=size)
    for piece in pieces:
        yield frame.compress(piece.data)
    yield frame.flush()


def decompress(data: np.ndarray, size: int, compression: Compression, what: str) -> np.ndarray:
    """Inverse of ``compress``; the plane must have exactly ``size`` bytes.

    Raises:
        FormatError: not one zstd frame of that declared size.
        LimitError: the declared size or window is above its limit; nothing was allocated.
    """
    declared_size(data, compression, what, size)
    if compression == "none" or size == 0:
        return data[:size]
    try:
        plain: bytes = zstandard.ZstdDecompressor().decompress(
            data.data, max_output_size=size, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise FormatError(f"{what} is not a valid zstd frame: {error}") from error
    if len(plain) != size:
        raise FormatError(f"{what} expands to {len(plain)} bytes, {size} expected")
    return np.frombuffer(plain, np.uint8)


def declared_size(data: np.ndarray, compression: Compression, what: str, expected: int | None = None) -> int:
    """Return the number of bytes that ``decompress`` returns, read without decompressing.

    Args:
        expected: required number, if known.

    Raises:
        FormatError: it does not begin as a zstd frame that declares the expected size. LimitError: see ``decompress``.
    """
    if compression == "none":
        if expected not in (None, data.size):
            raise FormatError(f"{what} has {data.size} bytes, {expected} expected")
        return data.size
    if bytes(data[:4]) != _MAGIC:
        raise FormatError(f"{what} is not a zstd frame: it begins with {bytes(data[:4]).hex()}")
    try:
        frame = zstandard.get_frame_parameters(data.data)
    except zstandard.ZstdError as error:
        raise FormatError(f"{what} is not a zstd frame: {error}") from error
    size: int = frame.content_size
    if size == zstandard.CONTENTSIZE_UNKNOWN:
        raise FormatError(f"{what} does not declare its size")
    if expected not in (None, size):
        raise FormatError(f"{what} declares {size} bytes, {expected} expected")
    check_limit(f"{what}: zstd window", frame.window_size, 1 << limits.MAX_ZSTD_WINDOW_LOG, "MAX_ZSTD_WINDOW_LOG")
    check_limit(f"{what}: declared size", size, data.size * limits.MAX_ZSTD_RATIO, "MAX_ZSTD_RATIO")
    if size == 0:
        _check_empty(data, what)
    return size


def _check_empty(data: np.ndarray, what: str) -> None:
    # ``ZstdDecompressor.decompress`` returns early for a declared size of 0 and ignores what follows.
    check_limit(f"{what}: bytes of an empty frame", data.size, limits.MAX_EMPTY_FRAME_BYTES, "MAX_EMPTY_FRAME_BYTES")
    stream = zstandard.ZstdDecompressor().decompressobj()
    try:
        plain = stream.decompress(data.data)
    except zstandard.ZstdError as error:
        raise FormatError(f"{what} is not a valid zstd frame: {error}") from error
    if plain or not stream.eof or stream.unused_data:
        raise FormatError(f"{what} is not one whole zstd frame")
