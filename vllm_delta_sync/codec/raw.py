"""Codec ``raw``: per tensor ``{name}.indices`` (I32 or I64, flat) and ``{name}.values`` (the tensor's dtype).

This is the layout of Hugging Face's 2026 description of sparse weight sync, for interchange and inspection.
"""

import numpy as np

from vllm_delta_sync.codec.delta_object import Arrays, Directory
from vllm_delta_sync.errors import FormatError, TensorMismatchError, UsageError
from vllm_delta_sync.format.safetensors_file import Container, aligned
from vllm_delta_sync.format.table import DTYPES, TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import BaseLookup, Sparse

INDICES = ".indices"
VALUES = ".values"


def encode(groups: list[Sparse], table: TensorTable) -> Arrays:
    """Return the container entries of absolute groups; raises UsageError if the table has a tensor named like one."""
    clash = next(
        (
            s.name
            for s in table
            if s.name.removesuffix(INDICES).removesuffix(VALUES) in table and s.name.endswith((INDICES, VALUES))
        ),
        None,
    )
    if clash is not None:
        raise UsageError(f"codec 'raw' cannot carry a model with a tensor named {clash!r}; use codec='plain'")
    arrays: Arrays = {}
    for group in groups:
        for tensor, positions, values in group.tensors():
            spec = table[tensor]
            name, dtype = index_type(spec)
            arrays[spec.name + INDICES] = (name, positions.astype(dtype))
            arrays[spec.name + VALUES] = (spec.dtype, values)
    return arrays


def index_type(spec: TensorSpec) -> tuple[str, str]:
    """Return the dtype of a tensor's indices, as safetensors and as numpy name it."""
    return ("I32", "<i4") if spec.numel <= np.iinfo(np.int32).max else ("I64", "<i8")


def open_readers(container: Container, table: TensorTable, old: BaseLookup | None, what: str) -> list["RawReader"]:
    """Return a reader of the changed elements of each dtype. Raises as ``RawReader``."""
    tensors = [table.index(name) for name in _carried(table, container)]
    dtypes = sorted({table[tensor].dtype for tensor in tensors})
    return [
        RawReader(
            container, table, dtype, sorted(tensor for tensor in tensors if table[tensor].dtype == dtype), old, what
        )
        for dtype in dtypes
    ]


class RawReader:
    """Reads the changed elements of one dtype, tensor by tensor in ascending order of id.

    Args:
        tensors: their ids, ascending. old: tells which parts of tensors are wanted; None for all.

    Attributes:
        dtype: of its tensors. directory: its tensors. row: index of the first tensor not taken yet.

    Raises:
        TensorMismatchError: a tensor has another dtype. FormatError: the entries of a tensor do not fit each other.
    """

    def __init__(
        self, container: Container, table: TensorTable, dtype: str, tensors: list[int], old: BaseLookup | None,
        what: str,
    ) -> None:  # fmt: skip
        self.dtype, self.row = dtype, 0
        self._container, self._table, self._old, self._what = container, table, old, what
        counts = []
        for tensor in tensors:
            name = table[tensor].name
            indices, values = (container.bits(name + suffix) for suffix in (INDICES, VALUES))
            found = container.entries[name + INDICES].dtype.name, container.entries[name + VALUES].dtype.name
            if found[0] not in ("I32", "I64") or found[1] != dtype:
                raise TensorMismatchError(
                    f"{what}: {name!r} has values {found[1]} and indices {found[0]}; {dtype} and I32 or I64 expected"
                )
            if indices.size != values.size or indices.size == 0:
                raise FormatError(f"{what}: {name!r} has {indices.size} indices and {values.size} values")
            counts.append(indices.size)
        numels = np.array([table[tensor].numel for tensor in tensors], np.int64)
        self.directory = Directory(np.array(tensors, np.uint32), np.array(counts, np.int64), numels)

    def take(self, last: int) -> Sparse:
        """Return changed elements of the tensors from ``row`` up to row ``last``, excluded.

        Raises:
            FormatError: positions do not ascend, or are outside their tensor.
        """
        from vllm_delta_sync.format import kernels

        rows, self.row = slice(self.row, last), last
        old = self._old
        held = [old is None or old(int(tensor)).rectangles != () for tensor in self.directory.ids[rows]]
        tensors = self.directory.ids[rows][held]
        specs = [self._table[tensor] for tensor in tensors.tolist()]
        positions, data = [np.empty(0, np.int64)], [np.empty(0, DTYPES[self.dtype].uint)]
        for spec in specs:
            wide = self._container.entries[spec.name + INDICES].dtype.name == "I64"
            positions.append(self._container.bits(spec.name + INDICES).view("<i8" if wide else "<i4").astype(np.int64))
            data.append(self._container.bits(spec.name + VALUES))
        joined, counts = np.concatenate(positions), self.directory.counts[rows][held]
        bad = kernels.first_not_ascending(joined, counts, self.directory.numels[rows][held])
        if bad >= 0:
            raise FormatError(
                f"{self._what}: indices of {specs[bad].name!r} are not strictly ascending inside its "
                f"{specs[bad].numel} elements"
            )
        return Sparse(self.dtype, tensors, counts, joined, aligned(np.concatenate(data)), relative=False)


def compile_decoder() -> None:
    """Compile the loop of ``RawReader`` now."""
    from vllm_delta_sync.format import kernels

    kernels.first_not_ascending(*[np.empty(0, np.int64)] * 3)


def entry_names(table: TensorTable, container: Container) -> set[str]:
    """Return exactly the entry names of the tensors that the container carries."""
    return {name + suffix for name in _carried(table, container) for suffix in (INDICES, VALUES)}


def _carried(table: TensorTable, container: Container) -> list[str]:
    names = (name.removesuffix(INDICES) for name in container.entries if name.endswith(INDICES) and name not in table)
    return [name for name in names if name in table]
