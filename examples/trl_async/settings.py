"""What the trainer process is told, beside what the demo's is."""

from dataclasses import dataclass

from examples.demo import settings

LOG_HISTORY = "log_history.json"
"""Of the output directory: all that TRL has logged."""


@dataclass(frozen=True)
class TrainerSettings(settings.TrainerSettings):
    """``notice``: where versions are announced, for a server that is started before the run is there."""

    notice: str
