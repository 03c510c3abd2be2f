"""``LiveTensors``: the checkpoint tensors of a model, which can be read repeatedly.

``IterableTensors`` has those that the user yields. ``Selection`` says which tensors are published, and under which
names; ``target_names`` matches them to the tensors of a run.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from vllm_delta_sync.errors import ModelError, TensorMismatchError, UsageError
from vllm_delta_sync.format.base_document import load_json
from vllm_delta_sync.format.table import DRAFT_PREFIX, DTYPES, TensorSpec
from vllm_delta_sync.tensors.checkpoint import CONFIG_NAME
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES, dtype_name
from vllm_delta_sync.units import listed

CPU = torch.device("cpu")
HEAD = "lm_head.weight"
"""How the name of an output head ends."""

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


Patterns = str | Sequence[str]
"""A glob pattern of names, or several."""
Rename = Mapping[str, str] | Callable[[str], str]
"""Prefix of a name → what replaces it; or a function of the name."""


class Selection:
    """The arguments ``include``, ``exclude`` and ``rename`` of ``Publisher``, applied in this order.

    Raises:
        UsageError: an argument is invalid.
    """

    def __init__(
        self, include: Patterns | None = None, exclude: Patterns | None = None, rename: Rename | None = None
    ) -> None:
        self._include, self._exclude = _patterns("include", include), _patterns("exclude", exclude)
        self._rename = rename
        self._prefixes: list[str] = []
        if isinstance(rename, Mapping):
            for prefix, replacement in rename.items():
                if not isinstance(prefix, str) or not prefix or not isinstance(replacement, str):
                    raise UsageError(
                        f"rename has {prefix!r}: {replacement!r}; give prefixes of names and their replacements, such "
                        "as {'actor.': ''}"
                    )
            self._prefixes = sorted(rename, key=len, reverse=True)
        elif rename is not None and not callable(rename):
            raise UsageError(
                f"rename is a {type(rename).__name__}; give a mapping of prefixes, such as {{'actor.': ''}}, or a "
                "function that takes a name and returns one"
            )
        self._unused = {("include", each) for each in self._include} | {("exclude", each) for each in self._exclude}
        self._unused |= {("rename", prefix) for prefix in self._prefixes}

    @property
    def is_everything(self) -> bool:
        """Whether all tensors are published under their own names."""
        return not self._include and not self._exclude and not self.renames

    @property
    def renames(self) -> bool:
        return self._rename is not None

    def keeps(self, name: str) -> bool:
        """Return whether the parameter or buffer of this name is published."""
        included = [self._matches("include", pattern, name) for pattern in self._include]
        excluded = [self._matches("exclude", pattern, name) for pattern in self._exclude]
        return (any(included) or not included) and not any(excluded)

    def renamed(self, name: str) -> str:
        """Return the name in the run; of several prefixes that match, the longest is replaced."""
        if callable(self._rename):
            found = self._rename(name)
            if not isinstance(found, str):
                raise UsageError(f"rename returns {found!r} for {name!r}; return a name")
            return found
        for prefix in self._prefixes:
            if self._rename is not None and name.startswith(prefix):
                self._unused.discard(("rename", prefix))
                return self._rename[prefix] + name.removeprefix(prefix)
        return name

    def check_used(self, names: Sequence[str]) -> None:
        """Raise UsageError if a pattern or prefix has matched no name so far. Args: names: some, for the message."""
        for argument, pattern in sorted(self._unused):
            raise UsageError(
                f"{argument} has {pattern!r}, which matches no tensor of the model ({listed(names)}); correct it"
            )

    def _matches(self, argument: str, pattern: str, name: str) -> bool:
        found = fnmatchcase(name, pattern)
        if found:
            self._unused.discard((argument, pattern))
        return found


def note_renamed(given: dict[str, str], name: str, renamed: str) -> None:
    """Note the name in the run of a tensor; raise ModelError if another has it. Args: given: name in the run → name."""
    if given.setdefault(renamed, name) != name:
        raise ModelError(
            f"rename gives {given[renamed]!r} and {name!r} the same name, {renamed!r}; exclude one of them, or give it "
            "another name"
        )


def _patterns(argument: str, given: Patterns | None) -> tuple[str, ...]:
    found = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    if given is not None and (not found or not all(isinstance(each, str) and each for each in found)):
        raise UsageError(f"{argument} is {given!r}; give a pattern of names, such as 'v_head.*', or a sequence of them")
    return found


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
    folder: Path | None = None
    """The checkpoint folder that they are read from."""

    def select(self, selection: Selection, model: object) -> None:
        """Leave out and rename what is yielded, before anything else is done with it. Args: model: as it was given."""
        raise UsageError(
            f"include, exclude or rename is given, and the model is a {type(model).__name__}; they are for a "
            "torch.nn.Module and for gathered weights: yield the tensors to publish, under their names"
        )

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


class IterableTensors(LiveTensors):
    """Tensors under the names that the user yields."""

    def __init__(self, source: Callable[[], Mapping[str, torch.Tensor] | NamedTensors]) -> None:
        self._source = source
        self.tensors = {}
        self.aliases = {}
        owners: dict[tuple[object, ...], str] = {}
        # These keep identities, not memory: a function may gather each tensor and drop it before the next.
        identities: list[StorageWeakRef] = []
        for name, value in pairs(source()):
            tensor = check_readable(name, value)
            if name in self.tensors or name in self.aliases:
                raise ModelError(f"tensor name {name!r} is yielded twice; each name must occur once")
            # A buffer that was written since is refilled for each tensor; inference tensors do not say.
            key = storage_key(tensor)
            if key is not None and not tensor.is_inference():
                key = *key, tensor._version
            identities.append(StorageWeakRef(tensor.untyped_storage()))
            owner = name if key is None else owners.setdefault(key, name)
            if owner == name:
                self.tensors[name] = CheckpointTensor(name, tuple(tensor.shape), tensor.dtype, device=tensor.device)
            else:
                self.aliases[name] = owner

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[str] = set()
        for name, value in pairs(self._source()):
            seen.add(name)
            tensor = check_readable(name, value)
            known = self.tensors.get(self.aliases.get(name, name))
            if known is None:
                raise TensorMismatchError(
                    f"tensor {name!r} was not there when the publisher was made ({tensor.dtype} {list(tensor.shape)}), "
                    "and the tensors of a run are fixed; do not yield it, or start a new run under a new URL"
                )
            if (tuple(tensor.shape), tensor.dtype) != (known.shape, known.dtype):
                raise changed(name, (tuple(tensor.shape), tensor.dtype), (known.shape, known.dtype))
            yield name, tensor
        missing = [name for name in self.tensors if name not in seen]
        if missing:
            raise TensorMismatchError(
                f"tensor {missing[0]!r} is no longer yielded, {len(missing)} are missing in all; yield all that were "
                "there when the publisher was made, or start a new run under a new URL"
            )


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


# The tensors of a run


def own_spec(tensor: CheckpointTensor) -> TensorSpec:
    """Return the spec of a live tensor in a run that has no base."""
    own = dtype_name(tensor.dtype, tensor.name)
    # torch calls the scales of F8_E8M0 floating-point, but they cannot be rounded to the model's dtype.
    if tensor.configured is not None and DTYPES[own].is_float:
        own = dtype_name(tensor.configured, tensor.name)
    return TensorSpec(tensor.name, own, tensor.shape)


def target_names(
    live: LiveTensors, specs: Mapping[str, TensorSpec] | None, where: str, read_config: Callable[[], bytes]
) -> dict[str, list[str]]:
    """Return live name, aliases included → names in the run.

    Args:
        specs: the run's tensors, which must include the live ones; None if the live ones make up the run. Excluded
            tensors that the run lacks have no name there.
        where: what ``specs`` belong to, for messages. read_config: returns its config.json, empty if it has none.
    """
    groups: dict[str, list[str]] = {name: [name] for name in live.tensors}
    for alias, owner in (live.aliases | _tied_aliases(live, specs or {}, where, read_config)).items():
        groups[owner].append(alias)
    names: dict[str, list[str]] = {}
    for owner, group in groups.items():
        left_out = owner in live.excluded
        if specs is None:
            names.update(dict.fromkeys(group, [] if left_out else [owner]))
            continue
        targets = [name for name in group if name in specs]
        if not targets and not left_out and is_packed(owner, specs):
            raise ModelError(f"tensor {owner!r} is quantized in {where} and {_needs_scales(live.tensors[owner].dtype)}")
        if not targets and not left_out:
            raise TensorMismatchError(f"tensor {owner!r} of the model is not among the {len(specs)} tensors of {where}")
        for name in targets:
            check_fits(owner, live.tensors[owner], specs[name], where)
        names.update(dict.fromkeys(group, targets))
    return names


def _tied_aliases(
    live: LiveTensors, specs: Mapping[str, TensorSpec], where: str, read_config: Callable[[], bytes]
) -> dict[str, str]:
    """Return tensors that only the run has → the live tensor that its config.json ties them to.

    A checkpoint may have both an output head and the embedding that it is tied to, and servers then load both; what
    yields or saves a tied model mostly leaves one of them out.
    """
    found: dict[str, str] = {}
    known = {*live.tensors, *live.aliases}
    own = [spec for name, spec in specs.items() if not name.startswith(DRAFT_PREFIX)]
    for head in (spec.name for spec in own if spec.name.endswith(HEAD)):
        alike = [spec.name for spec in own if spec.name != head and replace(spec, name=head) == specs[head]]
        if not any(name in known for name in (head, *alike)) or known.issuperset([head, *alike]):
            continue
        if not _ties_heads(read_config()):
            continue
        if len(alike) == 1:
            missing, present = (head, alike[0]) if alike[0] in known else (alike[0], head)
            found[missing] = present
        elif head not in known:
            raise ModelError(
                f"config.json ties tensor {head!r} of {where}, and {', '.join(map(repr, alike[:5]))} have its shape: "
                f"yield the embedding under the name {head!r} too"
            )
    return found


def _ties_heads(config: bytes) -> bool:
    document = load_json(config, CONFIG_NAME, finite=False) if config else None
    parts = [document, document.get("text_config")] if isinstance(document, dict) else []
    return any(isinstance(part, dict) and bool(part.get("tie_word_embeddings")) for part in parts)


def check_fits(name: str, tensor: torch.Tensor | CheckpointTensor, spec: TensorSpec, where: str) -> None:
    """Raise TensorMismatchError unless a live tensor has the shape of ``spec`` and can be rounded to its dtype.

    Integers would wrap, as would the scales of F8_E8M0. ModelError: it would need scales.
    """
    if tensor.shape != spec.shape:
        raise TensorMismatchError(
            f"tensor {spec.name!r} is {spec.dtype} {list(spec.shape)} in {where}, but {name!r} is {tensor.dtype} "
            f"{list(tensor.shape)} in the model"
        )
    if tensor.dtype == TORCH_DTYPES[spec.dtype]:
        return
    if spec.element.itemsize == 1 and tensor.dtype.is_floating_point:
        raise ModelError(f"tensor {name!r} is {spec.dtype} in {where} and {_needs_scales(tensor.dtype)}")
    if not (DTYPES[dtype_name(tensor.dtype, name)].is_float and spec.element.is_float):
        raise TensorMismatchError(
            f"tensor {name!r} is {tensor.dtype}, but {spec.name!r} is {spec.dtype} in {where}, and only floating-point "
            f"weights are converted; give it as {TORCH_DTYPES[spec.dtype]}"
        )


def is_packed(name: str, specs: Mapping[str, TensorSpec]) -> bool:
    """Return whether a checkpoint holds a weight packed, under other names."""
    stem = name.removesuffix("weight")
    return any(stem + suffix in specs for suffix in ("weight_packed", "qweight", "_blocks"))


def _needs_scales(dtype: torch.dtype) -> str:
    return (
        f"needs scales that {dtype} weights do not give: a publisher quantizes them if config.json has a "
        "quantization_config and one process holds all weights; use such a base and publish from one rank "
        "(docs/quantized.md), or a base in full precision"
    )
