"""``replicate`` copies a model's structure with other tensors in it, so that its loader can run without side effects.

A loader may do anything to its module: replace parameters, collect tensors in lists, set attributes. Tracing and
reloading therefore run the loader on a replica. ``replicate`` copies modules, the plain objects attached to them, and
functions with tensors or modules in their closures, one by one, and keeps the references among them. It shares other
code, configuration values, library handles, everything of vLLM's distributed package, and every object that cleans up
after itself (``__del__``).
"""

import enum
import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Leaf = Callable[[torch.Tensor], torch.Tensor]
"""Makes a new tensor that replaces one in the replica. ``replicate`` sets its class and attributes."""
Model = TypeVar("Model")

_SHARED = frozenset(
    ("torch", "numpy", "builtins", "_thread", "threading", "logging", "concurrent", "asyncio", "queue", "weakref")
)
"""Packages whose objects are handles that cannot be duplicated. Modules of these packages are copied nevertheless."""
_SHARED_PREFIXES = ("vllm.distributed.",)
"""The same for parts of packages: process groups, communicators and their shared memory exist once."""
_CONFIGURATION = "vllm.config."
"""Objects of this package are not searched: they hold no weights, and sizes that change while an engine starts."""
READABLE_ELEMENTS = 4096
"""Maximum size of integer tensors that keep their data in a replica: a map of experts has one element per expert."""
_LISTS = (list, tuple, set, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict)


def replicate(model: Model, leaf: Leaf) -> Model:
    """Copy a module tree; each tensor becomes ``leaf(tensor)``, with the class and attributes of the original."""
    return _Copier(leaf).copy(model)


class MetaLeaf:
    """Makes tensors without data. They share memory where the originals do.

    Small integer and boolean tensors that are not weights (non-persistent buffers, and tensors attached to plain
    objects) keep their data, in host memory, because loaders read them: vLLM's map of the experts of a rank is one.

    Args:
        model: the model to replicate.
    """

    def __init__(self, model: Any) -> None:
        readable = _readable(model)
        self._storages = {
            key: torch.UntypedStorage(storage.nbytes()).copy_(storage) for key, storage in readable.items()
        }
        # Storage of each copy → the storage that it was copied from.
        self._kept = {self._storages[key]._cdata: storage for key, storage in readable.items()}
        self._readable = frozenset(readable)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same dtype, shape, strides and offset: on the meta device unless its data is kept."""
        known = tensor.untyped_storage()
        if known._cdata not in self._storages:
            self._storages[known._cdata] = torch.UntypedStorage(known.nbytes(), device="meta")
        return view_in_storage(tensor, self._storages[known._cdata])

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of the model keeps its data in the replica."""
        return tensor.untyped_storage()._cdata in self._readable

    def is_unwritten(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of the replica has kept data that nothing has changed since."""
        storage = tensor.untyped_storage()
        known = self._kept.get(storage._cdata)
        return known is not None and torch.equal(_bytes_of(storage), _bytes_of(known))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]


def _readable(model: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of a model whose data a replica keeps, by address."""
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
    """Return a tensor of the same dtype, shape, strides and offset in another storage, on that storage's device."""
    copied = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return copied.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload, no-any-return]


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is ordinary strided memory: not a wrapper subclass, not lazy, not quantized."""
    if is_lazy(tensor) or tensor.layout != torch.strided:
        return False
    return not tensor.is_quantized and not is_traceable_wrapper_subclass(tensor)


def walk_tensors(model: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (module path, path within the module, tensor) of every tensor reachable from a model: parameters, buffers,
    plain attributes, and tensors inside objects that modules keep; once per path of a tensor."""
    for path, name, found in _walk(model):
        if isinstance(found, torch.Tensor):
            yield path, name, found


def walk_numbers(model: Any) -> Iterator[tuple[str, str, float]]:
    """Yield (module path, path within the module, number) of every number attached to a model."""
    for path, name, found in _walk(model):
        if isinstance(found, float | int):
            yield path, name, found


def _walk(model: Any) -> Iterator[tuple[str, str, torch.Tensor | float]]:
    seen: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield path, name, tensor
        if id(module) in seen:
            continue
        seen.add(id(module))
        for name, value in list(vars(module).items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                for inner, found in _find_inside(value, seen):
                    yield path, name + inner, found


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
    """Copies each object once, also while another thread, which generates, adds to it."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._copies: dict[int, Any] = {}
        # Keeps originals alive: a freed object's address may be reused.
        self._originals: list[Any] = []

    def copy(self, value: Any) -> Any:
        """Return the copy of a value, or the value itself if it is shared."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value) if is_plain(value) else value
        if kind is types.FunctionType:
            return self._function(value)
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

    def _keep(self, value: Any, copied: Any) -> Any:
        self._copies[id(value)] = copied
        self._originals.append(value)
        return copied

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        """Copy a function with tensors or modules in its closure, as weight loaders have some; share any other one."""
        self._keep(function, function)
        before = function.__closure__ or ()
        cells = tuple(map(self._cell, before))
        if all(cell is old for cell, old in zip(cells, before, strict=True)):
            return function
        made = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        made.__kwdefaults__, made.__annotations__ = function.__kwdefaults__, function.__annotations__
        made.__module__, made.__qualname__ = function.__module__, function.__qualname__
        made.__dict__.update(function.__dict__)
        return cast(types.FunctionType, self._keep(function, made))

    def _cell(self, cell: types.CellType) -> types.CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # a name that was never set
            return cell
        if not isinstance(content, torch.Tensor | torch.nn.Module | types.FunctionType):
            return cell
        copied = self.copy(content)
        return cell if copied is content else types.CellType(copied)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        copied = self._leaf(tensor)
        copied.__class__ = tensor.__class__
        self._keep(tensor, copied)
        copied.__dict__.update({name: self.copy(item) for name, item in list(tensor.__dict__.items())})
        return copied

    def _container(self, value: Any) -> Any:
        # Keeps what is not an item: a factory of defaults, a maximum length.
        copied = value.copy()
        copied.clear()
        self._keep(value, copied)
        if isinstance(copied, dict):
            copied.update({key: self.copy(item) for key, item in list(value.items())})
        elif isinstance(copied, set):
            copied.update(self.copy(item) for item in list(value))
        else:
            copied.extend(self.copy(item) for item in list(value))
        return copied

    def _instance(self, value: Any) -> Any:
        kind = type(value)
        if hasattr(kind, "__del__"):
            # Modules are copied even so. The copy owns nothing that it could release.
            kind = type(kind.__name__, (kind,), {"__del__": lambda self: None, "__module__": kind.__module__})
        try:
            copied = object.__new__(kind)
        except TypeError:
            # An instance of a compiled class cannot be copied.
            return self._keep(value, value)
        self._keep(value, copied)
        slots = [name for cls in type(value).__mro__ for name in _slots(cls) if hasattr(value, name)]
        for name in slots:
            object.__setattr__(copied, name, self.copy(getattr(value, name)))
        for name, item in list(vars(value).items()):
            copied.__dict__[name] = self.copy(item)
        return copied


def _slots(cls: type) -> list[str]:
    named = cls.__dict__.get("__slots__", ())
    return [name for name in ([named] if isinstance(named, str) else named) if name not in ("__dict__", "__weakref__")]
