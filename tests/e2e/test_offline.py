"""Offline ``LLM`` with ``attach``: bit-equal after every version, tokens and log probabilities as a fresh engine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import servers
from tests.e2e.offline import VERSIONS
from tests.e2e.servers import VLLM_FLAGS, end_group, free_port
from tests.tiny import FAMILIES, make_model, save_checkpoint

pytestmark = pytest.mark.e2e


def follow_offline(root: Path, family: str) -> dict[str, Any]:
    """Run tests/e2e/offline.py in a process of its own and read what it saw."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.offline", str(root), family],
        env={**os.environ, **servers.ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode()[-4000:]
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
    program = str(Path(sys.executable).with_name("vllm"))
    command = [program, "serve", str(base), *flags, *VLLM_FLAGS, "--host", "127.0.0.1", "--port", str(free_port())]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **servers.ENVIRONMENT, "VLLM_PLUGINS": "delta_sync", **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            assert process.wait(servers.START_SECONDS) != 0
        finally:
            end_group(process)
    assert words in (tmp_path / "log").read_text()
