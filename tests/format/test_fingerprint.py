"""The model fingerprint: additive, position-sensitive, and the numbers that docs/FORMAT.md prints."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import reference
from vllm_delta_sync.errors import FormatError, TensorMismatchError
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_strided, fingerprint_tensor, tensor_seed

FORMAT = Path(__file__).parents[2] / "docs" / "FORMAT.md"
VALUES = st.integers(0, 2**64 - 1)


@given(VALUES, VALUES, VALUES, VALUES)
def test_fingerprints_form_a_group(a: int, b: int, c: int, d: int) -> None:
    one, two = Fingerprint(a, b), Fingerprint(c, d)
    assert one + two - two == one
    assert one + two == two + one
    assert one - one == Fingerprint()
    assert Fingerprint.from_hex(one.hex()) == one
    assert one.hex() == f"{b:016x}{a:016x}"


@pytest.mark.parametrize("text", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32, " " + "0" * 31, "٠" * 32])
def test_hex_has_one_spelling(text: str) -> None:
    with pytest.raises(FormatError, match="not 32 lower-case hex digits"):
        Fingerprint.from_hex(text)


FAR = st.sampled_from([0, 2**31 - 20, 2**32 - 20, 2**33 - 20, 2**47])


@given(st.sampled_from([8, 16, 32, 64]), st.data(), st.integers(0, 50), FAR)
def test_pieces_add_up_to_a_range(width: int, data: st.DataObject, cut: int, start: int) -> None:
    """Also one that begins far inside of a tensor."""
    values = data.draw(st.lists(st.integers(0, 2**width - 1), max_size=50))
    bits = np.array(values, f"<u{width // 8}")
    name, cut = "layers.0.weight", min(cut, bits.size)
    whole = fingerprint_tensor(name, bits, start)
    assert whole == fingerprint_tensor(name, bits[:cut], start) + fingerprint_tensor(name, bits[cut:], start + cut)
    assert (whole.low, whole.high) == reference.fingerprint(name, dict(enumerate(values, start)))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], tuple[int, list[int]], tuple[int, list[int]]]:
    """A shape, and two ways to lay its elements out: without overlap in memory, anyhow in the tensor."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    steps, reach = [0] * len(shape), 1
    for dim in draw(st.permutations(range(len(shape)))):
        steps[dim] = reach * draw(st.integers(1, 3))
        reach = steps[dim] * shape[dim]
    strides = [draw(st.integers(1, 2**40)) for _ in shape]
    return shape, (draw(st.integers(0, 5)), steps), (draw(st.integers(0, 2**45)), strides)


@given(boxes(), st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]))
def test_a_strided_box_follows_the_reference(
    box: tuple[list[int], tuple[int, list[int]], tuple[int, list[int]]], uint: type
) -> None:
    shape, (at, steps), (start, strides) = box
    bits: np.ndarray = np.random.default_rng(3).integers(0, np.iinfo(uint).max, 3**4 * 5**4 + 6, dtype=uint)
    expected = [0, 0]
    for point in itertools.product(*map(range, shape)):
        where = at + sum(c * step for c, step in zip(point, steps, strict=True))
        index = start + sum(c * stride for c, stride in zip(point, strides, strict=True))
        pair = reference.fingerprint("w", {index: int(bits[where])})
        expected = [(total + value) & reference.U64 for total, value in zip(expected, pair, strict=True)]
    assert fingerprint_strided("w", bits, shape, (at, steps), (start, strides)) == Fingerprint(*expected)


def test_an_empty_box_adds_nothing() -> None:
    bits = np.ones(4, np.uint16)
    assert fingerprint_strided("w", bits, (2, 0), (0, (1, 1)), (0, (1, 1))) == Fingerprint()
    assert fingerprint_tensor("w", bits[:0]) == Fingerprint()


@pytest.mark.parametrize("held", [(0, (3, 1)), (-1, (2, 1)), (1, (2, 1)), (0, (2, 0))])
def test_a_box_that_is_not_inside_its_array_is_refused(held: tuple[int, tuple[int, int]]) -> None:
    with pytest.raises(TensorMismatchError, match="'w': a box of shape"):
        fingerprint_strided("w", np.zeros(4, np.uint16), (2, 2), held, (0, (2, 1)))


def test_the_worked_example_of_the_specification() -> None:
    text = FORMAT.read_text()
    printed = dict(re.findall(r"^    (seed|low|high|fingerprint) += +([0-9a-fx]+)$", text, re.MULTILINE))
    name, bits = "model.norm.weight", np.array([0x3F80, 0x8000, 0x7FC1], np.uint16)
    found = fingerprint_tensor(name, bits)
    assert printed == {
        "seed": f"0x{tensor_seed(name):016x}",
        "low": f"0x{found.low:016x}",
        "high": f"0x{found.high:016x}",
        "fingerprint": found.hex(),
    }
