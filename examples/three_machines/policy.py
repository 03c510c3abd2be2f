"""The policy before reinforcement learning: the demo's toy model, taught how games look like, but not to play well.

    python -m examples.three_machines.policy --out DIR --seed N

Reinforcement learning needs a policy that is right now and then. So it learns from transcripts (supervised) in which
every guess fits all feedback so far, until it has begun to heed feedback, and no longer.
"""

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from examples.demo import policy
from examples.demo.characters import encode
from examples.three_machines import game
from examples.three_machines.environment import PROMPT
from examples.three_machines.learning import Turns, lay_out
from examples.three_machines.reading import first_prompt, next_part
from examples.three_machines.telling import Events

BATCH = 128
RATE = 1.5e-3
STOP_LOSS = 0.85
"""Mean loss per letter at which the warm-up stops. Random words of the list, whatever the feedback, cost 0.92."""
LIMIT = 400
"""Steps at most, unless told otherwise."""


def transcript(rng: random.Random) -> Turns:
    """One game, played with words that fit the feedback so far."""
    secret = rng.choice(game.WORDS)
    turns: list[tuple[list[int], list[int]]] = []
    fitting = list(game.WORDS)
    prompt = first_prompt(PROMPT)
    for _ in range(game.GUESSES):
        guess = rng.choice(fitting)
        output = encode(guess)
        turns.append((prompt, output))
        signs = game.feedback(secret, guess)
        if signs == game.SOLVED:
            break
        prompt = prompt + output + next_part(guess, signs)
        fitting = [word for word in fitting if game.feedback(word, guess) == signs]
    return turns


def warm_up(model: torch.nn.Module, seed: int, limit: int, report: Callable[[int, float], None]) -> float:
    """Teach a model transcripts until ``STOP_LOSS``, for ``limit`` steps at most; returns the last loss.

    Every batch is fresh, so its loss before the update is an honest estimate. ``report`` gets (step, loss).
    """
    rng = random.Random(seed)
    masters = policy.Masters(model, RATE, eps=1e-8)
    mean = math.inf
    for step in range(1, limit + 1):
        batch = lay_out([transcript(rng) for _ in range(BATCH)])
        logprobs = policy.next_token_logprobs(model, batch)
        loss = -(logprobs * batch.answers).sum() / batch.answers.sum()
        mean = float(loss.detach())
        report(step, mean)
        if mean <= STOP_LOSS:
            break
        loss.backward()
        masters.step(max_norm=1.0)
    return mean


def main(arguments: Sequence[str]) -> int:
    """Make a checkpoint as the module's docstring says."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.three_machines.policy",
        description="Makes the checkpoint that the trainer starts from.",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="checkpoint to write")
    parser.add_argument("--seed", type=int, default=0, help="of weights and transcripts (default %(default)s)")
    parser.add_argument("--steps", type=int, default=LIMIT, help="at most, of the warm-up (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default %(default)s)")
    options = parser.parse_args(arguments)
    events = Events.on_stdout()
    torch.set_num_threads(options.threads)
    model = policy.make_model(options.seed)
    loss = warm_up(
        model,
        options.seed,
        options.steps,
        lambda step, loss: events.tell("warm_up", step=step, loss=loss, target=STOP_LOSS),
    )
    policy.save(model, policy.make_tokenizer(), options.out)
    events.tell("warm", loss=loss)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
