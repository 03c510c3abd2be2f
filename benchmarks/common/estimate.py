"""Means of independent values, with a 95 % interval: ``estimate``."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t of a two-sided 95 % interval, for 1, 2, 3 … degrees of freedom."""
T_MANY = 2.09


@dataclass(frozen=True)
class Estimate:
    """A mean and the half width of its 95 % interval."""

    mean: float
    half: float


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of independent values, two at least."""
    t = T_95[len(values) - 2] if len(values) - 2 < len(T_95) else T_MANY
    return Estimate(statistics.fmean(values), t * statistics.stdev(values) / len(values) ** 0.5)
