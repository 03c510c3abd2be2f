"""What a fresh vLLM says: run as ``python -m tests.e2e.fresh OUT CHECKPOINT...`` in a process of its own.

Loads each checkpoint with vLLM's own loader and writes, per checkpoint, the SHA-256 of every runtime parameter; for
the last, also greedy tokens and log probabilities from a whole engine. The plugin is active and the worker extension
loaded, so that kernels are the same; nothing follows a run.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

PROMPTS = ["the quick", "lazy dog jumps over", "fox"]
MAX_TOKENS = 24
TIED = {"remove_duplicate": False}
"""With both names of what is held under two."""


def main(out: Path, checkpoints: list[str]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    last = make_engine(checkpoints[-1])
    outputs = generate(last)
    results: dict[str, Any] = {path: {"digests": digests(load_again(last, path))} for path in checkpoints[:-1]}
    results[checkpoints[-1]] = {"digests": digests(worker_model(last)), "outputs": outputs}
    out.write_text(json.dumps(results))


def fresh_vllm(root: Path, checkpoints: list[Path]) -> list[dict[str, Any]]:
    """What this program writes of checkpoints, in their order."""
    from tests.e2e import warm

    out = root / "fresh.json"
    done = warm.run("tests.e2e.fresh", str(out), *map(str, checkpoints), seconds=300)
    assert done.status == 0, done.said[-4000:]
    results = json.loads(out.read_text())
    return [results[str(checkpoint)] for checkpoint in checkpoints]


def make_engine(checkpoint: str | Path, **options: Any) -> Any:
    """An ``LLM`` in this process; eager, if the options do not say otherwise."""
    from vllm import LLM

    from vllm_delta_sync.engine import WORKER_EXTENSION

    options = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 16, **options}
    return LLM(str(checkpoint), worker_extension_cls=WORKER_EXTENSION, **options)


def worker_model(engine: Any) -> Any:
    """The runtime model of an engine that lives in this process."""
    return worker_of(engine).get_model()


def draft_model(engine: Any) -> Any:
    """The model that drafts for an engine that lives in this process."""
    return worker_of(engine).model_runner.drafter.model


def worker_of(engine: Any) -> Any:
    """The worker of an engine of one rank that lives in this process."""
    return engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def load_again(engine: Any, checkpoint: str | Path) -> Any:
    """A new model object, loaded from a checkpoint by vLLM's default loader."""
    return load_with(engine.llm_engine.vllm_config, checkpoint)


def load_with(vllm_config: Any, checkpoint: str | Path) -> Any:
    """As ``load_again``, with the configuration of an engine, which stays as it is."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    layers = vllm_config.compilation_config.static_forward_context
    held = dict(layers)
    # Experts sit in the configuration, and cannot be copied with it.
    layers.clear()
    try:
        config = deepcopy(vllm_config)
        config.model_config.model = str(checkpoint)
        with set_current_vllm_config(config):
            return get_model(vllm_config=config)
    finally:
        layers.update(held)


def addresses(*models: Any) -> list[dict[str, int]]:
    """Where each parameter and buffer lies: captured graphs and compiled code go on reading there."""
    return [
        {name: tensor.data_ptr() for name, tensor in (*model.named_parameters(**TIED), *model.named_buffers(**TIED))}
        for model in models
    ]


def digests(model: Any) -> dict[str, str]:
    """SHA-256 of each parameter's bytes, by runtime name: as vLLM's ``/weight_checker`` gives them."""
    import torch

    return {
        name: hashlib.sha256(weight.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()).hexdigest()
        for name, weight in model.named_parameters()
    }


def generate(engine: Any, lora: Any = None) -> list[dict[str, Any]]:
    """Greedy tokens and their log probabilities, one prompt at a time, as the server test asks for them."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=1, ignore_eos=True)
    answers = (engine.generate([prompt], params, use_tqdm=False, lora_request=lora) for prompt in PROMPTS)
    return [tokens_of(answer.outputs[0]) for (answer,) in answers]


def tokens_of(completion: Any) -> dict[str, Any]:
    """Tokens of a completion and their log probabilities."""
    tokens = list(completion.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(tokens, completion.logprobs or (), strict=True)]
    return {"tokens": tokens, "logprobs": logprobs}


def refusal(call: Callable[[], object]) -> str:
    """Kind and message of the error of ours that a call ends with; empty if there is none."""
    from vllm_delta_sync.errors import DeltaSyncError

    try:
        call()
    except DeltaSyncError as error:
        return f"{error.kind}: {error.message}"
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
