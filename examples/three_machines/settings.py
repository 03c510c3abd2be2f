"""What a run of the example is made of."""

from dataclasses import dataclass
from pathlib import Path

from examples.demo.settings import MODEL_NAME as MODEL_NAME  # what servers call the policy
from examples.fleet.output import SUMMARY as SUMMARY

TRAINER, ROLLOUT, ENVIRONMENT = "trainer", "rollout", "environment"
MACHINES = (TRAINER, ROLLOUT, ENVIRONMENT)
SERVER, WORKER, WITNESS, LINKS = "server", "worker", "witness", "links"
WEIGHTS, CHECKPOINT = "model.safetensors", "state/checkpoint"
MARKER, TABLES, PICTURE = ".delta-sync-three-machines", "three-machines.md", "three-machines.png"
PARTS = (ENVIRONMENT, WORKER, ROLLOUT, TRAINER)
"""What is killed, in this order: one program, or the rollout machine with its worker and its server."""
KILL_SHARES = (0.15, 0.3, 0.4, 0.7)
"""At these shares of all versions."""
DOWN_SECONDS = 5.0
"""From a kill until what was killed starts again."""
NEEDED_VERSIONS = 100
"""A run of fewer need not learn."""
NEEDED_RISE = 0.15


@dataclass(frozen=True)
class Options:
    """Command line.

    Attributes:
        max_staleness: versions that a trajectory may be behind when it is trained on. ahead: batches that the worker
            plays per version. mbit: of each link, each way. network: see ``machines.NETWORK_KINDS``.
        kills: whether each part is killed once. warm_up: supervised steps before; None: as many as the policy takes.
    """

    versions: int
    max_staleness: int
    ahead: int
    mbit: float
    round_trip_ms: float
    network: str
    kills: bool
    warm_up: int | None
    out: Path
    seed: int

    @property
    def bits_per_second(self) -> float:
        return 1e6 * self.mbit

    @property
    def round_trip(self) -> float:
        """Seconds."""
        return self.round_trip_ms / 1e3

    @property
    def kills_at(self) -> dict[str, int]:
        """Part → version at which it is killed."""
        if not self.kills:
            return {}
        return {part: round(share * self.versions) for part, share in zip(PARTS, KILL_SHARES, strict=True)}
