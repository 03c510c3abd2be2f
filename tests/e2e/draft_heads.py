"""Follow a run whose tensors include a draft head's: ``python -m tests.e2e.draft_heads FOLDER HEAD``.

The model and its head learn a text and are served: most drafts are accepted. Then both learn another text, and five
versions are published. What is said after each of them, after a rollback, and after the engine has slept, is compared
with what a new engine says that loads the same weights, the accepted drafts included; and an engine whose head stayed
behind shows what that costs.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.e2e.features import sleep
from tests.e2e.fresh import addresses, digests, draft_model, make_engine, tokens_of, worker_model
from tests.support.drafts import HEADS, Drafted, text

VERSIONS = 5
FIRST, SECOND = 7, 5
"""Strides of the texts."""
LEARN, STEPS = 60, 16
"""Steps before version 0, and before each version after it."""
ROLLBACK = 3
PROMPT, TOKENS = 8, 40


def main(root: Path, kind: str) -> None:
    from trainer_side import Publisher
    from vllm_delta_sync.engine import attach

    drafted = HEADS[kind]()
    drafted.train(FIRST, LEARN)
    base = drafted.save(root / "v0")
    url = str(root / "run")
    with Publisher(drafted.published, bucket=url, base=base, rename=drafted.rename) as publisher:
        llm = drafting(drafted, base)
        sync = attach(llm, bucket=url)
        sync.to()
        seen: dict[str, Any] = {"first": say(llm, FIRST), "synced": [], "verdicts": []}
        places = addresses(worker_model(llm), draft_model(llm))
        folders = [base]
        for step in range(1, VERSIONS + 1):
            drafted.train(SECOND, STEPS)
            publisher.publish(step=step, wait=True)
            publisher.flush()
            folders.append(drafted.save(root / f"v{step}"))
            sync.to()
            seen["synced"].append(say(llm, SECOND))
            seen["verdicts"].append(sync.verify()["verdict"])
    sync.to(ROLLBACK)
    seen["rolled back"] = say(llm, SECOND)
    sync.to(VERSIONS)
    seen["asleep"] = sleep(llm, sync, 2, draft_model(llm))
    sync.to(VERSIONS)
    seen["awake"] = say(llm, SECOND)
    seen["same places"] = addresses(worker_model(llm), draft_model(llm)) == places
    os.environ["DELTA_SYNC_BUCKET"] = url
    # Kept: an engine that ends takes along what it shares with the others of its process.
    engines = [llm, drafting(drafted, base, load_format="delta_sync")]
    seen["cold"] = say(engines[-1], SECOND)
    seen["fresh"] = []
    for folder in folders[1:]:
        engines.append(drafting(drafted, folder))
        seen["fresh"].append(say(engines[-1], SECOND))
    engines.append(drafting(drafted, left_behind(drafted, base, folders[-1], root / "stale")))
    seen["stale"] = say(engines[-1], SECOND)
    (root / "seen.json").write_text(json.dumps(seen))


def drafting(drafted: Drafted, folder: Path, **options: Any) -> Any:
    """An engine that loads the model and its head from a folder."""
    return make_engine(folder, speculative_config=drafted.speculation(folder), disable_log_stats=False, **options)


def left_behind(drafted: Drafted, first: Path, last: Path, folder: Path) -> Path:
    drafted.save(folder)
    name = "draft/model.safetensors" if drafted.head.own_checkpoint else "model.safetensors"
    old, new = load_file(first / name), load_file(last / name)
    kept = {key: tensor for key, tensor in old.items() if drafted.head.own_checkpoint or "mtp_layers" in key}
    save_file(new | kept, folder / name, metadata={"format": "pt"})
    return folder


def say(llm: Any, stride: int) -> dict[str, Any]:
    """Greedy tokens, their log-probabilities, the share of drafts that were accepted, and all weights."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1, ignore_eos=True)
    before = _drafts(llm)
    found = llm.generate([{"prompt_token_ids": text(stride, length=PROMPT)}], params, use_tqdm=False)[0].outputs[0]
    proposed, accepted = (now - then for now, then in zip(_drafts(llm), before, strict=True))
    weights = [digests(worker_model(llm)), digests(draft_model(llm))]
    return {**tokens_of(found), "accepted": accepted / proposed, "weights": weights}


def _drafts(llm: Any) -> tuple[float, float]:
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    served = llm.llm_engine.vllm_config.model_config.served_model_name
    metrics = [metric for metric in llm.get_metrics() if metric.labels.get("model_name") == served]
    found = {metric.name: metric.value for metric in metrics if metric.name in names}
    return found.get(names[0], 0), found.get(names[1], 0)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    torch.set_num_threads(2)
    main(Path(sys.argv[1]), sys.argv[2])
