"""Offline ``LLM`` with ``attach``: bit-equal after every version, tokens and log probabilities as a fresh engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import warm
from tests.e2e.offline import VERSIONS
from tests.e2e.servers import plain_vllm_serve, refused
from tests.support.tiny import FAMILIES, make_model, save_checkpoint

pytestmark = pytest.mark.e2e


def follow_offline(root: Path, family: str) -> dict[str, Any]:
    """Run tests/e2e/offline.py in a process of its own and read what it saw."""
    done = warm.run("tests.e2e.offline", str(root), family, seconds=400)
    assert done.status == 0, done.said[-4000:]
    result: dict[str, Any] = json.loads((root / "seen.json").read_text())
    return result


IN_CI = ["qwen3", "deepseek_v3"]
"""The second computes some of what it serves: latent attention, a router's bias in float32."""
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family not in IN_CI]


@pytest.mark.parametrize("family", [*IN_CI, *SLOW])
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


@pytest.mark.parametrize(
    ("environment", "flags", "words"),
    [
        ({}, ["--worker-extension-cls", "vllm_delta_sync.engine.WorkerExtension"], "setting 'bucket' is missing"),
        ({"DELTA_SYNC_BUCKET": "/nowhere"}, [], "launch vLLM with --worker-extension-cls"),
    ],
)
def test_half_a_setup_ends_the_server(
    tmp_path: Path, environment: dict[str, str], flags: list[str], words: str
) -> None:
    base = save_checkpoint(make_model("qwen3"), tmp_path / "base")
    environment = {"VLLM_PLUGINS": "delta_sync", **environment}
    status, text = refused(tmp_path / "log", plain_vllm_serve(base, *flags), environment)
    assert status != 0
    assert words in text
