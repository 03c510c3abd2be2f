"""Trainers of LoRA adapters, and an ``LLM`` that takes them over: ``python -m tests.e2e.lora FOLDER RANKS [OPTIONS]``.

What the ``LLM`` says with an adapter of a run is compared with what it says with the trainer's own adapter, saved by
PEFT and loaded by vLLM under a new name. OPTIONS is JSON: keyword arguments of ``vllm.LLM``, and ``sizes``, fields of
the model's config.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.e2e.fresh import generate as say
from tests.e2e.fresh import make_engine, refusal
from tests.support.adapters import adapted, randomize, save_adapter
from tests.support.tiny import make_model, save_checkpoint

VERSIONS = 5
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


def fail_once(worker: Any, rank: int) -> None:
    """In a worker: one rank loses an adapter in the middle of loading it, once."""
    # vLLM passes a wrapper, whose attributes are those of the worker.
    worker = worker.worker
    if worker.rank != rank:
        return
    load = worker.add_lora

    def fail(request: Any) -> None:
        worker.add_lora = load
        worker.remove_lora(request.lora_int_id)
        raise RuntimeError("out of slots")

    worker.add_lora = fail


def main(root: Path, ranks: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
    from trainer_side import Publisher
    from trainer_side.integrations.peft import adapter_publisher
    from vllm_delta_sync.engine import attach

    base = save_checkpoint(make_model("qwen3", seed=5, **sizes), root / "base")
    models = {
        "math": adapted(make_model("qwen3", seed=5, **sizes)),
        "code": adapted(
            make_model("qwen3", seed=5, **sizes), seed=1, r=2, target_modules=["k_proj", "o_proj", "gate_proj"]
        ),
    }
    llm = make_engine(base, **{**OPTIONS, "tensor_parallel_size": ranks, **options})
    numbers = iter(range(1, 100))

    def fresh(model: Any) -> list[Any]:
        from vllm.lora.request import LoRARequest

        number = next(numbers)
        return say(llm, LoRARequest(f"fresh-{number}", number, str(save_adapter(model, root / f"fresh-{number}"))))

    def follow(name: str, url: Path) -> Any:
        os.environ["DELTA_SYNC_LORA_NAME"] = name
        return attach(llm, bucket=str(url))

    def refused(name: str, model: Any, publish: Callable[..., Any] = adapter_publisher) -> str:
        with publish(model, str(root / name)):
            return refusal(lambda: follow(name, root / name).to())

    with ExitStack() as stack:
        publishers = {
            name: stack.enter_context(adapter_publisher(model, str(root / f"run-{name}")))
            for name, model in models.items()
        }
        syncs = {name: follow(name, root / f"run-{name}") for name in models}
        seen: dict[str, Any] = {"plain": say(llm), "served": [], "wrong": []}
        said: list[dict[str, Any]] = []
        for step in range(VERSIONS + 1):
            # The second adapter stays as it is at every other version of the first.
            for name in ("math", "code") if step % 2 == 0 else ("math",):
                if step:
                    randomize(models[name], 10 * step)
                    publishers[name].publish(step=step, wait=True)
                    publishers[name].flush()
                syncs[name].to()
            said.append({name: say(llm, sync.lora_request) for name, sync in syncs.items()})
            seen["wrong"] += [(step, name) for name, model in models.items() if fresh(model) != said[-1][name]]
            seen["served"].append({name: sync.status()["served"]["version"] for name, sync in syncs.items()})
        seen["verdicts"] = [sync.verify()["verdict"] for sync in syncs.values()]
        seen["labels"] = llm.llm_engine.get_weight_version()
        seen["different"] = all(before["math"] != after["math"] for before, after in itertools.pairwise(said))

        seen["rolled back to"] = syncs["math"].rollback(3)["served"]["version"]
        seen["rolled back"] = say(llm, syncs["math"].lora_request) == said[3]["math"]
        seen["other stayed"] = say(llm, syncs["code"].lora_request) == said[-1]["code"]
        syncs["math"].to()

        # vLLM fails once in the middle of a commit, on the last rank.
        llm.collective_rpc(fail_once, args=(ranks - 1,))
        randomize(models["math"], 77)
        publishers["math"].publish(step=VERSIONS + 1, wait=True)
        publishers["math"].flush()
        seen["failed"] = refusal(syncs["math"].to)
        seen["after failure"] = syncs["math"].status()["served"]["version"]
        seen["put back"] = say(llm, syncs["math"].lora_request) == said[-1]["math"]
        syncs["math"].to()
        seen["tried again"] = say(llm, syncs["math"].lora_request) == fresh(models["math"])

        seen["refused"] = {
            "other shape": refused("shape", adapted(make_model("qwen3", hidden_size=64))),
            "other depth": refused("depth", adapted(make_model("llama", num_hidden_layers=3))),
            "other rank": refused("rank", adapted(make_model("qwen3", **sizes), r=16)),
            "no adapter": refused("model", make_model("qwen3", **sizes), Publisher),
        }
        seen["nothing applied"] = say(llm) == seen["plain"]
        seen["others stay"] = say(llm, syncs["math"].lora_request) == fresh(models["math"])
    (root / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    given: dict[str, Any] = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    main(Path(sys.argv[1]), int(sys.argv[2]), given.pop("sizes", {}), given)
