"""``DType``: element types by safetensors name, their integer views, and the values of their bit patterns."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.errors import FormatError


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: safetensors name, such as ``BF16``.
        itemsize: bytes per element.
        is_float: sign and magnitude; decides the monotone order of bit patterns (docs/FORMAT.md, ULP distance).
        uint: unsigned numpy dtype of the same width, little-endian.
    """

    name: str
    itemsize: int
    is_float: bool
    uint: "np.dtype[np.unsignedinteger]"


DTYPES: dict[str, DType] = {
    name: DType(name, itemsize, is_float, np.dtype(f"<u{itemsize}"))
    for name, itemsize, is_float in (
        ("BF16", 2, True),
        ("F16", 2, True),
        ("F32", 4, True),
        ("F64", 8, True),
        ("F8_E4M3", 1, True),
        ("F8_E5M2", 1, True),
        ("F8_E8M0", 1, False),
        ("I64", 8, False),
        ("I32", 4, False),
        ("I16", 2, False),
        ("I8", 1, False),
        ("U64", 8, False),
        ("U32", 4, False),
        ("U16", 2, False),
        ("U8", 1, False),
        ("BOOL", 1, False),
    )
}


def dtype_of(name: str, what: str) -> DType:
    """Return an element type by name; raises FormatError if it is not one of DTYPES."""
    try:
        return DTYPES[name]
    except KeyError:
        raise FormatError(f"{what}: dtype {name[:40]!r} is not one of {', '.join(DTYPES)}") from None


Values = npt.NDArray[np.float64]

# A pattern with all these bits set is NaN or infinite; E4M3 and E8M0 have no infinity.
_NONFINITE: dict[str, int] = {
    "BF16": 0x7F80,
    "F16": 0x7C00,
    "F32": 0x7F80_0000,
    "F64": 0x7FF0 << 48,
    "F8_E4M3": 0x7F,
    "F8_E5M2": 0x7C,
    "F8_E8M0": 0xFF,
}
_NUMPY: dict[str, str] = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


def has_values(element: DType) -> bool:
    """Return whether the dtype is a floating-point type, with patterns that are not finite."""
    return element.name in _NONFINITE


def count_nonfinite(element: DType, bits: npt.NDArray[np.unsignedinteger]) -> int:
    """Return the number of NaN or infinite patterns in ``bits`` (n,); 0 for integers."""
    if element.name not in _NONFINITE:
        return 0
    mask = element.uint.type(_NONFINITE[element.name])
    return int(np.count_nonzero((bits & mask) == mask))


def values_of(element: DType, bits: npt.NDArray[np.unsignedinteger]) -> Values:
    """Return the exact values of ``bits`` (n,) of a floating-point dtype, as (n,) float64."""
    # numpy warns when it converts a signaling NaN.
    with np.errstate(invalid="ignore"):
        if element.name == "BF16":
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        if element.name in _NUMPY:
            return bits.view(_NUMPY[element.name]).astype(np.float64)
    return _table(element.name)[bits]


@cache
def _table(name: str) -> Values:
    """Return the value of each pattern of an 8-bit dtype."""
    patterns = np.arange(256)
    if name == "F8_E8M0":
        return np.where(patterns == 0xFF, np.nan, np.ldexp(1.0, patterns - 127))
    exponent_bits, bias = (4, 7) if name == "F8_E4M3" else (5, 15)
    fraction_bits = 7 - exponent_bits
    fraction = (patterns & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    exponent = (patterns >> fraction_bits) & ((1 << exponent_bits) - 1)
    size = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), np.ldexp(1 + fraction, exponent - bias))
    top = patterns & 0x7F
    if name == "F8_E4M3":
        size = np.where(top == 0x7F, np.nan, size)
    else:
        size = np.where(top == 0x7C, np.inf, np.where(top > 0x7C, np.nan, size))
    return np.where(patterns & 0x80, -size, size)
