"""``live_tensors``: turn what a user passes as the model into checkpoint tensors with live values.

A model is a module, an iterable of (checkpoint name, tensor) that can be read repeatedly, or a function without
arguments that returns one. Names are those of a Hugging Face checkpoint. ``target_names`` matches them to the tensors
of a run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from trainer_side.model.selection import Selection
from vllm_delta_sync.errors import ModelError, TensorMismatchError, UsageError
from vllm_delta_sync.format.dtypes import DTYPES
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES, dtype_name

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
    lasting = False
    """Whether a tensor that ``read`` yields stays valid when the next one is requested."""
    excluded: Collection[str] = ()
    """Names in ``tensors`` that are not published. What a run has under such a name must keep its bits."""
    unused: Collection[str] = ()
    """Names in ``excluded`` that the run does not have: ``read`` may leave them out."""

    def needed(self) -> list[str]:
        """Return the names in ``excluded`` without which the model's class cannot be loaded."""
        return []

    def convert(self, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (checkpoint name, detached tensor) from the ``weights=`` of a publish, one at a time."""
        for name, value in pairs(weights):
            yield name, check_readable(name, value)

    @abstractmethod
    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, detached tensor) for every entry of ``tensors``; views of live storage where possible.

        An alias may be yielded too; it must then have the values of its owner.

        Raises:
            TensorMismatchError: a tensor is new, missing, or has another shape, dtype or tie than before.
            ModelError: a tensor can no longer be read, see ``check_readable``.
        """


ModelLike = nn.Module | Mapping[str, torch.Tensor] | NamedTensors | Callable[[], NamedTensors] | LiveTensors


def live_tensors(model: ModelLike, selection: Selection | None = None) -> LiveTensors:
    """Return the tensors of what a user passed as the model. Args: selection: of a module, or of streamed weights."""
    if isinstance(model, nn.Module):
        from trainer_side.model.module import ModuleTensors

        return ModuleTensors(model, selection)
    if selection is not None and not selection.is_everything:
        from trainer_side.model.streamed import StreamedWeights

        if not isinstance(model, StreamedWeights):
            raise UsageError(
                f"include, exclude or rename is given, and the model is a {type(model).__name__}; they are for a "
                "torch.nn.Module and for gathered weights: yield the tensors to publish, under their names"
            )
        model.select(selection)
    if isinstance(model, LiveTensors):
        return model
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
    """Iterate over (name, tensor) pairs; of a mapping, over its items. UsageError: an item is not such a pair."""
    for item in items.items() if isinstance(items, Mapping) else items:
        if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], str):
            raise UsageError(f"expected (checkpoint name, tensor) pairs, got a {type(item).__name__}")
        yield item[0], item[1]


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
    return plain


def check_name(name: str) -> None:
    """Raise ModelError unless ``name`` is valid as the name of a tensor in a delta."""
    if not name or name.startswith("@"):
        raise ModelError(f"tensor name {name!r} cannot be published: it is empty or starts with '@'")


def storage_key(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return a key that is equal for two tensors exactly if they view the same elements of one storage; None if empty.

    Valid while the storages live, or while a StorageWeakRef keeps their identity from being reused.
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
            "tensors of a run are fixed; do not yield it, or start a new run under a new URL"
        )
    if (tuple(tensor.shape), tensor.dtype) != (known.shape, known.dtype):
        raise changed(name, (tuple(tensor.shape), tensor.dtype), (known.shape, known.dtype))


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


class IterableTensors(LiveTensors):
    """Tensors under the names that the user yields."""

    def __init__(self, source: Callable[[], NamedTensors]) -> None:
        self._source = source
        self.tensors = {}
        self.aliases = {}
        owners: dict[tuple[object, ...], str] = {}
        # These keep identities, not memory: a function may gather each tensor and drop it before the next.
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
                self.tensors[name] = CheckpointTensor(name, tuple(tensor.shape), tensor.dtype, device=tensor.device)
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


def own_spec(tensor: CheckpointTensor) -> TensorSpec:
    """Return the spec of a live tensor in a run that has no base."""
    own = dtype_name(tensor.dtype, tensor.name)
    # torch calls the scales of F8_E8M0 floating-point, but they cannot be rounded to the model's dtype.
    if tensor.configured is not None and DTYPES[own].is_float:
        own = dtype_name(tensor.configured, tensor.name)
    return TensorSpec(tensor.name, own, tensor.shape)


def target_names(live: LiveTensors, specs: Mapping[str, TensorSpec] | None, where: str) -> dict[str, list[str]]:
    """Return live name, aliases included → names in the run.

    Args:
        specs: the run's tensors, which must include the live ones; None if the live ones make up the run. Excluded
            tensors that the run lacks have no name there.
        where: what ``specs`` belong to, for messages.
    """
    if specs is None and (needed := live.needed()):
        raise ModelError(
            f"include= and exclude= leave out tensor {needed[0]!r} ({len(needed)} in all), which the model's class "
            "loads, and there is no base that has it: publish it, or give base= a checkpoint with the same bits"
        )
    groups: dict[str, list[str]] = {name: [name] for name in live.tensors}
    for alias, owner in live.aliases.items():
        groups[owner].append(alias)
    names: dict[str, list[str]] = {}
    for owner, group in groups.items():
        left_out = owner in live.excluded
        targets = ([] if left_out else [owner]) if specs is None else [name for name in group if name in specs]
        if specs is not None and (targets or not left_out):
            _check_targets(live.tensors[owner], targets, specs, where)
        names.update(dict.fromkeys(group, targets))
    return names


def check_fits(name: str, tensor: torch.Tensor, spec: TensorSpec) -> None:
    """Raise TensorMismatchError unless ``tensor`` has the shape of ``spec`` and a convertible dtype."""
    if tensor.shape != spec.shape:
        raise TensorMismatchError(
            f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, but {spec.name!r} is {spec.dtype} "
            f"{list(spec.shape)} in this run; start a new run"
        )
    if tensor.dtype != TORCH_DTYPES[spec.dtype]:
        _check_convertible(name, tensor.dtype, spec, "in this run")


def _check_targets(tensor: CheckpointTensor, targets: list[str], specs: Mapping[str, TensorSpec], where: str) -> None:
    if not targets:
        raise TensorMismatchError(
            f"tensor {tensor.name!r} of the model is not among the {len(specs)} tensors of {where}"
        )
    for name in targets:
        spec = specs[name]
        if spec.shape != tensor.shape:
            raise TensorMismatchError(
                f"tensor {name!r} is {spec.dtype} {list(spec.shape)} in {where}, but {tensor.dtype} "
                f"{list(tensor.shape)} in the model"
            )
        if spec.element.itemsize == 1 and tensor.dtype.is_floating_point and tensor.dtype != TORCH_DTYPES[spec.dtype]:
            raise ModelError(
                f"tensor {name!r} is {spec.dtype} in {where} and needs scales that {tensor.dtype} weights do not "
                "give: a publisher quantizes them if config.json has a quantization_config and one process holds all "
                "weights; use such a base and publish from one rank (docs/trainer.md), or a base in full precision"
            )
        _check_convertible(tensor.name, tensor.dtype, spec, f"in {where}")


def _check_convertible(name: str, dtype: torch.dtype, spec: TensorSpec, where: str) -> None:
    """Raise TensorMismatchError unless ``dtype`` can be rounded to the spec's: integers and scales would wrap."""
    given = dtype_name(dtype, name)
    if given == spec.dtype or (DTYPES[given].is_float and spec.element.is_float):
        return
    raise TensorMismatchError(
        f"tensor {name!r} is {dtype}, but {spec.name!r} is {spec.dtype} {where}, and only floating-point weights are "
        f"converted; give it as {TORCH_DTYPES[spec.dtype]}"
    )
