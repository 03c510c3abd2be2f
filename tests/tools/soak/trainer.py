"""The trainer: ``python -m tests.tools.soak.trainer BASE RUN``. Each line of its input trains and publishes a version.

Answers with its number. Steps are larger than any real ones, so that neighbouring versions differ by ten times what
bfloat16 hides; with this ``eps`` the elements with the larger gradients do most of it, and not all others change.
"""

import os
import sys
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from tests.support.tiny import VOCABULARY, make_model
from trainer_side import Publisher

FAMILY, SEED = "qwen3", 5
RATE, EPSILON = 3e-3, 1e-2


def steps(model: PreTrainedModel) -> Iterator[None]:
    """One step of AdamW on random sequences each time; endless."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPSILON, weight_decay=0.0)
    generator = torch.Generator().manual_seed(SEED)
    while True:
        tokens = torch.randint(3, VOCABULARY, (4, 24), generator=generator)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        yield


def main(base: str, url: str) -> None:
    torch.set_num_threads(1)
    # The server has most of the two cores.
    os.nice(5)
    model = make_model(FAMILY, seed=SEED)
    course = steps(model)
    with Publisher(model, bucket=url, base=base) as publisher:
        print("ready", flush=True)
        for number, _ in enumerate(sys.stdin, start=1):
            next(course)
            result = publisher.publish(step=number, wait=True)
            publisher.flush()
            print(result.version, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
