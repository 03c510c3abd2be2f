"""A PEFT model published merged into its base, and an offline vLLM: ``python -m tests.e2e.merged_lora FOLDER``.

Each version is compared with a fresh load of what ``merge_and_unload`` of a copy saves.
"""

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.e2e.fresh import digests, generate, load_again, make_engine, worker_model
from tests.support.adapters import adapted, randomize
from tests.support.tiny import make_model, save_checkpoint

VERSIONS = 5
ROLLED_BACK_TO = 2


def main(root: Path) -> None:
    from trainer_side import Publisher
    from vllm_delta_sync.engine import attach

    model = make_model("qwen3", seed=5)
    base = save_checkpoint(model, root / "base")
    trained = adapted(model)
    llm = make_engine(str(base))
    seen: list[dict[str, Any]] = []
    with Publisher(trained, str(root / "run"), base=base) as publisher:
        sync = attach(llm, bucket=str(root / "run"))
        for step in range(1, VERSIONS + 1):
            randomize(trained, step)
            publisher.publish(step=step, wait=True)
            publisher.flush()
            merged = save_checkpoint(copy.deepcopy(trained).merge_and_unload(), root / f"merged-{step}")
            served = sync.to()["served"]["version"]
            equal = digests(worker_model(llm)) == digests(load_again(llm, str(merged)))
            seen.append({"served": served, "equal": equal, "outputs": generate(llm)})
        back = sync.to(ROLLED_BACK_TO)["served"]["version"]
        rolled_back = {"served": back, "outputs": generate(llm)}
    del llm
    fresh = [generate(make_engine(str(root / f"merged-{step}"))) for step in range(1, VERSIONS + 1)]
    (root / "seen.json").write_text(json.dumps({"seen": seen, "rolled_back": rolled_back, "fresh": fresh}))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(Path(sys.argv[1]))
