"""Proof and rescan for ``benchmarks.apply``: hashing weights where they lie, against reading the same bytes once."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import numba
import numpy as np
import torch
from torch import nn

from benchmarks.apply.change import bits_of, read_checkpoint, table_of
from benchmarks.common.rows import Row, row
from benchmarks.common.timing import Method, time_all
from vllm_delta_sync.engine.model.route_compiler import trace_routes
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor

if TYPE_CHECKING:
    from benchmarks.apply.measure import Subject

BENCH = "apply"
RANKS = 2
ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")
"""Linear layers that tensor parallelism cuts by columns: each rank holds a part of every row."""
READ = "one read of the same bytes"


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def read_words(words: np.ndarray) -> np.uint64:
    total = np.uint64(0)
    for i in range(words.size):
        total ^= words[i]
    return total


class RowParallelSlices(nn.Module):
    """What rank 0 of RANKS holds of the row-parallel layers, loaded as vLLM's ``RowParallelLinear`` does it."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._names = {name: name.replace(".", "_") for name in tensors}
        for name, tensor in tensors.items():
            rows, columns = tensor.shape
            cut = torch.empty(rows, columns // RANKS, dtype=tensor.dtype)
            self.register_parameter(self._names[name], nn.Parameter(cut, requires_grad=False))
        self.load_weights(tensors.items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            parameter = self.get_parameter(self._names[name])
            parameter.data.copy_(tensor.narrow(1, 0, parameter.shape[1]))


def measure_proof(subject: "Subject", turns: tuple[int, int], sliced: bool) -> list[Row]:
    """Rows of one model: all of it on one rank; if ``sliced``, what row-parallel layers have of it on one of two."""
    tensors = read_checkpoint(subject.folder)
    found = {"TP 1": (subject.model, subject.routes)}
    cut = {name: tensor for name, tensor in tensors.items() if name.endswith(ROW_PARALLEL)}
    if sliced:
        slices = RowParallelSlices(cut)
        found[f"row-parallel slices of TP {RANKS}"] = (slices, trace_routes(slices, table_of(cut)))
    _check(tensors, found)
    rows: list[Row] = []
    for layout, (model, routes) in found.items():
        methods = [
            Method("trace", partial(trace_routes, model, routes.table), 0),
            Method("proof", partial(_prove, routes), 0),
            Method("rescan", partial(_rescan, routes), 0),
            Method(READ, partial(_read, routes), 0),
        ]
        for method in methods:
            method.run()
        time_all(methods, lambda: None, *turns)
        case = f"{subject.name} {layout}"
        seconds = {method.name: method.seconds for method in methods}
        hashed = sum(route.target.numel for of_tensor in routes.routes for route in of_tensor)
        rows.append(row(BENCH, case, "hashed", hashed, "elements"))
        rows += [row(BENCH, case, name, 1e3 * value, "ms") for name, value in seconds.items()]
        rows.append(row(BENCH, case, "disturbance", max(method.disturbance for method in methods), "x"))
        rows += [
            row(BENCH, f"{case}, {name}", "ratio", seconds[name] / seconds[READ], "x", READ)
            for name in ("proof", "rescan")
        ]
    return rows


def _prove(routes: RouteMap) -> list[list[str]]:
    return [[value.hex() for value in found] for found in routes.fingerprint_routes(range(len(routes.table)))]


def _rescan(routes: RouteMap) -> dict[int, list[Fingerprint]]:
    return routes.measure(range(len(routes.table)))


def _read(routes: RouteMap) -> None:
    for of_tensor in routes.routes:
        for route in of_tensor:
            bits = routes.destinations[route.destination].bits
            held = bits[route.target.offset : route.target.offset + route.target.numel]
            read_words(held[: held.size - held.size % 4].view(np.uint64))


def _check(tensors: dict[str, torch.Tensor], found: dict[str, tuple[nn.Module, RouteMap]]) -> None:
    """What is hashed is the checkpoint's own fingerprint, of the whole or of the columns held."""
    for model, routes in found.values():
        for spec, held in zip(routes.table, routes.fingerprint_routes(range(len(routes.table))), strict=True):
            whole = bits_of(tensors[spec.name])
            expected = fingerprint_tensor(spec.name, whole)
            if isinstance(model, RowParallelSlices):
                rows, columns = tensors[spec.name].shape
                rest = whole.reshape(rows, columns)[:, columns // RANKS :]
                starts = [line * columns + columns // RANKS for line in range(rows)]
                parts = (
                    fingerprint_tensor(spec.name, np.ascontiguousarray(line), start)
                    for line, start in zip(rest, starts, strict=True)
                )
                expected -= sum(parts, Fingerprint())
            if sum(held, Fingerprint()) != expected:
                raise SystemExit(f"{spec.name}: what is hashed is not what was loaded")
