"""An ``LLM`` that vLLM's own weight transfer calls move: run as ``python -m tests.e2e.native_offline FOLDER``."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.tiny import make_model, save_checkpoint, train_steps


def refused(call: Callable[[], Any]) -> str:
    """What a call is refused with; empty if it is not."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  whatever it is, it is compared by its text
        return f"{type(error).__name__}: {error}"
    return ""


def main(root: Path) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    from trainer_side import Publisher
    from vllm_delta_sync.engine import WORKER_EXTENSION, attach

    model = make_model("qwen3", seed=5)
    base = save_checkpoint(model, root / "base")
    steps = train_steps(model, lr=3e-5)
    with Publisher(model, bucket=str(root / "run"), base=base) as publisher:
        llm = LLM(
            str(base),
            worker_extension_cls=WORKER_EXTENSION,
            weight_transfer_config={"backend": "delta_bucket"},
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=16,
        )
        seen: dict[str, Any] = {"unattached": refused(llm.start_weight_update), "steps": []}
        sync = attach(llm, bucket=str(root / "run"))
        llm.init_weight_transfer_engine({"init_info": {}})
        for version in (1, 2):
            next(steps)
            publisher.publish(step=version, wait=True)
            publisher.flush()
            llm.start_weight_update()
            llm.update_weights({"update_info": {"version": version} if version == 1 else {}})
            llm.finish_weight_update(str(version))
            seen["steps"].append(
                {
                    "version": sync.status()["served"]["version"],
                    "label": llm.get_weight_version(),
                    "verdict": sync.verify()["verdict"],
                }
            )
        seen["unpublished"] = refused(lambda: llm.update_weights({"update_info": {"version": 9, "timeout_s": 0.3}}))
        seen["label"] = refused(lambda: llm.finish_weight_update("mine"))
    (root / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
