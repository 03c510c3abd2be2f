"""What the log says: one line for each change of the weights served, and errors now and then."""

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping

from vllm_delta_sync.engine.planning.commit_plan import UpdatePlan
from vllm_delta_sync.format.manifest import Manifest

ORDER = ("fetch", "verify", "decode", "route", "rescan", "turn", "wait", "pause", "commit", "resume")
"""Of the phases in ``timings_ms``; those up to ``turn`` pass beside generation."""
TOLD_MS = 0.05
"""What takes less is left out of the line: it had next to nothing to do."""
_WORDS = {
    "fetch": "fetched",
    "verify": "verified",
    "decode": "decoded",
    "route": "routed",
    "rescan": "rescanned",
    "turn": "queued",
    "wait": "waited",
}


REPEAT_SECONDS = 60.0
REMEMBERED = 64


class RepeatedErrors:
    """Which errors were told within the last minute. Those that differ in numbers only, such as times, are one."""

    def __init__(self, seconds: float = REPEAT_SECONDS) -> None:
        self._seconds = seconds
        self._told: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def is_due(self, text: str) -> bool:
        """Whether to tell it; if so, it counts as told."""
        key, now = re.sub(r"[0-9]+", "0", text), time.monotonic()
        with self._lock:
            told = self._told.get(key)
            if told is not None and now - told < self._seconds:
                return False
            self._told[key] = now
            self._told.move_to_end(key)
            while len(self._told) > REMEMBERED:
                self._told.popitem(last=False)
            return True


def ordered(ms: Mapping[str, float]) -> dict[str, float]:
    """Timings in the order in which they pass, with what is not known left out."""
    known = {phase: ms[phase] for phase in ORDER if phase in ms}
    return known | {phase: value for phase, value in ms.items() if phase not in known}


def forward(leg: UpdatePlan, ms: Mapping[str, float], elements: int) -> str:
    """Versions were served; ``elements``: how many the commit wrote, over all ranks."""
    target = leg.target
    if leg.steps and leg.versions > 1:
        # What several versions changed is known of each; most of it is the same elements again.
        what = f"{leg.versions} versions in one commit, {elements:,} elements written, {_size(leg.payload_bytes)}"
    elif leg.steps:
        share = 100 * leg.changed / max(1, target.total)
        what = f"{_share(share)} % changed, {_size(leg.payload_bytes)}"
    elif leg.rebuild:
        what = "rebuilt whole"
    else:
        what = f"taken whole, {_size(leg.payload_bytes)}"
    return f"{_named(target)} served: {what}; {durations(ms)}"


def back(target: Manifest, left: int, ms: Mapping[str, float]) -> str:
    """An older version is served again."""
    return f"{_named(target)} served: gone back from version {left}; {durations(ms)}"


def repaired(target: Manifest, ms: Mapping[str, float]) -> str:
    """Weights that somebody else had changed are a version again."""
    return f"{_named(target)} served: weights that were changed from outside are replaced; {durations(ms)}"


def durations(ms: Mapping[str, float]) -> str:
    """``timings_ms`` in words, such as ``fetched 210 ms, decoded 12, paused 14 (committed 9, resumed 1)``."""
    told = [f"{word} {_ms(ms[phase])}" for phase, word in _WORDS.items() if ms.get(phase, 0) >= TOLD_MS]
    if "pause" in ms:
        parts = [
            f"{word} {_ms(ms[phase])}"
            for phase, word in (("commit", "committed"), ("resume", "resumed"))
            if phase in ms
        ]
        told.append(f"paused {_ms(ms['pause'])}" + (f" ({', '.join(parts)})" if parts else ""))
    if told:
        # The unit once: whoever reads on knows it.
        first, space, rest = told[0].partition(" (")
        told[0] = f"{first} ms{space}{rest}"
    return ", ".join(told)


def _named(manifest: Manifest) -> str:
    return f"version {manifest.version} (step {manifest.step})"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def _share(percent: float) -> str:
    return f"{percent:.1f}" if percent >= 0.95 else f"{percent:.2g}"


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
