"""``LiveTensors``: the checkpoint tensors of a model, which can be read repeatedly; and checks of one tensor."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from vllm_delta_sync.errors import ModelError, TensorMismatchError, UsageError

CPU = torch.device("cpu")

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class CheckpointTensor:
    """What is known of a checkpoint tensor from construction.

    Attributes:
        dtype: of the live tensor.
        configured: dtype that the model's configuration gives to checkpoints; None if it does not say.
        device: of the live tensor; the CPU if that is not known yet.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    configured: torch.dtype | None = None
    device: torch.device = CPU


class LiveTensors(ABC):
    """The checkpoint tensors of a model. They can be read repeatedly, each time with their current values.

    Attributes:
        tensors: name → description, in the model's order.
        aliases: name of a tied duplicate → name in ``tensors`` under which its values are published.
    """

    tensors: dict[str, CheckpointTensor]
    aliases: dict[str, str]
    has_values = True
    """Whether ``read`` yields the values; otherwise they come with each version only, through ``convert``."""
    storages: Collection[int] = ()
    """Of the model's own tensors, while ``read`` yields: keeping a view of them takes no memory."""
    excluded: Collection[str] = ()
    """Names in ``tensors`` that are not published. What a run has under such a name must keep its bits."""
    unused: Collection[str] = ()
    """Names in ``excluded`` that the run does not have: ``read`` may leave them out."""

    def convert(self, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (checkpoint name, detached tensor) from the ``weights=`` of a publish, one at a time."""
        for name, value in pairs(weights):
            yield name, check_readable(name, value)

    def lasts(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor that ``read`` has just yielded is the model's: it stays valid after the next one."""
        return tensor.untyped_storage()._cdata in self.storages

    @abstractmethod
    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, detached tensor) for every entry of ``tensors``; views of live storage where possible.

        An alias may be yielded too; it must then have the values of its owner.

        Raises:
            TensorMismatchError: a tensor is new, missing, or has another shape, dtype or tie than before.
            ModelError: a tensor can no longer be read, see ``check_readable``.
        """


def pairs(items: Mapping[str, torch.Tensor] | NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (name, tensor) pairs; of a mapping, over its items. UsageError: an item is not such a pair."""
    found = items.items() if isinstance(items, Mapping) else items
    if not isinstance(found, Iterable):
        raise UsageError(f"expected (checkpoint name, tensor) pairs, got a {type(items).__name__}")
    for item in found:
        if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], str):
            raise UsageError(f"expected (checkpoint name, tensor) pairs, got a {type(item).__name__}")
        yield item[0], item[1]


@contextmanager
def read_to_end(weights: Iterable[object]) -> Iterator[None]:
    """Read what the block leaves of ``weights``, except after an interrupt.

    Frameworks gather each tensor on all ranks together: a rank that stops reading hangs the others.
    """
    interrupted = False
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        interrupted = True
        raise
    finally:
        if not interrupted:
            for _ in weights:
                pass


def check_readable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` detached; raise ModelError if this process cannot read its bits now."""
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
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_meta:
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
    if plain.numel() and not plain.untyped_storage().nbytes():
        # Reading it would end the process.
        raise ModelError(
            f"tensor {name!r} has no memory: its storage was freed, as trainers do to offload weights; bring them back "
            "before publishing"
        )
    return plain


def storages_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the identities of the storages of some tensors; valid while they live."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def storage_key(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return a key that is equal for two tensors exactly if they view the same elements of one storage; None if empty.

    Valid while the storages live, or while a StorageWeakRef keeps their identity from being reused.
    """
    if not tensor.numel():
        return None
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def changed(
    name: str, now: tuple[tuple[int, ...], torch.dtype], then: tuple[tuple[int, ...], torch.dtype]
) -> TensorMismatchError:
    """Return the error for a tensor whose (shape, dtype) has changed since the publisher was made."""
    remedy = "restore its former shape, or start a new run under a new URL"
    if now[0] == then[0]:
        # A run keeps its dtypes, and a publisher that takes it over rounds to them.
        remedy = "convert it back, or make a new Publisher for the model in its present state"
    return TensorMismatchError(
        f"tensor {name!r} is now {now[1]} {list(now[0])}, but was {then[1]} {list(then[0])} when the publisher was "
        f"made; {remedy}"
    )
