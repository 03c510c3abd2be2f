"""Follow a run with an offline ``LLM`` under some of vLLM's options: ``python -m tests.e2e.features FOLDER OPTIONS``.

OPTIONS is JSON: keyword arguments of ``vllm.LLM``, and some of ours: ``family``, of the model, and ``sizes``, fields of
its config; ``silent``, if this
machine can load the model and not compute with it, so that weights are compared and nothing is asked; ``sleep``, a
level; ``each``, to compare weights with a fresh load after each version, ask each time, and go back in the end; and
``cold``, to start one more engine from the bucket: over a folder without weights (``bare``), or over the base, which
was moved away from where the run says (``moved``).
Where LoRA is on, an adapter is asked as well as the served weights. Everything said at the end is compared with what a
new engine says that loads the last version's checkpoint under the same options.
"""

import json
import os
import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from tests.e2e.fresh import (
    PROMPTS,
    addresses,
    digests,
    draft_model,
    generate,
    load_again,
    make_engine,
    refusal,
    worker_model,
)
from tests.e2e.world import World
from tests.support.adapters import adapted, lose_adapter_memory, save_adapter
from tests.support.tiny import make_model, save_checkpoint

FAMILY = "qwen3"
VERSIONS, BACK = 3, 1
RATE = 1e-3
"""Of learning: high enough for other tokens after each version."""
DRAFT, SERVED = "DRAFT", "SERVED"
"""Stand in OPTIONS for the folder of a second model, and for that of the served model."""


def main(root: Path, options: dict[str, Any]) -> None:
    from vllm_delta_sync.engine import attach

    level, each, silent, cold = (options.pop(name, None) for name in ("sleep", "each", "silent", "cold"))
    sizes = options.pop("sizes", {})
    world = World(root, options.pop("family", FAMILY), rate=RATE, sizes=sizes)
    speculative = options.get("speculative_config", {})
    if speculative.get("model") == DRAFT:
        speculative["model"] = str(save_checkpoint(make_model(FAMILY, seed=7), root / "draft"))
    adapter = None
    if options.get("enable_lora") and not silent:
        adapter = save_adapter(adapted(make_model(world.family, seed=5, **sizes)), root / "adapter")
    with closing(world):
        llm = engine_with(world.base, options)
        sync = attach(llm, bucket=world.url)
        sync.to()
        seen: dict[str, Any] = {"first": held(llm, adapter, silent), "verdicts": [], "asleep": [], "each": []}
        places = addresses(worker_model(llm))
        for _ in range(VERSIONS):
            world.publish()
            if level is not None:
                seen["asleep"].append(sleep(llm, sync, level))
            sync.to()
            seen["verdicts"].append(sync.verify()["verdict"])
            if each:
                seen["each"].append(look(llm, world.save()))
        seen["served"] = sync.status()["served"]["version"]
        seen["same_places"] = addresses(worker_model(llm)) == places
        seen["last"] = held(llm, adapter, silent)
        if each:
            sync.rollback(BACK)
            seen["back"] = look(llm, root / f"v{BACK}")
            again = attach(llm, bucket=world.url)
            seen["again"] = [again.to()["served"]["version"], refusal(sync.to), again.to(BACK)["served"]["version"]]
    # vLLM gives one engine of a process memory that it can give up; what is said does not depend on it.
    options.pop("enable_sleep_mode", None)
    fresh = engine_with(world.save(), options)
    seen["fresh"] = held(fresh, adapter, silent)
    engines = [llm, fresh]
    if cold:
        engines.append(start_cold(root, world.base, options, moved=cold == "moved"))
        seen["cold"] = say(engines[-1], None)
        seen["loaded"] = look_at_loaded(root, engines[-1])
        seen["weights"] = [digests(worker_model(engine)) for engine in engines]
    if "model" in speculative:
        seen["drafts"] = [digests(draft_model(engine)) for engine in engines]
    (root / "seen.json").write_text(json.dumps(seen))


def engine_with(checkpoint: Path, options: dict[str, Any]) -> Any:
    speculative = options.get("speculative_config", {})
    if speculative.get("model") == SERVED:
        options = {**options, "speculative_config": {**speculative, "model": str(checkpoint)}}
    return make_engine(checkpoint, **{"enforce_eager": False, **options})


def start_cold(root: Path, base: Path, options: dict[str, Any], moved: bool) -> Any:
    """An engine that loads the newest version from the bucket."""
    if moved:
        folder = base.rename(root / "moved")
    else:
        folder = Path(shutil.copytree(base, root / "bare", ignore=shutil.ignore_patterns("*.safetensors")))
    os.environ["DELTA_SYNC_BUCKET"] = str(root / "run")
    return engine_with(folder, {**options, "load_format": "delta_sync"})


def look_at_loaded(root: Path, engine: Any) -> list[bool]:
    """Whether an engine knows that it has loaded the head: its run, its version and its fingerprints."""
    from vllm_delta_sync import open_run

    loaded, moved = worker_model(engine).delta_sync_loaded, root / "moved"
    with open_run(str(root / "run")) as run:
        head, state = run.head(), run.snapshot(base=moved if moved.exists() else None)
    fingerprints = list(state.fingerprints)
    return [loaded.run == head.run, loaded.version == head.version == VERSIONS, loaded.fingerprints == fingerprints]


def look(llm: Any, checkpoint: Path) -> dict[str, Any]:
    """Whether an engine has the weights of a checkpoint, by which label, and what it says."""
    equal = digests(worker_model(llm)) == digests(load_again(llm, checkpoint))
    return {"equal": equal, "label": llm.llm_engine.get_weight_version(), "said": say(llm, None)}


def held(llm: Any, adapter: Path | None, silent: bool) -> dict[str, Any]:
    """What an engine says, or, if nothing is asked, its weights."""
    return digests(worker_model(llm)) if silent else say(llm, adapter)


def say(llm: Any, adapter: Path | None) -> dict[str, Any]:
    """Greedy tokens and their log probabilities, of the served weights alone and with the adapter; or embeddings."""
    if llm.llm_engine.vllm_config.model_config.runner_type == "pooling":
        return {"plain": [output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)]}
    said = {"plain": generate(llm)}
    if adapter is not None:
        from vllm.lora.request import LoRARequest

        said["adapter"] = generate(llm, LoRARequest("adapter", 1, str(adapter)))
        said["plain again"] = generate(llm)
    return said


def sleep(llm: Any, sync: Any, level: int, *drafts: Any) -> str:
    """Send the workers to sleep, try to move them, and wake them; what was said to the attempt.

    At level 2 the weights are lost, also those of ``drafts``. CPU workers keep their memory while they sleep, so it is
    overwritten meanwhile. Others give it up: nothing may touch it until they are awake, and it may then be as before.
    """
    weights = [weight for model in (worker_model(llm), *drafts) for weight in model.parameters()]
    kept = weights[0].is_cpu
    llm.collective_rpc("sleep", args=(level,))
    said = refusal(sync.to)
    if level == 2 and kept:
        lose(weights)
        if llm.llm_engine.vllm_config.lora_config is not None:
            lose_adapter_memory(worker_model(llm))
    llm.collective_rpc("wake_up")
    if level == 2 and not kept:
        lose(weights)
    return said


def lose(weights: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for weight in weights:
            weight.zero_()


def expect_followed(seen: dict[str, Any], options: dict[str, Any]) -> None:
    """What an engine under such options, without ``each``, has to have said and held."""
    assert seen["served"] == VERSIONS
    assert seen["verdicts"] == [True] * VERSIONS
    assert seen["same_places"], "compiled code and captured graphs read where weights no longer are"
    assert seen["last"] == seen["fresh"]
    assert seen["last"]["plain"] != seen["first"]["plain"], "the versions do not differ enough to tell"
    if "enable_lora" in options:
        assert seen["last"]["adapter"] != seen["last"]["plain"], "the adapter does too little to tell"
        assert seen["last"]["adapter"] != seen["first"]["adapter"]
        assert seen["last"]["plain again"] == seen["last"]["plain"]
    if "drafts" in seen:
        assert seen["drafts"][0] == seen["drafts"][1]
    if "sleep" in options:
        assert all(said.startswith("busy: ") and "wake it up" in said for said in seen["asleep"]), seen["asleep"]


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
