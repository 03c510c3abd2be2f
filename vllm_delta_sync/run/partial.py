"""``restore_boxes`` rebuilds parts of a version's tensors; ``fill_shards`` writes them into a sharded model.

All objects on the path to the version are read in full, because the SHA-256 of an object and the fingerprint of a
tensor in an anchor or checkpoint cover all of it. Only the boxes are kept. A change of a tensor is compared with its
declared fingerprint if the boxes together are the whole tensor, or the change carries the whole tensor. Other changes
are verified as listed by the run's documents, and their declared fingerprints must add up to the version's; the sum of
``fingerprint_box`` over the boxes of all ranks verifies the rest.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from vllm_delta_sync.codec.tiles.grid import CutTileError, held_part, refusing, view_of
from vllm_delta_sync.errors import TensorMismatchError
from vllm_delta_sync.format.documents import Anchor
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_strided
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.run.checks import check_base_exists, check_bits, check_tensor
from vllm_delta_sync.run.read_plan import Plan
from vllm_delta_sync.run.restore import execute_plan, load_root, open_branch_source, root_tensors
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.tensors.boxes import Box
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, Changes
from vllm_delta_sync.tensors.state import HeldPieces, apply_changes
from vllm_delta_sync.tensors.torch_sharding import Pieces, is_sharded, local_boxes, whole_shape
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES, bits_of, tensor_from_bits

logger = guarded_logger(__name__)

Boxes = Mapping[str, Sequence[Box]]
"""Boxes of tensors by checkpoint name. They may overlap, be empty, and cover a tensor in part."""
TargetTensors = Mapping[str, torch.Tensor]
"""The tensors to write to, by checkpoint name."""


def restore_boxes(
    run: RunReader, manifest: Manifest, boxes: Boxes, base: str | Path | None = None
) -> dict[str, list[Bits]]:
    """Rebuild some boxes of a version; like ``restore``, takes another path around damaged or missing objects.

    Takes the memory of the boxes, of one object of up to ``MAPPED_BYTES`` (larger ones go through a temporary file or
    the run's cache, in pieces of at most ``ranged.BUFFER_BYTES`` together), and of one decoded step of up to
    ``DECODED_ELEMENTS`` (larger ones are decoded in pieces, except those of codec ``raw``). If the boxes cut a tile
    that is not plain, the whole model is rebuilt in a temporary file, because decoding the tile needs all of its base
    bits.

    Args:
        boxes: of tensors of the run. base: as ``restore``.

    Returns:
        for each name, the flat (numel,) bits of its boxes, in their order; writable.

    Raises:
        TensorMismatchError: the run has no such tensor, or its shape is not the one in a box. Otherwise as ``restore``.
    """
    check_base_exists(base)
    for name, wanted in boxes.items():
        shape = run.table.by_name(name).shape
        mismatch = next((box for box in wanted if box.whole != shape), None)
        if mismatch is not None:
            raise TensorMismatchError(
                f"a box of tensor {name!r} is for shape {list(mismatch.whole)}, the tensor of the run has {list(shape)}"
            )

    try:
        _, held = execute_plan(run, manifest, lambda found: _load_root_boxes(run, found, boxes, base))
        return held.bits(boxes)
    except CutTileError as error:
        logger.info(
            "rebuilding all of version %d in a temporary file to extract this rank's parts: %s", manifest.version, error
        )
    _, state = execute_plan(run, manifest, lambda found: load_root(run, found.root, base, in_memory=False))
    return {name: [_copied(box, state.bits[run.table.index(name)]) for box in wanted] for name, wanted in boxes.items()}


def fingerprint_box(name: str, box: Box, bits: Bits) -> Fingerprint:
    """Return the share of a box's elements in the fingerprint of their tensor, and so in that of the model.

    Args:
        bits: flat (numel of the box,).
    """
    local = [math.prod(box.shape[axis + 1 :]) for axis in range(len(box.shape))]
    return fingerprint_strided(name, bits, box.shape, (0, local), (box.start, box.strides))


class PartialState:
    """The bits of some boxes, moved from version to version (a ``StepTarget``).

    Attributes:
        fingerprint: declared fingerprint of the whole model.

    Args:
        document: declares the fingerprints of the version of the pieces.
        pieces: by tensor id; the boxes are not empty.
    """

    def __init__(
        self, table: TensorTable, document: Manifest | Anchor, pieces: Mapping[int, list[tuple[Box, Bits]]]
    ) -> None:
        self._table = table
        self.fingerprint = Fingerprint.from_hex(document.fingerprint)
        self._pieces = pieces
        declared = document.tensor_fingerprints or {}
        self._fingerprints = {tensor: Fingerprint.from_hex(declared[table[tensor].name]) for tensor in pieces}
        self._incomplete = {tensor for tensor, kept in pieces.items() if not _complete([box for box, _ in kept])}

    def bits(self, boxes: Boxes) -> dict[str, list[Bits]]:
        """Return the bits of the boxes that this state was made from."""
        found: dict[str, list[Bits]] = {}
        for name, wanted in boxes.items():
            kept = iter(self._held(self._table.index(name)))
            empty = np.empty(0, self._table.by_name(name).element.uint)
            found[name] = [next(kept)[1] if box.numel else empty.copy() for box in wanted]
        return found

    def base_tensor(self, tensor: int) -> BaseTensor:
        """Return the bits of the boxes of a tensor; none of it if no box is wanted."""
        spec, kept = self._table[tensor], self._pieces.get(tensor, [])

        def assembled() -> Bits:
            bits = np.empty(spec.numel, spec.element.uint)
            for box, held in kept:
                box.view(bits)[...] = held.reshape(box.shape)
            return bits

        largest = [box for box, _ in kept if box.is_whole][:1] or [box for box, _ in kept]
        if len(largest) > 1 and any(one.overlaps(other) for one, other in combinations(largest, 2)):
            return refusing(CutTileError(f"boxes of tensor {spec.name!r} overlap"))
        return held_part(spec, [view_of(box) for box in largest], assembled)

    def apply(self, changes: Changes) -> None:
        """Move to the next version in place.

        Raises:
            FingerprintError: a tensor's fingerprint is not the declared one; the bits are then unusable.
        """
        apply_changes(changes, self._table, self._held, self._fingerprints, self._incomplete)
        self.fingerprint += changes.fingerprint

    def _held(self, tensor: int) -> HeldPieces:
        return self._pieces.get(tensor, ())


def _load_root_boxes(run: RunReader, found: Plan, boxes: Boxes, base: str | Path | None) -> PartialState:
    """Load the boxes at a plan's root. Errors as ``load_root``."""
    wanted = {name: full for name, some in boxes.items() if (full := [box for box in some if box.numel])}
    table = run.table
    if not found.root.is_branch:
        with root_tensors(run, found.root, base, None) as tensors:
            document = found.root.document
            return PartialState(table, document, _extract_boxes(table, document, tensors, wanted))
    with open_branch_source(run, found.root.manifest, base) as (source, at, further):
        bits = restore_boxes(source, at, wanted, further)
        pieces = {table.index(name): list(zip(some, bits[name], strict=True)) for name, some in wanted.items()}
        for tensor, kept in pieces.items():
            if _complete([box for box, _ in kept]):
                name = table[tensor].name
                measured = sum((fingerprint_box(name, box, bits) for box, bits in kept), Fingerprint())
                check_tensor(found.root.manifest, name, measured)
    return PartialState(table, found.root.manifest, pieces)


def _extract_boxes(
    table: TensorTable, document: Manifest | Anchor, tensors: Iterable[tuple[str, Bits]], boxes: Boxes
) -> dict[int, list[tuple[Box, Bits]]]:
    """Extract the boxes from whole tensors, each of which is checked by its fingerprint."""
    pieces: dict[int, list[tuple[Box, Bits]]] = {}
    for name, bits in tensors:
        if name not in boxes:
            continue
        check_bits(document, table.by_name(name), bits)
        pieces[table.index(name)] = [(box, _copied(box, bits)) for box in boxes[name]]
    missing = next((name for name in boxes if table.index(name) not in pieces), None)
    if missing is not None:
        raise TensorMismatchError(f"tensor {missing!r} is missing")
    return pieces


def _copied(box: Box, bits: Bits) -> Bits:
    return np.array(box.view(bits), order="C").reshape(-1)


def _complete(boxes: Sequence[Box]) -> bool:
    """Return whether non-empty boxes of one tensor hold each element exactly once."""
    if sum(box.numel for box in boxes) != math.prod(boxes[0].whole):
        return False
    return not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def any_sharded(targets: TargetTensors) -> bool:
    """Return whether this process holds only a part of any of the tensors."""
    return any(is_sharded(target) for target in targets.values())


def fill_shards(run: RunReader, manifest: Manifest, targets: TargetTensors, base: str | Path | None) -> None:
    """Write a version's weights into the parts that this process holds. Errors as ``restore_boxes``."""
    pieces_by_name = {spec.name: _pieces(spec.name, targets[spec.name]) for spec in run.table if spec.name in targets}
    boxes = {name: [box for box, _ in pieces] for name, pieces in pieces_by_name.items()}
    fresh = {
        name: [
            tensor_from_bits(bits, TensorSpec(name, run.table.by_name(name).dtype, box.shape))
            for box, bits in zip(boxes[name], found, strict=True)
        ]
        for name, found in restore_boxes(run, manifest, boxes, base).items()
    }
    check_ties(targets, fresh)
    with torch.no_grad():
        for name, pieces in pieces_by_name.items():
            for (_, local), tensor in zip(pieces, fresh[name], strict=True):
                local.copy_(tensor)


def _pieces(name: str, target: torch.Tensor) -> Pieces:
    pieces = local_boxes(target, name)
    if getattr(getattr(target, "ds_status", None), "name", "") == "AVAILABLE":
        # ZeRO-3 also holds small parameters gathered, and all of them between forward and backward.
        pieces.append((Box.all_of(whole_shape(target)), target.detach()))
    return pieces


def check_targets(targets: TargetTensors, specs: Mapping[str, TensorSpec], strict: bool) -> None:
    """Raise TensorMismatchError unless a run's tensors fit into the targets.

    Args:
        specs: of the run's tensors. strict: whether both sides must have the same tensors.
    """
    for name, target in targets.items():
        if not isinstance(target, torch.Tensor):  # such as an array of numpy
            raise TensorMismatchError(f"{name!r} of the target is a {type(target).__name__}; give a torch.Tensor")
    filled = {_memory(targets[name]) for name in specs if name in targets}
    if strict:
        absent = next((name for name in specs if name not in targets), None)
        if absent is not None:
            longer = next((name for name in targets if name.endswith(f".{absent}")), None)
            remedy = "pass strict=False to skip it"
            if longer is not None:
                remedy = f"it has {longer!r}: pass the module inside the wrapper that adds to the names"
            raise TensorMismatchError(f"tensor {absent!r} of the run is not in the target; {remedy}")
        unlisted = (name for name in targets if name not in specs)
        extra = next((name for name in unlisted if _memory(targets[name]) not in filled), None)
        if extra is not None:
            raise TensorMismatchError(
                f"tensor {extra!r} of the target is not in the run; pass strict=False to leave it"
            )
    for name, spec in specs.items():
        if name in targets:
            _check_target(name, targets[name], spec)


def _check_target(name: str, target: torch.Tensor, spec: TensorSpec) -> None:
    dtype, shape = TORCH_DTYPES[spec.dtype], whole_shape(target)
    # Elements of a byte, and integers, may be those of a quantized weight, whose values need scales.
    widens = target.dtype.is_floating_point and spec.element.is_float and min(target.itemsize, dtype.itemsize) > 1
    if shape != spec.shape:
        raise TensorMismatchError(
            f"tensor {name!r} has shape {list(shape)} in the target, {list(spec.shape)} in the run"
        )
    if target.dtype != dtype and not (widens and torch.promote_types(target.dtype, dtype) == target.dtype):
        raise TensorMismatchError(
            f"tensor {name!r} is {target.dtype} in the target, and {dtype} in the run; give the target the same dtype, "
            "or, for floating-point numbers of 16 bits or more, a wider one"
        )
    if target.is_meta:
        raise TensorMismatchError(
            f"tensor {name!r} of the target is on the device 'meta' and has no memory; call to_empty(device=...) on "
            "the model first"
        )


def check_ties(targets: TargetTensors, fresh: Mapping[str, Sequence[torch.Tensor]]) -> None:
    """Raise TensorMismatchError if two names of one tensor are to get different values: only the last would stay.

    Args:
        fresh: what is to be written to the targets of these names, in pieces.
    """
    owners: dict[tuple[object, ...], str] = {}
    for name, pieces in fresh.items():
        target = targets[name]
        owner = owners.setdefault(_memory(target), name)
        if owner == name:
            continue
        for one, other in zip(fresh[owner], pieces, strict=True):
            if not np.array_equal(bits_of(one.to(target.dtype)), bits_of(other.to(target.dtype))):
                raise TensorMismatchError(
                    f"tensors {owner!r} and {name!r} are one tensor in the target, and have different values in the "
                    "run; untie them, for an output head with tie_word_embeddings=False in the model's configuration"
                )


def _memory(target: torch.Tensor) -> tuple[object, ...]:
    """Return an identity that two names of one tensor share."""
    if not is_sharded(target):
        # Not that of the storage, in which trainers may keep all parameters.
        return (target.data_ptr(), *target.shape, *target.stride())
    pieces = local_boxes(target)
    # Partitions of different tensors may share a storage. A tensor without a local part has no address.
    return (pieces[0][1].data_ptr(), *pieces[0][0].shape) if pieces else (None, id(target))
