"""vLLM ties an output head or not, depending on the checkpoint: an engine says what a fresh engine says that loads the
version, or the run is refused with a way out, which works.

Each case runs in a process of its own, as ``python -m tests.e2e.test_tied_heads FOLDER CASE OPTIONS``.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.fresh import generate, make_engine, refusal
from tests.e2e.warm import see
from tests.e2e.world import ranks_bound
from tests.receiver.test_tied_heads import EMBEDDING, HEAD, WEIGHTS, write
from tests.support.tiny import make_model, save_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


class Site:
    """A checkpoint whose config.json ties the head and which has none, a run that has one, and engines that follow."""

    def __init__(self, root: Path, options: dict[str, Any], both_in_base: bool) -> None:
        from trainer_side import Publisher

        self.root, self.options, self.url = root, options, str(root / "run")
        self.tied = save_checkpoint(make_model("qwen3", seed=5), root / "tied")
        self.live = load_file(self.tied / WEIGHTS)
        self.live[HEAD] = self.live[EMBEDDING].clone()
        self.both = write(root / "both", self.tied, self.live)
        self.publisher = Publisher(lambda: self.live.items(), self.url, self.both if both_in_base else None)

    def publish(self, step: int, *changed: str) -> Path:
        """Change these tensors in the same way, enough for other tokens; a checkpoint of the version."""
        for name in changed:
            generator = torch.Generator().manual_seed(step)
            noise = 0.02 * torch.randn(self.live[name].shape, generator=generator)
            self.live[name] = (self.live[name].float() + noise).bfloat16()
        self.publisher.publish(step=step, wait=True)
        self.publisher.flush()
        return write(self.root / f"v{step}", self.tied, self.live)

    def engine(self, folder: Path, load_format: str = "auto") -> Any:
        return make_engine(folder, load_format=load_format, **self.options)


def look(llm: Any, sync: Any, act: Callable[[], object]) -> dict[str, Any]:
    """Do something, and what an engine is and says then."""
    raised, status = refusal(act), sync.status()
    return {
        "raised": raised,
        "state": status["state"],
        "served": status["served"]["version"],
        "verdict": sync.verify()["verdict"],
        "outputs": generate(llm),
    }


def left_out(site: Site) -> dict[str, Any]:
    """Two engines over a folder without a head: one loads the folder, the other the bucket. Then the head changes, the
    embedding does, and both do."""
    from vllm_delta_sync.engine import attach

    # Kept: an engine that ends takes along what it shares with the others of its process.
    first = site.engine(site.tied)
    refused = refusal(attach(first, site.url).to)
    return {"refused": refused, **follow(site, site.engine(site.tied, "delta_sync"), site.tied, first)}


def both_in_base(site: Site) -> dict[str, Any]:
    """The base has both, with equal bits, and vLLM loads it by itself."""
    return follow(site, site.engine(site.both), site.both)


def follow(site: Site, llm: Any, base: Path, *others: Any) -> dict[str, Any]:
    """Follow three versions and one back, and ask engines that load them. Args: others: engines to keep alive."""
    from vllm_delta_sync.engine import attach

    sync = attach(llm, site.url)
    found = {"own": [look(llm, sync, sync.to)]}
    folders = [base]
    for step, changed in enumerate(((HEAD,), (EMBEDDING,), (HEAD, EMBEDDING)), start=1):
        folders.append(site.publish(step, *changed))
        found["own"].append(look(llm, sync, sync.to))
    found["own"].append(look(llm, sync, lambda: sync.rollback(1)))
    engines, fresh = [llm, *others], []
    for folder in folders:
        engines.append(site.engine(folder))
        fresh.append(generate(engines[-1]))
    return {**found, "fresh": fresh}


def main(root: Path, case: str, options: dict[str, Any]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    site = Site(root, options, both_in_base=case == "both_in_base")
    os.environ["DELTA_SYNC_BUCKET"] = site.url
    found = {"left_out": left_out, "both_in_base": both_in_base}[case](site)
    (root / "seen.json").write_text(json.dumps(found))


def seen_of(root: Path, case: str, options: dict[str, Any]) -> Any:
    environment = ranks_bound(2 if len(options) > 1 else 1)
    return see("tests.e2e.test_tied_heads", root, case, json.dumps(options), seconds=900, environment=environment)


def expect_followed(seen: dict[str, Any]) -> None:
    """Every version, and version 1 again."""
    assert [(step["served"], step["raised"]) for step in seen["own"]] == [(i, "") for i in (0, 1, 2, 3, 1)]
    for step in seen["own"]:
        assert step["outputs"] == seen["fresh"][step["served"]], step["served"]
        assert step["verdict"] is True
    assert all(first != second for first, second in zip(seen["fresh"], seen["fresh"][1:], strict=False))


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"enforce_eager": True},
    "tensor": {"tensor_parallel_size": 2, "enforce_eager": True},
    "pipeline": {
        "pipeline_parallel_size": 2,
        "enforce_eager": False,
        "compilation_config": {"mode": 2, "backend": "eager"},
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_that_the_model_folder_lacks(tmp_path: Path, layout: str) -> None:
    seen = seen_of(tmp_path, "left_out", LAYOUTS[layout])
    assert seen["refused"].startswith("model: ")
    assert f"tensor {HEAD!r} is left out by this model" in seen["refused"]
    assert "start vLLM with --load-format delta_sync" in seen["refused"]
    expect_followed(seen)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_that_equals_the_embedding_in_the_base(tmp_path: Path, layout: str) -> None:
    expect_followed(seen_of(tmp_path, "both_in_base", LAYOUTS[layout]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
