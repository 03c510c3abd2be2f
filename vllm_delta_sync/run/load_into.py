"""Tensors that a version's weights are written into: whether they fit, and those of which a rank holds a part."""

from collections.abc import Mapping
from pathlib import Path

import torch

from vllm_delta_sync.errors import TensorMismatchError
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.partial import restore_boxes
from vllm_delta_sync.tensors.boxes import Box
from vllm_delta_sync.tensors.torch_sharding import Pieces, is_sharded, local_boxes, whole_shape
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES, tensor_from_bits

Places = Mapping[str, torch.Tensor]
"""Where to write, by checkpoint name."""


def any_sharded(places: Places) -> bool:
    """Whether this process holds a part of one of them only."""
    return any(is_sharded(place) for place in places.values())


def fill_shards(run: RunDocuments, manifest: Manifest, places: Places, base: str | Path | None) -> None:
    """Write what this process holds of each tensor of the run. Errors as ``slices.restore_boxes``."""
    held = {spec.name: _pieces(spec.name, places[spec.name]) for spec in run.table if spec.name in places}
    boxes = {name: [box for box, _ in pieces] for name, pieces in held.items()}
    with torch.no_grad():
        for name, found in restore_boxes(run, manifest, boxes, base).items():
            dtype = run.table.by_name(name).dtype
            for (box, local), bits in zip(held[name], found, strict=True):
                local.copy_(tensor_from_bits(bits, TensorSpec(name, dtype, box.shape)))


def _pieces(name: str, place: torch.Tensor) -> Pieces:
    pieces = local_boxes(place, name)
    if getattr(getattr(place, "ds_status", None), "name", "") == "AVAILABLE":
        # Small parameters, and all of them between forward and backward, ZeRO-3 holds gathered beside its partition.
        pieces.append((Box.all_of(whole_shape(place)), place.detach()))
    return pieces


def check_places(places: Places, specs: Mapping[str, TensorSpec], strict: bool) -> None:
    """Raise TensorMismatchError unless a run's tensors fit.

    Args:
        specs: of the run. strict: whether every tensor of either must be in the other.
    """
    filled = {_memory(places[name]) for name in specs if name in places}
    if strict:
        absent = next((name for name in specs if name not in places), None)
        if absent is not None:
            longer = next((name for name in places if name.endswith(f".{absent}")), None)
            mend = "pass strict=False to skip it"
            if longer is not None:
                mend = f"it has {longer!r}: pass the module inside the wrapper that adds to the names"
            raise TensorMismatchError(f"tensor {absent!r} of the run is not in the target; {mend}")
        extra = (name for name, place in places.items() if name not in specs)
        odd = next((name for name in extra if _memory(places[name]) not in filled), None)
        if odd is not None:
            raise TensorMismatchError(f"tensor {odd!r} of the target is not in the run; pass strict=False to leave it")
    for name, spec in specs.items():
        if name in places:
            _check_place(name, places[name], spec)


def _check_place(name: str, place: torch.Tensor, spec: TensorSpec) -> None:
    dtype, shape = TORCH_DTYPES[spec.dtype], whole_shape(place)
    if shape != spec.shape:
        raise TensorMismatchError(f"tensor {name!r} is {list(shape)} in the target, {list(spec.shape)} in the run")
    if place.dtype != dtype and torch.promote_types(place.dtype, dtype) != place.dtype:
        raise TensorMismatchError(
            f"tensor {name!r} is {place.dtype} in the target, which cannot hold every {dtype} of the run"
        )
    if place.is_meta:
        raise TensorMismatchError(
            f"tensor {name!r} of the target is on the device 'meta' and has no memory; call to_empty(device=...) on "
            "the model first"
        )


def _memory(place: torch.Tensor) -> tuple[object, ...]:
    """What two names of one tensor have in common."""
    if not is_sharded(place):
        return (place.untyped_storage().data_ptr(),)
    pieces = local_boxes(place)
    # Partitions of different tensors may lie in one storage. Those of which nothing is here have no place in memory.
    return (pieces[0][1].data_ptr(), *pieces[0][0].shape) if pieces else (None, id(place))
