"""The trainer's machine: learns from games that are stored in a bucket, and publishes its weights to a run.

    python trainer.py --bucket RUN --games URL --folder DIR --versions 120

It connects to the bucket only: to no server, and to no rollout machine. At its first start it makes a policy of 3 M
parameters and warms it up (supervised) until it begins to heed feedback. Each trajectory is trained on once, or left
out because it is too old or not a batch of this run. The sidecar ``trained`` of a version records this.

Weights, optimizer and read position are one file, which is replaced atomically before its version is published, and the
weights do not change before that version is durable. So at any moment the file belongs to the newest version, or to the
next, which is then published first: killed at any time and restarted, the trainer neither trains on a trajectory twice
nor loses one. It writes JSON lines of events to standard output.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, model_validator
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer_side import Publisher
from vllm_delta_sync import DeltaSyncError, open_run
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.errors import LimitError, NotFoundError

CHARACTERS = ["<pad>", "<eos>", "<unk>", ">", *"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"01234567"]
IDS = {character: number for number, character in enumerate(CHARACTERS)}
WORDS = ["ant", "are", "ate", "ear", "eat", "net", "not", "oat", "one", "ore", "rat", "rot", "sea", "tan", "ten", "toe"]
GUESSES = 4
POSITIONS = 64
WARM_UP_LOSS = 0.85
"""Mean loss per letter at which the warm-up stops. Random words of the list, regardless of feedback, have 0.92."""
TRUNCATION = 2.0
KEY = re.compile(r"trajectories/([A-Za-z0-9][A-Za-z0-9_-]{0,62})/([0-9]{10})\.json\.gz")
MAX_STORED_BYTES, MAX_BYTES = 4 << 20, 32 << 20
POLL_SECONDS = 0.2
Turns = Sequence[tuple[list[int], list[int]]]
"""Prompt and output token ids of each turn of a game; a prompt begins with all of the previous turn."""

# Trajectories, as rollouts.py writes them. They come from another machine, so everything is checked. Unknown fields are
# ignored, so that later writers can add fields.

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=len(CHARACTERS))]], Field(min_length=1, max_length=POSITIONS)]


class Span(BaseModel, strict=True):
    """Output tokens ``start`` to ``end`` (exclusive) were sampled by one version."""

    version: NonNegativeInt
    start: int
    end: int


class Turn(BaseModel, strict=True):
    """One guess: input tokens, output tokens and their log-probs when sampled, and spans that cover the output."""

    prompt: TokenIds
    output: TokenIds
    logprobs: list[Annotated[FiniteFloat, Field(le=0)]]
    spans: Annotated[list[Span], Field(min_length=1)]

    @model_validator(mode="after")
    def _covered(self) -> Self:
        if len(self.logprobs) != len(self.output):
            raise ValueError(f"{len(self.logprobs)} logprobs for {len(self.output)} output tokens")
        end, version = 0, 0
        for span in self.spans:
            if span.start != end or span.end <= end or span.version < version:
                raise ValueError(f"span {span.start}-{span.end} of version {span.version} does not begin at {end}")
            end, version = span.end, span.version
        if end != len(self.output):
            raise ValueError(f"spans end at {end}, the output has {len(self.output)} tokens")
        return self


class Game(BaseModel, strict=True):
    """One play of a game to its end."""

    game: int
    turns: Annotated[list[Turn], Field(min_length=1, max_length=GUESSES)]
    solved: bool
    reward: FiniteFloat

    @model_validator(mode="after")
    def _continues(self) -> Self:
        for number, (before, turn) in enumerate(zip(self.turns, self.turns[1:], strict=False), start=1):
            seen = before.prompt + before.output
            if turn.prompt[: len(seen)] != seen:
                raise ValueError(f"the prompt of turn {number} does not begin with all of turn {number - 1}")
        if len(self.turns[-1].prompt) + len(self.turns[-1].output) > POSITIONS:
            raise ValueError(f"a game of more than {POSITIONS} tokens")
        return self


class Batch(BaseModel, strict=True):
    """One object: games of one worker, each played several times, and the run whose versions the spans name."""

    format_version: Annotated[int, Field(ge=1, le=1)]
    run: str
    worker: str
    number: int
    games: Annotated[list[Game], Field(min_length=1, max_length=4096)]


def read_batch(data: bytes, key: str) -> Batch:
    """The batch in an object. Raises ValueError, zlib.error: it is none, or one of another key."""
    # Of a longer text only the beginning is decompressed, which is then no JSON.
    gzip_wrapped = 16 + zlib.MAX_WBITS
    batch = Batch.model_validate_json(zlib.decompressobj(gzip_wrapped).decompress(data, MAX_BYTES))
    if key != f"trajectories/{batch.worker}/{batch.number:010d}.json.gz":
        raise ValueError(f"it is batch {batch.number} of worker {batch.worker!r}")
    return batch


# The policy, and games as its input.


def encode(text: str) -> list[int]:
    """Token ids of a text, one per character."""
    return [IDS[character] for character in text]


def marked(secret: str, guess: str) -> str:
    """A guess with its feedback: upper case in place, lower case elsewhere in the secret, 0 absent or not once more."""
    left = [letter for letter, guessed in zip(secret, guess, strict=True) if letter != guessed]
    signs = ""
    for letter, guessed in zip(secret, guess, strict=True):
        if letter == guessed:
            signs += guessed.upper()
        elif guessed in left:
            signs += guessed
            left.remove(guessed)
        else:
            signs += "0"
    return signs


def example_game(rng: random.Random) -> Turns:
    """One game, played with words that fit all feedback so far: the data of the warm-up."""
    secret, fitting, prompt, turns = rng.choice(WORDS), WORDS, encode(">"), list[tuple[list[int], list[int]]]()
    for _ in range(GUESSES):
        guess = rng.choice(fitting)
        turns.append((prompt, encode(guess)))
        if guess == secret:
            break
        feedback = marked(secret, guess)
        prompt = prompt + encode(guess + feedback + ">")
        fitting = [word for word in fitting if marked(word, guess) == feedback]
    return turns


def make_policy(folder: Path, seed: int, warm_up_steps: int) -> None:
    """Write a warmed-up Qwen3 of 3.2 M parameters, with a tokenizer of one token per character."""
    tokenizer = Tokenizer(WordLevel(IDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": POSITIONS}
    ids = {"vocab_size": len(IDS), "pad_token_id": IDS["<pad>"], "eos_token_id": IDS["<eos>"], "bos_token_id": None}
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **ids, tie_word_embeddings=True, attn_implementation="eager"))
    warm_up(model, seed, warm_up_steps)
    draft = folder.with_suffix(".draft")
    model.to(torch.bfloat16).save_pretrained(draft)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=POSITIONS, **special).save_pretrained(draft)
    os.replace(draft, folder)


def warm_up(model: Qwen3ForCausalLM, seed: int, limit: int) -> None:
    """Teach example games until ``WARM_UP_LOSS``. Each batch is new, so its loss is an unbiased estimate."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, weight_decay=0.0)
    for step in range(1, limit + 1):
        tokens, answers = lay_out([example_game(rng) for _ in range(128)])
        loss = -logprobs_of(model, tokens)[answers].mean()
        emit("warm_up", step=step, loss=loss.item())
        if loss.item() <= WARM_UP_LOSS:
            break
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()


def lay_out(games: Sequence[Turns]) -> tuple[torch.Tensor, torch.Tensor]:
    """One right-padded sequence per game, and where the policy wrote the next token: (n, length), (n, length - 1)."""
    rows = [torch.tensor([*turns[-1][0], *turns[-1][1]]) for turns in games]
    tokens = pad_sequence(rows, batch_first=True, padding_value=IDS["<pad>"])
    answers = torch.zeros_like(tokens[:, 1:], dtype=torch.bool)
    for number, turns in enumerate(games):
        for prompt, output in turns:
            answers[number, len(prompt) - 1 : len(prompt) + len(output) - 1] = True
    return tokens, answers


def logprobs_of(model: Qwen3ForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probability of every next token, (n, length - 1) float32."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def advantages_of(batch: Batch) -> torch.Tensor:
    """Reward minus the mean over all plays of the same game, over their standard deviation; (games,) float32."""
    groups: dict[int, list[float]] = {}
    for play in batch.games:
        groups.setdefault(play.game, []).append(play.reward)
    scale = {game: (statistics.fmean(rewards), statistics.pstdev(rewards)) for game, rewards in groups.items()}
    return torch.tensor([(play.reward - scale[play.game][0]) / (scale[play.game][1] + 1e-6) for play in batch.games])


def off_policy_loss(
    logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, answers: torch.Tensor
) -> torch.Tensor:
    """Policy-gradient loss of tokens that older versions sampled, averaged over the tokens that the policy wrote.

    Each token's gradient is weighted by its present probability over that under the version that sampled it, truncated
    at ``TRUNCATION``: unbiased where no weight is cut, and of bounded variance. All are (n, length), advantages (n,).
    """
    ratio = torch.where(answers, logprobs.detach() - sampled, 0.0).exp()
    weight = ratio.clamp(max=TRUNCATION) * advantages[:, None]
    return -(logprobs * weight)[answers].mean()


def gradient(model: Qwen3ForCausalLM, batch: Batch) -> None:
    """Add the gradient of a batch to the model's."""
    tokens, answers = lay_out([[(turn.prompt, turn.output) for turn in game.turns] for game in batch.games])
    sampled = torch.zeros(answers.shape)
    sampled[answers] = torch.tensor([value for game in batch.games for turn in game.turns for value in turn.logprobs])
    off_policy_loss(logprobs_of(model, tokens), sampled, advantages_of(batch), answers).backward()


def emit(event: str, **fields: Any) -> None:
    """Write one event."""
    print(json.dumps({"event": event, "at": time.time(), **fields}), flush=True)


def sync(path: Path) -> None:
    """Make a file or folder survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Consumed(BaseModel):
    """Keys processed by one step: trained on, too old, or not batches of this run. The sidecar ``trained``."""

    step: int
    trained: list[str] = []
    stale: list[str] = []
    set_aside: list[str] = []


class Trainer:
    """Trains from the newest version to the last one."""

    def __init__(self, options: argparse.Namespace, policy: Path) -> None:
        self._options = options
        # Trained in fp32, published in bf16, as its configuration says.
        self.model = Qwen3ForCausalLM.from_pretrained(policy, dtype=torch.bfloat16, attn_implementation="eager").float()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, eps=1e-3, weight_decay=0.0)
        self._run = ""
        self._cursor: dict[str, int] = {}  # worker → its next batch
        self._consumed = Consumed(step=0)  # by the last step
        self._ended = threading.Event()
        self._file = options.folder / "state.pt"
        if self._file.exists():
            state = torch.load(self._file, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self._run, self._cursor, self._consumed = state["run"], state["cursor"], Consumed(**state["consumed"])

    def save(self) -> None:
        """Replace the state file. After a crash of the machine at any moment, the old or the new one is intact."""
        state = {"run": self._run, "cursor": self._cursor, "consumed": self._consumed.model_dump()}
        draft = self._file.with_suffix(".draft")
        torch.save({**state, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, draft)
        sync(draft)
        os.replace(draft, self._file)
        sync(draft.parent)

    def end(self, *_: object) -> None:
        """End after the step under way, whose weights are published. A handler of SIGTERM."""
        self._ended.set()

    def run(self, games: Bucket, publisher: Publisher) -> None:
        """Train until the run has the number of versions asked for."""
        self._games, self._publisher = games, publisher
        self._resume()
        while publisher.version < self._options.versions:
            consumed = Consumed(step=self._consumed.step + 1)
            batch = self._collect(consumed)
            if batch is None:
                emit("ended", version=publisher.version, step=self._consumed.step)
                return
            gradient(self.model, batch)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._consumed = consumed
            self.save()
            reward = statistics.fmean(game.reward for game in batch.games)
            emit("step", step=consumed.step, trained=consumed.trained, reward=reward)
            self._publish()
        self.model.to(torch.bfloat16).save_pretrained(self._options.folder / "checkpoint")
        emit("done", version=publisher.version, step=self._consumed.step)

    def _resume(self) -> None:
        """Check that the state is of the run's newest version, or of the next; publish that one first."""
        run, step = self._publisher.run, self._consumed.step
        self._run = self._run or run
        with open_run(self._options.bucket) as opened:
            newest = opened.head().step
        if self._run != run or step not in (newest, newest + 1):
            raise SystemExit(
                f"trainer: {self._file} is of step {step} of run {self._run}, and {self._options.bucket} holds run "
                f"{run} up to step {newest}; give the --folder of that"
            )
        if step > newest:
            self._publish()
        emit("ready", run=run, version=self._publisher.version, step=step, resumed=self._file.exists())

    def _publish(self) -> None:
        """Publish the weights of the state file, which must not change before the version is durable."""
        called, consumed = time.time(), self._consumed
        self._publisher.publish(consumed.step, sidecars={"trained": consumed.model_dump_json().encode()})
        self._publisher.flush()
        emit("published", version=self._publisher.version, step=consumed.step, called=called)

    def _collect(self, consumed: Consumed) -> Batch | None:
        """Wait for the next batch to train on; record in ``consumed`` what becomes of each key. None after SIGTERM."""
        began = time.monotonic()
        while time.monotonic() - began < self._options.patience:
            if self._ended.is_set():
                return None
            found = [match for item in self._games.list("trajectories/") if (match := KEY.fullmatch(item.key))]
            # The next batch of each worker first, so that workers alternate.
            for match in sorted(found, key=lambda match: int(match[2]) - self._cursor.get(match[1], 0)):
                if int(match[2]) >= self._cursor.get(match[1], 0):
                    batch = self._judged(match[0], consumed)
                    self._cursor[match[1]] = int(match[2]) + 1
                    if batch is not None:
                        return batch
            time.sleep(POLL_SECONDS)
        raise SystemExit(f"trainer: no trajectory to train on for {self._options.patience:g} s")

    def _judged(self, key: str, consumed: Consumed) -> Batch | None:
        """The batch, if it is to be trained on."""
        run, newest = self._run, self._publisher.version
        try:
            batch = read_batch(self._games.get(key, max_bytes=MAX_STORED_BYTES), key)
            versions = {span.version for game in batch.games for turn in game.turns for span in turn.spans}
            if batch.run != run or max(versions) > newest:
                raise ValueError(f"it is of run {batch.run}, version {max(versions)}; this is {run}, version {newest}")
        except (ValueError, zlib.error, NotFoundError, LimitError) as error:
            consumed.set_aside.append(key)
            emit("set_aside", key=key, why=str(error)[:300])
            return None
        if newest - min(versions) > self._options.max_staleness:
            consumed.stale.append(key)
            emit("stale", key=key, version=newest, lowest=min(versions))
            return None
        consumed.trained.append(key)
        return batch


def main(arguments: Sequence[str]) -> int:
    """Run as the module's docstring says."""
    parser = argparse.ArgumentParser(description="Train on trajectories from a bucket and publish the weights.")
    add = parser.add_argument
    add("--bucket", required=True, metavar="RUN", help="run to publish; begun, or continued")
    add("--games", required=True, metavar="URL", help="bucket that rollout machines write to")
    add("--folder", required=True, type=Path, metavar="DIR", help="for policy, state and checkpoint")
    add("--versions", required=True, type=int, metavar="N", help="end when the run has so many")
    add("--max-staleness", type=int, default=4, help="most versions that a batch may be old (default %(default)s)")
    add("--warm-up", type=int, default=400, help="supervised steps at most (default %(default)s)")
    add("--seed", type=int, default=0, help="of the policy (default %(default)s)")
    add("--patience", type=float, default=600.0, help="seconds to wait for a trajectory (default %(default)g)")
    options = parser.parse_args(arguments)
    policy = options.folder / "policy"
    if not policy.exists():
        make_policy(policy, options.seed, options.warm_up)
    trainer = Trainer(options, policy)
    signal.signal(signal.SIGTERM, trainer.end)
    try:
        with open_bucket(options.games) as games, Publisher(trainer.model, options.bucket, files=policy) as publisher:
            trainer.run(games, publisher)
    except DeltaSyncError as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
