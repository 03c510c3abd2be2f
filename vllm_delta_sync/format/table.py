"""``TensorTable``: the checkpoint tensors that a run consists of, fixed for the whole run (``tensors.json``)."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from vllm_delta_sync.errors import FormatError, TensorMismatchError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.canonical_json import check_format_version, dump_canonical, load_canonical
from vllm_delta_sync.format.dtypes import DType, dtype_of
from vllm_delta_sync.format.limits import check_limit

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
