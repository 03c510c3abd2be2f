"""``target_names``: match a model's tensors to the tensors of a run, and check that they fit."""

from collections.abc import Mapping

import torch

from trainer_side.model.sources import CheckpointTensor, LiveTensors
from vllm_delta_sync.errors import ModelError, TensorMismatchError
from vllm_delta_sync.format.dtypes import DTYPES
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES, dtype_name


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
