"""What each part may load, tried in an interpreter of its own where the rest cannot be imported at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

VLLM = ("vllm", "vllm_delta_sync.engine")
TRAINERS = ("transformers", "trl", "trainer_side")
# Later ones may load what earlier ones may not.
LOADED_IN_ORDER: list[dict[str, tuple[str, ...]]] = [
    {
        "vllm_delta_sync": (*VLLM, *TRAINERS, "torch", "numpy", "numba", "pydantic", "zmq"),
        "vllm_delta_sync.errors": (*VLLM, *TRAINERS, "torch", "numpy", "numba", "pydantic", "zmq"),
        "vllm_delta_sync.format": (*VLLM, *TRAINERS, "torch", "numba", "zmq"),
        "vllm_delta_sync.format.manifest": (*VLLM, *TRAINERS, "torch", "numba", "zmq"),
        "vllm_delta_sync.codec.delta_writer": (*VLLM, *TRAINERS, "torch", "numba", "zmq"),
        "vllm_delta_sync.codec.delta_reader": (*VLLM, *TRAINERS, "torch", "numba", "zmq"),
        "vllm_delta_sync.bucket": (*VLLM, *TRAINERS, "torch", "numba", "zmq", "huggingface_hub", "obstore"),
        "vllm_delta_sync.settings": (*VLLM, *TRAINERS, "torch", "numba", "zmq"),
        "vllm_delta_sync.cache": (*VLLM, *TRAINERS, "torch", "numba", "zmq"),
        "vllm_delta_sync.client": (*VLLM, *TRAINERS, "torch", "numba", "zmq"),
        "vllm_delta_sync.cli": ("vllm", *TRAINERS, "torch", "numba", "zmq"),
    },
    {"vllm_delta_sync.notice": (*VLLM, *TRAINERS, "torch", "numba")},
    {"trainer_side": (*VLLM, "transformers", "trl", "numba")},
    {
        "vllm_delta_sync.engine": (*TRAINERS, "vllm", "torch", "numba", "zmq"),
        # vLLM scans what is loaded while it builds a worker, and numba in there makes it crash.
        "vllm_delta_sync.engine.entrypoints.plugin": (*TRAINERS, "numba", "zmq"),
        "vllm_delta_sync.engine.worker.rank_worker": (*TRAINERS, "numba", "zmq"),
    },
]

# A name bound to None in sys.modules cannot be imported.
BLOCKED = """
import json, sys
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None
"""
LOADED = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(json.dumps(sorted(sys.modules)))
"""

PUBLISH_READ_AND_HELP = """
import torch
from trainer_side import Publisher
from vllm_delta_sync import open_run

weights = {"a.weight": torch.randn(64, 32).bfloat16(), "b.weight": torch.randn(7)}
with Publisher(lambda: weights.items(), bucket=sys.argv[2]) as publisher:
    weights["a.weight"].view(torch.int16)[3, 5] += 1
    result = publisher.publish(step=1, wait=True)
    assert (result.version, result.changed) == (1, 1), result
run = open_run(sys.argv[2])
assert run.head().version == 1
read = dict(run.tensors())
for name, tensor in weights.items():
    assert torch.equal(read[name].view(torch.uint8), tensor.view(torch.uint8)), name
assert "vllm_delta_sync.engine" not in sys.modules

from vllm_delta_sync.cli import main
sys.argv[1:] = ["--help"]
sys.exit(main())
"""


def run_clean(code: str, *arguments: str) -> str:
    # Without the PYTHON… variables of whoever runs the tests, which could load anything.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("modules", LOADED_IN_ORDER, ids=lambda modules: next(iter(modules)))
def test_a_module_loads_only_what_it_may(modules: dict[str, tuple[str, ...]]) -> None:
    for (module, forbidden), line in zip(modules.items(), run_clean(LOADED, *modules).splitlines(), strict=True):
        assert not set(json.loads(line)) & set(forbidden), module


def test_runs_are_published_and_read_and_the_command_helps_where_vllm_is_not_installed(tmp_path: Path) -> None:
    blocked = json.dumps(["vllm", "transformers", "trl"])
    assert "serve" in run_clean(BLOCKED + PUBLISH_READ_AND_HELP, blocked, str(tmp_path / "run"))


def test_servers_load_where_trainers_are_not_installed() -> None:
    names = "vllm_delta_sync.engine, vllm_delta_sync.engine.entrypoints.plugin"
    run_clean(f"{BLOCKED}\nimport {names}", json.dumps(["trainer_side", "trl", "datasets", "accelerate"]))
