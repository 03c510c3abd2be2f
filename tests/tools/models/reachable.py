"""Every tensor that a model can compute with, by path, and whether two models hold the same bits.

Weights do not only live in parameters: vLLM keeps absorbed projections, scales and packed copies as plain attributes of
modules, on objects that hang on modules (quantization methods, attention implementations), in lists, and in closures.
"""

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

EXCLUDED = {
    "kv_cache": "keys and values of requests",
    "static_forward_context": "the configuration's list of the same layers",
}
"""Attribute names that are left out: they are no function of weights, or lead to what is reached otherwise."""
_ATOMS = (str, bytes, int, float, bool, type(None), type, types.ModuleType, torch.dtype, torch.device, torch.Size)
_DEPTH = 40


def reachable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that lead from a model: parameters, buffers, and whatever attributes, containers and closures hold.

    Returns:
        path → tensor; one that is reached by several paths has all of them, so that ties are compared too.
    """
    found: dict[str, torch.Tensor] = {}
    # By address, and kept: that of something made on access would be used again.
    seen: dict[int, Any] = {}
    waiting: list[tuple[str, Any, int]] = [("", model, 0)]
    while waiting:
        path, value, depth = waiting.pop()
        if isinstance(value, torch.Tensor):
            found[path] = value
        elif not isinstance(value, _ATOMS) and id(value) not in seen and depth < _DEPTH:
            seen[id(value)] = value
            waiting += [(f"{path}.{name}".lstrip("."), inner, depth + 1) for name, inner in _inside(value)]
    return found


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Named parts of an object, in an order that does not depend on where it lies in memory."""
    if isinstance(value, dict):
        yield from ((str(key), inner) for key, inner in value.items() if str(key) not in EXCLUDED)
        return
    if isinstance(value, list | tuple):
        yield from ((str(position), inner) for position, inner in enumerate(value))
        return
    if isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    if isinstance(value, types.MethodType):
        yield "self", value.__self__
        value = value.__func__
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            try:
                yield name, cell.cell_contents
            except ValueError:  # a cell that is not filled
                continue
    # Modules hold parameters, buffers and children in dictionaries of their own: paths are as state_dict has them.
    for name, inner in getattr(value, "__dict__", {}).items():
        if name in ("_parameters", "_buffers", "_modules"):
            yield from ((key, each) for key, each in inner.items() if key not in EXCLUDED)
        elif name not in EXCLUDED:
            yield name, inner
    for name in (slot for cls in type(value).__mro__ for slot in _slots(cls)):
        if name not in EXCLUDED and hasattr(value, name):
            yield name, getattr(value, name)


def _slots(cls: type) -> tuple[str, ...]:
    declared = cls.__dict__.get("__slots__", ())
    return () if cls.__module__ in ("builtins", "torch") else (declared,) if isinstance(declared, str) else declared


def differences(patched: torch.nn.Module, fresh: torch.nn.Module) -> list[str]:
    """Where two models do not hold the same tensors, bit for bit: one line each, with path and reason."""
    mine, right = reachable(patched), reachable(fresh)
    lines = [f"{path}: only in the patched model" for path in mine.keys() - right.keys()]
    lines += [f"{path}: only in a fresh load" for path in right.keys() - mine.keys()]
    for path in mine.keys() & right.keys():
        reason = _difference(mine[path], right[path])
        if reason is not None:
            lines.append(f"{path}: {reason}")
    return sorted(lines)


def _difference(mine: torch.Tensor, right: torch.Tensor) -> str | None:
    if (mine.dtype, mine.shape, mine.device.type) != (right.dtype, right.shape, right.device.type):
        return f"{mine.dtype} {tuple(mine.shape)}, a fresh load has {right.dtype} {tuple(right.shape)}"
    if mine.device.type == "meta" or mine.numel() == 0:
        return None
    first, second = (tensor.detach().contiguous().reshape(-1, 1).view(torch.uint8) for tensor in (mine, right))
    count = int((first != second).any(dim=1).sum())
    return f"{count} of {mine.numel()} elements" if count else None
