"""``UpdateGate``: check each version against a ``Gate``'s bounds, relative to the newest version that passed.

Each rank measures its own part of the weights, and only sums pass between ranks. While the current version is sound, a
judgement costs O(changed elements). While it is quarantined, the sound bits of the tensors that differ are kept (at
most one more copy of the model), and comparing those costs O(tensor).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trainer_side.diff.baseline import Baseline
from trainer_side.diff.pending_delta import PendingDelta
from trainer_side.options import Gate
from trainer_side.ranks.group import Json, ProcessGroup, added_rows
from vllm_delta_sync.errors import GateError
from vllm_delta_sync.format.table import DType, TensorTable, Values, count_nonfinite, has_values, values_of
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.tensors.boxes import Box
from vllm_delta_sync.tensors.changes import Bits

logger = guarded_logger(__name__)

PIECE_ELEMENTS = 1 << 16
"""Elements processed at once, so that intermediate results stay in the processor's cache."""
MAX_REASON_CHARS = 1000
# A running sum is recomputed when the terms added to it could have left an error above this share of it.
_DRIFT = 1e-9
_ROUNDING = 2.0**-52

Pieces = Iterable[tuple[Bits, Bits]]


@dataclass
class Difference:
    """Difference of one tensor from the version it is compared with.

    Attributes:
        changed: elements whose bits differ. nonfinite: those among them that are NaN or infinite now.
        distance: Σ (new − old)² of elements that were finite; infinite if one no longer is and only norms are bounded.
        squares_gain: Σ new² − Σ old², of finite elements. magnitude: Σ new² + Σ old², which bounds rounding errors.
    """

    changed: int = 0
    nonfinite: int = 0
    distance: float = 0.0
    squares_gain: float = 0.0
    magnitude: float = 0.0


@dataclass
class _Verdict:
    """The difference of each changed tensor from the sound version, kept until ``mark_durable`` records it."""

    differences: dict[int, Difference]
    reasons: list[str] = field(default_factory=list)
    saved: dict[int, Bits] = field(default_factory=dict)


class UpdateGate:
    """The running state of a gate. One thread at a time; nothing else may change the baseline meanwhile.

    Of several ranks each has the state of its own part of the weights, and all reach one verdict.

    Attributes:
        sound: number of the version that others are compared with; None if it is not available.
        squares: per tensor id, Σ w² of the sound version's finite elements; empty if norms are not bounded.

    Args:
        baseline: of this rank. table: the run's tensors. places: as in ``RunWeights``. group: the ranks.
    """

    def __init__(
        self,
        gate: Gate,
        baseline: Baseline,
        table: TensorTable,
        places: Sequence[tuple[int, Box]],
        group: ProcessGroup,
    ) -> None:
        self.gate = gate
        self._baseline, self._table, self._places, self._group = baseline, table, places, group
        self.sound: int | None = None
        self.squares: list[float] = []
        self._magnitude: list[float] = []
        self._sound_bits: dict[int, Bits] = {}
        self._differences: dict[int, Difference] = {}
        self._verdict: _Verdict | None = None

    def start(self, version: int, quarantined: bool, sound: tuple[int, list[Bits]] | None) -> None:
        """Start with the baseline as the current version: one pass over the model.

        Args:
            version: its number. quarantined: whether it is quarantined.
            sound: for a quarantined one, number and bits per tensor id of the version to compare with; None if it
                cannot be read. Then versions are compared with the current one, and all non-finite elements count.
        """
        self._verdict = None
        self._sound_bits, self._differences = {}, {}
        self.sound = version if not quarantined else None
        bits = [self._baseline.read(tensor) for tensor in range(len(self._places))]
        reference = bits
        if quarantined and sound is not None:
            self.sound, reference = sound
            for tensor, (before, after) in enumerate(zip(reference, bits, strict=True)):
                if not np.array_equal(before, after):
                    self._sound_bits[tensor] = np.array(before)
                    self._differences[tensor] = self._compare(tensor, pieces(before, after))
        if self.gate.max_norm_jump is not None:
            self.squares = [self._squared(tensor, of) for tensor, of in enumerate(reference)]
            self._magnitude = [0.0] * len(self.squares)
        self._log_start(version, quarantined, _nonfinite_now(self._baseline) if self.gate.nonfinite else {})

    def judge(self, pending: PendingDelta) -> list[str]:
        """Return how the baseline with its pending delta exceeds the bounds, one line each; empty if it does not.

        Every rank calls it with its own delta, and gets the same lines.
        """
        self._verdict = None
        found: list[tuple[_Verdict, tuple[Mapping[int, float], ...]]] = []

        def measure() -> Json:
            verdict = self._compared(pending)
            found.append((verdict, self._measured(verdict)))
            return [*(sum(of.values()) for of in found[0][1]), sum(self.squares)]

        sums = self._group.sums("gate", measure)
        verdict, measured = found[0]
        self._verdict = verdict
        exceeded = self._exceeded(*sums)
        if not exceeded:
            return []

        # In a second question, since a model may have many tensors, and most versions pass.
        worst = self._group.reduce_on_rank0(
            "gate: reasons",
            lambda: [[*self._by_tensor(measured[check]).items()] for check in exceeded],
            lambda reports: [_worst(added_rows(rows)) for rows in zip(*reports, strict=True)],
        )
        texts = self._nonfinite_reason, self._share_reason, self._norm_reason
        reasons = [texts[check](sums, *most)[:MAX_REASON_CHARS] for check, most in zip(exceeded, worst, strict=True)]
        verdict.reasons = reasons
        if self.gate.action == "quarantine":
            # Saved before the version is written, so that nothing can fail afterwards.
            verdict.saved = pending.before(verdict.differences.keys() - self._sound_bits.keys())
        return reasons

    def mark_durable(self, version: int) -> None:
        """Record that the most recently judged delta is now durable as this version. It may already be closed."""
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            return
        if not verdict.reasons:
            self._advance(self._differences | verdict.differences)
            self._sound_bits, self._differences, self.sound = {}, {}, version
            return
        self._sound_bits |= verdict.saved
        self._differences |= verdict.differences
        for tensor in [tensor for tensor, found in self._differences.items() if not found.changed]:
            del self._sound_bits[tensor], self._differences[tensor]

    def _advance(self, differences: dict[int, Difference]) -> None:
        """Make the baseline the sound version, by updating its norms."""
        if not self.squares:
            return
        for tensor, difference in differences.items():
            self.squares[tensor] += difference.squares_gain
            self._magnitude[tensor] += difference.magnitude
            error = _ROUNDING * self._magnitude[tensor]
            # Not (… <= …), so that a sum that is no longer finite is recomputed too.
            if not error <= _DRIFT * self.squares[tensor]:
                self.squares[tensor] = self._squared(tensor, self._baseline.read(tensor))
                self._magnitude[tensor] = self.squares[tensor]

    # Reasons

    def _measured(self, verdict: _Verdict) -> tuple[Mapping[int, float], ...]:
        """Return for each check what it looks at, by tensor id of the baseline: not finite, changed, distance."""
        found = self._differences | verdict.differences
        nonfinite: Mapping[int, float] = {tensor: difference.nonfinite for tensor, difference in found.items()}
        if self.gate.nonfinite and self.sound is None:
            nonfinite = _nonfinite_now(self._baseline)
        changed: dict[int, float] = {tensor: difference.changed for tensor, difference in found.items()}
        return nonfinite, changed, {tensor: difference.distance for tensor, difference in found.items()}

    def _exceeded(self, nonfinite: float, changed: float, distance: float, squares: float) -> list[int]:
        """Return the checks, by their places in ``_measured``, that sums over the model do not pass."""
        share, jump = self.gate.max_changed_share, self.gate.max_norm_jump
        beyond = (
            nonfinite > 0,
            share is not None and changed > share * self._table.total,
            # Infinity divided by infinity is NaN, which must not let the version pass.
            jump is not None and distance != 0 and not _jump(distance, squares) <= jump,
        )
        return [check for check, is_beyond in enumerate(beyond) if is_beyond]

    def _nonfinite_reason(self, sums: Sequence[float], worst: int, count: float, tensors: int) -> str:
        name, others = _named(self._table, worst), _others(sums[0], tensors)
        return f"elements became NaN or infinite: {count} in tensor {name}{others}; nonfinite is True"

    def _share_reason(self, sums: Sequence[float], worst: int, count: float, tensors: int) -> str:
        return (
            f"{sums[1] / self._table.total:.4g} of the elements changed since {self._since}, most in tensor "
            f"{_named(self._table, worst)} ({count:g}); max_changed_share is {self.gate.max_changed_share:g}"
        )

    def _norm_reason(self, sums: Sequence[float], worst: int, distance: float, tensors: int) -> str:
        return (
            f"the weights moved by {_jump(*sums[2:]):.4g} of the norm of {self._since}, most in tensor "
            f"{_named(self._table, worst)} (by {_sqrt(distance):.4g}); max_norm_jump is {self.gate.max_norm_jump:g}"
        )

    @property
    def _since(self) -> str:
        return "the version before" if self.sound is None else f"version {self.sound}"

    def _by_tensor(self, values: Mapping[int, float]) -> dict[int, float]:
        """Return the sums by id in the run's table, those that are not 0; the argument has ids of the baseline."""
        return added_rows([[(self._places[part][0], value) for part, value in values.items() if value]])

    def _log_start(self, version: int, quarantined: bool, counts: Mapping[int, float]) -> None:
        nonfinite = self._by_tensor(counts)
        if quarantined and self.sound is None:
            logger.warning(
                "version %d is quarantined and the sound version before it cannot be read: the next one is sound if "
                "everything in it is finite and it is within the bounds of this one", version,
            )  # fmt: skip
        elif nonfinite and not quarantined:
            worst, count, tensors = _worst(nonfinite)
            logger.warning(
                "version %d holds elements that are NaN or infinite, %d in tensor %s%s; the gate looks at those that "
                "change",
                version, count, _named(self._table, worst), _others(sum(nonfinite.values()), tensors),
            )  # fmt: skip

    # Measuring

    def _compared(self, pending: PendingDelta) -> _Verdict:
        differences = {}
        for tensor, found in pending.elements(PIECE_ELEMENTS):
            sound = self._sound_bits.get(tensor)
            changed: Pieces = ((before, now) for _, before, now in found)
            if sound is not None:
                changed = pieces(sound, self._baseline.read(tensor))
            differences[tensor] = self._compare(tensor, changed)
        return _Verdict(differences)

    def _compare(self, tensor: int, found: Pieces) -> Difference:
        element, gate, result = self._baseline.table[tensor].element, self.gate, Difference()
        with np.errstate(all="ignore"):
            for before, after in found:
                add_difference(result, element, before, after, gate.nonfinite, gate.max_norm_jump is not None)
        if math.isnan(result.distance):
            result.distance = math.inf
        return result

    def _squared(self, tensor: int, bits: Bits) -> float:
        return squared_norm(self._baseline.table[tensor].element, bits)


def pieces(before: Bits, after: Bits) -> Iterator[tuple[Bits, Bits]]:
    """Yield both arrays, in views of ``PIECE_ELEMENTS`` elements."""
    for start in range(0, before.size, PIECE_ELEMENTS):
        yield before[start : start + PIECE_ELEMENTS], after[start : start + PIECE_ELEMENTS]


def squared_norm(element: DType, bits: Bits) -> float:
    """Return Σ w² of the finite elements of (numel,) bits, inf if that is too large for a float; 0 for integers."""
    if not has_values(element):
        return 0.0
    with np.errstate(all="ignore"):
        try:
            return math.fsum(_squares(values_of(element, piece)) for piece, _ in pieces(bits, bits))
        except OverflowError:
            return math.inf


def judge_state(gate: Gate | None, table: TensorTable, nonfinite: Callable[[], Mapping[int, int]]) -> list[str]:
    """Return why to quarantine weights that cannot be compared with a version.

    Args:
        nonfinite: returns the number of elements that are NaN or infinite, by id of the tensors that have some.

    Raises:
        GateError: the gate refuses them.
    """
    bad = nonfinite() if gate is not None and gate.nonfinite else {}
    if gate is None or not bad:
        return []
    worst, count, tensors = _worst(bad)
    reason = (
        f"elements are NaN or infinite: {count} in tensor {_named(table, worst)}{_others(sum(bad.values()), tensors)}; "
        "nonfinite is True"
    )
    if gate.action == "refuse":
        raise GateError(f"the weights are not published: {reason}. Fix them, or give a gate with nonfinite=False")
    return [reason]


def nonfinite_by_tensor(baseline: Baseline, places: Sequence[tuple[int, Box]]) -> dict[int, int]:
    """Return NaN and infinite elements of a rank's weights, by id in the run's table of the tensors that have some."""
    return added_rows([[(places[part][0], count) for part, count in _nonfinite_now(baseline).items() if count]])


def _nonfinite_now(baseline: Baseline) -> dict[int, int]:
    """Return NaN and infinite elements by tensor id: one pass over the model."""
    found: dict[int, int] = {}
    for tensor, spec in enumerate(baseline.table):
        bits = baseline.read(tensor)
        found[tensor] = sum(count_nonfinite(spec.element, piece) for piece, _ in pieces(bits, bits))
    return found


def add_difference(result: Difference, element: DType, before: Bits, after: Bits, nonfinite: bool, norm: bool) -> None:
    """Add the difference of (n,) bits before and after to a result; see ``Gate`` for ``nonfinite`` and ``norm``."""
    different = before != after
    changed = int(np.count_nonzero(different))
    if not changed:
        return
    result.changed += changed
    if changed < before.size:
        before, after = before[different], after[different]
    if not has_values(element):
        return
    if nonfinite:
        result.nonfinite += count_nonfinite(element, after)
    if norm:
        old, new = values_of(element, before), values_of(element, after)
        old_squares, new_squares = _squares(old), _squares(new)
        result.distance += _distance(old, new, nonfinite)
        result.squares_gain += new_squares - old_squares
        result.magnitude += new_squares + old_squares


def _distance(old: Values, new: Values, nonfinite: bool) -> float:
    moved = new - old
    distance = _sum_of_squares(moved)
    if math.isfinite(distance):
        return distance
    # The non-finite check, if enabled, handles elements that became NaN or infinite.
    counted = np.isfinite(old) & np.isfinite(new) if nonfinite else np.isfinite(old)
    return _sum_of_squares(moved[counted])


def _squares(values: Values) -> float:
    """Return Σ w² of the finite elements."""
    total = _sum_of_squares(values)
    if math.isfinite(total):
        return total
    return _sum_of_squares(values[np.isfinite(values)])


def _sum_of_squares(values: Values) -> float:
    # Not np.dot, whose threads compete with the trainer's.
    return float(np.einsum("i,i->", values, values))


def _sqrt(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan


def _jump(distance: float, squares: float) -> float:
    norm = _sqrt(squares)
    return _sqrt(distance) / norm if norm > 0 else math.inf


def _worst(of: Mapping[int, float]) -> tuple[int, float, int]:
    """Return the tensor with the largest value, the first if there are several, that value, and how many have one."""
    tensor = max(of, key=lambda number: (of[number], -number))
    return tensor, of[tensor], len(of)


def _named(table: TensorTable, tensor: int) -> str:
    return repr(table[tensor].name[:200])


def _others(total: float, tensors: int) -> str:
    return f", {total} in {tensors} tensors" if tensors > 1 else ""
