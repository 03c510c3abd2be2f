"""Boxes of a version's tensors, rebuilt without the rest: what one rank of a sharded trainer holds.

Everything that leads to the version is read, since an object is proven by the SHA-256 of all of it, and a tensor of an
anchor or a checkpoint by the fingerprint of all of it. Only the boxes are kept. A change of a tensor is held against
the fingerprint that it declares where the boxes together are the whole tensor, or the change carries all of it; of
other changes it is proven that they are those that the chain lists, and that the fingerprints they declare lead to the
version's. ``fingerprint_box`` of all ranks' boxes, added up, proves the rest.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from vllm_delta_sync.errors import FingerprintError, TensorMismatchError, UnsupportedError
from vllm_delta_sync.format.documents import Anchor
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_change, fingerprint_strided, fingerprint_tensor
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.run.checks import check_base, check_tensor
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.objects import needs_weights
from vllm_delta_sync.run.plan import Plan
from vllm_delta_sync.run.restore import carry_out, held_whole, whole
from vllm_delta_sync.run.roots import branches, origin
from vllm_delta_sync.tensors.bits import BaseTensor, Bits, Positions, apply_distances
from vllm_delta_sync.tensors.boxes import Box
from vllm_delta_sync.tensors.changes import Changes, Sparse
from vllm_delta_sync.tensors.state import ModelState

logger = guarded_logger(__name__)

Boxes = Mapping[str, Sequence[Box]]
"""Boxes of tensors by checkpoint name. They may overlap, be empty, and leave out what is not wanted."""


def restore_boxes(
    run: RunDocuments, manifest: Manifest, boxes: Boxes, base: str | Path | None = None
) -> dict[str, list[Bits]]:
    """Rebuild some boxes of a version, with other ways around what is damaged or missing, as ``read.restore``.

    Takes the memory of the boxes, of one object of up to ``read.MAPPED_BYTES`` (larger ones go through a temporary
    file, or the run's cache), and of one decoded step of up to ``read.DECODED_ELEMENTS`` (larger ones are decoded in
    pieces, except those of codec ``raw``). Where a step of codec ``context`` leads to the version, the whole model is
    rebuilt in a temporary file: such a step is read with all that it builds on at hand.

    Args:
        boxes: of tensors of the run. base: as ``read.restore``.

    Returns:
        for each name, the flat (numel,) bits of its boxes, in their order; writable.

    Raises:
        TensorMismatchError: the run has no such tensor, or it has another shape than a box says. Else as
            ``read.restore``.
    """
    check_base(base)
    for name, wanted in boxes.items():
        shape = run.table.by_name(name).shape
        odd = next((box for box in wanted if box.whole != shape), None)
        if odd is not None:
            raise TensorMismatchError(
                f"box of tensor {name!r} is of a tensor {list(odd.whole)}, the run's {list(shape)}"
            )

    def begin(found: Plan) -> ModelState | PartialState:
        context = next((step for step in found.steps if needs_weights(step.document)), None)
        if context is None:
            return _root(run, found, boxes, base)
        logger.info(
            "%s is of codec 'context': all of version %d is rebuilt in a temporary file to cut the wanted parts out",
            context.key,
            manifest.version,
        )
        return whole(run, found.root, found.beside, base, in_memory=False)

    _, held = carry_out(run, manifest, begin)
    if isinstance(held, PartialState):
        return held.bits(boxes)
    return {name: [_copied(box, held.bits[run.table.index(name)]) for box in wanted] for name, wanted in boxes.items()}


def fingerprint_box(name: str, box: Box, bits: Bits) -> Fingerprint:
    """What the elements of a box add to the fingerprint of their tensor, and so to that of the model.

    Args:
        bits: flat (numel of the box,).
    """
    local = [math.prod(box.shape[axis + 1 :]) for axis in range(len(box.shape))]
    return fingerprint_strided(name, bits, box.shape, (0, local), (box.start, box.strides))


@dataclass
class _Held:
    """What is kept of one tensor.

    Attributes:
        pieces: boxes that are not empty, and their flat bits. complete: whether each element is in one of them.
        fingerprint: of the whole tensor, as far as is declared.
    """

    pieces: list[tuple[Box, Bits]]
    complete: bool
    fingerprint: Fingerprint


class PartialState:
    """Boxes as bit patterns, moved from version to version (``read.Weights``).

    Attributes:
        fingerprint: of the whole model, as far as is declared.

    Args:
        document: declares the fingerprints of the version that they are of.
        pieces: by tensor id.
    """

    def __init__(
        self, table: TensorTable, document: Manifest | Anchor, pieces: Mapping[int, list[tuple[Box, Bits]]]
    ) -> None:
        self._table = table
        self.fingerprint = Fingerprint.from_hex(document.fingerprint)
        declared = document.tensor_fingerprints or {}
        self._held = {
            tensor: _Held(held, _complete([box for box, _ in held]), Fingerprint.from_hex(declared[table[tensor].name]))
            for tensor, held in pieces.items()
        }

    def bits(self, boxes: Boxes) -> dict[str, list[Bits]]:
        """The bits of the boxes that these were made of."""
        found: dict[str, list[Bits]] = {}
        for name, wanted in boxes.items():
            held = self._held.get(self._table.index(name))
            kept = iter([] if held is None else held.pieces)
            empty = np.empty(0, self._table.by_name(name).element.uint)
            found[name] = [next(kept)[1] if box.numel else empty.copy() for box in wanted]
        return found

    def base_tensor(self, tensor: int) -> BaseTensor:
        """Nothing is held whole: raises UnsupportedError."""
        raise UnsupportedError(
            f"tensor {self._table[tensor].name!r} is held in parts, and an object of codec 'context' was not announced "
            "by what lists it; publish with codec='packed'"
        )

    def apply(self, changes: Changes) -> None:
        """Move to the next version in place.

        Raises:
            FingerprintError: a tensor did not come out as the object declares; the bits are then unusable.
        """
        measured: dict[int, Fingerprint] = {}
        for group in changes.sparse:
            for tensor, positions, data in group.tensors():
                held = self._held.get(tensor)
                if held is not None:
                    change = self._move(group, held, self._table[tensor].name, positions, data)
                    if held.complete:
                        measured[tensor] = measured.get(tensor, Fingerprint()) + change
        for full in changes.full:
            held = self._held.get(full.id)
            if held is not None:
                for box, bits in held.pieces:
                    bits.reshape(box.shape)[...] = box.view(full.bits)
                measured[full.id] = fingerprint_tensor(self._table[full.id].name, full.bits) - held.fingerprint
        for tensor, declared in changes.fingerprints.items():
            held = self._held.get(tensor)
            if held is None:
                continue
            if measured.get(tensor, Fingerprint() if held.complete else declared) != declared:
                raise FingerprintError(
                    f"tensor {self._table[tensor].name!r} does not have the declared fingerprint after the change: "
                    "the object was made against other weights, or is damaged"
                )
            held.fingerprint += declared
        self.fingerprint += changes.fingerprint

    def _move(self, group: Sparse, held: _Held, name: str, positions: Positions, data: Bits) -> Fingerprint:
        change = Fingerprint()
        for box, bits in held.pieces:
            chosen, local = box.inside(positions)
            before, values = bits[local], data[chosen]
            if group.relative:
                apply_distances(group.element, bits, local, values)
            else:
                bits[local] = values
            if held.complete:
                change += fingerprint_change(name, positions[chosen], before, bits[local])
        return change


def _root(run: RunDocuments, found: Plan, boxes: Boxes, base: str | Path | None) -> PartialState:
    """The boxes at a plan's root. Errors as ``read.whole``."""
    wanted = {name: full for name, some in boxes.items() if (full := [box for box in some if box.numel])}
    table = run.table
    if not branches(found.root, found.beside):
        with held_whole(run, found.root, found.beside, base, None) as (document, tensors):
            return PartialState(table, document, _cut(table, document, tensors, wanted))
    with origin(run, found.root, base) as (source, at, further):
        bits = restore_boxes(source, at, wanted, further)
    pieces = {table.index(name): list(zip(some, bits[name], strict=True)) for name, some in wanted.items()}
    for tensor, held in pieces.items():
        if _complete([box for box, _ in held]):
            name = table[tensor].name
            measured = sum((fingerprint_box(name, box, bits) for box, bits in held), Fingerprint())
            check_tensor(found.root, name, measured)
    return PartialState(table, found.root, pieces)


def _cut(
    table: TensorTable, document: Manifest | Anchor, tensors: Iterable[tuple[str, Bits]], boxes: Boxes
) -> dict[int, list[tuple[Box, Bits]]]:
    """The boxes of tensors that are at hand whole, each of which is proven by its fingerprint."""
    pieces: dict[int, list[tuple[Box, Bits]]] = {}
    for name, bits in tensors:
        if name not in boxes:
            continue
        spec = table.by_name(name)
        if bits.dtype != spec.element.uint or bits.size != spec.numel:
            raise TensorMismatchError(f"tensor {name!r} has {bits.size} elements of {bits.dtype}, not {spec}")
        check_tensor(document, name, fingerprint_tensor(name, bits))
        pieces[table.index(name)] = [(box, _copied(box, bits)) for box in boxes[name]]
    missing = next((name for name in boxes if table.index(name) not in pieces), None)
    if missing is not None:
        raise TensorMismatchError(f"tensor {missing!r} is missing")
    return pieces


def _copied(box: Box, bits: Bits) -> Bits:
    return np.array(box.view(bits), order="C").reshape(-1)


def _complete(boxes: Sequence[Box]) -> bool:
    """Whether boxes of one tensor, none of them empty, hold each element once."""
    if sum(box.numel for box in boxes) != math.prod(boxes[0].whole):
        return False
    return not any(_overlap(one, other) for one, other in combinations(boxes, 2))


def _overlap(one: Box, other: Box) -> bool:
    sides = zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    return all(at < beside + along and beside < at + size for at, size, beside, along in sides)
