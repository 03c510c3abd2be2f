"""Codec ``raw``: per tensor ``{name}.indices`` (I32 or I64, flat) and ``{name}.values`` (the tensor's dtype).

This is the layout of Hugging Face's 2026 description of sparse weight sync, for interchange and inspection.
"""

from itertools import groupby

import numpy as np

from vllm_delta_sync.errors import FormatError, TensorMismatchError, UsageError
from vllm_delta_sync.format.safetensors_file import Container, aligned
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import Sparse

INDICES = ".indices"
VALUES = ".values"
Arrays = dict[str, tuple[str, np.ndarray]]


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


def decode(container: Container, table: TensorTable, what: str) -> list[Sparse]:
    """Read and check every tensor (errors: see ``delta_reader.decode``); one group per dtype."""
    tensors = sorted(table.index(name) for name in _carried(table, container))
    groups = []
    by_dtype = sorted(tensors, key=lambda tensor: (table[tensor].dtype, tensor))
    for dtype, members in groupby(by_dtype, key=lambda tensor: table[tensor].dtype):
        groups.append(_decode_group(container, table, dtype, list(members), what))
    return groups


def _decode_group(container: Container, table: TensorTable, dtype: str, tensors: list[int], what: str) -> Sparse:
    from vllm_delta_sync.format import kernels

    positions, data = [], []
    for tensor in tensors:
        spec = table[tensor]
        indices, values = container.bits(spec.name + INDICES), container.bits(spec.name + VALUES)
        index_dtype = container.entries[spec.name + INDICES].dtype.name
        value_dtype = container.entries[spec.name + VALUES].dtype.name
        if value_dtype != dtype or index_dtype not in ("I32", "I64"):
            raise TensorMismatchError(
                f"{what}: {spec.name!r} has values {value_dtype} and indices {index_dtype}; {dtype} and I32 or I64 "
                "expected"
            )
        if indices.size != values.size or indices.size == 0:
            raise FormatError(f"{what}: {spec.name!r} has {indices.size} indices and {values.size} values")
        positions.append(indices.view("<i4" if index_dtype == "I32" else "<i8").astype(np.int64))
        data.append(values)
    counts = np.array([array.size for array in positions], np.int64)
    numels = np.array([table[tensor].numel for tensor in tensors], np.int64)
    joined = np.concatenate(positions)
    bad = kernels.first_not_ascending(joined, counts, numels)
    if bad >= 0:
        spec = table[tensors[bad]]
        raise FormatError(
            f"{what}: indices of {spec.name!r} are not strictly ascending inside its {spec.numel} elements"
        )
    return Sparse(dtype, np.array(tensors, np.uint32), counts, joined, aligned(np.concatenate(data)), relative=False)


def compile_decoder() -> None:
    """Compile the loop of ``decode`` now."""
    from vllm_delta_sync.format import kernels

    kernels.first_not_ascending(*[np.empty(0, np.int64)] * 3)


def entry_names(table: TensorTable, container: Container) -> set[str]:
    """Return exactly the entry names of the tensors that the container carries."""
    return {name + suffix for name in _carried(table, container) for suffix in (INDICES, VALUES)}


def _carried(table: TensorTable, container: Container) -> list[str]:
    names = (name.removesuffix(INDICES) for name in container.entries if name.endswith(INDICES) and name not in table)
    return [name for name in names if name in table]
