"""How many random stories a test tells."""

from typing import Any

import pytest


def seeds(quick: int, full: int) -> list[Any]:
    """Numbers from 0: the first ones for every run, the rest for ``make test-full``."""
    return [seed if seed < quick else pytest.param(seed, marks=pytest.mark.slow) for seed in range(full)]
