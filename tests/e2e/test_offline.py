"""Offline ``LLM`` with ``attach``: bit-equal after every version, tokens and log probabilities as a fresh engine."""

from pathlib import Path

import pytest

from tests.e2e.test_features import follow_each
from tests.support.tiny import FAMILIES

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("offline")]

QUICK = "deepseek_v3"
"""Computes some of what it serves: latent attention, a router's bias in float32."""
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family != QUICK]


@pytest.mark.parametrize("family", [QUICK, *SLOW])
def test_attach_between_two_generate_calls(tmp_path: Path, family: str) -> None:
    follow_each(tmp_path, family=family)
