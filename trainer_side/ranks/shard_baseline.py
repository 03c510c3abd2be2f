"""``ShardBaseline``: the bits of one rank's parts, and how they relate to whole tensors."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import torch

from trainer_side.diff.baseline import Baseline, names_in_run, new_run_tensors
from trainer_side.diff.buffers import BaselineLocation
from trainer_side.diff.pending_delta import FullTensor, PendingDelta, SparseTensor, VersionChanges
from trainer_side.model.live_tensors import LiveTensors
from trainer_side.ranks.shard_parts import RankParts
from vllm_delta_sync.codec.tiles.grid import CutTileError, covered_rectangles, extent, view_of
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_change
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.run.partial import fingerprint_box
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.tensors.boxes import Box
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, InPlace, Matrix, Positions
from vllm_delta_sync.tensors.checkpoint import Checkpoint
from vllm_delta_sync.units import listed

_PIECE_ELEMENTS = 1024**2


class _WholeTensors(LiveTensors):
    """The whole tensors of a sharded model, for matching them to the tensors of a run."""

    def __init__(self, live: RankParts) -> None:
        self._live = live
        self.tensors, self.aliases, self.excluded = live.whole, live.whole_aliases, live.whole_excluded

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._live.read()


class ShardBaseline(Baseline):
    """The baseline of the parts that this rank owns, and where they lie in the run's tensors.

    Rank 0 also owns the run's tensors that the model does not have. ``table`` and ``fingerprints`` are of the parts.

    Attributes:
        whole: the run's tensors.
        boxes: per part, its tensor's id in ``whole``, and its box there.
        shares: tensor id in ``whole`` → what this rank's parts add to its fingerprint; see ``scan``, ``replace_bits``.
    """

    def __init__(
        self,
        live: RankParts,
        table: TensorTable,
        names: Mapping[str, list[str]],
        checkpoint: Checkpoint | None,
        rank: int,
        location: BaselineLocation = "host",
    ) -> None:
        found: dict[str, tuple[TensorSpec, int, Box]] = {}
        targets_of: dict[str, list[str]] = {}
        for part_name, part in live.parts.items():
            for target in names[part.name]:
                # ``target`` is the tensor of the part, or one that is tied to it.
                name = target + part_name.removeprefix(part.name)
                spec = TensorSpec(name, table.by_name(target).dtype, part.box.shape)
                found[name] = spec, table.index(target), part.box
                targets_of.setdefault(part_name, []).append(name)
        if rank == 0:
            present = {target for targets in names.values() for target in targets}
            for spec in table:
                if spec.name not in present:
                    found[spec.name] = spec, table.index(spec.name), Box.all_of(spec.shape)
        parts = TensorTable((spec for spec, _, _ in found.values()), checks=False)
        partial = {part for part, spec in enumerate(parts) if spec.name not in table}
        super().__init__(parts, targets_of, checkpoint, partial, location)
        live.unused = [name for name in live.excluded if name not in targets_of]
        self.expect_on_devices(live)
        self.whole = table
        self.boxes = [found[spec.name][1:] for spec in parts]
        self.shares: dict[int, Fingerprint] = {}
        self._of_tensor: dict[str, list[tuple[int, Box]]] = {}
        for number, (tensor, box) in enumerate(self.boxes):
            self._of_tensor.setdefault(table[tensor].name, []).append((number, box))

    @classmethod
    def captured_parts(
        cls, live: RankParts, base: str | Path | None, rank: int, location: BaselineLocation = "host"
    ) -> Self:
        """Return the baseline of a new run, from the current parts."""
        table, names, checkpoint = new_run_tensors(_WholeTensors(live), base)
        baseline = cls(live, table, names, checkpoint, rank, location)
        baseline.capture(live)
        if checkpoint is not None:

            def base_bits(part: int) -> Bits:
                tensor, box = baseline.boxes[part]
                return box.view(checkpoint.bits(table[tensor].name)).reshape(-1)

            baseline.warn_of_missing("base")
            baseline.compare(base_bits, live.excluded)
        return baseline

    @classmethod
    def parts_of_run(cls, live: RankParts, run: RunReader, rank: int) -> Self:
        """Return the baseline of an existing run, still without values."""
        baseline = cls(live, run.table, names_in_run(_WholeTensors(live), run), None, rank)
        baseline.warn_of_missing("run")
        return baseline

    def scan(self) -> None:
        """Fingerprint every part, by itself and as a share of its tensor."""
        super().scan()
        self.shares = self.shares_of([self.read(part) for part in range(len(self.boxes))])

    def shares_of(self, bits: Sequence[Bits]) -> dict[int, Fingerprint]:
        """Return tensor id → what this rank adds to its fingerprint, if its parts have these (numel,) bits."""
        shares: dict[int, Fingerprint] = {}
        for (tensor, box), here in zip(self.boxes, bits, strict=True):
            share = fingerprint_box(self.whole[tensor].name, box, here)
            shares[tensor] = shares.get(tensor, Fingerprint()) + share
        return shares

    def replace_bits(self, bits: list[Bits], shares: dict[int, Fingerprint]) -> None:
        """Replace all bits, after the sum of all ranks' shares was checked; else as ``Baseline.replace``."""
        self.write_all(bits, self.fingerprints_of(bits))
        self.shares = shares

    def wanted(self) -> dict[str, list[Box]]:
        """Return checkpoint name → this rank's boxes of that tensor, in the order of ``in_part_order``."""
        return {name: [box for _, box in parts] for name, parts in self._of_tensor.items()}

    def in_part_order(self, found: Mapping[str, Sequence[Bits]]) -> list[Bits]:
        """Return the bits per part, from the bits of the ``wanted`` boxes."""
        rows = {name: iter(bits) for name, bits in found.items()}
        return [next(rows[self.whole[tensor].name]) for tensor, _ in self.boxes]

    def parts_of(self, name: str) -> list[tuple[int, Box]]:
        """Return the id and box of each part that this rank has of a tensor."""
        return self._of_tensor.get(name, [])

    def base_tensor(self, tensor: int) -> BaseTensor:
        """Return the bits that this rank has of a tensor of ``whole``, after the changes.

        Those of a part that is one rectangle are the baseline's own; of others, they are copied to their places in a
        whole tensor, of which the other pages are never touched.
        """
        spec = self.whole[tensor]
        own = [(part, box) for part, box in self.parts_of(spec.name) if box.numel]
        try:
            rectangles = covered_rectangles(spec, [view_of(box) for _, box in own])
        except CutTileError:
            # Too many pieces: its tiles are plain.
            rectangles = ()
        rows, columns = extent(spec.shape)
        found = ((0, rows, 0, columns),) if rectangles is None else rectangles
        in_place = None
        if len(own) == len(found) == 1:
            top, _, left, right = found[0]
            stride = right - left
            in_place = InPlace(Matrix(self.read(own[0][0]), -top * stride - left, stride), nullcontext)

        def copied() -> Bits:
            bits = np.empty(spec.numel, spec.element.uint)
            for part, box in own:
                box.view(bits)[...] = self.read(part).reshape(box.shape)
            return bits

        return BaseTensor(copied, rectangles, in_place, after=True)


def changes_of_tensors(baseline: ShardBaseline, pending: PendingDelta) -> VersionChanges:
    """Return the changes of a pending delta of this rank's parts, in terms of whole tensors.

    Valid as long as ``PendingDelta.changes``.
    """
    own = pending.changes()
    found: dict[int, list[_PartChanges]] = {}
    for part in own.sparse:
        tensor, box = baseline.boxes[part.id]
        found.setdefault(tensor, []).append(_PartChanges(box, part))
    changes = VersionChanges(baseline.whole, own.relative, fingerprints=_fingerprint_changes(baseline, pending))
    changes.full = [FullTensor(baseline.boxes[one.id][0], one.read) for one in own.full]
    for tensor, parts in found.items():
        read = parts[0].pieces if len(parts) == 1 else partial(_merged, parts)
        changes.sparse.append(SparseTensor(tensor, sum(part.of.count for part in parts), read))
    return changes


@dataclass(frozen=True)
class _PartChanges:
    """Changes of one part, and the part's box in its tensor."""

    box: Box
    of: SparseTensor

    def pieces(self) -> Iterator[tuple[Positions, Bits]]:
        """Yield the changes with positions in the whole tensor."""
        for positions, data in self.of.pieces():
            yield self.box.positions(positions), data


def _fingerprint_changes(baseline: ShardBaseline, pending: PendingDelta) -> dict[int, Fingerprint]:
    changes: dict[int, Fingerprint] = {}
    for part, pieces in pending.elements(_PIECE_ELEMENTS):
        tensor, box = baseline.boxes[part]
        for positions, before, now in pieces:
            change = fingerprint_change(baseline.whole[tensor].name, box.positions(positions), before, now)
            changes[tensor] = changes.get(tensor, Fingerprint()) + change
    return changes


def _merged(parts: Sequence[_PartChanges]) -> Iterator[tuple[Positions, Bits]]:
    """Yield one tensor's changes, in one piece, from those of its parts, whose elements may interleave."""
    pieces = [piece for part in parts for piece in part.pieces()]
    positions = np.concatenate([where for where, _ in pieces])
    order = np.argsort(positions, kind="stable")
    yield positions[order], np.concatenate([data for _, data in pieces])[order]


def check_same_models(reports: Sequence[Mapping[str, object]]) -> None:
    """Raise ModelError unless all ranks have the same model, and publish the same tensors.

    What rank 0's model lacks keeps the values of the base or the run, so a tensor that only another rank has would
    never be published.

    Args:
        reports: per rank, ``model`` is a digest of the model's tensors, and ``tensors`` one of a new run's.
    """
    odd = [
        rank
        for rank, theirs in enumerate(reports)
        if any(theirs.get(each) != reports[0].get(each) for each in ("model", "tensors"))
    ]
    if odd:
        raise ModelError(
            f"the model of rank {listed(odd, 8)} has other tensors than that of rank 0: names, shapes, dtypes; make "
            "the same model on every rank, and give the same base=; if ranks hold different tensors, as pipeline "
            "stages do, give parts="
        )
