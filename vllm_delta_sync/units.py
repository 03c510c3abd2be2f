"""``duration`` and ``byte_count`` read what people write: ``90s``, ``2h``, ``500MB``, ``8GiB``; ``rounded`` writes
figures, and ``listed`` the first of many names.

Numbers without a unit are seconds or bytes. Commands and settings use these, and no other parsers.
"""

import re
from collections.abc import Mapping, Sequence

DURATIONS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
SIZES = {
    "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4,
    "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4,
}  # fmt: skip
_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?(?:e[0-9]{1,2})?) ?([A-Za-z]*)")


LONGEST_SECONDS = 1e9
"""What longer durations count as: 31 years. Waits of more than 292 years would be refused by Python."""


def duration(text: str) -> float | None:
    """Return the seconds that a text means, 0 or more; None if it is no duration."""
    found = _scaled(text, DURATIONS, "s")
    return None if found is None else min(found, LONGEST_SECONDS)


def byte_count(text: str) -> int | None:
    """Return the bytes that a text means, case ignored; None if it is no size."""
    found = _scaled(text, SIZES, "b")
    return None if found is None else round(found)


def rounded(value: float) -> str:
    """Format a figure with three digits, or all that stand before the point; never as 1.23e+03."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def listed(items: Sequence[object], most: int = 3) -> str:
    """Return items with commas between them; of more than ``most`` the first ones, and how many there are besides."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def _scaled(text: str, units: Mapping[str, float], unit: str) -> float | None:
    match = _NUMBER.fullmatch(text)
    if match is None or (match[2] or unit).lower() not in units:
        return None
    return float(match[1]) * units[(match[2] or unit).lower()]
