"""``TensorTable``: the checkpoint tensors that a run consists of, fixed for the whole run (``tensors.json``).

``DType``: element types by safetensors name, their integer views, and the values of their bit patterns.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.errors import FormatError, TensorMismatchError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.base_document import check_format_version, dump_canonical, load_canonical
from vllm_delta_sync.format.limits import check_limit


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


DRAFT_PREFIX = "draft."
"""Begins the names of tensors that are not of the served model's checkpoint, but of the one that drafts for it
(speculative decoding) and has a checkpoint of its own; what follows is their name there."""


@dataclass(frozen=True)
class TensorSpec:
    """Name (Hugging Face checkpoint name), dtype (safetensors name) and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.element.itemsize

    @property
    def element(self) -> DType:
        return dtype_of(self.dtype, f"tensor {self.name}")


class TensorTable:
    """All tensors of a run, ascending by the UTF-8 bytes of their names. A tensor id is a position in this order.

    Args:
        checks: False for parts of tensors that were checked, which have longer names and may be more: only duplicates
            are refused then.

    Raises:
        FormatError: a duplicate or malformed name, an unknown dtype.
        LimitError: a count, name, shape or size above its limit.
    """

    def __init__(self, specs: Iterable[TensorSpec], checks: bool = True) -> None:
        rows = list(specs)
        if checks:
            _check_specs(rows)
        self.specs = tuple(sorted(rows, key=lambda spec: spec.name.encode()))
        self._source: bytes | None = None
        self._index: dict[str, int] = {}
        for position, spec in enumerate(self.specs):
            if self._index.setdefault(spec.name, position) != position:
                raise FormatError(f"tensor table names {spec.name!r} twice")
        self.total = sum(spec.numel for spec in self.specs)
        self.full_bytes = sum(spec.nbytes for spec in self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.specs)

    def __getitem__(self, position: int) -> TensorSpec:
        return self.specs[position]

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def index(self, name: str) -> int:
        """Return the id of a tensor; raises TensorMismatchError if the run has none of that name."""
        try:
            return self._index[name]
        except KeyError:
            raise TensorMismatchError(
                f"tensor {name[:120]!r} is not in this run's tensor table of {len(self.specs)} tensors"
            ) from None

    def by_name(self, name: str) -> TensorSpec:
        """Return the spec of a tensor; raises TensorMismatchError as ``index`` does."""
        return self.specs[self.index(name)]

    def to_bytes(self) -> bytes:
        """Return the content of ``tensors.json``: the bytes that were parsed, or else its canonical JSON."""
        if self._source is not None:
            return self._source
        rows = [{"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in self.specs]
        return dump_canonical({"format_version": limits.FORMAT_VERSION, "tensors": rows})

    @cached_property
    def digest(self) -> str:
        return sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes) -> "TensorTable":
        """Parse ``tensors.json``.

        Raises:
            FormatError, LimitError: see the class; or rows are not in ascending order.
            UnsupportedError: written by a later release.
        """
        value = load_canonical(data, "tensors.json")
        if not isinstance(value, dict):
            raise FormatError("tensors.json is not a JSON object")
        check_format_version(value, "tensors.json")
        if not isinstance(value.get("tensors"), list):
            raise FormatError("tensors.json: field 'tensors' is missing or not a list")
        specs = [_parse_row(row) for row in value["tensors"]]
        table = cls(specs)
        if table.specs != tuple(specs):
            raise FormatError("tensors.json: rows are not in ascending order of name")
        table._source = data
        return table


def _parse_row(row: object) -> TensorSpec:
    if not isinstance(row, dict):
        raise FormatError("tensors.json: a row is not an object")
    name, dtype, shape = row.get("name"), row.get("dtype"), row.get("shape")
    if not isinstance(name, str) or not isinstance(dtype, str) or not isinstance(shape, list):
        raise FormatError(f"tensors.json: row {str(name)[:80]!r} lacks a name, dtype or shape of the right type")
    if not all(type(size) is int for size in shape):
        raise FormatError(f"tensors.json: shape of {name[:80]!r} has an entry that is not an integer")
    return TensorSpec(name, dtype, tuple(shape))


def _check_specs(rows: Sequence[TensorSpec]) -> None:
    check_limit("tensor table: number of tensors", len(rows), limits.MAX_TENSORS, "MAX_TENSORS")
    for spec in rows:
        _check_spec(spec)
    full_bytes = sum(spec.nbytes for spec in rows)
    check_limit("tensor table: bytes in all", full_bytes, limits.MAX_MODEL_BYTES, "MAX_MODEL_BYTES")


def _check_spec(spec: TensorSpec) -> None:
    shown = spec.name[:80]
    if not spec.name or spec.name.startswith("@") or spec.name == "__metadata__" or not spec.name.isprintable():
        raise FormatError(f"tensor name {shown!r} is empty, reserved, starts with '@' or is not printable")
    name_bytes = len(spec.name.encode())
    check_limit(f"tensor name {shown!r}: bytes", name_bytes, limits.MAX_TENSOR_NAME_BYTES, "MAX_TENSOR_NAME_BYTES")
    check_limit(f"{shown}: dimensions", len(spec.shape), limits.MAX_DIMENSIONS, "MAX_DIMENSIONS")
    for size in spec.shape:
        check_limit(f"{shown}: a dimension", size, limits.MAX_TENSOR_ELEMENTS, "MAX_TENSOR_ELEMENTS")
    check_limit(f"{shown}: elements", math.prod(spec.shape), limits.MAX_TENSOR_ELEMENTS, "MAX_TENSOR_ELEMENTS")
    dtype_of(spec.dtype, f"tensor {shown}")
