"""The run of ``benchmarks.serving``: ``python -m benchmarks.serving.run SIZE VERSIONS FOLDER``.

It is written before anything is measured, in a process of its own, so that its memory and its threads are gone before
the server starts. Weights are random; each version is one more step of Adam on all of them
(``benchmarks.common.synthetic``), at the rate that changes about 1 %.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.common import policy
from benchmarks.common.synthetic import Moved, learning_rate, move
from trainer_side import Publisher

SHARE = 0.01
POSITIONS = 1024


@dataclass(frozen=True)
class Size:
    """A model, and the requests that it is asked: their number at a time, and the tokens of each answer."""

    streams: int
    tokens: int
    config: dict[str, int]


SIZES = {
    "demo": Size(streams=16, tokens=128, config={}),
    "0.3B": Size(
        streams=4,
        tokens=96,
        config={
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
}
"""``demo``: the toy policy of ``benchmarks.common.policy``, 3.2 M parameters, with room for longer answers."""


def make_model(size: str) -> Qwen3ForCausalLM:
    """A model of that size in bfloat16; its weights are whatever memory held."""
    with torch.device("meta"):
        usual = policy.make_model(seed=0).config.to_dict()
        # What follows from the number of layers is made anew.
        del usual["layer_types"]
        config = Qwen3Config(**{**usual, **SIZES[size].config, "max_position_embeddings": POSITIONS})
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    return model


class Training:
    """Moves a model's parameters from version to version."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self._parameters = dict(model.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        generator = torch.Generator().manual_seed(0)
        self._moved: dict[str, Moved] = {name: move(shape, generator) for name, shape in shapes.items()}
        self._rate = learning_rate(shapes, SHARE)
        self._step = 0
        self._write()

    def step(self) -> None:
        """One more step in the direction of the ones before: each element goes on drifting over its boundaries."""
        self._step += 1
        self._write()

    def _write(self) -> None:
        for name, moved in self._moved.items():
            bits = torch.from_numpy(moved.rounded(self._rate * self._step).view("int16"))
            self._parameters[name].data.view(torch.int16).copy_(bits)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of each parameter, as the publisher takes them."""
        yield from self._parameters.items()


def main(size: str, versions: str, folder: str) -> None:
    root = Path(folder)
    model = make_model(size)
    # ``to_empty`` has emptied the rotary tables too: they are no parameters, and the server makes its own.
    training = Training(model)
    model.save_pretrained(root / "base")
    policy.make_tokenizer().save_pretrained(root / "base")
    with Publisher(training.weights, bucket=str(root / "run"), base=root / "base") as publisher:
        for number in range(1, int(versions) + 1):
            training.step()
            result = publisher.publish(step=number, wait=True)
            if result.version != number:
                raise SystemExit(f"version {number} was published as {result.version}")


if __name__ == "__main__":
    main(*sys.argv[1:4])
