"""Offline ``LLM`` with ``attach``: bit-equal after every version, tokens and log probabilities as a fresh engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import warm
from tests.e2e.offline import VERSIONS
from tests.support.tiny import FAMILIES

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("offline")]


def follow_offline(root: Path, family: str) -> dict[str, Any]:
    """Run tests/e2e/offline.py in a process of its own and read what it saw."""
    done = warm.run("tests.e2e.offline", str(root), family, seconds=400)
    assert done.status == 0, done.said[-4000:]
    result: dict[str, Any] = json.loads((root / "seen.json").read_text())
    return result


QUICK = "deepseek_v3"
"""Computes some of what it serves: latent attention, a router's bias in float32."""
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family != QUICK]


@pytest.mark.parametrize("family", [QUICK, *SLOW])
def test_attach_between_two_generate_calls(tmp_path: Path, family: str) -> None:
    result = follow_offline(tmp_path, family)
    first, *later = result["seen"]
    assert first["status"]["served"]["version"] == 0
    for version, step in enumerate(later, start=1):
        assert step["status"]["served"]["version"] == version
        assert step["label"] == str(version)
        assert step["equal"] is True
        assert step["verify"]["verdict"] is True
    assert len(later) == VERSIONS
    assert later[-1]["outputs"] == result["fresh"]
    assert later[-1]["outputs"] != first["outputs"]
