"""The entropy stage: what is declared is checked before anything is allocated."""

import time

import numpy as np
import pytest
import zstandard

from tests.support.hostile import EMPTY, FRAMES, declaring
from vllm_delta_sync.codec.zstd import compress, decompress
from vllm_delta_sync.errors import DeltaSyncError, FormatError, LimitError


def plane(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


@pytest.mark.parametrize("size", [2**60, 2**40, 2**31, 2**64 - 2])
def test_a_frame_that_declares_more_than_it_can_hold(size: int) -> None:
    with pytest.raises(LimitError, match="MAX_ZSTD_RATIO"):
        decompress(plane(declaring(size)), size, "zstd", "plane")


def test_a_bomb_that_keeps_its_word_is_bounded_by_the_expected_size() -> None:
    bomb = plane(zstandard.ZstdCompressor().compress(bytes(1 << 20)))
    with pytest.raises(FormatError, match="declares 1048576 bytes, 16 expected"):
        decompress(bomb, 16, "zstd", "plane")
    assert not decompress(bomb, 1 << 20, "zstd", "plane").any()


def test_a_million_empty_blocks_take_no_time() -> None:
    last = (5 << 3 | 1).to_bytes(3, "little") + b"plane"
    frame = plane(declaring(5, bytes(3_000_000) + last))
    began = time.process_time()
    assert bytes(decompress(frame, 5, "zstd", "plane")) == b"plane"
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("case", FRAMES)
def test_what_is_not_exactly_one_frame_of_the_declared_size(case: str) -> None:
    kind, size, data = FRAMES[case]
    with pytest.raises(DeltaSyncError, match="plane") as caught:
        decompress(plane(data), size, "zstd", "plane")
    assert caught.value.kind == kind


def test_an_empty_plane_takes_few_bytes() -> None:
    stored = compress(plane(b""), "zstd")
    assert decompress(stored, 0, "zstd", "plane").size == 0
    checked = zstandard.ZstdCompressor(write_checksum=True).compress(b"")
    assert decompress(plane(checked), 0, "zstd", "plane").size == 0
    with pytest.raises(LimitError, match="MAX_EMPTY_FRAME_BYTES"):
        decompress(plane(EMPTY + b"\x02\x00\x10x" * 1000), 0, "zstd", "plane")
