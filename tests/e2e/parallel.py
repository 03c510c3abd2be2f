"""Trainer and an ``LLM`` of several tensor-parallel ranks.

Run as ``python -m tests.e2e.parallel FOLDER FAMILY RANKS [CODEC VOCABULARY [OPTION=VALUE...]]``; options are those of
``LLM``, values JSON.

Every rank is a process of its own. Publishes from real steps, moves the ``LLM`` along between ``generate`` calls, and
after every version compares each rank's parameters with those of a model that the same rank loads anew by vLLM's own
loader.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.e2e.fresh import digests, generate
from tests.support.tiny import VOCABULARY, make_model, save_checkpoint, train_steps

VERSIONS = 3


def main(
    root: Path, family: str, ranks: int, codec: Any = "tiled", vocabulary: int = VOCABULARY, **options: Any
) -> None:
    from trainer_side import Publisher
    from vllm_delta_sync.engine import attach

    model = make_model(family, seed=5, vocab_size=vocabulary)
    base = save_checkpoint(model, root / "base")
    steps = train_steps(model, lr=3e-5)
    with Publisher(model, bucket=str(root / "run"), base=base, codec=codec) as publisher:
        llm = make_parallel(base, ranks, **options)
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
                    "equal": llm.collective_rpc(equals_fresh_load, args=(str(checkpoint),)),
                    "verify": sync.verify(),
                }
            )
        seen[-1]["outputs"] = generate(llm)
        back = sync.rollback(2)
        seen.append({"status": back, "equal": llm.collective_rpc(equals_fresh_load, args=(str(root / "v2"),))})
    (root / "seen.json").write_text(json.dumps(seen))


def fresh(root: Path, ranks: int) -> None:
    """What an engine says that vLLM loads from the last checkpoint."""
    (root / "fresh.json").write_text(json.dumps(generate(make_parallel(root / f"v{VERSIONS}", ranks))))


def make_parallel(checkpoint: Path, ranks: int, **options: Any) -> Any:
    from vllm import LLM

    from vllm_delta_sync.engine import WORKER_EXTENSION

    return LLM(
        str(checkpoint),
        tensor_parallel_size=ranks,
        worker_extension_cls=WORKER_EXTENSION,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=16,
        **options,
    )


def equals_fresh_load(worker: Any, checkpoint: str) -> dict[str, Any]:
    """In a worker: whether its parameters are those that vLLM loads from a checkpoint on the same rank."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = worker.vllm_config
    layers = config.compilation_config.static_forward_context
    held, path = dict(layers), config.model_config.model
    layers.clear()
    config.model_config.model = checkpoint
    try:
        with set_current_vllm_config(config):
            other = digests(get_model(vllm_config=config))
    finally:
        config.model_config.model = path
        layers.clear()
        layers.update(held)
    mine = digests(worker.get_model())
    return {"different": sorted(name for name in other if mine.get(name) != other[name]), "compared": len(other)}


if __name__ == "__main__":
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # collective_rpc of a function of these tests
    folder, *arguments = sys.argv[1:]
    if len(arguments) == 1:
        fresh(Path(folder), int(arguments[0]))
    else:
        family_name, rank_count, *rest = arguments
        chosen = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in rest[2:])}
        main(
            Path(folder),
            family_name,
            int(rank_count),
            rest[0] if rest else "tiled",
            int(rest[1]) if rest else VOCABULARY,
            **chosen,
        )
