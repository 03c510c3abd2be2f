"""TRL's trainer publishes an adapter alone, and an ``LLM`` follows it: ``python -m tests.e2e.trl_adapter FOLDER``.

After each sync the ``LLM`` is asked with the adapter of the run, and with the trainer's own, saved by PEFT and loaded
by vLLM under a new name.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from peft import LoraConfig

from tests.e2e.features import _say as say
from tests.e2e.features import make_engine
from tests.support.adapters import TARGETS, save_adapter
from tests.support.async_trainers import async_trainer
from tests.support.tiny import make_model, save_checkpoint
from trainer_side.integrations.trl import DeltaWeightTransfer

VERSIONS = 5
OPTIONS = {"enforce_eager": True, "enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


def main(root: Path) -> None:
    from vllm.lora.request import LoRARequest

    from vllm_delta_sync.engine import attach

    base = save_checkpoint(make_model("qwen3", seed=5), root / "base")
    llm, url = make_engine(base, OPTIONS), str(root / "run")
    os.environ["DELTA_SYNC_LORA_NAME"] = "policy"
    seen: dict[str, Any] = {"plain": say(llm, None), "served": [], "synced": [], "fresh": []}

    syncs: list[Any] = []

    class Followed(DeltaWeightTransfer):
        def resume(self) -> None:
            super().resume()
            assert self.publisher is not None
            self.publisher.flush()
            if not syncs:
                syncs.append(attach(llm, bucket=url))
            (sync,), number = syncs, len(seen["served"]) + 1
            sync.to()
            seen["served"].append(sync.status()["served"]["version"])
            seen["synced"].append(say(llm, sync.lora_request))
            saved = save_adapter(trainer.model, root / f"fresh-{number}")
            seen["fresh"].append(say(llm, LoRARequest(f"fresh-{number}", number, str(saved))))

    adapter = LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, task_type="CAUSAL_LM")
    transfer = Followed(url, adapter=True)
    # The first sync is that of the adapter as it was made, which changes nothing.
    trainer = async_trainer(base, root, transfer, peft=adapter, learning_rate=3e-2, max_steps=VERSIONS)
    trainer.train()
    (root / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(Path(sys.argv[1]))
