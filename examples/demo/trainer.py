"""The trainer process: makes the policy, warms it up, and trains it on answers of the running server.

    python -m examples.demo.trainer SETTINGS_JSON

Speaks JSON lines: one event per line on standard output, and one line ``{"server": URL, "seconds": N}`` read
from standard input once the server serves the base that ``ready`` announced; training ends after N seconds.
"""

import json
import os
import random
import sys
import time
from dataclasses import dataclass
from typing import IO, Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.demo import policy, task
from examples.demo.characters import encode
from examples.demo.loss import Loss, group_advantages, policy_loss
from examples.demo.rollouts import Completion, ServerClient, ServerError
from examples.demo.settings import MODEL_NAME, TrainerSettings
from trainer_side import Publisher
from trainer_side.result import PublishResult
from vllm_delta_sync.errors import DeltaSyncError

PROMPTS = 16
SAMPLES = 8
RATE = 3e-4
EPS = 1e-2
MAX_NORM = 10.0
SHOW_EVERY = 10


@dataclass
class Rollouts:
    """One step's answers: ``SAMPLES`` to each of ``PROMPTS`` words, and their rewards, flat and in order."""

    words: list[str]
    prompts: list[list[int]]
    completions: list[Completion]
    rewards: torch.Tensor

    def lag(self, version: int) -> float:
        """Mean number of versions by which the weights that sampled a token were older than ``version``."""
        ages = [version - known for one in self.completions for known in one.versions if known is not None]
        return sum(ages) / max(1, len(ages))


class Trainer:
    """State of the training loop; ``events`` gets one JSON object per line."""

    def __init__(self, settings: TrainerSettings, events: IO[str]) -> None:
        self._settings = settings
        self._events = events
        self._rng = random.Random(settings.seed + 1)
        self._tokenizer: PreTrainedTokenizerFast = policy.make_tokenizer()
        self._model: Qwen3ForCausalLM = policy.make_model(settings.seed)
        self._seen_commits = 0

    def tell(self, event: str, **fields: Any) -> None:
        """Write one event."""
        self._events.write(json.dumps({"event": event, **fields}) + "\n")
        self._events.flush()

    def prepare(self) -> None:
        """Warm up on all cores (no server runs yet) and save the base."""
        chance = policy.warm_up(
            self._model,
            self._settings.seed,
            lambda step, chance: self.tell("warm_up", step=step, chance=chance, target=policy.WARM_UP_TARGET),
        )
        policy.save(self._model, self._tokenizer, self._settings.base)
        self.tell("warm", chance=chance)

    def publisher(self) -> Publisher:
        """Start the run: version 0 is a reference to the base, nothing is uploaded for it."""
        publisher = Publisher(self._model, self._settings.bucket, base=self._settings.base, notice="tcp://127.0.0.1:*")
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self.tell("ready", run=publisher.run, notice=publisher.notice_address, parameters=parameters)
        return publisher

    def train(self, publisher: Publisher, client: ServerClient, seconds: float) -> None:
        """Rollouts, loss, optimizer step, publish: again and again until steps or seconds are used up."""
        masters = policy.Masters(self._model, RATE, EPS)
        deadline = time.monotonic() + seconds
        pending: dict[str, Any] | None = None
        result: PublishResult | None = None
        for step in range(1, self._settings.steps + 1):
            start = time.monotonic()
            rollouts = self._rollouts(client)
            # What only the upload knew is known by now: the server has been answering meanwhile.
            self._tell_step(pending, result, client)
            sampled = time.monotonic()
            version = publisher.version
            loss, norm = self._learn(rollouts, masters)
            learnt = time.monotonic()
            result = publisher.publish(step=step, wait=True)
            pending = {
                "step": step,
                "reward": float(rollouts.rewards.mean()),
                "lag": rollouts.lag(version),
                "clipped": loss.clipped,
                "drift": loss.drift,
                "norm": norm,
                "rollout_s": sampled - start,
                "train_s": learnt - sampled,
                "publish_s": time.monotonic() - learnt,
                "sample": self._sample(rollouts),
            }
            if step % SHOW_EVERY == 1:
                pending["shown"] = self._shown(client)
            if time.monotonic() > deadline:
                break
        publisher.flush()
        self._await_version(client, publisher.version)
        self._tell_step(pending, result, client)
        self.tell("shown", shown=self._shown(client))

    def finish(self, publisher: Publisher) -> None:
        """Export the weights the way any trainer would, for the verdict."""
        policy.save(self._model, self._tokenizer, self._settings.checkpoint)
        self.tell("done", versions=publisher.version)

    def _rollouts(self, client: ServerClient) -> Rollouts:
        words = [task.random_word(self._rng) for _ in range(PROMPTS)]
        prompts = [encode(task.prompt_of(word)) for word in words]
        groups = client.complete(prompts, SAMPLES, task.MAX_ANSWER_TOKENS, temperature=1.0)
        repeated = [word for word in words for _ in range(SAMPLES)]
        completions = [completion for group in groups for completion in group]
        rewards = [
            task.reward(word, completion.text, completion.finished)
            for word, completion in zip(repeated, completions, strict=True)
        ]
        return Rollouts(repeated, [ids for ids in prompts for _ in range(SAMPLES)], completions, torch.tensor(rewards))

    def _learn(self, rollouts: Rollouts, masters: policy.Masters) -> tuple[Loss, float]:
        """One optimizer step; returns the loss and the gradient's norm."""
        advantages = group_advantages(rollouts.rewards, SAMPLES)
        batch = policy.make_batch(rollouts.prompts, [completion.tokens for completion in rollouts.completions])
        sampled = torch.zeros(batch.answers.shape)
        for row, completion in enumerate(rollouts.completions):
            sampled[row, batch.answers[row]] = torch.tensor(completion.logprobs)
        loss = policy_loss(policy.next_token_logprobs(self._model, batch), sampled, advantages, batch.answers)
        loss.value.backward()
        return loss, masters.step(MAX_NORM)

    def _tell_step(self, pending: dict[str, Any] | None, result: PublishResult | None, client: ServerClient) -> None:
        if pending is None or result is None:
            return
        status = client.request("GET", "/delta_sync/status")
        if status["last_error"] is not None:
            raise ServerError(f"the server stopped following: {status['last_error']['message']}")
        new = [commit for commit in status["recent"] if commit["version"] > self._seen_commits]
        self._seen_commits = max([self._seen_commits, *(commit["version"] for commit in new)])
        self.tell(
            "step",
            **pending,
            version=result.version,
            served=status["served"]["version"] if status["served"] else None,
            changed=result.changed,
            total=result.total,
            payload_bytes=result.payload_bytes,
            full_bytes=result.full_bytes,
            diff_ms=1e3 * result.seconds["diff"],
            upload_ms=1e3 * (result.seconds["encode"] + result.seconds["upload"]),
            pauses_ms=[[commit["version"], commit["timings_ms"]["pause"]] for commit in new],
        )

    def _sample(self, rollouts: Rollouts) -> list[Any]:
        pick = self._rng.randrange(len(rollouts.words))
        return [rollouts.words[pick], rollouts.completions[pick].text, float(rollouts.rewards[pick])]

    def _shown(self, client: ServerClient) -> list[list[Any]]:
        prompts = [encode(task.prompt_of(word)) for word in task.SHOWN_WORDS]
        groups = client.complete(prompts, 1, task.MAX_ANSWER_TOKENS, temperature=0.0)
        return [
            [word, one.text, task.reward(word, one.text, one.finished)]
            for word, (one,) in zip(task.SHOWN_WORDS, groups, strict=True)
        ]

    def _await_version(self, client: ServerClient, version: int) -> None:
        client.request("GET", f"/delta_sync/wait?version={version}&timeout=60")


def main(arguments: list[str]) -> None:
    """Run the trainer as its module's docstring says."""
    # Libraries print to standard output now and then; events must not be mixed with that.
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = TrainerSettings.from_dict(json.loads(arguments[0]))
    trainer = Trainer(settings, events)
    trainer.prepare()
    with trainer.publisher() as publisher:
        line = sys.stdin.readline()
        if not line:
            return
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, settings.cores)
        torch.set_num_threads(len(settings.cores))
        start = json.loads(line)
        with ServerClient(start["server"], MODEL_NAME) as client:
            trainer.train(publisher, client, start["seconds"])
        trainer.finish(publisher)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ServerError, DeltaSyncError) as error:
        sys.exit(f"trainer: {error}")
