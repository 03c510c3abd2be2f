"""Start straight from the bucket: ``load_format="delta_sync"`` against a fresh load of the exported checkpoint.

A server that starts so, and follows: tests/e2e/test_bucket_alone.py. An output head that the folder lacks:
tests/e2e/test_tied_heads.py.
Each case runs in a process of its own, as ``python -m tests.e2e.test_cold_start FOLDER CASE``.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.fresh import digests, draft_model, generate, make_engine, worker_model
from tests.e2e.warm import see
from tests.support.tiny import make_model, save_checkpoint, train_steps

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

VERSIONS = 3
WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]


def without_weights(checkpoint: Path, folder: Path) -> Path:
    """A model folder with config and tokenizer only."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.name != WEIGHTS:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def anchor(root: Path) -> tuple[Path, Path]:
    """A run that starts from an anchor: (folder without weights, exported checkpoint of the head)."""
    from trainer_side import Publisher

    model = make_model("qwen3", seed=5)
    model.config.dtype = torch.bfloat16
    steps = train_steps(model, lr=3e-5)
    with Publisher(model, bucket=str(root / "run")) as publisher:
        for step in range(1, VERSIONS):
            next(steps)
            publisher.publish(step=step, wait=True)
    exported = save_checkpoint(model, root / "exported")
    return without_weights(exported, root / "bare"), exported


def reference(root: Path) -> tuple[Path, Path]:
    """A run by reference whose base was moved away since, into the model folder that vLLM is given."""
    from trainer_side import Publisher

    model = make_model("llama", seed=5)
    base = save_checkpoint(model, root / "base")
    steps = train_steps(model, lr=3e-5)
    with Publisher(model, bucket=str(root / "run"), base=base) as publisher:
        for step in range(1, VERSIONS):
            next(steps)
            publisher.publish(step=step, wait=True)
    return base.rename(root / "moved"), save_checkpoint(model, root / "exported")


def draft(root: Path) -> tuple[Path, Path]:
    """A run beside another model of the same shapes, which is to draft for it."""
    save_checkpoint(make_model("qwen3", seed=7), root / "draft")
    return anchor(root)


CASES: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "anchor": anchor,
    "reference": reference,
    "draft": draft,
}


def main(root: Path, case: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["DELTA_SYNC_BUCKET"] = str(root / "run")
    from vllm_delta_sync import open_run

    folder, exported = CASES[case](root)
    options: dict[str, Any] = {}
    if case == "draft":
        drafts = {"method": "draft_model", "model": str(root / "draft"), "num_speculative_tokens": 3}
        options["speculative_config"] = drafts
    cold = make_engine(str(folder), load_format="delta_sync", **options)
    loaded = worker_model(cold).delta_sync_loaded
    head = open_run(str(root / "run")).head()
    state = open_run(str(root / "run")).snapshot(base=folder if case == "reference" else None)
    fresh = make_engine(str(exported), **options)
    result = {
        "kind": open_run(str(root / "run")).manifest(0).kind,
        "folder": sorted(file.name for file in folder.iterdir()),
        "loaded": [loaded.run, loaded.version],
        "head": [head.run, head.version],
        "fingerprints_equal": list(loaded.fingerprints) == [value.hex() for value in state.fingerprints],
        "cold": {"digests": digests(worker_model(cold)), "outputs": generate(cold)},
        "fresh": {"digests": digests(worker_model(fresh)), "outputs": generate(fresh)},
    }
    if case == "draft":
        result["drafts"] = [digests(draft_model(engine)) for engine in (cold, fresh)]
    (root / "seen.json").write_text(json.dumps(result))


@pytest.mark.parametrize(
    ("case", "kind", "has_weights"),
    [
        ("anchor", "anchor", False),
        ("reference", "reference", True),
        ("draft", "anchor", False),
    ],
)
def test_cold_start_is_a_fresh_load_of_the_head(tmp_path: Path, case: str, kind: str, has_weights: bool) -> None:
    seen = see("tests.e2e.test_cold_start", tmp_path, case)
    assert seen["kind"] == kind
    assert (WEIGHTS in seen["folder"]) is has_weights
    assert seen["head"][1] == VERSIONS - 1
    assert seen["loaded"] == seen["head"]
    assert seen["fingerprints_equal"] is True
    assert seen["cold"]["digests"] == seen["fresh"]["digests"]
    assert seen["cold"]["outputs"] == seen["fresh"]["outputs"]
    if case == "draft":
        # The draft is no part of the run: it comes from its own folder.
        of_cold, of_fresh = seen["drafts"]
        assert of_cold == of_fresh
        assert of_cold != seen["cold"]["digests"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
