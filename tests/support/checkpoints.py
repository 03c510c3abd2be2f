"""Checkpoint folders as trainers write them, at once or slowly: file by file and each file in pieces."""

import json
import time
from pathlib import Path

import torch
from safetensors.torch import save, save_file

from tests.support.publishing import Tensors
from vllm_delta_sync.tensors.checkpoint import INDEX_NAME, SINGLE_NAME

PIECES = 5


def weights(step: int) -> Tensors:
    """Those of a training at a step: between two steps a few elements of each change, or all of one."""
    torch.manual_seed(0)
    tensors = {
        "model.embed.weight": torch.randn(400, 64).bfloat16(),
        "model.layers.0.proj.weight": torch.randn(64, 64).bfloat16(),
        "model.layers.0.scale": torch.randn(64),
        "model.steps": torch.zeros(1, dtype=torch.int64),
    }
    tensors["model.embed.weight"].view(-1)[step::101] += 0.25
    tensors["model.layers.0.proj.weight"] *= 1 + step / 64
    tensors["model.steps"] += step
    return tensors


def shards_of(tensors: Tensors) -> dict[str, Tensors]:
    """File name → tensors, two files for all."""
    names = sorted(tensors)
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    return {
        f"model-{number:05}-of-00002.safetensors": {n: tensors[n] for n in half}
        for number, half in enumerate(halves, 1)
    }


def index_of(shards: dict[str, Tensors]) -> str:
    return json.dumps({"weight_map": {name: file for file, tensors in shards.items() for name in tensors}})


def write_checkpoint(folder: Path, tensors: Tensors, sharded: bool = False) -> Path:
    """Write a checkpoint, with the small files of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    if sharded:
        shards = shards_of(tensors)
        for name, part in shards.items():
            save_file(part, folder / name)
        (folder / INDEX_NAME).write_text(index_of(shards))
    else:
        save_file(tensors, folder / SINGLE_NAME)
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write_slowly(folder: Path, step: int, seconds: float) -> None:
    """Write a sharded checkpoint in ``seconds``, as a trainer on a slow disk does; the index comes first."""
    folder.mkdir(parents=True)
    shards = shards_of(weights(step))
    files = {INDEX_NAME: index_of(shards).encode()}
    files |= {name: save(part) for name, part in shards.items()}
    files |= {"config.json": b"{}", "trainer_state.json": json.dumps({"global_step": step}).encode()}
    for name, data in files.items():
        with (folder / name).open("wb", buffering=0) as file:
            size = -(-len(data) // PIECES)
            for start in range(0, len(data), size):
                file.write(data[start : start + size])
                time.sleep(seconds / len(files) / PIECES)
