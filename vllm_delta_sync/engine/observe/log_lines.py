"""Log lines for changes of the served weights."""

from collections.abc import Mapping
from typing import Any

from vllm_delta_sync.engine.planning.commit_plan import UpdatePlan
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.json_log import about

PHASE_ORDER = ("fetch", "verify", "decode", "route", "rescan", "wait", "pause", "commit", "resume")
"""Order of the phases in ``timings_ms``; those up to ``rescan`` run beside generation."""
MIN_SHOWN_MS = 0.05
"""Phases shorter than this are left out of the line."""
_WORDS = {
    "fetch": "fetched",
    "verify": "verified",
    "decode": "decoded",
    "route": "routed",
    "rescan": "rescanned",
    "wait": "waited",
}


def ordered(ms: Mapping[str, float]) -> dict[str, float]:
    """Return the timings in the order of ``PHASE_ORDER``, then any others."""
    known = {phase: ms[phase] for phase in PHASE_ORDER if phase in ms}
    return known | {phase: value for phase, value in ms.items() if phase not in known}


def forward(plan: UpdatePlan, ms: Mapping[str, float], elements: int) -> str:
    """Return the line for a commit forward; ``elements``: elements that it wrote, over all ranks."""
    target = plan.target
    if plan.steps and plan.versions > 1:
        # A sum over the versions would count most elements several times.
        what = f"{plan.versions} versions in one commit, {elements:,} elements written, {_size(plan.payload_bytes)}"
    elif plan.steps:
        share = 100 * plan.changed / max(1, target.total)
        what = f"{_share(share)} % changed, {_size(plan.payload_bytes)}"
    elif plan.rebuild:
        what = "rebuilt whole"
    else:
        what = f"taken whole, {_size(plan.payload_bytes)}"
    return f"{_label(target)} served: {what}; {durations(ms)}"


def back(target: Manifest, left: int, ms: Mapping[str, float]) -> str:
    """Return the line for a rollback."""
    return f"{_label(target)} served: rolled back from version {left}; {durations(ms)}"


def repaired(target: Manifest, ms: Mapping[str, float]) -> str:
    """Return the line for a repair after an external write."""
    return f"{_label(target)} served: weights that were changed from outside are repaired; {durations(ms)}"


def fields(
    event: str, target: Manifest, ms: Mapping[str, float], payload_bytes: int = 0, changed: int = 0
) -> dict[str, Any]:
    """Return ``extra`` of such a line, for ``log_format`` json; see ``json_log.about``."""
    return about(
        event,
        version=target.version,
        step=target.step,
        run=target.run,
        payload_bytes=payload_bytes,
        changed=changed,
        timings_ms=ordered(ms),
    )


def durations(ms: Mapping[str, float]) -> str:
    """Put ``timings_ms`` in words, such as ``fetched 210 ms, decoded 12, paused 14 (committed 9, resumed 1)``."""
    parts = [f"{word} {_ms(ms[phase])}" for phase, word in _WORDS.items() if ms.get(phase, 0) >= MIN_SHOWN_MS]
    if "pause" in ms:
        details = [
            f"{word} {_ms(ms[phase])}"
            for phase, word in (("commit", "committed"), ("resume", "resumed"))
            if phase in ms
        ]
        parts.append(f"paused {_ms(ms['pause'])}" + (f" ({', '.join(details)})" if details else ""))
    if parts:
        # The unit stands only after the first number.
        first, space, rest = parts[0].partition(" (")
        parts[0] = f"{first} ms{space}{rest}"
    return ", ".join(parts)


def _label(manifest: Manifest) -> str:
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
