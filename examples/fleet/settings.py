"""What a run of the example is made of, and what the trainer process is told."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

SHARE = 0.01
"""Of the elements that change with each version: what reinforcement learning of large models was seen to do."""
CONTEXT = 256
"""Tokens."""


@dataclass(frozen=True)
class Size:
    """Shape of the model, a Qwen3 with a vocabulary of characters. ``ratio``: what the verdict asks for, if at all."""

    layers: int
    hidden: int
    inner: int
    heads: int
    ratio: float | None


SIZES = {
    "small": Size(layers=4, hidden=256, inner=768, heads=4, ratio=None),
    "full": Size(layers=8, hidden=1024, inner=3072, heads=16, ratio=20.0),
}
"""3.2 M and 100.7 M parameters; beside the small one round trips weigh more than all its bytes."""


@dataclass(frozen=True)
class Options:
    """Command line. ``mbit``: of each link, each way; ``round_trip_ms``: from each machine to any other's link."""

    size: str
    replicas: int
    versions: int
    mbit: float
    round_trip_ms: float
    slow_start: bool
    out: Path
    seed: int

    @property
    def bits_per_second(self) -> float:
        return 1e6 * self.mbit

    @property
    def round_trip(self) -> float:
        """Seconds."""
        return self.round_trip_ms / 1e3


@dataclass(frozen=True)
class TrainerSettings:
    """What the trainer needs to know from the start. ``bucket``: URL of the run; ``full``: of full checkpoints."""

    out: str
    bucket: str
    full: str
    size: str
    seed: int

    @property
    def base(self) -> Path:
        """Checkpoint directory that replicas start from."""
        return Path(self.out) / "base"

    @property
    def bare(self) -> Path:
        """The same without weights: configuration and tokenizer."""
        return Path(self.out) / "bare"

    @property
    def checkpoint(self) -> Path:
        """Checkpoint directory with the trainer's last weights."""
        return Path(self.out) / "checkpoint"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**values)
