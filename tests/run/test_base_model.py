"""A base named as a public model: fetched by the real client from a Hub on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.hub import COMMIT, serving
from vllm_delta_sync import open_run
from vllm_delta_sync.checkpoint import resolve_base

# The client reads where the Hub is when it is imported.
PUBLISH = """
import json, sys
from safetensors.torch import load_file
from trainer_side import Publisher
from vllm_delta_sync.errors import DeltaSyncError
weights = load_file(sys.argv[1])
weights["w"][:int(sys.argv[4])] += 1
try:
    with Publisher(weights, sys.argv[2], base=sys.argv[3]) as publisher:
        weights["w"][3] += 1
        publisher.publish(step=1)
        publisher.flush()
        print(json.dumps({"version": publisher.version}))
except DeltaSyncError as error:
    print(json.dumps({"kind": error.kind, "message": error.message}))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "original").mkdir(parents=True)
    save_file({"w": torch.arange(64, dtype=torch.float32)}, folder / "model.safetensors")
    save_file({"x": torch.zeros(1)}, folder / "original" / "consolidated.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "picture.png").write_bytes(b"png")
    return folder


def publish(model: Path, run: Path, base: str, endpoint: str, changed: int = 0) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {
        "HF_ENDPOINT": endpoint, "HF_HOME": str(model.parent / "cache"), "PYTHONPATH": os.getcwd(),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    arguments = [sys.executable, "-c", PUBLISH, str(model / "model.safetensors"), str(run), base, str(changed)]
    done = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_version_0_refers_to_the_models_commit(model: Path, tmp_path: Path) -> None:
    with serving(model) as hub:
        assert publish(model, tmp_path / "run", "org/model@main", hub.endpoint) == {"version": 1}
        asked = hub.asked[:]
        # Named by its commit it is found in the cache, wherever the Hub is.
        elsewhere = "http://127.0.0.1:9"
        again = f"hf:org/model@{COMMIT}"
    assert not any("original" in path or "picture" in path for path in asked)
    assert publish(model, tmp_path / "run2", again, elsewhere, changed=5) == {"version": 1}
    first = open_run(str(tmp_path / "run")).manifest(0)
    assert (first.kind, first.objects) == ("reference", [])
    assert first.base is not None
    assert (first.base.model, first.base.revision) == ("org/model", COMMIT)
    assert Path(first.base.location).name == COMMIT
    assert open_run(str(tmp_path / "run")).verify().replayed
    assert open_run(str(tmp_path / "run2")).manifest(0).kind == "anchor"


@pytest.mark.parametrize(
    ("base", "kind", "message"),
    [
        ("org/model@nothing", "not_found", "no model org/model at revision nothing"),
        ("org/other@main", "not_found", "no model org/other at revision main"),
        ("org/model@", "not_found", "does not exist; give the path of a local one, or org/name@revision"),
        ("org/--model@main", "usage", "no model's name"),
    ],
)
def test_model_that_is_not_there_is_named(base: str, kind: str, message: str, model: Path, tmp_path: Path) -> None:
    with serving(model) as hub:
        answer = publish(model, tmp_path / "run", base, hub.endpoint)
    assert answer["kind"] == kind
    assert message in answer["message"]
    assert not (tmp_path / "run").exists()


def test_hub_that_cannot_be_reached_is_a_store_error(model: Path, tmp_path: Path) -> None:
    answer = publish(model, tmp_path / "run", "org/model@main", "http://127.0.0.1:9")
    assert answer["kind"] == "store"
    assert "neither in the cache nor to be had" in answer["message"]


def test_path_that_exists_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model@main").mkdir(parents=True)
    found = resolve_base("org/model@main")
    assert (found.path, found.model, found.revision) == (Path("org/model@main"), None, None)
    assert found.recorded.location == str(tmp_path / "org" / "model@main")
