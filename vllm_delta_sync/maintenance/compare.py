"""``compare`` says how far tensors moved between two versions."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.errors import TensorMismatchError
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.format.table import DType, TensorSpec, has_values, values_of
from vllm_delta_sync.run.restore import Progress, restore
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.tensors.changes import Bits

CHUNK_ELEMENTS = 1024 * 1024
"""Elements compared at a time; in fp64 they take 8 MB for each array."""


@dataclass(frozen=True)
class TensorChange:
    """How far a tensor moved.

    Attributes:
        spec: of the tensor. changed: elements whose bits differ.
        nonfinite_old, nonfinite_new: elements that are NaN or infinite; they are in no norm, on neither side.
        norm_change, norm_old: ‖new − old‖₂ and ‖old‖₂, in fp64.
    """

    spec: TensorSpec
    changed: int
    nonfinite_old: int
    nonfinite_new: int
    norm_change: float
    norm_old: float

    @property
    def relative(self) -> float | None:
        """‖new − old‖₂ / ‖old‖₂; 0 if the values are equal, None if the old ones are all zero or the norms overflow."""
        return relative_norm(self.norm_change, self.norm_old)


@dataclass(frozen=True)
class Comparison:
    """How far the tensors of a model moved.

    Attributes:
        changes: of every tensor, in the order of the table. objects: that were read for both versions.
        bases: how many of the versions began with a checkpoint or run elsewhere.
    """

    changes: list[TensorChange]
    objects: list[ObjectRef]
    bases: int

    @property
    def norm_change(self) -> float:
        return math.hypot(*(change.norm_change for change in self.changes))

    @property
    def norm_old(self) -> float:
        return math.hypot(*(change.norm_old for change in self.changes))


def relative_norm(change: float, old: float) -> float | None:
    """Return ``change / old`` as ``TensorChange.relative`` does."""
    if change == 0:
        return 0.0
    return change / old if 0 < old < math.inf and math.isfinite(change) else None


def check_same_tensors(run: RunReader, other: RunReader) -> None:
    """Raise TensorMismatchError, which names the first difference, unless two runs have the same tensors."""
    differing = {*run.table.specs} ^ {*other.table.specs}
    if differing:
        first = min(differing, key=lambda spec: (spec.name, spec.dtype, spec.shape))
        lacking = other if first in run.table.specs else run
        raise TensorMismatchError(
            f"run {lacking.info.run} at {lacking.bucket.url!r} has no tensor {first.name[:120]!r} of {first.dtype} "
            f"{list(first.shape)}, so its versions cannot be compared with those of the other run"
        )


def compare(
    run: RunReader,
    old: Manifest,
    other: RunReader,
    new: Manifest,
    base: str | Path | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Rebuild version ``old`` of ``run`` and ``new`` of ``other`` in temporary files, and compare them.

    Needs twice the model of disk space, and the memory of one tensor or one delta object.

    Args:
        base: as ``restore``, for both. progress: called with bytes done and in total, of both versions.

    Raises:
        TensorMismatchError: the runs have other tensors. Otherwise as ``restore``.
    """
    check_same_tensors(run, other)

    def half(number: int) -> Progress | None:
        # What the second version takes is known once the first is rebuilt, so count both as equal.
        return None if progress is None else lambda done, total: progress(done + number * total, 2 * total)

    before = restore(run, old, base, in_memory=False, progress=half(0))
    after = restore(other, new, base, in_memory=False, progress=half(1))
    pairs = zip(run.table, before.state.bits, after.state.bits, strict=True)
    plans = (before.plan, after.plan)
    objects = [ref for plan in plans for step in plan.steps for ref in step.objects]
    objects += [ref for plan in plans if plan.root.is_stored for ref in plan.root.document.objects]
    bases = sum(not plan.root.is_stored for plan in plans)
    return Comparison([compare_tensor(*pair) for pair in pairs], objects, bases)


def compare_tensor(spec: TensorSpec, old: Bits, new: Bits) -> TensorChange:
    """Compare the bits (numel,) of a tensor at two versions."""
    changed = nonfinite_old = nonfinite_new = 0
    change = squares = 0.0
    # Norms of F64 may overflow; they are then infinite.
    with np.errstate(all="ignore"):
        for start in range(0, old.size, CHUNK_ELEMENTS):
            a, b = old[start : start + CHUNK_ELEMENTS], new[start : start + CHUNK_ELEMENTS]
            changed += int(np.count_nonzero(a != b))
            x, y = _values(spec.element, a), _values(spec.element, b)
            finite_x, finite_y = np.isfinite(x), np.isfinite(y)
            nonfinite_old += int(x.size - np.count_nonzero(finite_x))
            nonfinite_new += int(y.size - np.count_nonzero(finite_y))
            x, y = (values[finite_x & finite_y] for values in (x, y))
            squares += float(np.sum(np.square(x)))
            change += float(np.sum(np.square(y - x)))
    return TensorChange(spec, changed, nonfinite_old, nonfinite_new, math.sqrt(change), math.sqrt(squares))


def _values(element: DType, bits: Bits) -> npt.NDArray[np.float64]:
    if has_values(element):
        return values_of(element, bits)
    signed = element.name.startswith("I")
    return bits.view(f"<i{element.itemsize}" if signed else element.uint).astype(np.float64)
