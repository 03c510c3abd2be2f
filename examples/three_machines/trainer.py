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
import copy
import gzip
import io
import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, TextIO, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer_side import Publisher
from trainer_side.result import PublishResult
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import DeltaSyncError, LimitError, NotFoundError, PublishError, StoreError

CHARACTERS = ["<pad>", "<eos>", "<unk>", ">", *"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"01234567"]
IDS = {character: number for number, character in enumerate(CHARACTERS)}
WORDS = ["ant", "are", "ate", "ear", "eat", "net", "not", "oat", "one", "ore", "rat", "rot", "sea", "tan", "ten", "toe"]
GUESSES = 4
POSITIONS = 64
WARM_UP_LOSS = 0.85
"""Mean loss per letter at which the warm-up stops. Random words of the list, regardless of feedback, have 0.92."""
TRUNCATION = 2.0
"""Largest importance weight of a token."""
MAX_NORM = 10.0
SIDECAR = "trained"
KEY = re.compile(r"trajectories/([A-Za-z0-9][A-Za-z0-9_-]{0,62})/([0-9]{10})\.json\.gz")
MAX_STORED_BYTES, MAX_BYTES = 4 << 20, 32 << 20
POLL_SECONDS, RETRY_SECONDS = 0.2, 0.5
EVENTS: TextIO | None = None
Turns = Sequence[tuple[list[int], list[int]]]
"""Prompt and output token ids of each turn of a game; a prompt begins with all of the previous turn."""
_Result = TypeVar("_Result")

# Trajectories, as rollouts.py writes them. They come from another machine, so everything is checked.

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=len(CHARACTERS))]], Field(min_length=1, max_length=POSITIONS)]
Version = Annotated[int, Field(ge=0)]


class BatchError(Exception):
    """An object is not a batch that this trainer can use; the message gives the reason."""


class Part(BaseModel):
    """Unknown fields are ignored, so that later writers can add fields."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Span(Part):
    """Output tokens ``start`` to ``end`` (exclusive) were sampled by one version."""

    version: Version
    start: int
    end: int


class Turn(Part):
    """One guess: input tokens, output tokens and their log-probs when sampled, and spans that cover the output."""

    prompt: TokenIds
    output: TokenIds
    logprobs: list[Annotated[float, Field(le=0, allow_inf_nan=False)]]
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


class Game(Part):
    """One play of a game to its end."""

    game: int
    turns: Annotated[list[Turn], Field(min_length=1, max_length=GUESSES)]
    solved: bool
    reward: Annotated[float, Field(allow_inf_nan=False)]

    @model_validator(mode="after")
    def _continues(self) -> Self:
        for number, (before, turn) in enumerate(zip(self.turns, self.turns[1:], strict=False), start=1):
            seen = before.prompt + before.output
            if turn.prompt[: len(seen)] != seen:
                raise ValueError(f"the prompt of turn {number} does not begin with all of turn {number - 1}")
        if len(self.turns[-1].prompt) + len(self.turns[-1].output) > POSITIONS:
            raise ValueError(f"a game of more than {POSITIONS} tokens")
        return self


class Batch(Part):
    """One object: games of one worker, each played several times, and the run whose versions the spans name."""

    format_version: Annotated[int, Field(ge=1, le=1)]
    run: str
    worker: str
    number: int
    games: Annotated[list[Game], Field(min_length=1, max_length=4096)]

    @property
    def versions(self) -> set[int]:
        """All versions that sampled a token."""
        return {span.version for game in self.games for turn in game.turns for span in turn.spans}

    @classmethod
    def from_object(cls, data: bytes, key: str) -> Self:
        """Raises BatchError: it is not a batch, or one of another key."""
        try:
            text = gzip.GzipFile(fileobj=io.BytesIO(data)).read(MAX_BYTES + 1)
            if len(text) > MAX_BYTES:
                raise BatchError(f"{key} has more than {MAX_BYTES} bytes")
            batch = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            raise BatchError(f"{key}: field {'.'.join(map(str, first['loc']))!r}: {first['msg']}") from error
        except (OSError, EOFError, ValueError) as error:
            raise BatchError(f"{key} is not a gzip file: {error}") from error
        if key != f"trajectories/{batch.worker}/{batch.number:010d}.json.gz":
            raise BatchError(f"{key} holds batch {batch.number} of worker {batch.worker!r}")
        return batch


# The policy, and games as its input.


def encode(text: str) -> list[int]:
    """Token ids of a text, one per character."""
    return [IDS.get(character, IDS["<unk>"]) for character in text]


def example_game(rng: random.Random) -> Turns:
    """One game, played with words that fit all feedback so far: the data of the warm-up."""
    secret, fitting, prompt, turns = rng.choice(WORDS), WORDS, encode(">"), list[tuple[list[int], list[int]]]()
    for _ in range(GUESSES):
        guess = rng.choice(fitting)
        turns.append((prompt, encode(guess)))
        if guess == secret:
            break
        heard = marked(secret, guess)
        prompt = prompt + encode(guess + heard + ">")
        fitting = [word for word in fitting if marked(word, guess) == heard]
    return turns


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


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, nothing added around a text."""
    tokenizer = Tokenizer(WordLevel(IDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=POSITIONS
    )


def make_config(**changes: Any) -> Qwen3Config:
    """A Qwen3 of 3.2 M parameters over characters."""
    shape: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    shape |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": len(CHARACTERS)}
    ids = {"pad_token_id": IDS["<pad>"], "eos_token_id": IDS["<eos>"], "bos_token_id": None}
    shape |= {"max_position_embeddings": POSITIONS, "tie_word_embeddings": True, **ids, **changes}
    return Qwen3Config(**shape, dtype="bfloat16", attn_implementation="eager")


def lay_out(games: Sequence[Turns]) -> tuple[torch.Tensor, torch.Tensor]:
    """One right-padded sequence per game, and where the policy wrote the next token: (n, length), (n, length - 1)."""
    rows = [[*turns[-1][0], *turns[-1][1]] for turns in games]
    tokens = torch.full((len(rows), max(map(len, rows))), IDS["<pad>"], dtype=torch.int64)
    answers = torch.zeros((len(rows), tokens.shape[1] - 1), dtype=torch.bool)
    for number, (row, turns) in enumerate(zip(rows, games, strict=True)):
        tokens[number, : len(row)] = torch.tensor(row)
        for prompt, output in turns:
            answers[number, len(prompt) - 1 : len(prompt) + len(output) - 1] = True
    return tokens, answers


class Policy:
    """The trained model and the published model.

    Attributes:
        model: fp32, with AdamW. served: the same rounded to bf16, in place, after each step.
    """

    def __init__(self, model: Qwen3ForCausalLM, rate: float, eps: float) -> None:
        self.model = model.float()
        self.served = copy.deepcopy(self.model).to(torch.bfloat16)
        self._adam = torch.optim.AdamW(self.model.parameters(), lr=rate, eps=eps, weight_decay=0.0)

    def logprobs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probability of every next token, (n, length - 1) float32."""
        logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        return torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)

    def step(self, max_norm: float) -> None:
        """Update the weights along the gradient."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self._adam.step()
        self._adam.zero_grad()
        self._round()

    def _round(self) -> None:
        with torch.no_grad():
            for served, master in zip(self.served.parameters(), self.model.parameters(), strict=True):
                served.copy_(master)

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that ``restore`` needs, by name."""
        kept = {f"model.{number}": master.detach() for number, master in enumerate(self.model.parameters())}
        for number, moments in self._adam.state_dict()["state"].items():
            kept |= {f"adam.{number}.{name}": value for name, value in moments.items()}
        return kept

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from a ``state``. Raises KeyError, RuntimeError, ValueError: it belongs to another model."""
        moments: dict[int, dict[str, torch.Tensor]] = {}
        masters = list(self.model.parameters())
        if sum(name.startswith("model.") for name in state) != len(masters):
            raise ValueError(f"the model has {len(masters)} parameters")
        with torch.no_grad():
            for number, master in enumerate(masters):
                master.copy_(state[f"model.{number}"])
        for name, value in state.items():
            kind, number_text, *moment = name.split(".")
            if kind == "adam":
                moments.setdefault(int(number_text), {})[moment[0]] = value
        self._adam.load_state_dict({"state": moments, "param_groups": self._adam.state_dict()["param_groups"]})
        self._round()


def warm_up(policy: Policy, seed: int, limit: int) -> None:
    """Teach example games until ``WARM_UP_LOSS``. Each batch is new, so its loss is an unbiased estimate."""
    rng = random.Random(seed)
    for step in range(1, limit + 1):
        tokens, answers = lay_out([example_game(rng) for _ in range(128)])
        loss = -(policy.logprobs(tokens) * answers).sum() / answers.sum()
        emit("warm_up", step=step, loss=float(loss.detach()))
        if float(loss.detach()) <= WARM_UP_LOSS:
            break
        loss.backward()
        policy.step(max_norm=1.0)


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

    Each token's gradient is weighted by its present probability over that under the version that sampled it, at most
    ``TRUNCATION``: unbiased where no weight is cut, and of bounded variance.

    Args:
        logprobs: (n, length) with gradient. sampled: those when sampled. advantages: (n,). answers: (n, length) bool.
    """
    ratio = torch.where(answers, logprobs.detach() - sampled, 0.0).exp()
    weight = ratio.clamp(max=TRUNCATION) * advantages[:, None]
    return -(torch.where(answers, logprobs, 0.0) * weight).sum() / answers.sum().clamp(min=1)


def gradient(policy: Policy, batch: Batch) -> None:
    """Add the gradient of a batch to the policy's."""
    tokens, answers = lay_out([[(turn.prompt, turn.output) for turn in game.turns] for game in batch.games])
    sampled = torch.zeros(answers.shape)
    sampled[answers] = torch.tensor([value for game in batch.games for turn in game.turns for value in turn.logprobs])
    off_policy_loss(policy.logprobs(tokens), sampled, advantages_of(batch), answers).backward()


# The state file, and the loop.


class Consumed(BaseModel):
    """Keys processed between two steps: trained on, too old, or not batches of this run. The sidecar."""

    model_config = ConfigDict(strict=True, extra="forbid")
    step: int = 0
    trained: list[str] = []
    stale: list[str] = []
    set_aside: list[str] = []


class Progress(BaseModel):
    """The trainer's position. ``cursor``: worker → its next batch. ``consumed``: by the last step."""

    model_config = ConfigDict(strict=True, extra="forbid")
    run: str
    step: int = 0
    cursor: dict[str, int] = {}
    consumed: Consumed = Consumed()


class StateError(Exception):
    """The state file cannot be used, or there is nothing to train on; the message says what to do."""


def save_state(path: Path, progress: Progress, policy: Policy) -> None:
    """Replace the state file. After a crash of the machine at any moment, the old or the new one is intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    save_file({n: t.contiguous() for n, t in policy.state().items()}, draft, {"progress": progress.model_dump_json()})
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file or folder survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def load_state(path: Path, policy: Policy) -> Progress | None:
    """Load the state into the policy; None if there is none. Raises StateError."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            progress = Progress.model_validate_json((file.metadata() or {}).get("progress", ""))
            policy.restore({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise StateError(f"{path} is not a state of this policy: {str(error)[:200]}; give another --folder") from error
    return progress


def emit(event: str, **fields: Any) -> None:
    """Write one event."""
    print(json.dumps({"event": event, "at": time.time(), **fields}), file=EVENTS, flush=True)


class Trainer:
    """Trains from the newest version to the last one."""

    def __init__(self, options: argparse.Namespace, policy: Policy) -> None:
        """Raises StateError: a state exists and cannot be used."""
        self._options, self._policy = options, policy
        self._state = options.folder / "state.safetensors"
        self._loaded = load_state(self._state, policy)
        self._published: PublishResult | None = None
        self._called: dict[int, float] = {}  # step → when its weights were passed to the publisher

    def run(self) -> None:
        """Train until the run has the number of versions asked for. Raises StateError, DeltaSyncError."""
        files = self._options.folder / "policy"
        with open_bucket(self._options.games) as games:
            with self._retry(lambda: Publisher(self._policy.served, self._options.bucket, files=files)) as publisher:
                self._publisher, self._games = publisher, games
                self._resume()
                while self._version < self._options.versions:
                    self._one_step()
                self._settle()
        self._policy.served.save_pretrained(self._options.folder / "checkpoint")
        emit("done", version=self._version, step=self._progress.step)

    def _retry(self, call: Callable[[], _Result]) -> _Result:
        """Repeat a call while the store is unreachable, for up to ``--give-up`` seconds."""
        began: float | None = None
        while True:
            try:
                return call()
            except (StoreError, PublishError) as error:
                if began is None:
                    began = time.monotonic()
                    emit("away", what="store", error=str(error)[:300])
                if time.monotonic() - began > self._options.give_up:
                    raise
                time.sleep(RETRY_SECONDS)

    def _resume(self) -> None:
        """Check that the state is of the run's newest version, or of the next; publish that one first."""
        publisher, loaded = self._publisher, self._loaded
        self._version = publisher.version
        recorded = self._recorded_step()
        self._progress = loaded or Progress(run=publisher.run)
        if self._progress.run != publisher.run or self._progress.step not in (recorded, recorded + 1):
            raise StateError(
                f"{self._state} is of step {self._progress.step} of run {self._progress.run}, and "
                f"{self._options.bucket} holds run {publisher.run} up to step {recorded}; give the --folder of that"
            )
        if loaded is None:
            save_state(self._state, self._progress, self._policy)
        self._consumed = Consumed(step=self._progress.step + 1)
        self._settle()
        emit("ready", run=publisher.run, version=self._version, step=self._progress.step, resumed=loaded is not None)

    def _recorded_step(self) -> int:
        """Step of the newest version that has the sidecar; 0 if none has."""
        run = open_run(self._options.bucket)
        for version in range(self._publisher.version, 0, -1):
            if any(sidecar.name == SIDECAR for sidecar in run.manifest(version).sidecars):
                return Consumed.model_validate_json(run.sidecar(version, SIDECAR)).step
        return 0

    def _one_step(self) -> None:
        batch = self._collect()
        gradient(self._policy, batch)
        # The previous version's upload ended here at the latest. It reads the weights that are about to change.
        self._settle()
        self._policy.step(MAX_NORM)
        step = self._progress.step + 1
        self._progress = self._progress.model_copy(update={"step": step, "consumed": self._consumed})
        save_state(self._state, self._progress, self._policy)
        rewards = [game.reward for game in batch.games]
        emit("step", step=step, trained=self._consumed.trained, reward=sum(rewards) / len(rewards))
        self._consumed = Consumed(step=step + 1)
        self._publish()

    def _collect(self) -> Batch:
        """The next batch to train on, once it is available."""
        began = time.monotonic()
        while time.monotonic() - began < self._options.patience:
            for key, worker, number in self._retry(lambda: list(self._new())):
                batch = self._judged(key)
                self._progress.cursor[worker] = number + 1
                if batch is not None:
                    self._consumed.trained.append(key)
                    return batch
            if self._published is not None and self._published.done:
                self._settle()
            time.sleep(POLL_SECONDS)
        raise StateError(f"no trajectory to train on came to {self._options.games} for {self._options.patience:g} s")

    def _new(self) -> Iterator[tuple[str, str, int]]:
        """Keys from the cursor on, with worker and number, alternating between workers."""
        cursor = self._progress.cursor
        found = [match for item in self._games.list("trajectories/") if (match := KEY.fullmatch(item.key))]
        due = [(int(match[2]) - cursor.get(match[1], 0), match[1], match[0]) for match in found]
        for ahead, worker, key in sorted(due):
            if ahead >= 0:
                yield key, worker, ahead + cursor.get(worker, 0)

    def _judged(self, key: str) -> Batch | None:
        """The batch, if it is to be trained on; otherwise the reason is recorded."""
        try:
            data = self._retry(lambda: self._games.get(key, max_bytes=MAX_STORED_BYTES))
            batch = Batch.from_object(data, key)
            if batch.run != self._progress.run:
                raise BatchError(f"{key} is of run {batch.run}, this one is {self._progress.run}")
            if max(batch.versions) > self._version:
                raise BatchError(f"{key} names version {max(batch.versions)}; the newest is {self._version}")
        except (BatchError, NotFoundError, LimitError) as error:
            self._consumed.set_aside.append(key)
            emit("set_aside", key=key, why=str(error)[:300])
            return None
        if self._version - min(batch.versions) > self._options.max_staleness:
            self._consumed.stale.append(key)
            emit("stale", key=key, version=self._version, lowest=min(batch.versions))
            return None
        return batch

    def _publish(self) -> None:
        """Pass the weights of the state to the publisher, which uploads them in the background."""
        sidecars = {SIDECAR: self._progress.consumed.model_dump_json().encode()}
        self._called.setdefault(self._progress.step, time.time())
        self._published = self._publisher.publish(self._progress.step, wait=True, sidecars=sidecars)
        self._version = self._published.version or self._version

    def _settle(self) -> None:
        """Wait until the version of the last step is durable; publish it again if necessary."""
        self._retry(self._settled)
        published, self._published = self._published, None
        if published is not None:
            emit("published", version=published.version, step=published.step, called=self._called[self._progress.step])

    def _settled(self) -> None:
        # A failed or killed upload may have arrived nevertheless: then it must not be published twice.
        if self._published is None or self._published.failed:
            self._published = None
            if self._recorded_step() < self._progress.step:
                self._publish()
        self._publisher.flush()


def open_policy(options: argparse.Namespace) -> Policy:
    """The policy that training starts from; made and warmed up if the folder has none."""
    folder = options.folder / "policy"
    if not (folder / "config.json").exists():
        torch.manual_seed(options.seed)
        made = Policy(Qwen3ForCausalLM(make_config()), rate=1.5e-3, eps=1e-8)
        warm_up(made, options.seed, options.warm_up)
        draft = options.folder / "policy.draft"
        made.served.save_pretrained(draft)
        make_tokenizer().save_pretrained(draft)
        os.replace(draft, folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    return Policy(model, options.rate, eps=1e-3)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with status 2 on a wrong one."""
    parser = argparse.ArgumentParser(description="Train on trajectories from a bucket and publish the weights.")
    parser.add_argument("--bucket", required=True, metavar="RUN", help="run to publish; begun, or continued")
    parser.add_argument("--games", required=True, metavar="URL", help="bucket that rollout machines write to")
    parser.add_argument("--folder", required=True, type=Path, metavar="DIR", help="for policy, state and checkpoint")
    parser.add_argument("--versions", required=True, type=int, metavar="N", help="end when the run has so many")
    parser.add_argument("--max-staleness", type=int, default=4, help="leave out batches that are more versions old (4)")
    parser.add_argument("--warm-up", type=int, default=400, help="supervised steps at most (default %(default)s)")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the policy (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default %(default)s)")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds to wait for a trajectory")
    parser.add_argument("--give-up", type=float, default=300.0, help="seconds to wait for the store")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run as the module's docstring says."""
    global EVENTS
    options = parse_options(arguments)
    # Libraries sometimes print to standard output, which must not mix with events.
    EVENTS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        Trainer(options, open_policy(options)).run()
    except (StateError, DeltaSyncError) as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
