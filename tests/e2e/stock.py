"""What a vLLM without any of our code says: ``python -m tests.e2e.stock OUT FOLDER...``, with ``VLLM_PLUGINS`` empty.

Writes greedy tokens per folder. A process of its own, which imports nothing else: on a CPU vLLM 0.32 does not start
where numba is imported already; our own code imports it, and works around that.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.e2e.fresh import generate
from tests.e2e.warm import ENVIRONMENT


def main(out: Path, folders: list[str]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import LLM

    # On CPUs with AMX vLLM ends with SIGILL in a process that has not asked the kernel for it; our plugin asks.
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    said: dict[str, Any] = {}
    engines = []  # the first takes what it shares with the others along when it ends
    for folder in folders:
        engine = LLM(folder, enforce_eager=True, max_model_len=256, max_num_seqs=16)
        engines.append(engine)
        said[folder] = [output["tokens"] for output in generate(engine)]
    assert not any(name.startswith(("vllm_delta_sync", "trainer_side")) for name in sys.modules)
    out.write_text(json.dumps(said))


def said_by_stock(root: Path, *folders: Path) -> list[list[list[int]]]:
    """What this program writes of folders, in their order."""
    from tests.support.running import run_python

    out = root / "stock.json"
    run_python("-m", "tests.e2e.stock", str(out), *map(str, folders), environment={**ENVIRONMENT, "VLLM_PLUGINS": ""})
    said = json.loads(out.read_text())
    return [said[str(folder)] for folder in folders]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
