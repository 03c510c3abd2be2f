"""``trace``: find where every element of a converted tensor comes from.

Transformers 5 holds some weights in a different form from the checkpoint (experts stacked, gate and up fused).
``trace`` runs the model's own conversion back to the checkpoint once, on tensors without data, and records which
operations lead from which source to which result. Each publish replays the recording on the live parameters: it copies
nothing needlessly and never reads stale data. A conversion that computes new values instead of moving old ones is
refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.units import listed

aten = torch.ops.aten

# Copies and aliases: the result has the elements of the first argument at the same logical indices.
_SAME = {aten.clone, aten.detach, aten.alias, aten.contiguous, aten.lift_fresh, aten._to_copy}
# A new shape over the same elements in row-major order, whatever the layout in memory.
_RESHAPE = {aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten._reshape_copy, aten.view_copy}
# Moves between logical indices, independent of the layout in memory: safe to replay on another layout.
_MOVE = {
    aten.cat, aten.stack, aten.t, aten.transpose, aten.permute, aten.unsqueeze, aten.squeeze, aten.select,
    aten.slice, aten.narrow, aten.split, aten.split_with_sizes, aten.chunk, aten.unbind, aten.expand,
    aten.flip, aten.roll, aten.unfold, aten.diagonal, aten.movedim,
}  # fmt: skip
_KNOWN = _SAME | _RESHAPE | _MOVE


@dataclass(frozen=True, eq=False)
class _TracedSource:
    name: str

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True, eq=False)
class _TracedCall:
    """What ``op`` makes of its arguments, in which nodes stand for values. ``sources``: of all of them, each once."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sources: tuple[str, ...]


_Node = _TracedSource | _TracedCall


@dataclass(frozen=True)
class View:
    """A strided window into one source, relative to the first element of that source.

    Attributes:
        is_source: whether it is all of the source, in its own shape.
    """

    source: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_source: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def read(self, live: Mapping[str, torch.Tensor]) -> torch.Tensor:
        source = live[self.source]
        if self.is_source:
            return source
        return source.as_strided(self.shape, self.strides, source.storage_offset() + self.offset)


@dataclass(frozen=True)
class Replay:
    """A result that no single window describes, such as a concatenation: assembled again at each read."""

    node: _Node
    shape: tuple[int, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        return self.node.sources

    def read(self, live: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            value: torch.Tensor = _evaluate(self.node, live, {})
            return value


Route = View | Replay
"""How a checkpoint tensor is read from live sources: ``read`` takes detached sources by name."""


def trace(
    sources: Mapping[str, torch.Tensor],
    convert: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
) -> dict[str, Route]:
    """Record how ``convert`` makes its results from ``sources``.

    Args:
        sources: detached tensors by name; only their shapes, strides and dtypes are used.
        convert: takes tensors of the same names (on the meta device) and returns the results by name.

    Raises:
        ModelError: an operation computes values, casts, or writes in place, so that the results cannot be traced
            exactly; the message names the operation and the sources it was applied to.
    """
    stand_ins = {
        name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        for name, tensor in sources.items()
    }
    recorder = _CallRecorder(stand_ins)
    with torch.no_grad(), recorder:
        results = dict(convert(dict(stand_ins)))
    storages = {tensor.untyped_storage()._cdata: name for name, tensor in stand_ins.items()}
    cache: dict[_Node, Any] = {}
    routes: dict[str, Route] = {}
    for name, result in results.items():
        node = recorder.nodes.get(id(result))
        if node is None:
            raise ModelError(f"checkpoint tensor {name!r} does not come from a parameter, so it cannot be traced")
        with torch.no_grad():
            reached = _evaluate(node, stand_ins, cache)
        source = storages.get(reached.untyped_storage()._cdata)
        if source is None:
            routes[name] = Replay(node, tuple(result.shape))
            continue
        whole = stand_ins[source]
        is_source = (reached.shape, reached.stride()) == (whole.shape, whole.stride())
        routes[name] = View(source, tuple(reached.shape), reached.stride(), reached.storage_offset(), is_source)
    return routes


class _CallRecorder(TorchDispatchMode):
    def __init__(self, stand_ins: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.nodes: dict[int, _Node] = {}
        # Ids stay unique only while their tensors live.
        self._alive: list[torch.Tensor] = []
        for name, tensor in stand_ins.items():
            self._remember(tensor, _TracedSource(name))

    def _remember(self, tensor: torch.Tensor, node: _Node) -> None:
        self.nodes[id(tensor)] = node
        self._alive.append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        known = [self.nodes[id(leaf)] for leaf in inputs if id(leaf) in self.nodes]
        if not known:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            raise _untraceable(func, known, "writes in place")
        if len(known) != len(inputs):
            raise _untraceable(func, known, "mixes in a tensor that is not a parameter")
        result = func(*args, **kwargs)
        if func.overloadpacket not in _KNOWN or func is aten.view.dtype:
            raise _untraceable(func, known, "computes new values instead of moving old ones")
        if isinstance(result, torch.Tensor) and result.dtype != inputs[0].dtype:
            raise _untraceable(func, known, f"casts {inputs[0].dtype} to {result.dtype}")
        op = _first if func.overloadpacket in _SAME else _reshaped if func.overloadpacket in _RESHAPE else func
        nodes = tree_map_only(torch.Tensor, lambda tensor: self.nodes[id(tensor)], (args, kwargs))
        call = _TracedCall(op, nodes[0], nodes[1], _names(known))
        if isinstance(result, torch.Tensor):
            if id(result) not in self.nodes:
                self._remember(result, call)
        else:
            for index, tensor in enumerate(result):
                self._remember(tensor, _TracedCall(getitem, (call, index), {}, call.sources))
        return result


def _first(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _reshaped(tensor: torch.Tensor, size: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor.reshape(size)


def _names(nodes: list[_Node]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for node in nodes for name in node.sources))


def _untraceable(func: Any, known: list[_Node], reason: str) -> ModelError:
    return ModelError(
        f"the conversion of {listed(sorted(_names(known)))} to checkpoint form cannot be traced: operation {func} "
        f"{reason}; pass an iterable of (checkpoint name, tensor) instead"
    )


def _evaluate(node: _Node, live: Mapping[str, torch.Tensor], cache: dict[_Node, Any]) -> Any:
    """Return the value of a node on ``live`` sources: a view of them wherever one exists."""
    if isinstance(node, _TracedSource):
        return live[node.name]
    if node not in cache:
        args, kwargs = tree_map_only(
            (_TracedSource, _TracedCall), lambda inner: _evaluate(inner, live, cache), (node.args, node.kwargs)
        )
        cache[node] = node.op(*args, **kwargs)
    return cache[node]
