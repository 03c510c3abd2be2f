"""The run of ``benchmarks.serving``: ``python -m benchmarks.serving.run SIZE VERSIONS FOLDER``.

It is written before anything is measured, in a process of its own, so that its memory and its threads are gone before
the server starts. Weights are random; each version is one more step of Adam on all of them
(``benchmarks.common.noise``), at the rate that changes about 1 %.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.noise import NoisyModel, qwen3_config
from examples import rl_loop
from trainer_side import Publisher

POSITIONS = 1024


@dataclass(frozen=True)
class Size:
    """A model, and the requests that it is asked: their number at a time, and the tokens of each answer."""

    streams: int
    tokens: int
    config: dict[str, Any]


SIZES = {
    "demo": Size(streams=16, tokens=128, config={"hidden": 256, "inner": 768, "layers": 4}),
    "0.3B": Size(streams=4, tokens=96, config={"hidden": 1024, "inner": 3072, "layers": 20, "head_dim": 128}),
}
"""``demo``: as large as the policy of ``examples/rl_loop.py``, 3.2 M parameters, with room for longer answers."""


def main(size: str, versions: str, folder: str) -> None:
    root = Path(folder)
    vocabulary, end = len(rl_loop.VOCABULARY), rl_loop.IDS[rl_loop.EOS]
    training = NoisyModel(
        qwen3_config(**SIZES[size].config, vocabulary=vocabulary, positions=POSITIONS, eos_token_id=end)
    )
    rl_loop.save_checkpoint(training.model, root / "base")
    with Publisher(training.model, bucket=str(root / "run"), base=root / "base") as publisher:
        for number in range(1, int(versions) + 1):
            training.step()
            result = publisher.publish(step=number, wait=True)
            if result.version != number:
                raise SystemExit(f"version {number} was published as {result.version}")


if __name__ == "__main__":
    main(*sys.argv[1:4])
