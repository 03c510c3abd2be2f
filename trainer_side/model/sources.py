"""``live_tensors``: turn what a user passes as the model into checkpoint tensors with live values.

A model is a module, an iterable of (checkpoint name, tensor) that can be read repeatedly, or a function without
arguments that returns one. Names are those of a Hugging Face checkpoint. ``target_names`` matches them to the tensors
of a run."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from trainer_side.model.live_tensors import (
    CheckpointTensor,
    LiveTensors,
    NamedTensors,
    changed,
    check_readable,
    pairs,
    storage_key,
)
from trainer_side.model.module import ModuleTensors, Selection
from trainer_side.model.streamed import StreamedWeights
from vllm_delta_sync.errors import ModelError, TensorMismatchError, UsageError
from vllm_delta_sync.format.base_document import load_json
from vllm_delta_sync.format.table import DRAFT_PREFIX, DTYPES, TensorSpec
from vllm_delta_sync.tensors.checkpoint import CONFIG_NAME
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES, dtype_name

HEAD = "lm_head.weight"
"""How the name of an output head ends."""

ModelLike = nn.Module | Mapping[str, torch.Tensor] | NamedTensors | Callable[[], NamedTensors] | LiveTensors


def live_tensors(model: ModelLike, selection: Selection | None = None) -> LiveTensors:
    """Return the tensors of what a user passed as the model. Args: selection: of a module, or of streamed weights."""
    if isinstance(model, nn.Module):
        return ModuleTensors(model, selection)
    if selection is not None and not selection.is_everything:
        if not isinstance(model, StreamedWeights):
            raise UsageError(
                f"include, exclude or rename is given, and the model is a {type(model).__name__}; they are for a "
                "torch.nn.Module and for gathered weights: yield the tensors to publish, under their names"
            )
        model.select(selection)
    if isinstance(model, LiveTensors):
        return model
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
        targets = ([] if left_out else [owner]) if specs is None else [name for name in group if name in specs]
        if specs is not None and (targets or not left_out):
            _check_targets(live.tensors[owner], targets, specs, where)
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
    if not targets and is_packed(tensor.name, specs):
        raise ModelError(f"tensor {tensor.name!r} is quantized in {where} and {_needs_scales(tensor.dtype)}")
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
            raise ModelError(f"tensor {name!r} is {spec.dtype} in {where} and {_needs_scales(tensor.dtype)}")
        _check_convertible(tensor.name, tensor.dtype, spec, f"in {where}")


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


def _check_convertible(name: str, dtype: torch.dtype, spec: TensorSpec, where: str) -> None:
    """Raise TensorMismatchError unless ``dtype`` can be rounded to the spec's: integers and scales would wrap."""
    given = dtype_name(dtype, name)
    if given == spec.dtype or (DTYPES[given].is_float and spec.element.is_float):
        return
    raise TensorMismatchError(
        f"tensor {name!r} is {dtype}, but {spec.name!r} is {spec.dtype} {where}, and only floating-point weights are "
        f"converted; give it as {TORCH_DTYPES[spec.dtype]}"
    )
