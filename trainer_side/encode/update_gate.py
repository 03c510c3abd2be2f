"""Judges versions by a gate: what they differ in from the last sound one, from what changed and what is kept of it.

While the version held is sound, a judgement costs O(changed). While it is quarantined, the tensors that differ from the
sound version are kept as they are there (at most the model once more), and comparing those costs O(tensor).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from trainer_side.diff.baseline import Baseline
from trainer_side.diff.pending_delta import PendingDelta
from trainer_side.gate import Gate
from vllm_delta_sync.errors import GateError
from vllm_delta_sync.format.dtypes import DType, Values, count_nonfinite, has_values, values_of
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.tensors.bits import Bits

logger = guarded_logger(__name__)

PIECE_ELEMENTS = 1 << 16
"""Elements looked at together: what is made of them stays in a processor's cache."""
LONGEST_REASON = 1000
# A running sum is taken anew when what went through it could have left an error above this part of it.
_DRIFT = 1e-9
_ROUNDING = 2.0**-52

Pieces = Iterable[tuple[Bits, Bits]]


@dataclass
class Difference:
    """What one tensor differs in from before.

    Attributes:
        changed: elements of other bits. nonfinite: those among them that are NaN or infinite now.
        distance: Σ (new − old)² of elements that were finite; infinite if one is not any more and only norms are asked.
        nonfinite_gain: elements not finite now, less those of before.
        squares_gain: Σ new² less Σ old², of finite elements. flow: Σ new² + Σ old²: how much went through.
    """

    changed: int = 0
    nonfinite: int = 0
    distance: float = 0.0
    nonfinite_gain: int = 0
    squares_gain: float = 0.0
    flow: float = 0.0


@dataclass
class _Verdict:
    """What ``settle`` has to take note of: the judgement, by tensor that the patch touches."""

    reasons: list[str]
    against_sound: dict[int, Difference]
    against_held: dict[int, Difference]
    saved: dict[int, Bits] = field(default_factory=dict)


class UpdateGate:
    """Running state of a gate. One thread at a time, and nobody else touches the baseline meanwhile.

    Attributes:
        sound: number of the version that others are compared with; None if it is not at hand.
        nonfinite: per tensor id, elements of the version held that are NaN or infinite; empty if that is not asked.
        squares: per tensor id, Σ w² of the sound version's finite elements; empty if that is not asked.
    """

    def __init__(self, gate: Gate, baseline: Baseline) -> None:
        self.gate = gate
        self._baseline = baseline
        self.sound: int | None = None
        self.nonfinite: list[int] = []
        self.squares: list[float] = []
        self._flow: list[float] = []
        self._apart: dict[int, Bits] = {}
        self._differences: dict[int, Difference] = {}
        self._verdict: _Verdict | None = None

    @property
    def _table(self) -> TensorTable:
        return self._baseline.table

    def begin(self, version: int, quarantined: bool, sound: tuple[int, list[Bits]] | None) -> None:
        """Take the baseline as the version held: one pass over the model.

        Args:
            version: its number. quarantined: whether it is.
            sound: for a quarantined one, number and bits per tensor id of the version to compare with; None if that
                cannot be read. Then changes count from the version held, and everything that is not finite counts.
        """
        self._verdict = None
        self._apart, self._differences = {}, {}
        self.sound = version if not quarantined else None
        bits = [self._baseline.peek(tensor) for tensor in range(len(self._table))]
        self.nonfinite = _counted(self._table, bits) if self.gate.nonfinite else []
        reference = bits
        if quarantined and sound is not None:
            self.sound, reference = sound
            for tensor, (before, after) in enumerate(zip(reference, bits, strict=True)):
                if not np.array_equal(before, after):
                    self._apart[tensor] = np.array(before)
                    self._differences[tensor] = self._compare(tensor, pieces(before, after))
        if self.gate.max_norm_jump is not None:
            self.squares = [self._squared(tensor, of) for tensor, of in enumerate(reference)]
            self._flow = [0.0] * len(self.squares)
        self._tell(version, quarantined)

    def judge(self, patch: PendingDelta) -> list[str]:
        """What is beyond the bounds in the baseline with an open patch; empty if nothing is. One line each."""
        held = {tensor: self._compare(tensor, found) for tensor, found in patch.pieces(PIECE_ELEMENTS)}
        against_sound = {
            tensor: self._compare(tensor, pieces(self._apart[tensor], self._baseline.bits(tensor)))
            if tensor in self._apart
            else difference
            for tensor, difference in held.items()
        }
        reasons = self._reasons(self._differences | against_sound, held)
        verdict = _Verdict(reasons, against_sound, held)
        if reasons and self.gate.action == "quarantine":
            # Before the version is written, so that there is no way to fail once it is.
            wanted = [tensor for tensor in held if tensor not in self._apart]
            verdict.saved = patch.before(wanted)
        self._verdict = verdict
        return reasons

    def settle(self, version: int) -> None:
        """The patch judged last is durable, as that version; it may be settled already."""
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            return
        for tensor, difference in verdict.against_held.items():
            if self.nonfinite:
                self.nonfinite[tensor] += difference.nonfinite_gain
        if not verdict.reasons:
            self._advance(self._differences | verdict.against_sound)
            self._apart, self._differences, self.sound = {}, {}, version
            return
        self._apart |= verdict.saved
        self._differences |= verdict.against_sound
        for tensor in [tensor for tensor, found in self._differences.items() if not found.changed]:
            del self._apart[tensor], self._differences[tensor]

    def _advance(self, differences: dict[int, Difference]) -> None:
        """The baseline is sound: its norms are what versions are compared with."""
        if not self.squares:
            return
        for tensor, difference in differences.items():
            self.squares[tensor] += difference.squares_gain
            self._flow[tensor] += difference.flow
            error = _ROUNDING * self._flow[tensor]
            # Not (… <= …): so that a sum that is not finite any more is taken anew, too.
            if not error <= _DRIFT * self.squares[tensor]:
                self.squares[tensor] = self._squared(tensor, self._baseline.peek(tensor))
                self._flow[tensor] = self.squares[tensor]

    # Reasons

    def _reasons(self, sound: dict[int, Difference], held: dict[int, Difference]) -> list[str]:
        found = [
            self._nonfinite_reason(sound, held),
            self._share_reason(sound),
            self._norm_reason(sound),
        ]
        return [reason[:LONGEST_REASON] for reason in found if reason is not None]

    def _nonfinite_reason(self, sound: dict[int, Difference], held: dict[int, Difference]) -> str | None:
        if not self.gate.nonfinite:
            return None
        if self.sound is None:
            counts = {
                tensor: count + (held[tensor].nonfinite_gain if tensor in held else 0)
                for tensor, count in enumerate(self.nonfinite)
            }
        else:
            counts = {tensor: difference.nonfinite for tensor, difference in sound.items()}
        bad = {tensor: count for tensor, count in counts.items() if count}
        if not bad:
            return None
        name, count = self._most(bad)
        return f"elements became NaN or infinite: {count} in tensor {name}{_rest(bad)}; nonfinite is True"

    def _share_reason(self, sound: dict[int, Difference]) -> str | None:
        bound = self.gate.max_changed_share
        changed = {tensor: difference.changed for tensor, difference in sound.items() if difference.changed}
        total = sum(changed.values())
        if bound is None or total <= bound * self._table.total:
            return None
        name, count = self._most(changed)
        share = total / self._table.total
        return (
            f"{share:.4g} of the elements changed since {self._since}, most in tensor {name} ({count:g}); "
            f"max_changed_share is {bound:g}"
        )

    def _norm_reason(self, sound: dict[int, Difference]) -> str | None:
        bound = self.gate.max_norm_jump
        distances = {tensor: difference.distance for tensor, difference in sound.items() if difference.distance}
        if bound is None or not distances:
            return None
        norm = _root(sum(self.squares))
        jump = _root(sum(distances.values())) / norm if norm > 0 else math.inf
        # Infinite by infinite is no number, and no reason to let the version pass.
        if jump <= bound:
            return None
        name, distance = self._most(distances)
        return (
            f"the weights moved by {jump:.4g} of the norm of {self._since}, most in tensor {name} "
            f"(by {_root(distance):.4g}); max_norm_jump is {bound:g}"
        )

    @property
    def _since(self) -> str:
        return "the version before" if self.sound is None else f"version {self.sound}"

    def _most(self, of: "dict[int, int] | dict[int, float]") -> tuple[str, float]:
        tensor = max(of, key=lambda number: (of[number], -number))
        return repr(self._table[tensor].name[:200]), of[tensor]

    def _tell(self, version: int, quarantined: bool) -> None:
        odd = {tensor: count for tensor, count in enumerate(self.nonfinite) if count}
        if quarantined and self.sound is None:
            logger.warning(
                "version %d is quarantined and the sound version before it cannot be read: the next one is sound if "
                "everything in it is finite and it is within the bounds of this one", version,
            )  # fmt: skip
        elif odd and not quarantined:
            name, count = self._most(odd)
            logger.warning(
                "version %d holds elements that are NaN or infinite, %d in tensor %s%s; the gate looks at those that "
                "change", version, count, name, _rest(odd),
            )  # fmt: skip

    # Measuring

    def _compare(self, tensor: int, found: Pieces) -> Difference:
        element, gate, result = self._table[tensor].element, self.gate, Difference()
        with np.errstate(all="ignore"):
            for before, after in found:
                _add(result, element, before, after, gate.nonfinite, gate.max_norm_jump is not None)
        if math.isnan(result.distance):
            result.distance = math.inf
        return result

    def _squared(self, tensor: int, bits: Bits) -> float:
        element = self._table[tensor].element
        if not has_values(element):
            return 0.0
        with np.errstate(all="ignore"):
            return math.fsum(_squares(values_of(element, piece)) for piece, _ in pieces(bits, bits))


def pieces(before: Bits, after: Bits) -> Iterator[tuple[Bits, Bits]]:
    """Both arrays, in views of so many elements as are looked at together."""
    for start in range(0, before.size, PIECE_ELEMENTS):
        yield before[start : start + PIECE_ELEMENTS], after[start : start + PIECE_ELEMENTS]


def judge_whole(gate: Gate | None, baseline: Baseline) -> list[str]:
    """Why weights that are to be published with nothing that they could be compared with are quarantined.

    Raises:
        GateError: the gate refuses them.
    """
    if gate is None or not gate.nonfinite:
        return []
    table = baseline.table
    counts = _counted(table, [baseline.peek(tensor) for tensor in range(len(table))])
    bad = {tensor: count for tensor, count in enumerate(counts) if count}
    if not bad:
        return []
    worst = max(bad, key=lambda tensor: bad[tensor])
    name = table[worst].name[:200]
    reason = f"elements are NaN or infinite: {bad[worst]} in tensor {name!r}{_rest(bad)}; nonfinite is True"
    if gate.action == "refuse":
        raise GateError(f"the weights are not published: {reason}. Mend them, or give a gate with nonfinite=False")
    return [reason]


def _counted(table: TensorTable, bits: list[Bits]) -> list[int]:
    return [
        sum(count_nonfinite(spec.element, piece) for piece, _ in pieces(of, of))
        for spec, of in zip(table, bits, strict=True)
    ]


def _add(result: Difference, element: DType, before: Bits, after: Bits, nonfinite: bool, norm: bool) -> None:
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
        count = count_nonfinite(element, after)
        result.nonfinite += count
        result.nonfinite_gain += count - count_nonfinite(element, before)
    if norm:
        old, new = values_of(element, before), values_of(element, after)
        gone, come = _squares(old), _squares(new)
        result.distance += _distance(old, new, nonfinite)
        result.squares_gain += come - gone
        result.flow += come + gone


def _distance(old: Values, new: Values, nonfinite: bool) -> float:
    moved = new - old
    distance = _sum_of_squares(moved)
    if math.isfinite(distance):
        return distance
    # Of what is not finite any more the other check speaks, if there is one.
    counted = np.isfinite(old) & np.isfinite(new) if nonfinite else np.isfinite(old)
    return _sum_of_squares(moved[counted])


def _squares(values: Values) -> float:
    """Σ w² of the finite ones."""
    total = _sum_of_squares(values)
    if math.isfinite(total):
        return total
    return _sum_of_squares(values[np.isfinite(values)])


def _sum_of_squares(values: Values) -> float:
    # Not np.dot, which would wake threads that take turns with the trainer's.
    return float(np.einsum("i,i->", values, values))


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan


def _rest(counts: dict[int, int]) -> str:
    others = len(counts) - 1
    return f", {sum(counts.values())} in {others + 1} tensors" if others else ""
