"""Bytes per step of a run in bf16 and of runs on quantized bases, which the publisher quantizes, on the same steps.

*policy*: consecutive versions of a small Qwen3 that is really trained (``benchmarks.common.training_data``), by the
share of their elements in bf16 that a step changes. *SmolLM2*: steps of a real language model
(``benchmarks.common.real_steps``), where its packages are installed. Each run gets the same three versions, and the
last delta counts. Linear layers are quantized, the tied embedding and norms are not. A ratio above 1 means that the
delta in bf16 has more bytes.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.common import real_model, real_steps
from benchmarks.common.real_model import CASE
from benchmarks.common.rows import Row, parser, row, start, write
from benchmarks.common.tables import grid
from benchmarks.common.training_data import Pair, Weights, policy_pairs
from examples import rl_loop

BENCH = "quantized"
PLAIN = "bf16"
SCHEMES = {
    "int8, per channel": "int8 channel",
    "fp8, per channel": "fp8 channel",
    "fp8, blocks of 64": "fp8 block",
    "NVFP4": "nvfp4 a16",
    "MXFP4": "mxfp4",
}
Fill = Callable[[Weights], PreTrainedModel]
"""Gives one model, in bfloat16, these weights."""
RATES = (1e-6,)
"""Of the real model."""
Codec = Literal["plain", "tiled"]
CODECS: tuple[Codec, ...] = ("plain", "tiled")
SHOWN = ("1.0% of bf16, tiled", "10.0% of bf16, tiled", *(f"{CASE}, settled, lr {rate:g}, tiled" for rate in RATES))
"""Cases of the page of all benchmarks; the results have the rest."""


def filled(model: PreTrainedModel, weights: Weights) -> PreTrainedModel:
    tensors = {name: torch.from_numpy(bits.view("<i2")).view(torch.bfloat16) for name, bits in weights.items()}
    model.load_state_dict(tensors, strict=False)  # the tied head has no weights of its own
    return model


def last_delta(fill: Fill, versions: Sequence[Weights], scheme: str | None, codec: Codec) -> tuple[int, int, int]:
    """(bytes, changed elements, changed global scales) of the newest version on a base with the first weights."""
    from tests.support.quantizing import save_quantized
    from tests.support.tiny import save_checkpoint
    from trainer_side import Publisher
    from vllm_delta_sync import open_run

    model = fill(versions[0])
    with tempfile.TemporaryDirectory() as folder:
        path, url = Path(folder) / "base", str(Path(folder) / "run")
        base = save_checkpoint(model, path) if scheme is None else save_quantized(model, path, scheme)
        with Publisher(model, url, base=base, codec=codec, merge=False) as publisher:
            for step, weights in enumerate(versions[1:], start=1):
                fill(weights)
                result = publisher.publish(step, wait=True)
            publisher.flush()
        newest = len(versions) - 1
        with open_run(url) as run:
            before, after = (
                {name: tensor.item() for name, tensor in run.tensors(version) if name.endswith("global_scale")}
                for version in (newest - 1, newest)
            )
            scales = sum(before[name] != scale for name, scale in after.items())
            return run.manifest(newest).payload_bytes, result.changed, scales


def compare(
    pair: Pair, name: str, model: PreTrainedModel, schemes: dict[str, str], codecs: Sequence[Codec] = CODECS
) -> list[Row]:
    """Rows of one pair of versions. Args: name: of the step."""

    def fill(weights: Weights) -> PreTrainedModel:
        return filled(model, weights)

    rows: list[Row] = []
    versions = (pair.before, pair.old, pair.new)
    for codec in codecs:
        case = f"{name}, {codec}"
        plain, changed, _ = last_delta(fill, versions, None, codec)
        rows += [row(BENCH, case, PLAIN, plain, "B"), row(BENCH, case, f"changed, {PLAIN}", changed, "elements")]
        for form, scheme in schemes.items():
            size, changed, scales = last_delta(fill, versions, scheme, codec)
            rows += [
                row(BENCH, case, form, size, "B"),
                row(BENCH, case, f"changed, {form}", changed, "elements"),
                row(BENCH, case, "ratio", plain / size, "x", form),
            ]
            if form == "NVFP4":
                rows.append(row(BENCH, case, f"global scales changed, {form}", scales, "tensors"))
    return rows


def tables(rows: Sequence[Row]) -> list[str]:
    """Sizes in codec ``plain``, and those in bf16 over them, of some shares."""
    shown = [item for item in rows if item["case"] in SHOWN]
    return grid("step", shown, (PLAIN, *SCHEMES, *(f"/ {form}" for form in SCHEMES)))


def main(arguments: list[str] | None = None) -> None:
    known = parser(BENCH, __doc__ or "", minutes=25)
    real_model.add_flag(known)
    options = start(known, arguments)
    rows: list[Row] = []
    for pair in [] if options.real else policy_pairs(options.quick, say=print):
        rows += compare(pair, f"{pair.asked:.1%} of bf16", rl_loop.make_model(0).to(torch.bfloat16), SCHEMES)
    folder = real_model.find_checkpoint(options)
    if folder is not None:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        for pair in real_steps.pairs("settled", RATES, say=print):
            # The blocks of the fp8 scheme do not fit its projections.
            schemes = {form: scheme for form, scheme in SCHEMES.items() if scheme != "fp8 block"}
            rows += compare(pair, f"{CASE}, settled, lr {pair.lr:g}", model, schemes, codecs=("tiled",))
    write(options.json, rows)


if __name__ == "__main__":
    main()
