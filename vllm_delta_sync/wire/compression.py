"""The entropy stage: zstd frames that declare their size, or nothing."""

from typing import Literal

import numpy as np
import zstandard

from vllm_delta_sync.errors import FormatError
from vllm_delta_sync.wire import limits
from vllm_delta_sync.wire.limits import check_limit

Compression = Literal["zstd", "none"]
COMPRESSIONS = ("zstd", "none")

_MAGIC = b"\x28\xb5\x2f\xfd"

# Planes are close to memoryless, so matches only cost: long minimum matches leave the work to Huffman coding.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=18, hash_log=12, min_match=7, target_length=1
)


def compress(plane: np.ndarray, compression: Compression) -> np.ndarray:
    """(n,) uint8 → (m,) uint8: one zstd frame with its content size, or the plane itself for ``none``."""
    if compression == "none":
        return plane
    return np.frombuffer(zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(plane.data), np.uint8)


def decompress(data: np.ndarray, size: int, compression: Compression, what: str) -> np.ndarray:
    """Inverse of ``compress`` for a plane that must have exactly ``size`` bytes.

    Raises:
        FormatError: not one zstd frame of that declared size.
        LimitError: the declared size or window is above its limit; nothing was allocated.
    """
    if compression == "none":
        if data.size != size:
            raise FormatError(f"{what} has {data.size} bytes, {size} expected")
        return data
    try:
        plain = _decompress_frame(data, size, what)
    except zstandard.ZstdError as error:
        raise FormatError(f"{what} is not a valid zstd frame: {error}") from error
    if len(plain) != size:
        raise FormatError(f"{what} expands to {len(plain)} bytes, {size} expected")
    return np.frombuffer(plain, np.uint8)


def _decompress_frame(data: np.ndarray, size: int, what: str) -> bytes:
    if bytes(data[:4]) != _MAGIC:
        raise FormatError(f"{what} is not a zstd frame: it begins with {bytes(data[:4]).hex()}")
    frame = zstandard.get_frame_parameters(data.data)
    if frame.content_size != size:
        raise FormatError(f"{what} declares {frame.content_size} bytes, {size} expected")
    check_limit(f"{what}: zstd window", frame.window_size, 1 << limits.MAX_ZSTD_WINDOW_LOG, "MAX_ZSTD_WINDOW_LOG")
    check_limit(f"{what}: declared size", size, data.size * limits.MAX_ZSTD_RATIO, "MAX_ZSTD_RATIO")
    if size == 0:
        return _decompress_empty(data, what)
    plain: bytes = zstandard.ZstdDecompressor().decompress(
        data.data, max_output_size=size, read_across_frames=False, allow_extra_data=False
    )
    return plain


def _decompress_empty(data: np.ndarray, what: str) -> bytes:
    # The one-call interface returns early for a declared size of 0 and looks at nothing that follows.
    check_limit(f"{what}: bytes of an empty frame", data.size, limits.MAX_EMPTY_FRAME_BYTES, "MAX_EMPTY_FRAME_BYTES")
    stream = zstandard.ZstdDecompressor().decompressobj()
    plain: bytes = stream.decompress(data.data)
    if not stream.eof or stream.unused_data:
        raise FormatError(f"{what} is not one whole zstd frame")
    return plain
