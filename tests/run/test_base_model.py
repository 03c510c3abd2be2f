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
from vllm_delta_sync.tensors.checkpoint import resolve_base

# The client reads where the Hub is when it is imported.
PUBLISH = """
import json, sys
from safetensors.torch import load_file
from trainer_side import Publisher
from vllm_delta_sync.errors import DeltaSyncError
for run, base, changed in json.loads(sys.argv[2]):
    weights = load_file(sys.argv[1])
    weights["w"][:changed] += 1
    try:
        with Publisher(weights, run, base=base) as publisher:
            weights["w"][3] += 1
            publisher.publish(step=1)
            publisher.flush()
            print(json.dumps(publisher.version))
    except DeltaSyncError as error:
        print(json.dumps([error.kind, error.message]))
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


def publish(model: Path, endpoint: str, *jobs: tuple[str, str, int]) -> list[Any]:
    """Begin runs in a process of its own: names, bases, and how much of the weights is not as in the base."""
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {
        "HF_ENDPOINT": endpoint, "HF_HOME": str(model.parent / "cache"), "PYTHONPATH": os.getcwd(),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0",
    }  # fmt: skip
    placed = json.dumps([(str(model.parent / name), *rest) for name, *rest in jobs])
    arguments = [sys.executable, "-c", PUBLISH, str(model / "model.safetensors"), placed]
    done = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()[-len(jobs) :]]


def test_version_0_refers_to_the_models_commit(model: Path, tmp_path: Path) -> None:
    absent = {"org/model@nothing": "not_found", "org/other@main": "not_found", "org/model@": "not_found"}
    refused = {**absent, "org/--model@main": "usage"}
    with serving(model) as hub:
        answers = publish(model, hub.url, ("run", "org/model@main", 0), *(("never", base, 0) for base in refused))
        asked = [one.path for one in hub.asked]
    assert answers[0] == 1
    assert [kind for kind, _ in answers[1:]] == list(refused.values())
    for base, (_, message) in zip(absent, answers[1:], strict=False):
        assert base.split("@")[0] in message
    assert not (tmp_path / "never").exists()
    assert not any("original" in path or "picture" in path for path in asked)
    first = open_run(str(tmp_path / "run")).manifest(0)
    assert (first.kind, first.objects) == ("reference", [])
    assert first.base is not None
    assert (first.base.model, first.base.revision) == ("org/model", COMMIT)
    assert Path(first.base.location).name == COMMIT
    assert open_run(str(tmp_path / "run")).verify().replayed
    # Named by its commit it is found in the cache, wherever the Hub is; another one is not.
    jobs = ("run2", f"hf:org/model@{COMMIT}", 5), ("never", "org/unknown@main", 0)
    version, (kind, _) = publish(model, "http://127.0.0.1:9", *jobs)
    assert (version, kind) == (1, "store")
    assert open_run(str(tmp_path / "run2")).manifest(0).kind == "anchor"


def test_path_that_exists_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model@main").mkdir(parents=True)
    found = resolve_base("org/model@main")
    assert (found.path, found.model, found.revision) == (Path("org/model@main"), None, None)
    assert found.recorded.location == str(tmp_path / "org" / "model@main")
