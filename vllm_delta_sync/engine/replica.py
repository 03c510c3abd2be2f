"""A second model of the same structure, with tensors of one's own: what is done to it does not reach the first.

A loader may do anything to the module it belongs to: replace parameters, keep what it is given in lists, set
attributes. So it is watched, and asked again later, on a replica. Modules and the plain objects that hang on them are
copied one by one, references among them follow; code, configurations' values and handles of libraries are shared.
"""

import enum
import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Leaf = Callable[[torch.Tensor], torch.Tensor]
"""What stands for a tensor in the replica; it need not care about classes and attributes."""
Model = TypeVar("Model")

_SHARED = frozenset(
    ("torch", "numpy", "builtins", "_thread", "threading", "logging", "concurrent", "asyncio", "queue", "weakref")
)
"""Packages whose objects are handles of something that has no second one. Modules are copied all the same."""
_LISTS = (list, tuple, set, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict)


def replicate(model: Model, leaf: Leaf) -> Model:
    """A copy of a module tree in which each tensor is replaced by ``leaf`` of it, of the same class and attributes."""
    found: Model = _Copier(leaf).copy(model)
    return found


class MetaLeaf:
    """Tensors without data that share memory where the originals do."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same dtype, shape, strides and offset on the meta device."""
        return place(tensor, self.storage(tensor))

    def storage(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """The storage that stands for a tensor's."""
        known = tensor.untyped_storage()
        return self._storages.setdefault(known._cdata, torch.UntypedStorage(known.nbytes(), device="meta"))


def place(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor of the same dtype, shape, strides and offset in another storage, on that one's device."""
    made = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return made.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload, no-any-return]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is memory with a shape, and no wrapper or promise of one."""
    if is_lazy(tensor) or tensor.layout != torch.strided:
        return False
    return not tensor.is_quantized and not is_traceable_wrapper_subclass(tensor)


def walk(model: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(path of the module, path from there, tensor) of every tensor that hangs on a model: parameters, buffers, plain
    attributes, and those of the objects that modules keep. A tensor that has several paths comes as often."""
    for path, module, is_first in _modules(model):
        for registered in (module._parameters, module._buffers):
            for name, tensor in registered.items():
                if isinstance(tensor, torch.Tensor):
                    yield path, name, tensor
        if is_first is not None:
            for name, found in _hanging(module, is_first):
                if isinstance(found, torch.Tensor):
                    yield path, name, found


def walk_numbers(model: Any) -> Iterator[tuple[str, str, float]]:
    """The same of every number that is no tensor."""
    for path, module, is_first in _modules(model):
        if is_first is not None:
            for name, found in _hanging(module, is_first):
                if isinstance(found, float | int):
                    yield path, name, found


def _modules(model: Any) -> Iterator[tuple[str, torch.nn.Module, set[int] | None]]:
    """(path, module, what was looked into already), or None for that where the module itself was."""
    seen: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        yield path, module, None if id(module) in seen else seen
        seen.add(id(module))


def _hanging(module: torch.nn.Module, seen: set[int]) -> Iterator[tuple[str, torch.Tensor | float]]:
    for name, value in list(vars(module).items()):
        if name not in ("_parameters", "_buffers", "_modules"):
            for inner, found in _inside(value, seen):
                yield name + inner, found


def _inside(value: Any, seen: set[int]) -> Iterator[tuple[str, torch.Tensor | float]]:
    if isinstance(value, torch.Tensor | float | int) and not isinstance(value, enum.Enum):
        yield "", value
        return
    kind = type(value)
    is_holder = kind in _LISTS or kind in _MAPPINGS or (not isinstance(value, torch.nn.Module) and _is_copied(value))
    if not is_holder or id(value) in seen:
        return
    seen.add(id(value))
    if kind in _LISTS:
        parts: Any = ((f"[{position}]", item) for position, item in enumerate(value))
    elif kind in _MAPPINGS:
        parts = ((f"[{key!r}]", item) for key, item in list(value.items()))
    else:
        parts = ((f".{name}", item) for name, item in list(vars(value).items()))
    for name, item in parts:
        for inner, found in _inside(item, seen):
            yield name + inner, found


def _is_copied(value: Any) -> bool:
    if isinstance(value, torch.nn.Module):
        return True
    if isinstance(value, type | types.ModuleType | types.FunctionType | enum.Enum) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _SHARED


class _Copier:
    """Copies each object once."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._made: dict[int, Any] = {}
        # An address may be used again once what was there is gone.
        self._alive: list[Any] = []

    def copy(self, value: Any) -> Any:
        """The copy of a value, or the value itself where it is shared."""
        if id(value) in self._made:
            return self._made[id(value)]
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value) if is_plain(value) else value
        if kind is types.MethodType:
            return types.MethodType(value.__func__, self.copy(value.__self__))
        if kind is functools.partial:
            arguments = [self.copy(item) for item in value.args]
            named = {name: self.copy(item) for name, item in value.keywords.items()}
            return functools.partial(self.copy(value.func), *arguments, **named)
        if kind is tuple:
            return tuple(self.copy(item) for item in value)
        if kind in _LISTS or kind in _MAPPINGS:
            return self._container(value)
        if _is_copied(value):
            return self._instance(value)
        return value

    def _keep(self, value: Any, made: Any) -> Any:
        self._made[id(value)] = made
        self._alive.append(value)
        return made

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self._leaf(tensor)
        if made is not tensor:
            made.__class__ = tensor.__class__
        self._keep(tensor, made)
        if made is not tensor:
            made.__dict__.update({name: self.copy(item) for name, item in tensor.__dict__.items()})
        return made

    def _container(self, value: Any) -> Any:
        if isinstance(value, defaultdict):
            made: Any = defaultdict(value.default_factory)
        else:
            made = deque(maxlen=value.maxlen) if isinstance(value, deque) else type(value)()
        self._keep(value, made)
        if isinstance(made, dict):
            made.update({key: self.copy(item) for key, item in list(value.items())})
        elif isinstance(made, set):
            made.update(self.copy(item) for item in value)
        else:
            made.extend(self.copy(item) for item in value)
        return made

    def _instance(self, value: Any) -> Any:
        try:
            made = object.__new__(type(value))
        except TypeError:
            # Made by compiled code: there is no second one.
            return self._keep(value, value)
        self._keep(value, made)
        slots = [name for cls in type(value).__mro__ for name in _slots(cls) if hasattr(value, name)]
        for name in slots:
            object.__setattr__(made, name, self.copy(getattr(value, name)))
        for name, item in list(vars(value).items()):
            made.__dict__[name] = self.copy(item)
        return made


def _slots(cls: type) -> list[str]:
    named = cls.__dict__.get("__slots__", ())
    return [name for name in ([named] if isinstance(named, str) else named) if name not in ("__dict__", "__weakref__")]
