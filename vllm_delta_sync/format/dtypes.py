"""Element types by their safetensors name, and the integer view that the wire works on."""

from dataclasses import dataclass

import numpy as np

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


def _dtype(name: str, itemsize: int, is_float: bool) -> DType:
    return DType(name, itemsize, is_float, np.dtype(f"<u{itemsize}"))


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        _dtype("BF16", 2, True),
        _dtype("F16", 2, True),
        _dtype("F32", 4, True),
        _dtype("F64", 8, True),
        _dtype("F8_E4M3", 1, True),
        _dtype("F8_E5M2", 1, True),
        _dtype("F8_E8M0", 1, False),
        _dtype("I64", 8, False),
        _dtype("I32", 4, False),
        _dtype("I16", 2, False),
        _dtype("I8", 1, False),
        _dtype("U64", 8, False),
        _dtype("U32", 4, False),
        _dtype("U16", 2, False),
        _dtype("U8", 1, False),
        _dtype("BOOL", 1, False),
    )
}


def dtype_of(name: str, what: str) -> DType:
    """Look an element type up.

    Raises:
        FormatError: the name is not one of DTYPES.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise FormatError(f"{what}: dtype {name[:40]!r} is not one of {', '.join(DTYPES)}") from None
