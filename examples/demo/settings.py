"""What the orchestrator tells the trainer, and how a machine's cores are shared out."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

MODEL_NAME = "policy"


@dataclass(frozen=True)
class Cores:
    """Core numbers. The server computes on the first core alone, the trainer on the others.

    vLLM's worker spins for a second after its last message. A trainer that shares its core, or that has one
    thread waiting there for the others, is slowed down several times. The fixed single server thread
    also makes two servers compare equal: greedy output depends on the number of threads.
    """

    server: int
    trainer: tuple[int, ...]

    @classmethod
    def share_out(cls, limit: int = 4) -> Self:
        """Divide the cores that this process may use; with a single one, both use it."""
        available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0, 1]
        return cls(available[0], tuple(available[1 : 1 + limit] or available[:1]))


@dataclass(frozen=True)
class TrainerSettings:
    """Everything the trainer needs to know from the start."""

    out: str
    bucket: str
    steps: int
    seed: int
    cores: tuple[int, ...]

    @property
    def base(self) -> Path:
        """Checkpoint directory that the server starts from."""
        return Path(self.out) / "base"

    @property
    def checkpoint(self) -> Path:
        """Checkpoint directory with the trainer's last weights."""
        return Path(self.out) / "checkpoint"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**{**values, "cores": tuple(values["cores"])})
