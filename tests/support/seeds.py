"""How many random stories a test tells."""

from typing import Any

import pytest
from hypothesis import settings


def seeds(quick: int, full: int) -> list[Any]:
    """Numbers from 0: the first ones for every run, the rest for ``make test-full``."""
    return [seed if seed < quick else pytest.param(seed, marks=pytest.mark.slow) for seed in range(full)]


def few_by_default(quick: int) -> settings:
    """For a property whose examples take long: so many in ``make test``, and all that other profiles draw."""
    usual = settings().max_examples
    return settings(max_examples=quick if usual == settings.get_profile("quick").max_examples else usual)
