"""Bytes per step of a run in bf16 and of runs on quantized bases, which the publisher quantizes, on the same steps.

The weights are those of ``benchmarks.common.training_data``: consecutive versions of a small Qwen3 that is really
trained, by the share of their elements in bf16 that a step changes. Each run gets the same three versions, and the last
delta counts. Linear layers are quantized, the tied embedding and norms are not. A ratio above 1 means that the delta in
bf16 has more bytes.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from benchmarks.common import policy
from benchmarks.common.rows import Row, parse, row, write
from benchmarks.common.tables import grid
from benchmarks.common.training_data import Pair, Weights, policy_pairs

BENCH = "quantized"
PLAIN = "bf16"
SCHEMES = {"int8, per channel": "int8 channel", "fp8, per channel": "fp8 channel", "fp8, blocks of 64": "fp8 block"}
CODECS: tuple[Literal["plain"], Literal["tiled"]] = ("plain", "tiled")
SHOWN = ("1.0% of bf16, tiled", "10.0% of bf16, tiled")
"""Cases of the page of all benchmarks; the results have the rest."""


def model_of(weights: Weights) -> PreTrainedModel:
    """The policy with these weights, in bfloat16."""
    model = policy.make_model(0)
    tensors = {name: torch.from_numpy(bits.view("<i2")).view(torch.bfloat16) for name, bits in weights.items()}
    model.load_state_dict(tensors, strict=False)  # the tied head has no weights of its own
    return model


def last_delta(versions: Sequence[Weights], scheme: str | None, codec: Literal["plain", "tiled"]) -> tuple[int, int]:
    """(bytes, changed elements) of the newest version of a run on a base with the first weights."""
    from tests.support.quantizing import save_quantized
    from tests.support.tiny import save_checkpoint
    from trainer_side import Publisher
    from vllm_delta_sync import open_run

    model = model_of(versions[0])
    with tempfile.TemporaryDirectory() as folder:
        path, url = Path(folder) / "base", str(Path(folder) / "run")
        base = save_checkpoint(model, path) if scheme is None else save_quantized(model, path, scheme)
        with Publisher(model, url, base=base, codec=codec, merge=False) as publisher:
            for step, weights in enumerate(versions[1:], start=1):
                model.load_state_dict(model_of(weights).state_dict())
                result = publisher.publish(step, wait=True)
            publisher.flush()
        with open_run(url) as run:
            return run.manifest(len(versions) - 1).payload_bytes, result.changed


def compare(pair: Pair) -> list[Row]:
    """Rows of one pair of versions."""
    rows: list[Row] = []
    for codec in CODECS:
        case = f"{pair.asked:.1%} of bf16, {codec}"
        plain, changed = last_delta((pair.before, pair.old, pair.new), None, codec)
        rows += [row(BENCH, case, PLAIN, plain, "B"), row(BENCH, case, f"changed, {PLAIN}", changed, "elements")]
        for form, scheme in SCHEMES.items():
            size, changed = last_delta((pair.before, pair.old, pair.new), scheme, codec)
            rows += [
                row(BENCH, case, form, size, "B"),
                row(BENCH, case, f"changed, {form}", changed, "elements"),
                row(BENCH, case, "ratio", plain / size, "x", form),
            ]
    return rows


def tables(rows: Sequence[Row]) -> list[str]:
    """Sizes in codec ``plain``, and those in bf16 over them, of some shares."""
    shown = [item for item in rows if item["case"] in SHOWN]
    return grid("step", shown, (PLAIN, *SCHEMES, *(f"/ {form}" for form in SCHEMES)))


def main(arguments: list[str] | None = None) -> None:
    options = parse(BENCH, __doc__ or "", arguments, minutes=15)
    write(options.json, [item for pair in policy_pairs(options.quick, say=print) for item in compare(pair)])


if __name__ == "__main__":
    main()
