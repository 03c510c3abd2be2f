"""Change detection on the host: one pass over live tensors, against whole-array operations of numpy and torch."""

import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.detection import NAME, Difference, check, compared, disturbed, expected, served, tensor_of
from tests.support.differences import diff
from trainer_side.diff import engine, reader
from trainer_side.diff.buffers import HostBuffer
from trainer_side.diff.change_log import ChangeLog
from trainer_side.diff.engine import Detector, SmallTensor
from trainer_side.diff.reader import boxes, host_bits, nan_pattern
from vllm_delta_sync.format.table import DTYPES, TensorSpec, TensorTable
from vllm_delta_sync.tensors import changes as wire_bits
from vllm_delta_sync.tensors import diff_kernels
from vllm_delta_sync.tensors.changes import CHUNK_ELEMENTS
from vllm_delta_sync.tensors.segments import CHUNKS, ROOM
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES

SPECIAL = [0, 1, 0x7F, 0x7F7F, 0x3F80, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF, 0x0080, 0x4000]


@pytest.fixture
def detector() -> Iterator[Detector]:
    detector = Detector(3)
    yield detector
    detector.close()


@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2", "I8", "BOOL"])
def test_every_pattern_of_8_bits_to_every_other(name: str) -> None:
    old, new = (np.ascontiguousarray(axis.reshape(-1)) for axis in np.meshgrid(*2 * [np.arange(256, dtype=np.uint8)]))
    check(name, old, tensor_of(name, new))


@pytest.mark.parametrize("name", ["BF16", "F16", "U16"])
def test_every_pattern_of_16_bits_to_some_others(name: str) -> None:
    old = np.arange(1 << 16, dtype=np.uint16)
    for special in SPECIAL:
        for new in (np.full_like(old, special), np.full_like(old, special | 0x8000), old ^ np.uint16(special)):
            check(name, old, tensor_of(name, new))
    check(name, old, tensor_of(name, np.random.default_rng(0).permutation(old)))


@pytest.mark.parametrize("name", ["F32", "F64", "I64"])
def test_wide_patterns(name: str) -> None:
    element = DTYPES[name]
    shift = 8 * element.itemsize - 16
    ends = [0, 1, (1 << shift) - 1]
    patterns = [(special | sign) << shift | end for special in SPECIAL for sign in (0, 0x8000) for end in ends]
    old, new = np.meshgrid(*2 * [np.array(patterns, element.uint)])
    check(name, np.ascontiguousarray(old.reshape(-1)), tensor_of(name, np.ascontiguousarray(new.reshape(-1))))


def test_rounding_is_that_of_torch_for_every_upper_half() -> None:
    """NaN payloads, signed zeros, subnormals, ties to even and carries into the exponent."""
    assert nan_pattern() is not None
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = (upper[:, None] | lower).reshape(-1)
    live = torch.from_numpy(bits.view(np.int32)).view(torch.float32)
    check("BF16", np.repeat(np.arange(1 << 16, dtype=np.uint16), lower.size), live)
    assert np.array_equal(host_bits(live, "BF16"), served(live, "BF16"))


@pytest.mark.parametrize("size", [*range(1, 20), 63, 64, 65, 127, 128, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS + 1])
def test_no_size_leaves_anything_out(size: int) -> None:
    live = torch.randn(size)
    live[::3] = float("nan")
    for dtype in ("BF16", "F32"):
        new = served(live, dtype)
        check(dtype, new.copy(), live)
        check(dtype, ~new, live)
        for only in {0, size // 2, size - 1}:
            old = new.copy()
            old[only] ^= 1
            check(dtype, old, live)


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    def values(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)

    return {
        "scalar": values(),
        "empty": values(3, 0),
        "transposed": values(70, 90).t(),
        "transposed, long": values(5, 40_000).t(),
        "every second": values(80_000)[::2],
        "columns": values(40, 50)[:, 3:40:3],
        "expanded": values(1, 300).expand(200, 300),
        "permuted": values(6, 70, 80).permute(0, 2, 1),
        "small planes": values(7, 9, 700).permute(2, 0, 1),
        "offset": values(1000)[13:],
    }


@pytest.mark.parametrize("layout", sorted(layouts(torch.float32)))
@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (torch.float32, "BF16"), (torch.bfloat16, "BF16"), (torch.float32, "F16"), (torch.float16, "F16"),
        (torch.float64, "BF16"), (torch.bfloat16, "F32"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.bool, "BOOL"),
    ],
)  # fmt: skip
def test_layouts_and_conversions(
    given: torch.dtype, dtype: str, layout: str, monkeypatch: pytest.MonkeyPatch, detector: Detector
) -> None:
    monkeypatch.setattr(reader, "GATHER_ELEMENTS", 10_000)
    monkeypatch.setattr(engine, "PARALLEL_ELEMENTS", 1000)
    live = layouts(given)[layout]
    old = disturbed(served(live, dtype), 0.05)
    check(dtype, old, live, detector)
    assert np.array_equal(host_bits(live, dtype), served(live, dtype))


@given(st.lists(st.integers(0, 7), max_size=5), st.integers(1, 40))
def test_boxes_make_up_the_shape(shape: list[int], most: int) -> None:
    flat = np.arange(math.prod(shape)).reshape(shape)
    following = 0
    for start, index in boxes(tuple(shape), most):
        box = flat[index].reshape(-1)
        assert 1 <= box.size <= most
        assert start == following
        assert box.tolist() == list(range(start, start + box.size))
        following += box.size
    assert following == flat.size


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32, torch.float64])
def test_more_than_there_is_room_for(given: torch.dtype, share: float) -> None:
    live = torch.randn(2 * ROOM + 777, generator=torch.Generator().manual_seed(0)).to(given)
    check("BF16", disturbed(served(live, "BF16"), share), live)


def test_more_chunks_than_there_is_room_for() -> None:
    old = np.zeros((CHUNKS + 1) * CHUNK_ELEMENTS + 3, np.uint8)
    new = old.copy()
    new[:: CHUNK_ELEMENTS // 2] = 9
    new[-1] = 3
    check("U8", old, torch.from_numpy(new))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32, torch.float16])
def test_any_count_of_threads_finds_the_same(given: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "PARALLEL_ELEMENTS", 1)
    detector = Detector(threads)
    try:
        for size in (1, 3, 4097, 300_001):
            live = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(given)
            check("BF16", disturbed(served(live, "BF16"), 0.02), live, detector)
    finally:
        detector.close()


def test_a_failing_helper_fails_the_comparison(detector: Detector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "PARALLEL_ELEMENTS", 1)
    old = np.zeros(3 * CHUNK_ELEMENTS, np.uint16)
    held, found = HostBuffer(old.copy()), ChangeLog(DTYPES["U16"])
    read = reader.Reader.read

    def failing(self: Any, box: torch.Tensor, dtype: str) -> Any:
        if threading.current_thread().name == "delta-sync-diff-2":
            raise MemoryError
        return read(self, box, dtype)

    monkeypatch.setattr(reader.Reader, "read", failing)
    live = torch.ones(old.size, dtype=torch.uint16)
    with pytest.raises(MemoryError):
        detector.collect(TensorSpec(NAME, "U16", (old.size,)), held, live, found)
    assert held.bits.any()
    detector.wait_idle()
    found.revert(held)
    assert not held.bits.any()


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
def test_weights_that_move_meanwhile_are_noted_as_they_were_stored(
    given: torch.dtype, detector: Detector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was in the baseline, moved by the distances, is what is there now; whatever that is."""
    monkeypatch.setattr(engine, "PARALLEL_ELEMENTS", 1)
    live = torch.zeros(300_000, dtype=given)
    over = threading.Event()

    def train() -> None:
        while not over.is_set():
            live.add_(1.0)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        held = HostBuffer(served(torch.zeros(live.shape), "BF16"))
        for _ in range(3):
            before = held.bits.copy()
            found, difference = compared("BF16", held, live, detector)
            moved = before.copy()
            for positions, distances in found.pieces():
                assert distances.all()
                wire_bits.apply_distances(DTYPES["BF16"], moved, positions, distances)
            assert np.array_equal(moved, held.bits)
            assert difference.fingerprint == expected("BF16", before, held.bits).fingerprint
    finally:
        over.set()
        thread.join()


SMALL_SIZES = [1, 63, 64, 65, 4097, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, 3, 2 * ROOM, 5, 300_001]


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F64", "U8"])
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_small_tensors_are_compared_in_one_call(dtype: str, share: float) -> None:
    """Also where all elements change, so that there is no room for the changes of all in one array."""
    detector, element = Detector(), DTYPES[dtype]
    random = np.random.default_rng(0)
    specs = [TensorSpec(f"tensor {number}", dtype, (size,)) for number, size in enumerate(SMALL_SIZES)]
    olds = [random.integers(0, 255, size).astype(element.uint) for size in SMALL_SIZES]
    news = [np.where(random.random(old.size) < share, old ^ element.uint.type(1), old) for old in olds]
    for _ in range(2):
        buffers, logs = [HostBuffer(old.copy()) for old in olds], [ChangeLog(element) for _ in olds]
        lives = [tensor_of(dtype, new) for new in news]
        small = [SmallTensor.of(*each) for each in zip(specs, buffers, lives, strict=True)]
        changes = detector.collect_each([tensor for tensor in small if tensor is not None], logs)
        for spec, old, new, buffer, log, change in zip(specs, olds, news, buffers, logs, changes, strict=True):
            wanted = diff(spec.name, element, old.copy(), new)
            assert Difference.of(log, change) == Difference(wanted[0].tolist(), wanted[1].tolist(), wanted[2])
            assert np.array_equal(buffer.bits, new)
            log.revert(buffer)
            assert np.array_equal(buffer.bits, old)


@pytest.mark.parametrize("calls", [1, 2, 5])
def test_small_tensors_can_be_put_back_after_any_call(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt just after the loop has returned, before anything is done with what it found."""
    loop, made = diff_kernels.collect_each, 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal made
        found, made = loop(*arguments), made + 1
        if made == calls:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(diff_kernels, "collect_each", interrupted)
    buffers = [HostBuffer(np.zeros(size, np.uint16)) for size in SMALL_SIZES]
    logs = [ChangeLog(DTYPES["U16"]) for _ in buffers]
    small = [
        SmallTensor(TensorSpec(f"tensor {size}", "U16", (size,)), buffer, torch.ones(size, dtype=torch.uint16))
        for size, buffer in zip(SMALL_SIZES, buffers, strict=True)
    ]
    with pytest.raises(KeyboardInterrupt):
        Detector().collect_each(small, logs)
    assert any(buffer.bits.any() for buffer in buffers)
    for log, buffer in zip(logs, buffers, strict=True):
        log.revert(buffer)
    assert not any(buffer.bits.any() for buffer in buffers)


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3"])
def test_everything_is_compiled_before_the_first_comparison(dtype: str) -> None:
    table = TensorTable([TensorSpec("a", dtype, (3,))])
    engine.compile_kernels(table)
    loops = (
        *(diff_kernels.collect, diff_kernels.collect_rounded, diff_kernels.gather, diff_kernels.expand),
        diff_kernels.collect_each,
    )
    compiled = [len(loop.signatures) for loop in loops]
    for live in (torch.randn(50, 60), torch.randn(50, 60).t(), torch.randn(3000)[::2], torch.randn(4000)[1:]):
        served_live = live if dtype != "F8_E4M3" else live.to(TORCH_DTYPES[dtype])
        found, _ = compared(dtype, HostBuffer(~served(served_live, dtype)), served_live, Detector())
        assert sum(positions.size for positions, _ in found.pieces()) == found.size
    zeros = torch.zeros(4, dtype=TORCH_DTYPES[dtype])
    held = HostBuffer(~served(zeros, dtype))
    small = SmallTensor(TensorSpec(NAME, dtype, (4,)), held, zeros)
    Detector().collect_each([small], [ChangeLog(DTYPES[dtype])])
    assert held.bits.tolist() == [0] * 4
    assert [len(loop.signatures) for loop in loops] == compiled


def test_a_live_tensor_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed float32 masters of 64 MB go through scratch of a few."""
    made: list[int] = []
    empty = torch.empty

    def counting(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*arguments, **options)
        made.append(tensor.numel() * tensor.element_size())
        return tensor

    live = torch.zeros(4000, 4000).t()
    held = HostBuffer(np.zeros(live.numel(), np.uint16))
    monkeypatch.setattr(torch, "empty", counting)
    compared("BF16", held, live, Detector())
    assert sum(made) <= 8 * reader.GATHER_ELEMENTS
