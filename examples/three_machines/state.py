"""All that a trainer needs to go on after a kill, in one file that is replaced as a whole.

Weights (fp32 masters), optimizer, random numbers, step, and how far the trajectories are read belong together: a state
that mixed two moments would train on a trajectory twice, or lose one.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_delta_sync.errors import FormatError

NAME = "state.safetensors"
FIELD = "state"


class Consumed(BaseModel):
    """What became of the trajectories that the trainer took between two steps, by key; the sidecar of a version.

    Attributes:
        step: that they led to. trained: were trained on. stale: were too old. set_aside: were no batches of this run.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    step: int = 0
    trained: list[str] = []
    stale: list[str] = []
    set_aside: list[str] = []

    def to_bytes(self) -> bytes:
        """As JSON."""
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> "Consumed":
        """Inverse of ``to_bytes``. Raises FormatError."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise FormatError(f"{what} is not what a trainer wrote: {error.errors()[0]['msg']}") from error


class Progress(BaseModel):
    """Where the trainer is.

    Attributes:
        run: id of the run it publishes. step: optimizer steps so far. cursor: worker → its next batch.
        consumed: by the last step.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    run: str
    step: int = 0
    cursor: dict[str, int] = {}
    consumed: Consumed = Consumed()


class Store:
    """The file in the trainer's folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME

    def save(self, progress: Progress, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the state. When this returns it survives a crash of the machine; before, the old one does."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        held = {**tensors, "rng": torch.get_rng_state()}
        save_file(
            {name: tensor.contiguous() for name, tensor in held.items()}, draft, {FIELD: progress.model_dump_json()}
        )
        _sync(draft)
        os.replace(draft, self.path)
        _sync(self.path.parent)

    def load(self) -> tuple[Progress, dict[str, torch.Tensor]] | None:
        """The state, and the random numbers' put in force; None if there is none.

        Raises:
            FormatError: the file is not a state.
        """
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                progress = Progress.model_validate_json((file.metadata() or {}).get(FIELD, ""))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            torch.set_rng_state(tensors.pop("rng"))
        except (SafetensorError, ValidationError, KeyError) as error:
            raise FormatError(
                f"{self.path} is not a trainer's state: {str(error)[:200]}; give another --folder"
            ) from error
        return progress, tensors


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
