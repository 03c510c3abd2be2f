"""``delta-sync doctor --server`` on a vLLM server without the plugin; one with it is in tests/e2e/test_secrets.py."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import plain_vllm_serve, serving
from tests.support.tiny import make_model, save_checkpoint

pytestmark = pytest.mark.e2e


def doctor(url: str, server: str, *flags: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and findings by check."""
    program = str(Path(sys.executable).with_name("delta-sync"))
    command = [program, "doctor", "--bucket", url, "--server", server, "--bytes", "1000000", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout, done.stderr
    return done.returncode, {row["check"]: row for row in json.loads(done.stdout)["findings"]}


def bad(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: row["verdict"] for name, row in found.items() if row["verdict"] not in ("ok", "skipped")}


@pytest.mark.slow
def test_a_server_without_the_plugin(tmp_path: Path) -> None:
    base = save_checkpoint(make_model("qwen3"), tmp_path / "base")
    command = plain_vllm_serve(base, "--api-key", "of-vllm-itself")
    with serving(base, tmp_path / "server.log", command, {}) as server:
        code, found = doctor(str(tmp_path / "run"), server.url)
    assert (code, bad(found)) == (1, {"url": "warning", "plugin": "failed"})
    assert (found["plugin"]["kind"], found["server"]["figures"]["api_key"]) == ("engine", True)
    assert "VLLM_PLUGINS" in found["plugin"]["mend"]
