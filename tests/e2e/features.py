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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.e2e.fresh import MAX_TOKENS, PROMPTS, digests, draft_model, load_again, make_engine, worker_model
from tests.support.adapters import lose_adapter_memory
from tests.support.tiny import make_model, save_checkpoint, train_steps

FAMILY = "qwen3"
VERSIONS, BACK = 3, 1
RATE = 1e-3
"""Of learning: high enough for other tokens after each version."""
DRAFT, SERVED = "DRAFT", "SERVED"
"""Stand in OPTIONS for the folder of a second model, and for that of the served model."""


def main(root: Path, options: dict[str, Any]) -> None:
    from trainer_side import Publisher
    from vllm_delta_sync.engine import attach

    level, each, silent, cold = (options.pop(name, None) for name in ("sleep", "each", "silent", "cold"))
    model = make_model(options.pop("family", FAMILY), seed=5, **options.pop("sizes", {}))
    base = save_checkpoint(model, root / "base")
    speculative = options.get("speculative_config", {})
    if speculative.get("model") == DRAFT:
        speculative["model"] = str(save_checkpoint(make_model(FAMILY, seed=7), root / "draft"))
    adapter = make_adapter(model, root / "adapter") if options.get("enable_lora") and not silent else None
    steps = train_steps(model, lr=RATE)
    with Publisher(model, bucket=str(root / "run"), base=base) as publisher:
        llm = engine_with(base, options)
        sync = attach(llm, bucket=str(root / "run"))
        sync.to()
        seen: dict[str, Any] = {
            "first": digests(worker_model(llm)) if silent else say(llm, adapter),
            "verdicts": [],
            "asleep": [],
            "each": [],
        }
        places = addresses(llm)
        for step in range(1, VERSIONS + 1):
            next(steps)
            publisher.publish(step=step, wait=True)
            publisher.flush()
            if level is not None:
                seen["asleep"].append(sleep(llm, sync, level))
            sync.to()
            seen["verdicts"].append(sync.verify()["verdict"])
            if each:
                seen["each"].append(look(llm, save_checkpoint(model, root / f"v{step}")))
        seen["served"] = sync.status()["served"]["version"]
        seen["same_places"] = addresses(llm) == places
        seen["last"] = digests(worker_model(llm)) if silent else say(llm, adapter)
        if each:
            sync.rollback(BACK)
            seen["back"] = look(llm, root / f"v{BACK}")
            again = attach(llm, bucket=str(root / "run"))
            seen["again"] = [again.to()["served"]["version"], said(sync.to), again.to(BACK)["served"]["version"]]
    # vLLM gives one engine of a process memory that it can give up; what is said does not depend on it.
    options.pop("enable_sleep_mode", None)
    fresh = engine_with(save_checkpoint(model, root / "last"), options)
    seen["fresh"] = digests(worker_model(fresh)) if silent else say(fresh, adapter)
    engines = [llm, fresh]
    if cold:
        engines.append(start_cold(root, base, options, moved=cold == "moved"))
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
    fingerprints = [value.hex() for value in state.fingerprints]
    return [loaded.run == head.run, loaded.version == head.version == VERSIONS, [*loaded.fingerprints] == fingerprints]


def look(llm: Any, checkpoint: Path) -> dict[str, Any]:
    """Whether an engine has the weights of a checkpoint, by which label, and what it says."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    held = dict(layers)
    # Experts sit in the configuration, and cannot be copied with it.
    layers.clear()
    try:
        equal = digests(worker_model(llm)) == digests(load_again(llm, str(checkpoint)))
    finally:
        layers.update(held)
    return {"equal": equal, "label": llm.llm_engine.get_weight_version(), "said": say(llm, None)}


def make_adapter(model: Any, folder: Path, rank: int = 4) -> Path:
    """A LoRA adapter in PEFT's files, large enough to change what is said."""
    generator = torch.Generator().manual_seed(11)
    tensors = {}
    targets = ("q_proj", "v_proj", "down_proj")
    for name, parameter in model.named_parameters():
        if name.removesuffix(".weight").endswith(targets):
            rows, columns = parameter.shape
            path = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
            tensors[f"{path}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) / 8
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8, "target_modules": [*targets]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
    return folder


def say(llm: Any, adapter: Path | None) -> dict[str, Any]:
    """Greedy tokens and their log probabilities, of the served weights alone and with the adapter; or embeddings."""
    if llm.llm_engine.vllm_config.model_config.runner_type == "pooling":
        return {"plain": [output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)]}
    said = {"plain": _say(llm, None)}
    if adapter is not None:
        from vllm.lora.request import LoRARequest

        said["adapter"] = _say(llm, LoRARequest("adapter", 1, str(adapter)))
        said["plain again"] = _say(llm, None)
    return said


def _say(llm: Any, lora: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=1, ignore_eos=True)
    said = []
    for prompt in PROMPTS:
        completion = llm.generate([prompt], params, use_tqdm=False, lora_request=lora)[0].outputs[0]
        tokens = list(completion.token_ids)
        chosen = [entry[token].logprob for token, entry in zip(tokens, completion.logprobs, strict=True)]
        said.append([tokens, chosen])
    return said


def addresses(llm: Any) -> dict[str, int]:
    """Where each parameter and buffer lies: captured graphs and compiled code go on reading there."""
    model = worker_model(llm)
    found = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.data_ptr() for name, tensor in found}


def sleep(llm: Any, sync: Any, level: int, *drafts: Any) -> str:
    """Send the workers to sleep, try to move them, and wake them; what was said to the attempt.

    At level 2 the weights are lost, also those of ``drafts``. CPU workers keep their memory while they sleep, so it is
    overwritten meanwhile. Others give it up: nothing may touch it until they are awake, and it may then be as before.
    """
    from vllm_delta_sync.errors import BusyError

    weights = [weight for model in (worker_model(llm), *drafts) for weight in model.parameters()]
    kept = weights[0].is_cpu
    llm.collective_rpc("sleep", args=(level,))
    try:
        sync.to()
        said = "moved"
    except BusyError as error:
        said = error.message
    if level == 2 and kept:
        lose(weights)
        if llm.llm_engine.vllm_config.lora_config is not None:
            lose_adapter_memory(worker_model(llm))
    llm.collective_rpc("wake_up")
    if level == 2 and not kept:
        lose(weights)
    return said


def said(call: Callable[[], object]) -> str:
    """Return the error that a call raises."""
    from vllm_delta_sync.errors import DeltaSyncError

    try:
        return f"nothing but {call()}"
    except DeltaSyncError as error:
        return error.message


def lose(weights: list[torch.Tensor]) -> None:
    """Overwrite weights."""
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
        assert all("wake it up" in said for said in seen["asleep"]), seen["asleep"]


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
