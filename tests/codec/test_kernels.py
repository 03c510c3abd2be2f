"""The compiled loops against the plain reference in tests/support/reference.py."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vllm_delta_sync
from tests.support import reference
from tests.support.differences import diff
from tests.support.running import run_python
from tests.support.samples import patterns
from vllm_delta_sync.format import kernels
from vllm_delta_sync.format.fingerprint import tensor_seed
from vllm_delta_sync.format.table import DTYPES, DType
from vllm_delta_sync.tensors import changes as wire_bits

DTYPE_NAMES = sorted(DTYPES)


def position_halves(positions: np.ndarray) -> np.ndarray:
    """The position half of the element hash, for each position in tensor "w"."""
    return np.array([kernels._premix(np.uint64(tensor_seed("w")), np.uint64(at)) for at in positions], np.uint64)


@st.composite
def two_versions(draw: st.DrawFn) -> tuple[DType, list[int], list[int]]:
    element = DTYPES[draw(st.sampled_from(DTYPE_NAMES))]
    old = draw(st.lists(patterns(element.name), max_size=40))
    new = [draw(patterns(element.name)) if draw(st.booleans()) else bits for bits in old]
    return element, old, new


@given(two_versions())
def test_diff_apply_revert_follow_the_reference(sample: tuple[DType, list[int], list[int]]) -> None:
    element, old, new = sample
    width = 8 * element.itemsize
    baseline, current = np.array(old, element.uint), np.array(new, element.uint)
    positions, distances, change = diff("w", element, baseline, current)
    expected = reference.diff(old, new, width, element.is_float)
    assert (positions.tolist(), distances.tolist()) == expected
    assert baseline.tolist() == new
    before = reference.fingerprint("w", dict(enumerate(old)))
    after = reference.fingerprint("w", dict(enumerate(new)))
    assert change.low == (after[0] - before[0]) & reference.U64
    assert change.high == (after[1] - before[1]) & reference.U64

    moved = np.array(old, element.uint)
    wire_bits.apply_distances(element, moved, positions, distances)
    assert moved.tolist() == new
    wire_bits.revert_distances(element, moved, positions, distances)
    assert moved.tolist() == old


@pytest.mark.parametrize("count", [kernels.PIECE - 1, kernels.PIECE, kernels.PIECE + 1, 3 * kernels.PIECE + 5])
@pytest.mark.parametrize("name", ["BF16", "I8", "F64"])
def test_loops_that_work_in_pieces_leave_nothing_out(name: str, count: int) -> None:
    element = DTYPES[name]
    random = np.random.default_rng(count)
    old = random.integers(0, 256, (3 * count, element.itemsize), dtype=np.uint8).view(element.uint)[:, 0]
    new = old.copy()
    new[1::3] ^= 1
    positions, distances, change = diff("w", element, old.copy(), new)
    assert positions.size == count
    premix = position_halves(positions)
    masks = wire_bits.order_masks(element)
    live, forth, back = old.copy(), (change.low, change.high), (-change.low % 2**64, -change.high % 2**64)
    for backwards, end, sums in ((False, new, forth), (True, old, back)):
        found = kernels.commit_relative(live, positions.astype(np.int32), distances, premix, *masks, backwards)
        assert tuple(map(int, found)) == sums
        assert np.array_equal(live, end)
        wire_bits.apply_distances(element, live, positions, distances)
        wire_bits.revert_distances(element, live, positions, distances)
        assert np.array_equal(live, end)
    values = new[positions]
    for end, held, sums in ((new, old, forth), (old, new, back)):
        assert tuple(map(int, kernels.exchange(live, positions, values, premix))) == sums
        assert np.array_equal(live, end)
        assert np.array_equal(values, held[positions])


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("name", ["BF16", "U8", "F64"])
def test_one_loop_commits_many_arrays_as_one_after_the_other(name: str, index: Any, relative: bool) -> None:
    element, random = DTYPES[name], np.random.default_rng(7)
    masks, changed = wire_bits.order_masks(element), (0, 1, kernels.PIECE, 3)
    arrays = []
    for count in changed:
        live, data = (random.integers(0, 200, size).astype(element.uint) for size in (500, count))
        positions = np.sort(random.choice(500, count, replace=False)).astype(index)
        arrays.append((live, positions, data, random.integers(0, 2**63, count).astype(np.uint64)))
    counts, sums = np.array(changed, np.int64), np.empty((len(changed), 2), np.uint64)
    for backwards in (False, True):
        expected = [tuple(array.copy() for array in one) for one in arrays]
        changes = [
            kernels.commit_relative(*one, *masks, backwards) if relative else kernels.exchange(*one) for one in expected
        ]
        pointers = np.array([[array.ctypes.data for array in one] for one in arrays], np.int64)
        no_index, no_bits = np.empty(0, index), np.empty(0, element.uint)
        kernels.commit_each(pointers, counts, no_index, no_bits, *masks, relative, backwards, sums)
        assert sums.tolist() == [list(map(int, change)) for change in changes]
        for one, other in zip(arrays, expected, strict=True):
            assert all(map(np.array_equal, one, other))


@pytest.mark.parametrize("name", ["BF16", "F16", "I16", "U16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"])
def test_order_is_a_bijection_of_every_pattern(name: str) -> None:
    element = DTYPES[name]
    width = 8 * element.itemsize
    every = np.arange(1 << width, dtype=np.uint64)
    all_bits = every.astype(element.uint)
    lowest = reference.moved(0, -reference.order_key(0, width, element.is_float), width, element.is_float)
    start = np.full(all_bits.size, lowest, element.uint)
    positions, ranks, _ = diff("w", element, start, all_bits)
    assert positions.size == all_bits.size - 1  # only the lowest itself stays
    assert ranks.tolist() == [
        reference.order_key(bits, width, element.is_float) for bits in all_bits[positions].tolist()
    ]
    walked = np.full(all_bits.size, lowest, element.uint)
    wire_bits.apply_distances(element, walked, every.astype(np.int64), all_bits)
    assert np.array_equal(np.sort(walked), all_bits)


@pytest.mark.parametrize(
    ("positions", "bad"),
    [([0, 1, 5], -1), ([0, 0, 5], 0), ([1, 0, 5], 0), ([-1, 0, 5], 0), ([0, 1, 9], 1), ([0, 9, 1], 0)],
)
def test_positions_must_ascend_inside_their_tensor(positions: list[int], bad: int) -> None:
    counts, numels = np.array([2, 1], np.int64), np.array([9, 9], np.int64)
    assert kernels.first_not_ascending(np.array(positions, np.int64), counts, numels) == bad


def test_indices_beyond_32_bits_hash_as_themselves() -> None:
    positions = np.array([5, 2**32 + 5, 2**47], np.int64)
    old, new = np.array([1, 1, 1], np.uint16), np.array([2, 2, 2], np.uint16)
    low, high = kernels.fingerprint_change(positions, old, new, np.uint64(reference.seed("big")))
    before = reference.fingerprint("big", dict(zip(positions.tolist(), [1, 1, 1], strict=True)))
    after = reference.fingerprint("big", dict(zip(positions.tolist(), [2, 2, 2], strict=True)))
    assert int(low) == (after[0] - before[0]) & reference.U64
    assert int(high) == (after[1] - before[1]) & reference.U64


@pytest.mark.parametrize("writable", [False, True])
def test_compiled_code_needs_no_place_to_be_kept(writable: bool, tmp_path: Path) -> None:
    """A copy of the package where ``__pycache__`` cannot be made, run by a user without a usable home."""
    copy = tmp_path / "packages" / "vllm_delta_sync"
    original = Path(vllm_delta_sync.__file__).parent
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "format" / "__pycache__").write_text("a file, so that no directory can be made here")
    cache = tmp_path / "cache"
    nowhere = "/proc/nope"
    code = (
        "import numpy as np\n"
        "from vllm_delta_sync.format import kernels\n"
        "print(kernels.__file__, kernels.first_not_ascending(*np.arange(3)[:, None]))\n"
    )
    environment = {
        "HOME": nowhere, "XDG_CACHE_HOME": nowhere, "NUMBA_CACHE_DIR": str(cache) if writable else nowhere,
        "PYTHONPATH": str(copy.parent),
    }  # fmt: skip
    done = run_python("-B", "-P", "-c", code, environment=environment)
    assert done.stdout == f"{copy / 'format' / 'kernels.py'} -1\n"
    assert bool(list(cache.rglob("kernels.first_not_ascending*.nbc"))) == writable
    lines = done.stderr.splitlines()
    assert len(lines) == (0 if writable else 1), done.stderr
    assert all("no locator available" in line and "set NUMBA_CACHE_DIR" in line for line in lines)


def test_compiled_code_that_cannot_be_kept_or_read_is_compiled_anew(tmp_path: Path) -> None:
    """With a full disk, as its limit of file sizes stands for here, and with files that a power failure has emptied."""

    def run(limit: str = "resource.RLIM_INFINITY") -> str:
        code = (
            f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
            "import numpy as np\n"
            "from vllm_delta_sync.format import kernels\n"
            "kernels.first_not_ascending(*np.arange(3)[:, None])\n"
            "kernels.fingerprint_range(np.zeros(1, np.uint8), np.int64(0), np.uint64(0))\n"
            "loops = kernels.first_not_ascending, kernels.fingerprint_range\n"
            "print(*(sum(loop.stats.cache_hits.values()) for loop in loops), end=' ')\n"
        )
        done = run_python("-c", code, environment={"NUMBA_CACHE_DIR": str(tmp_path)})
        return done.stdout + done.stderr

    full = run("4096")
    assert full.startswith("0 0 each process compiles its loops again, which takes seconds: File too large")
    assert (full.count("\n"), str(tmp_path) in full) == (1, True)
    assert (run(), run()) == ("0 0 ", "1 1 ")
    for file in (*tmp_path.rglob("*first_not_ascending*.nbi"), *tmp_path.rglob("*fingerprint_range*.nbc")):
        file.write_bytes(b"")
    assert (run(), run()) == ("0 0 ", "1 1 ")
