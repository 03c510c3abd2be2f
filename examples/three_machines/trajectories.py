"""Finished games on their way from rollout workers to the trainer: immutable objects below one bucket URL.

Key ``trajectories/WORKER/0000000017.json.zst``: one batch, in groups of plays of the same game, as canonical JSON in
one zstd frame. A worker numbers its batches from 0 without gaps, and each is created only if absent: what is read once
never changes, and what was not written whole is not there. Every token carries the log-probability it was sampled with,
and every output the weight versions that produced it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import ConflictError, FormatError, UsageError
from vllm_delta_sync.wire.compression import compress, declared_size, decompress
from vllm_delta_sync.wire.limits import check_limit
from vllm_delta_sync.wire.manifest import Count, Document, FormatVersion, Hex32, Timestamp, Version

PREFIX = "trajectories/"
MAX_STORED_BYTES = 4 << 20
MAX_BYTES = 32 << 20
MAX_GAMES = 4096
MAX_TURNS = 64
MAX_TOKENS = 4096

_WORKER = r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}"
_KEY = re.compile(rf"{PREFIX}({_WORKER})/([0-9]{{10}})\.json\.zst")

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_TOKENS)]
Logprob = Annotated[float, Field(le=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class Span(_Part):
    """Output tokens from ``start`` up to ``end``, without it, were sampled by the weights of one version."""

    version: Version
    start: Count
    end: Count


class Turn(_Part):
    """One answer of the policy.

    ``prompt``: token ids that it saw. ``output``: token ids that it wrote, and their ``logprobs`` when they were
    sampled. ``spans`` cover the output from its first token to its last, without gaps, versions ascending.
    """

    prompt: TokenIds
    output: Annotated[TokenIds, Field(min_length=1)]
    logprobs: Annotated[list[Logprob], Field(max_length=MAX_TOKENS)]
    spans: Annotated[list[Span], Field(min_length=1, max_length=MAX_TOKENS)]

    @model_validator(mode="after")
    def _covered(self) -> Self:
        if len(self.logprobs) != len(self.output):
            raise ValueError(f"{len(self.logprobs)} logprobs for {len(self.output)} output tokens")
        end, version = 0, 0
        for span in self.spans:
            if span.start != end or span.end <= span.start or span.version < version:
                raise ValueError(f"span {span.start}-{span.end} of version {span.version} does not go on from {end}")
            end, version = span.end, span.version
        if end != len(self.output):
            raise ValueError(f"spans end at {end}, the output has {len(self.output)} tokens")
        return self


class Game(_Part):
    """One play of a game to its end. Each turn's prompt begins with the prompt and the output of the turn before."""

    game: Count
    turns: Annotated[list[Turn], Field(min_length=1, max_length=MAX_TURNS)]
    solved: bool
    reward: Annotated[float, Field(allow_inf_nan=False)]

    @model_validator(mode="after")
    def _continues(self) -> Self:
        for number, (before, turn) in enumerate(zip(self.turns, self.turns[1:], strict=False), start=1):
            seen = before.prompt + before.output
            if turn.prompt[: len(seen)] != seen:
                raise ValueError(f"the prompt of turn {number} does not begin with all of turn {number - 1}")
        return self

    @property
    def versions(self) -> set[int]:
        """All weight versions that sampled tokens of it."""
        return {span.version for turn in self.turns for span in turn.spans}


class Batch(Document):
    """One object.

    Attributes:
        run: id of the run whose versions the spans name. number: the worker's, as in the key.
        plays: how many plays of one game stand in a row. lowest, highest: version in any span.
    """

    KIND = "trajectories"
    format_version: FormatVersion = 1
    run: Hex32
    worker: Annotated[str, Field(pattern=f"^{_WORKER}$")]
    number: Annotated[int, Field(ge=0, lt=10**10)]
    created_at: Timestamp
    lowest: Version
    highest: Version
    plays: Annotated[int, Field(ge=1, le=MAX_GAMES)]
    games: Annotated[list[Game], Field(min_length=1, max_length=MAX_GAMES)]

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        if len(self.games) % self.plays:
            raise ValueError(f"{len(self.games)} games are not groups of {self.plays}")
        for start in range(0, len(self.games), self.plays):
            if len({play.game for play in self.games[start : start + self.plays]}) > 1:
                raise ValueError(f"the {self.plays} plays from {start} on are not all of one game")
        versions = set().union(*(play.versions for play in self.games))
        if (min(versions), max(versions)) != (self.lowest, self.highest):
            raise ValueError(f"versions {self.lowest} to {self.highest} are not those of the spans")
        return self

    @property
    def key(self) -> str:
        return key_of(self.worker, self.number)


def key_of(worker: str, number: int) -> str:
    """Key of a worker's batch."""
    return f"{PREFIX}{worker}/{number:010d}.json.zst"


def place_of(key: str) -> tuple[str, int] | None:
    """Inverse of ``key_of``; None for any other key."""
    match = _KEY.fullmatch(key)
    return (match[1], int(match[2])) if match else None


def encode(batch: Batch) -> bytes:
    """The object's bytes.

    Raises:
        LimitError: too large to be read again.
    """
    plain = batch.to_bytes()
    check_limit(f"{batch.key}: bytes", len(plain), MAX_BYTES, "MAX_BYTES")
    data = compress(np.frombuffer(plain, np.uint8), "zstd").tobytes()
    check_limit(f"{batch.key}: compressed bytes", len(data), MAX_STORED_BYTES, "MAX_STORED_BYTES")
    return data


def decode(data: bytes, key: str) -> Batch:
    """Inverse of ``encode``.

    Raises:
        FormatError: not such an object, or the one of another key. LimitError: larger than the limits here; nothing
            was allocated. UnsupportedError: a later format.
    """
    held = np.frombuffer(data, np.uint8)
    size = declared_size(held, "zstd", key)
    check_limit(f"{key}: bytes", size, MAX_BYTES, "MAX_BYTES")
    batch = Batch.from_bytes(decompress(held, size, "zstd", key).tobytes(), key)
    if batch.key != key:
        raise FormatError(f"{key} holds batch {batch.number} of worker {batch.worker!r}; it was put under another key")
    return batch


class Writer:
    """One worker's end: puts batches under ascending numbers.

    Attributes:
        number: of the next batch; the first that is free when the writer is made.
    """

    def __init__(self, bucket: Bucket, worker: str) -> None:
        """Raises UsageError: the name cannot be a worker's. StoreError: the store failed."""
        if not re.fullmatch(_WORKER, worker):
            raise UsageError(f"worker {worker[:80]!r} is no name; give up to 63 of A-Z a-z 0-9 _ -")
        self._bucket = bucket
        self.worker = worker
        self.number = 0
        for item in bucket.list(f"{PREFIX}{worker}/"):
            place = place_of(item.key)
            if place is not None:
                self.number = place[1] + 1

    def put(self, batch: Batch) -> Batch:
        """Write a batch under the next free number; returns it as it was written.

        Safe to call again with the same batch after a StoreError: if it had arrived after all, it is not written
        twice. A number that is taken by something else, such as what a killed predecessor still had on its way, is
        left alone.

        Raises:
            StoreError: the store failed; the batch may be there or not.
        """
        while True:
            batch = batch.model_copy(update={"worker": self.worker, "number": self.number})
            data = encode(batch)
            try:
                self._bucket.put(batch.key, data, if_absent=True)
            except ConflictError:
                if self._bucket.get(batch.key, max_bytes=MAX_STORED_BYTES) != data:
                    self.number += 1
                    continue
            self.number += 1
            return batch


@dataclass(frozen=True, slots=True)
class Found:
    """An object that is there to be read: its key, and whose it is."""

    key: str
    worker: str
    number: int


class Reader:
    """The trainer's end: each batch once, each worker's in order.

    Attributes:
        cursor: worker → number of the next batch; what a trainer saves with its weights.
    """

    def __init__(self, bucket: Bucket, cursor: Mapping[str, int] | None = None) -> None:
        self._bucket = bucket
        self.cursor = dict(cursor or {})

    def new(self) -> Iterator[Found]:
        """What is there from the cursor on, by number, and workers take turns. Raises StoreError."""
        places = (place_of(item.key) for item in self._bucket.list(PREFIX))
        due = [place for place in places if place is not None and place[1] >= self.cursor.get(place[0], 0)]
        for worker, number in sorted(due, key=lambda place: (place[1] - self.cursor.get(place[0], 0), place[0])):
            yield Found(key_of(worker, number), worker, number)

    def read(self, found: Found) -> Batch:
        """Fetch and check one.

        Raises:
            FormatError, LimitError, UnsupportedError: it is not a batch, which the message explains.
            NotFoundError: it is gone. StoreError: the store failed.
        """
        return decode(self._bucket.get(found.key, max_bytes=MAX_STORED_BYTES), found.key)

    def pass_by(self, found: Found) -> None:
        """Be done with it, and with all before it of its worker."""
        self.cursor[found.worker] = found.number + 1
