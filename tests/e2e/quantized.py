"""A trainer in full precision and an offline vLLM in int8, or with experts in MXFP4, in one process.

Run as ``python -m tests.e2e.quantized FOLDER FAMILY SCHEME [OPTIONS]``. Publishes from real steps on a base that
``compressed-tensors`` has quantized, or in OpenAI's format, moves an ``LLM`` along, and writes what it saw. Each
version is compared with a fresh load of its export, and with the checkpoint that the library writes. OPTIONS is JSON:
keyword arguments of ``vllm.LLM``, and ``sizes``, fields of the model's config.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from transformers import PreTrainedModel

from tests.e2e.fresh import digests, generate, load_again, make_engine, worker_model
from tests.support.publishing import digest
from tests.support.quantizing import save_quantized
from tests.support.small_floats import save_stacked
from tests.support.tiny import make_model, train_steps

VERSIONS = 5
ROLLED_BACK_TO = 2
STACKED = "stacked mxfp4"


def save(model: PreTrainedModel, path: Path, scheme: str) -> Path:
    return save_stacked(model, path) if scheme == STACKED else save_quantized(model, path, scheme)


def main(root: Path, family: str, scheme: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from trainer_side import Publisher
    from vllm_delta_sync import open_run
    from vllm_delta_sync.engine import attach
    from vllm_delta_sync.maintenance.export import export

    model = make_model(family, seed=5, **sizes)
    base = save(model, root / "base", scheme)
    steps = train_steps(model, lr=3e-4)
    url = str(root / "run")
    with Publisher(model, url, base=base) as publisher, open_run(url) as run:
        llm = make_engine(str(base), **options)
        sync = attach(llm, bucket=url)
        first = sync.to()
        seen: list[dict[str, Any]] = []
        for step in range(1, VERSIONS + 1):
            next(steps)
            publisher.publish(step=step, wait=True)
            publisher.flush()
            export(run, root / f"v{step}")
            status = sync.to()
            library = digest(load_file(save(model, root / f"library{step}", scheme) / "model.safetensors"))
            seen.append(
                {
                    "served": status["served"]["version"],
                    "kind": run.manifest(step).kind,
                    "digests": digests(worker_model(llm)),
                    "equal": digests(worker_model(llm)) == digests(load_again(llm, str(root / f"v{step}"))),
                    "library": library == digest({name: tensor.clone() for name, tensor in run.tensors(step)}),
                    "outputs": generate(llm),
                    "verdict": sync.verify()["verdict"],
                }
            )
        back = sync.to(ROLLED_BACK_TO)["served"]["version"]
        rolled_back = {"served": back, "digests": digests(worker_model(llm)), "outputs": generate(llm)}
    fresh = generate(make_engine(str(root / f"v{VERSIONS}"), **options))
    result = {"seen": seen, "rolled_back": rolled_back, "fresh": fresh, "derived": first["ranks"][0]["derived"]}
    (root / "seen.json").write_text(json.dumps(result))


def expect_quantized(result: dict[str, Any]) -> None:
    """What an ``LLM`` has to have held and said."""
    seen = result["seen"]
    assert [step["served"] for step in seen] == list(range(1, VERSIONS + 1))
    assert {step["kind"] for step in seen} == {"delta"}
    for step in seen:
        assert (step["equal"], step["library"], step["verdict"]) == (True, True, True)
    assert len({json.dumps(step["digests"]) for step in seen}) == VERSIONS
    assert seen[-1]["outputs"] == result["fresh"]
    then = seen[ROLLED_BACK_TO - 1]
    assert result["rolled_back"] == {key: then[key] for key in ("served", "digests", "outputs")}
    assert result["rolled_back"]["outputs"] != seen[-1]["outputs"]


if __name__ == "__main__":
    given: dict[str, Any] = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], given.pop("sizes", {}), given)
