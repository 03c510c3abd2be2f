"""``replicate`` copies a model's structure with other tensors in it, so that its loader can run without touching it.

A loader may do anything to the module it belongs to: replace parameters, keep what it is given in lists, set
attributes. So it is watched, and run again later, on a replica. Modules and the plain objects that hang on them are
copied one by one, and references among them follow. Code, configuration values, handles of libraries, everything of
vLLM's distributed package, and every object that cleans up after itself (``__del__``) are shared.
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
_SHARED_PREFIXES = ("vllm.distributed.",)
"""The same for parts of packages: process groups, communicators and their shared memory exist once."""
_CONFIGURATION = "vllm.config."
"""What this package's objects hold is not looked into: no weights, and sizes that change while an engine starts."""
READABLE_ELEMENTS = 4096
"""Largest integer tensor that keeps its data in a replica: a map of experts has one element for each of them."""
_LISTS = (list, tuple, set, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict)


def replicate(model: Model, leaf: Leaf) -> Model:
    """A copy of a module tree in which each tensor is replaced by ``leaf`` of it, of the same class and attributes."""
    found: Model = _Copier(leaf).copy(model)
    return found


class MetaLeaf:
    """Makes tensors without data that share memory where the originals do.

    Small integer and boolean tensors that are no weights keep their data, in host memory: loaders read them, such as
    vLLM's map of the experts that a rank holds. They are those that hang on plain objects, and non-persistent buffers.

    Args:
        model: what is replicated with it.
    """

    def __init__(self, model: Any) -> None:
        readable = _readable(model)
        self._storages = {
            key: torch.UntypedStorage(storage.nbytes()).copy_(storage) for key, storage in readable.items()
        }
        # Of each copy, what it was made of.
        self._kept = {self._storages[key]._cdata: storage for key, storage in readable.items()}
        self._readable = frozenset(readable)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same dtype, shape, strides and offset, on the meta device unless its data is kept."""
        known = tensor.untyped_storage()
        if known._cdata not in self._storages:
            self._storages[known._cdata] = torch.UntypedStorage(known.nbytes(), device="meta")
        return view_in_storage(tensor, self._storages[known._cdata])

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the model keeps its data in the replica."""
        return tensor.untyped_storage()._cdata in self._readable

    def is_unwritten(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the replica is one whose data was kept, and is what it was."""
        storage = tensor.untyped_storage()
        known = self._kept.get(storage._cdata)
        return known is not None and torch.equal(_bytes_of(storage), _bytes_of(known))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]


def _readable(model: Any) -> dict[int, torch.UntypedStorage]:
    """Those storages of a model whose data a replica keeps, by address."""
    weights: set[int] = set()
    found: dict[int, torch.UntypedStorage] = {}
    for path, name, tensor in walk_tensors(model):
        if not is_plain(tensor) or tensor.device.type == "meta":
            continue
        module, storage = model.get_submodule(path), tensor.untyped_storage()
        persistent = name in module._buffers and name not in module._non_persistent_buffers_set
        if name in module._parameters or persistent:
            weights.add(storage._cdata)
            continue
        is_small = storage.nbytes() <= READABLE_ELEMENTS * tensor.element_size()
        if is_small and not tensor.is_floating_point() and not tensor.is_complex():
            found[storage._cdata] = storage
    return {key: storage for key, storage in found.items() if key not in weights}


def view_in_storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor of the same dtype, shape, strides and offset in another storage, on that one's device."""
    made = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return made.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload, no-any-return]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is memory with a shape, and no wrapper or promise of one."""
    if is_lazy(tensor) or tensor.layout != torch.strided:
        return False
    return not tensor.is_quantized and not is_traceable_wrapper_subclass(tensor)


def walk_tensors(model: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(path of the module, path from there, tensor) of every tensor that hangs on a model: parameters, buffers, plain
    attributes, and those of the objects that modules keep. A tensor that has several paths comes as often."""
    for path, module, is_first in _modules(model):
        for registered in (module._parameters, module._buffers):
            for name, tensor in registered.items():
                if isinstance(tensor, torch.Tensor):
                    yield path, name, tensor
        if is_first is not None:
            for name, found in _reachable(module, is_first):
                if isinstance(found, torch.Tensor):
                    yield path, name, found


def walk_numbers(model: Any) -> Iterator[tuple[str, str, float]]:
    """The same of every number that is no tensor."""
    for path, module, is_first in _modules(model):
        if is_first is not None:
            for name, found in _reachable(module, is_first):
                if isinstance(found, float | int):
                    yield path, name, found


def _modules(model: Any) -> Iterator[tuple[str, torch.nn.Module, set[int] | None]]:
    """(path, module, what was looked into already), or None for that where the module itself was."""
    seen: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        yield path, module, None if id(module) in seen else seen
        seen.add(id(module))


def _reachable(module: torch.nn.Module, seen: set[int]) -> Iterator[tuple[str, torch.Tensor | float]]:
    for name, value in list(vars(module).items()):
        if name not in ("_parameters", "_buffers", "_modules"):
            for inner, found in _find_inside(value, seen):
                yield name + inner, found


def _find_inside(value: Any, seen: set[int]) -> Iterator[tuple[str, torch.Tensor | float]]:
    if isinstance(value, torch.Tensor | float | int) and not isinstance(value, enum.Enum):
        yield "", value
        return
    kind = type(value)
    is_holder = kind in _LISTS or kind in _MAPPINGS or (not isinstance(value, torch.nn.Module) and _is_copied(value))
    if not is_holder or id(value) in seen or f"{kind.__module__}.".startswith(_CONFIGURATION):
        return
    seen.add(id(value))
    if kind in _LISTS:
        parts: Any = ((f"[{position}]", item) for position, item in enumerate(value))
    elif kind in _MAPPINGS:
        parts = ((f"[{key!r}]", item) for key, item in list(value.items()))
    else:
        parts = ((f".{name}", item) for name, item in list(vars(value).items()))
    for name, item in parts:
        for inner, found in _find_inside(item, seen):
            yield name + inner, found


def _is_copied(value: Any) -> bool:
    if isinstance(value, torch.nn.Module):
        return True
    if isinstance(value, type | types.ModuleType | types.FunctionType | enum.Enum) or not hasattr(value, "__dict__"):
        return False
    kind = type(value)
    # A second object would release the same descriptors and memory as the first.
    if hasattr(kind, "__del__"):
        return False
    owner = kind.__module__
    return owner.partition(".")[0] not in _SHARED and not f"{owner}.".startswith(_SHARED_PREFIXES)


class _Copier:
    """Copies each object once."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._copies: dict[int, Any] = {}
        # An address may be used again once what was there is gone.
        self._originals: list[Any] = []

    def copy(self, value: Any) -> Any:
        """The copy of a value, or the value itself where it is shared."""
        if id(value) in self._copies:
            return self._copies[id(value)]
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
        self._copies[id(value)] = made
        self._originals.append(value)
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
        kind = type(value)
        if hasattr(kind, "__del__"):
            # A module is copied all the same. Its copy owns nothing that it could release.
            kind = type(kind.__name__, (kind,), {"__del__": lambda self: None, "__module__": kind.__module__})
        try:
            made = object.__new__(kind)
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
