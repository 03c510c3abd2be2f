"""``codec="auto"``: whether a version is smaller by more than coding it that small takes.

What is compared is the time until receivers hold new weights: encode, upload, download, decode. All in all it is a
choice between bytes (``packed`` has more) and work (``context`` reads every tensor that changed, on both sides).
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.tensors.changes import Changes

logger = guarded_logger(__name__)

LEAST_SHARE = 0.2
"""``context`` begins where it saves this share of the time that ``packed`` takes …"""
LEAST_SECONDS = 0.1
"""… and so much: less nobody notices, and a store that stalled once is no reason to …"""
STAY = 0.5
"""… and goes on as long as it saves this part of both, so that noise does not decide anew each time."""
LEAST_CHANGED = 64 * 1024
"""With fewer changed elements what is measured is overhead."""
RECENT = 5


@dataclass(frozen=True)
class Work:
    """What a version changes, tensors that are sent in full left out: they are the same in both codecs.

    Attributes:
        touched: elements of the tensors that changes are in. changed: those that changed.
    """

    touched: int
    changed: int

    @classmethod
    def of(cls, changes: Changes, table: TensorTable) -> "Work":
        ids = [tensor for group in changes.sparse for tensor in group.ids.tolist()]
        return cls(sum(table[tensor].numel for tensor in ids), sum(group.positions.size for group in changes.sparse))


@dataclass(frozen=True)
class Cost:
    """Seconds on one core, by element touched and by element changed."""

    touched: float
    changed: float

    def seconds(self, work: Work) -> float:
        return self.touched * work.touched + self.changed * work.changed


# 111 M bfloat16 elements moved by Adam (benchmarks/common/synthetic.py), 0.5 to 10 % changed: straight lines through
# what python -m benchmarks.codec measures, without detection. Taking the old bits back is part of encoding.
ENCODE: dict[Codec, Cost] = {"packed": Cost(0.0, 13e-9), "context": Cost(1e-9, 90e-9)}
DECODE: dict[Codec, Cost] = {"packed": Cost(0.0, 9e-9), "context": Cost(0.55e-9, 33e-9)}
VALUE_BYTES = 0.25
"""Of ``packed``, per changed element, beside the entropy of its positions; 0.23 to 0.27 there."""
CONTEXT_SHARE = 0.72
"""Size of ``context`` as a part of that of ``packed``; 0.70 to 0.73 there."""


@dataclass(frozen=True)
class Known:
    """What an estimate is made from.

    Attributes:
        up, down: bytes per second to the store, and from there to the receivers.
        value_bytes, context_share: see the constants.
        slowness: how much longer than ``ENCODE`` a codec takes; what is not known of ``context`` is as of ``packed``.
    """

    up: float
    down: float
    value_bytes: float = VALUE_BYTES
    context_share: float = CONTEXT_SHARE
    slowness: dict[Codec, float] = field(default_factory=dict)


def packed_bytes(work: Work, value_bytes: float) -> float:
    """Bytes that ``packed`` takes, as if the changes lay anywhere."""
    return work.changed * (_position_bytes(work) + value_bytes)


def _position_bytes(work: Work) -> float:
    """Entropy of one position among independent ones, in bytes."""
    share = work.changed / work.touched
    rest = 1 - share
    return -(math.log2(share) + (rest / share * math.log2(rest) if rest else 0.0)) / 8


def seconds(codec: Codec, work: Work, known: Known) -> float:
    """Estimated time from changes found to changes decoded, for at least one changed element."""
    size = packed_bytes(work, known.value_bytes) * (known.context_share if codec == "context" else 1.0)
    encoding = known.slowness.get(codec, known.slowness.get("packed", 1.0)) * ENCODE[codec].seconds(work)
    return encoding + size / known.up + size / known.down + DECODE[codec].seconds(work)


def better(current: Codec, work: Work, known: Known) -> Codec:
    """The codec for the next version, ``packed`` or ``context``; ``current`` is that of the one before."""
    packed = seconds("packed", work, known)
    wanted = max(LEAST_SHARE * packed, LEAST_SECONDS) * (STAY if current == "context" else 1.0)
    return "context" if packed - seconds("context", work, known) >= wanted else "packed"


class CodecChoice:
    """Chooses the codec of each version, and says why in the log: when it is chosen first, and when it changes.

    Args:
        receivers: bytes per second at which receivers download; None: as fast as this publisher uploads.
    """

    def __init__(self, receivers: float | None = None) -> None:
        self._receivers = receivers
        self._current: Codec = "packed"
        self._said: tuple[Codec, bool] | None = None
        self._value_bytes: deque[float] = deque(maxlen=RECENT)
        self._context_share: deque[float] = deque(maxlen=RECENT)
        self._slowness: dict[Codec, deque[float]] = {}

    def choose(self, version: int, work: Work, up: float | None) -> Codec:
        """The codec of a version. ``up``: bytes per second of the uploads so far; None if none was measured."""
        if not work.changed:
            return "packed"
        if up is None:
            self._say(version, False, "no upload was measured yet")
            return self._current
        known = self._known(up)
        self._current = better(self._current, work, known)
        packed, context = (seconds(codec, work, known) for codec in ("packed", "context"))
        self._say(
            version, True,
            f"{work.changed:,} of {work.touched:,} elements changed; at {_rate(up)} up and {_rate(known.down)} down "
            f"new weights take about {packed:.3g} s with 'packed', {context:.3g} s with 'context'",
        )  # fmt: skip
        return self._current

    def learn(self, codec: Codec, work: Work, payload_bytes: int, spent: float) -> None:
        """Take note of what encoding a version without full tensors has come to; ``spent``: seconds."""
        if work.changed < LEAST_CHANGED:
            return
        self._slowness.setdefault(codec, deque(maxlen=RECENT)).append(spent / ENCODE[codec].seconds(work))
        if codec == "packed":
            self._value_bytes.append(max(0.0, payload_bytes / work.changed - _position_bytes(work)))
        else:
            self._context_share.append(payload_bytes / packed_bytes(work, self._known(1.0).value_bytes))

    def _known(self, up: float) -> Known:
        return Known(
            up,
            up if self._receivers is None else self._receivers,
            median(self._value_bytes or [VALUE_BYTES]),
            median(self._context_share or [CONTEXT_SHARE]),
            {codec: median(recent) for codec, recent in self._slowness.items()},
        )

    def _say(self, version: int, measured: bool, why: str) -> None:
        said = self._current, measured
        if said != self._said:
            logger.info("codec 'auto': %r from version %d on: %s", self._current, version, why)
        self._said = said


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.3g} MB/s"
