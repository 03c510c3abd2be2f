"""``CodecChoice``: for ``codec="auto"``, choose between ``packed`` and ``context`` for each version.

It compares the time until receivers have new weights: encode, upload, download, decode. ``packed`` has more bytes,
``context`` costs more work (it reads every changed tensor, on both sides).
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from trainer_side.diff.version_changes import VersionChanges
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.redaction import guarded_logger

logger = guarded_logger(__name__)

MIN_SAVED_SHARE = 0.2
"""Switch to ``context`` if it saves this share of the time that ``packed`` takes …"""
MIN_SAVED_SECONDS = 0.1
"""… and at least this time: less is not noticeable, and one stall of the store is no reason to switch …"""
STAY_FACTOR = 0.5
"""… and stay with it while it saves this part of both, so that noise does not change the choice each time."""
MIN_MEASURED_CHANGES = 64 * 1024
"""With fewer changed elements, overhead dominates the measurement."""
RECENT_VERSIONS = 5


@dataclass(frozen=True)
class Work:
    """The changes of a version, without tensors sent in full, which are the same in both codecs.

    Attributes:
        touched: elements of the changed tensors. changed: elements that changed.
    """

    touched: int
    changed: int

    @classmethod
    def of(cls, changes: VersionChanges) -> "Work":
        counts = changes.counts
        return cls(sum(changes.table[tensor].numel for tensor in counts), sum(counts.values()))


@dataclass(frozen=True)
class Cost:
    """Seconds on one core, per element touched and per element changed."""

    touched: float
    changed: float

    def seconds(self, work: Work) -> float:
        return self.touched * work.touched + self.changed * work.changed


# 111 M bfloat16 elements changed by Adam (benchmarks/common/synthetic.py), 0.5 to 10 % of them: linear fits to the
# measurements of python -m benchmarks.codec, without detection. Recovering the base bits is part of encoding.
ENCODE: dict[Codec, Cost] = {"packed": Cost(0.0, 4e-9), "context": Cost(0.6e-9, 36e-9)}
DECODE: dict[Codec, Cost] = {"packed": Cost(0.0, 6.5e-9), "context": Cost(0.4e-9, 24e-9)}
VALUE_BYTES = 0.25
"""Bytes of ``packed`` per changed element, in addition to the entropy of its position; 0.23 to 0.27 measured there."""
CONTEXT_SHARE = 0.72
"""Size of ``context`` as a share of that of ``packed``; 0.70 to 0.73 measured there."""


@dataclass(frozen=True)
class Estimates:
    """Measurements that the estimate uses.

    Attributes:
        up, down: bytes per second to the store, and from there to the receivers.
        value_bytes, context_share: see the constants.
        slowness: encoding time of a codec relative to ``ENCODE``; if unknown for ``context``, that of ``packed``.
    """

    up: float
    down: float
    value_bytes: float = VALUE_BYTES
    context_share: float = CONTEXT_SHARE
    slowness: dict[Codec, float] = field(default_factory=dict)


def packed_bytes(work: Work, value_bytes: float) -> float:
    """Return the estimated bytes of ``packed`` if the changes are spread at random."""
    return work.changed * (_position_bytes(work) + value_bytes)


def _position_bytes(work: Work) -> float:
    """Return the entropy of one position among independent ones, in bytes."""
    share = work.changed / work.touched
    rest = 1 - share
    return -(math.log2(share) + (rest / share * math.log2(rest) if rest else 0.0)) / 8


def seconds(codec: Codec, work: Work, estimates: Estimates) -> float:
    """Return the estimated time from detected changes to decoded changes, for at least one changed element."""
    size = packed_bytes(work, estimates.value_bytes) * (estimates.context_share if codec == "context" else 1.0)
    encoding = estimates.slowness.get(codec, estimates.slowness.get("packed", 1.0)) * ENCODE[codec].seconds(work)
    return encoding + size / estimates.up + size / estimates.down + DECODE[codec].seconds(work)


def choose_codec(current: Codec, work: Work, estimates: Estimates) -> Codec:
    """Return the codec for the next version, ``packed`` or ``context``; ``current`` is that of the previous version."""
    packed = seconds("packed", work, estimates)
    wanted = max(MIN_SAVED_SHARE * packed, MIN_SAVED_SECONDS) * (STAY_FACTOR if current == "context" else 1.0)
    return "context" if packed - seconds("context", work, estimates) >= wanted else "packed"


class CodecChoice:
    """Chooses the codec of each version, and logs the reason at the first choice and at each change.

    Args:
        receivers: bytes per second at which receivers download; None means this publisher's upload speed.
    """

    def __init__(self, receivers: float | None = None) -> None:
        self._receivers = receivers
        self._current: Codec = "packed"
        self._logged: tuple[Codec, bool] | None = None
        self._value_bytes: deque[float] = deque(maxlen=RECENT_VERSIONS)
        self._context_share: deque[float] = deque(maxlen=RECENT_VERSIONS)
        self._slowness: dict[Codec, deque[float]] = {}

    def choose(self, version: int, work: Work, up: float | None) -> Codec:
        """Choose the codec of a version. ``up``: bytes per second of the uploads so far; None if unmeasured."""
        if not work.changed:
            return "packed"
        if up is None:
            self._log_choice(version, False, "no upload was measured yet")
            return self._current
        estimates = self._estimates(up)
        self._current = choose_codec(self._current, work, estimates)
        packed, context = (seconds(codec, work, estimates) for codec in ("packed", "context"))
        self._log_choice(
            version, True,
            f"{work.changed:,} of {work.touched:,} elements changed; at {_rate(up)} up and {_rate(estimates.down)} "
            f"down new weights take about {packed:.3g} s with 'packed', {context:.3g} s with 'context'",
        )  # fmt: skip
        return self._current

    def learn(self, codec: Codec, work: Work, payload_bytes: int, spent: float) -> None:
        """Record size and time of an encoded version without full tensors; ``spent``: seconds."""
        if work.changed < MIN_MEASURED_CHANGES:
            return
        self._slowness.setdefault(codec, deque(maxlen=RECENT_VERSIONS)).append(spent / ENCODE[codec].seconds(work))
        if codec == "packed":
            self._value_bytes.append(max(0.0, payload_bytes / work.changed - _position_bytes(work)))
        else:
            self._context_share.append(payload_bytes / packed_bytes(work, self._estimates(1.0).value_bytes))

    def _estimates(self, up: float) -> Estimates:
        return Estimates(
            up,
            up if self._receivers is None else self._receivers,
            median(self._value_bytes or [VALUE_BYTES]),
            median(self._context_share or [CONTEXT_SHARE]),
            {codec: median(recent) for codec, recent in self._slowness.items()},
        )

    def _log_choice(self, version: int, measured: bool, reason: str) -> None:
        logged = self._current, measured
        if logged != self._logged:
            logger.info("codec 'auto': %r from version %d on: %s", self._current, version, reason)
        self._logged = logged


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.3g} MB/s"
