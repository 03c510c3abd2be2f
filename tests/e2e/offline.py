"""Trainer and offline vLLM in one process: run as ``python -m tests.e2e.offline FOLDER FAMILY``.

Publishes from real steps, moves an ``LLM`` along between ``generate`` calls, and writes what it saw.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.e2e.fresh import digests, generate, load_again, make_engine, worker_model
from tests.support.tiny import make_model, save_checkpoint, train_steps

VERSIONS = 3


def main(root: Path, family: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from trainer_side import Publisher
    from vllm_delta_sync.engine import attach

    model = make_model(family, seed=5)
    base = save_checkpoint(model, root / "base")
    steps = train_steps(model, lr=3e-5)
    with Publisher(model, bucket=str(root / "run"), base=base) as publisher:
        llm = make_engine(str(base))
        sync = attach(llm, bucket=str(root / "run"))
        seen: list[dict[str, Any]] = [{"status": sync.to(), "outputs": generate(llm)}]
        for step in range(1, VERSIONS + 1):
            next(steps)
            publisher.publish(step=step, wait=True)
            publisher.flush()
            checkpoint = save_checkpoint(model, root / f"v{step}")
            seen.append(
                {
                    "status": sync.to(),
                    "equal": digests(worker_model(llm)) == digests(load_beside(llm, str(checkpoint))),
                    "outputs": generate(llm),
                    "verify": sync.verify(),
                    "label": llm.llm_engine.get_weight_version(),
                }
            )
    fresh = make_engine(str(root / f"v{VERSIONS}"))
    (root / "seen.json").write_text(json.dumps({"seen": seen, "fresh": generate(fresh)}))


def load_beside(engine: Any, checkpoint: str) -> Any:
    """``load_again`` for models with experts, whose modules sit in the configuration and cannot be copied with it."""
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context
    held = dict(layers)
    layers.clear()
    try:
        return load_again(engine, checkpoint)
    finally:
        layers.update(held)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
