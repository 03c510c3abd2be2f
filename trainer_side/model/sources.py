"""From what a user passes to checkpoint tensors: names as in a Hugging Face checkpoint, live values.

Three forms are understood: a module, something that can be iterated again and again over
(checkpoint name, tensor), and a function without arguments that returns such an iterable.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from vllm_delta_sync.errors import ModelError, TensorMismatchError, UsageError

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class CheckpointTensor:
    """What is known of a tensor since construction.

    Attributes:
        name: checkpoint name.
        shape: shape in the checkpoint.
        dtype: dtype of the live tensor.
        configured: dtype that the model's configuration gives to checkpoints; None where it says nothing.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    configured: torch.dtype | None = None


class LiveTensors(ABC):
    """The checkpoint tensors of a model, readable again and again with their values of the moment.

    Attributes:
        tensors: name → description, in the model's order.
        aliases: name of a tied duplicate → name in ``tensors`` under which its values are published.
    """

    tensors: dict[str, CheckpointTensor]
    aliases: dict[str, str]
    has_values = True
    """Whether ``read`` gives the values; otherwise they come with each version only, through ``given``."""

    def convert(self, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, tensor) pairs from what a caller hands over to be published, one after another.

        Raises:
            UsageError: not pairs. TensorMismatchError, ModelError: a tensor is not what it has to be.
        """
        return pairs(weights)

    @abstractmethod
    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, detached tensor) for every entry of ``tensors``; views of live storage where possible.

        An alias may be yielded too; it must then have the values of its owner.

        Raises:
            TensorMismatchError: a tensor is new, missing, or has another shape, dtype or tie than before.
            ModelError: a tensor can no longer be read, see ``check_plain``.
        """


ModelLike = nn.Module | Mapping[str, torch.Tensor] | NamedTensors | Callable[[], NamedTensors] | LiveTensors


def live_tensors(model: ModelLike) -> LiveTensors:
    """Understand what a user passed as the model.

    Raises:
        ModelError: a tensor cannot be published; names the tensor, the reason and the mend.
        UsageError: not one of the forms.
    """
    if isinstance(model, LiveTensors):
        return model
    if isinstance(model, nn.Module):
        from trainer_side.model.module import ModuleTensors

        return ModuleTensors(model)
    if isinstance(model, Mapping):
        return IterableTensors(model.items)
    if isinstance(model, Iterator):
        raise UsageError(
            "the model is an iterator, which can be read only once; pass a list of (name, tensor), or a "
            "function that returns a fresh iterator each time, such as model.named_parameters without the "
            "parentheses"
        )
    if isinstance(model, Iterable):
        return IterableTensors(lambda: model)
    if callable(model):
        return IterableTensors(model)
    raise UsageError(
        f"the model is a {type(model).__name__}; pass a torch.nn.Module, an iterable of (name, tensor), or a "
        "function without arguments that returns one"
    )


def pairs(items: Mapping[str, torch.Tensor] | NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (name, tensor) pairs, which a mapping has as its items.

    Raises:
        UsageError: something else comes out.
    """
    for item in items.items() if isinstance(items, Mapping) else items:
        if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], str):
            raise UsageError(f"expected (checkpoint name, tensor) pairs, got a {type(item).__name__}")
        yield item[0], item[1]


def check_readable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` detached, if its bits can be read here and now.

    Raises:
        ModelError: sharded, partitioned, quantized, sparse, or without data.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ModelError(f"tensor {name!r} is a {type(tensor).__name__}, not a torch.Tensor")
    if hasattr(tensor, "ds_id"):
        raise ModelError(
            f"tensor {name!r} is a ZeRO-3 partition, this process does not hold all of it; pass the module itself, or "
            "gather tensor by tensor on every rank (deepspeed.zero.GatheredParameters) and publish from one"
        )
    if hasattr(tensor, "device_mesh") and hasattr(tensor, "placements"):
        raise ModelError(
            f"tensor {name!r} is a DTensor, sharded over {tensor.device_mesh}; pass the module itself, or gather "
            "tensor by tensor on every rank (tensor.full_tensor()) and publish from one"
        )
    if nn.parameter.is_lazy(tensor):
        raise ModelError(f"tensor {name!r} is not initialized yet; run the model once before publishing it")
    plain = tensor.detach()
    if plain.device.type == "meta":
        raise ModelError(
            f"tensor {name!r} is on the meta device and has no data; load the weights, or fetch back offloaded ones, "
            "before publishing; a function that yields (checkpoint name, tensor) may fetch one at a time"
        )
    if type(plain) not in (torch.Tensor, nn.Parameter):
        raise ModelError(
            f"tensor {name!r} is a {type(plain).__name__}, whose bits are not those of a checkpoint; publish "
            "an iterable of (checkpoint name, plain tensor) instead"
        )
    if plain.layout != torch.strided or plain.is_quantized:
        raise ModelError(f"tensor {name!r} is not dense ({plain.layout}, quantized: {plain.is_quantized}); convert it")
    return plain


def check_name(name: str) -> None:
    """Raise ModelError unless ``name`` can be the name of a tensor in a delta."""
    if not name or name.startswith("@"):
        raise ModelError(f"tensor name {name!r} cannot be published: it is empty or starts with '@'")


def storage_key(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Equal for two tensors exactly if they show the same elements of one storage; None without elements.

    Holds while the storages live, or while a StorageWeakRef keeps their identity from being used again.
    """
    if not tensor.numel():
        return None
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def check_unchanged(name: str, tensor: torch.Tensor, known: CheckpointTensor | None) -> None:
    """Raise TensorMismatchError unless ``tensor`` has the shape and dtype it had at construction."""
    if known is None:
        raise TensorMismatchError(
            f"tensor {name!r} was not there when the publisher was made ({tensor.dtype} {list(tensor.shape)}), and the "
            "tensors of a run are fixed; yield it no more, or start a new run under a new URL"
        )
    if (tuple(tensor.shape), tensor.dtype) != (known.shape, known.dtype):
        raise changed(name, (tuple(tensor.shape), tensor.dtype), (known.shape, known.dtype))


def changed(
    name: str, now: tuple[tuple[int, ...], torch.dtype], then: tuple[tuple[int, ...], torch.dtype]
) -> TensorMismatchError:
    """What to raise of a tensor whose (shape, dtype) is not what it was when the publisher was made."""
    mend = "give it its former shape again, or start a new run under a new URL"
    if now[0] == then[0]:
        # A run keeps its dtypes, and whoever takes it over rounds to them.
        mend = "convert it back, or make a new Publisher of the model as it is now"
    return TensorMismatchError(
        f"tensor {name!r} is now {now[1]} {list(now[0])}, but was {then[1]} {list(then[0])} when the publisher was "
        f"made; {mend}"
    )


class IterableTensors(LiveTensors):
    """Tensors that the user names; names are taken as they are."""

    def __init__(self, source: Callable[[], NamedTensors]) -> None:
        self._source = source
        self.tensors = {}
        self.aliases = {}
        owners: dict[tuple[object, ...], str] = {}
        # Identities without the memory: a function may gather each tensor and drop it before the next.
        identities: list[StorageWeakRef] = []
        for name, value in pairs(source()):
            check_name(name)
            tensor = check_readable(name, value)
            if name in self.tensors or name in self.aliases:
                raise ModelError(f"tensor name {name!r} is yielded twice; each name must occur once")
            key = storage_key(tensor)
            identities.append(StorageWeakRef(tensor.untyped_storage()))
            owner = name if key is None else owners.setdefault(key, name)
            if owner == name:
                self.tensors[name] = CheckpointTensor(name, tuple(tensor.shape), tensor.dtype)
            else:
                self.aliases[name] = owner

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[str] = set()
        for name, value in pairs(self._source()):
            if name in seen:
                raise TensorMismatchError(f"tensor {name!r} is yielded twice; each name must occur once")
            seen.add(name)
            tensor = check_readable(name, value)
            check_unchanged(name, tensor, self.tensors.get(self.aliases.get(name, name)))
            yield name, tensor
        missing = [name for name in self.tensors if name not in seen]
        if missing:
            raise TensorMismatchError(
                f"tensor {missing[0]!r} is no longer yielded, {len(missing)} are missing in all; yield all that were "
                "there when the publisher was made, or start a new run under a new URL"
            )
