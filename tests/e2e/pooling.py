"""A trainer and an offline pooling model in one process: run as ``python -m tests.e2e.pooling FOLDER``.

Publishes from real steps, moves an ``LLM`` along between two calls, and writes what it embedded, and what a fresh one
embeds.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.e2e.fresh import PROMPTS, digests, load_again, worker_model
from tests.support.tiny import make_model, save_checkpoint, train_steps

VERSIONS = 3
BACK = 1


def main(root: Path) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from trainer_side import Publisher
    from vllm_delta_sync.engine import attach

    model = make_model("llama", seed=5)
    base = save_checkpoint(model, root / "base")
    steps = train_steps(model, lr=1e-3)
    with Publisher(model, bucket=str(root / "run"), base=base) as publisher:
        llm = make_engine(base)
        sync = attach(llm, bucket=str(root / "run"))
        seen: list[dict[str, Any]] = [{"served": sync.to()["served"]["version"], "embedded": embed(llm)}]
        for step in range(1, VERSIONS + 1):
            next(steps)
            publisher.publish(step=step, wait=True)
            publisher.flush()
            checkpoint = save_checkpoint(model, root / f"v{step}")
            seen.append(
                {
                    "served": sync.to()["served"]["version"],
                    "equal": digests(worker_model(llm)) == digests(load_again(llm, str(checkpoint))),
                    "embedded": embed(llm),
                    "verdict": sync.verify()["verdict"],
                }
            )
        back = {"served": sync.rollback(BACK)["served"]["version"], "embedded": embed(llm)}
    fresh = embed(make_engine(root / f"v{VERSIONS}"))
    (root / "seen.json").write_text(json.dumps({"seen": seen, "back": back, "fresh": fresh}))


def make_engine(checkpoint: Path) -> Any:
    from vllm import LLM

    from vllm_delta_sync.engine import WORKER_EXTENSION

    flags: dict[str, Any] = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 16}
    return LLM(str(checkpoint), runner="pooling", worker_extension_cls=WORKER_EXTENSION, **flags)


def embed(llm: Any) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
