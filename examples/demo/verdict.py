"""The proof: the weights served are the trainer's, and answers are those of a freshly loaded vLLM."""

import random
from dataclasses import asdict, dataclass, field
from pathlib import Path

from examples.demo import task
from examples.demo.processes import DemoError
from examples.demo.rollouts import Completion, ServerClient
from vllm_delta_sync import open_run
from vllm_delta_sync.checkpoint import Checkpoint
from vllm_delta_sync.wire.fingerprint import Fingerprint, fingerprint_tensor

COMPARED_WORDS = 32


@dataclass
class Verdict:
    """Three claims, and what was measured for them: fingerprints by where they come from, and counts."""

    weights_bit_identical: bool = False
    tokens_equal: bool = False
    logprobs_equal: bool = False
    fingerprints: dict[str, str] = field(default_factory=dict)
    compared_tokens: int = 0
    largest_logprob_difference: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether all three claims hold."""
        return self.weights_bit_identical and self.tokens_equal and self.logprobs_equal

    def claims(self) -> dict[str, bool]:
        """The three claims by name."""
        return {name: value for name, value in asdict(self).items() if isinstance(value, bool)}


def checkpoint_fingerprint(path: Path) -> str:
    """Fingerprint of a checkpoint directory, computed from its files alone."""
    checkpoint = Checkpoint(path)
    total = Fingerprint()
    for name in checkpoint.specs:
        total += fingerprint_tensor(name, checkpoint.bits(name))
    return total.hex()


def prove_weights(verdict: Verdict, client: ServerClient, bucket: str, checkpoint: Path) -> None:
    """Compare what the server holds (rescanned), what the run's head declares, and the exported checkpoint.

    Raises:
        ServerError: the server does not answer. DeltaSyncError: the run or the checkpoint cannot be read.
    """
    scan = client.request("POST", "/delta_sync/verify")
    verdict.fingerprints = {
        "server": scan["fingerprint"],
        "run": open_run(bucket).head().fingerprint,
        "checkpoint": checkpoint_fingerprint(checkpoint),
    }
    verdict.weights_bit_identical = scan["verdict"] and len(set(verdict.fingerprints.values())) == 1


def greedy_answers(client: ServerClient, prompts: list[list[int]]) -> list[Completion]:
    """Greedy answers, one request after the other: kernels round by batch shape, so no batch may differ."""
    return [client.complete([ids], 1, task.MAX_ANSWER_TOKENS, temperature=0.0)[0][0] for ids in prompts]


def comparison_words(seed: int) -> list[str]:
    """Words neither server has been asked for in training, up to chance."""
    rng = random.Random(seed + 2)
    return [*task.SHOWN_WORDS, *(task.random_word(rng) for _ in range(COMPARED_WORDS))]


def prove_answers(verdict: Verdict, running: list[Completion], fresh: list[Completion]) -> None:
    """Compare greedy tokens and log-probs of the running server with those of the fresh one, exactly."""
    if not running or len(running) != len(fresh):
        raise DemoError(f"{len(running)} answers of the running server, {len(fresh)} of the fresh one")
    verdict.compared_tokens = sum(len(one.tokens) for one in running)
    verdict.tokens_equal = [one.tokens for one in running] == [one.tokens for one in fresh]
    verdict.logprobs_equal = [one.logprobs for one in running] == [one.logprobs for one in fresh]
    pairs = zip(running, fresh, strict=True)
    verdict.largest_logprob_difference = max(
        (abs(a - b) for one, two in pairs for a, b in zip(one.logprobs, two.logprobs, strict=False)),
        default=0.0,
    )
