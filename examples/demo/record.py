"""What the demo keeps of every step, and the summary made of it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from examples.demo.verdict import Verdict

SMOOTH_STEPS = 20
REWARD_STEPS = 10
NEEDED_RISE = 0.25
NEEDED_VERSIONS = 100


@dataclass
class Record:
    """Events of the trainer, in order. ``shown`` holds (word, answer, reward) lists of fixed words."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    pauses_ms: dict[int, float] = field(default_factory=dict)
    shown_first: list[list[Any]] = field(default_factory=list)
    shown_last: list[list[Any]] = field(default_factory=list)
    parameters: int = 0
    versions: int = 0

    def add(self, event: dict[str, Any]) -> None:
        """Take in a ``step`` event."""
        self.steps.append(event)
        self.pauses_ms.update(dict(event["pauses_ms"]))
        self.show(event.get("shown", []))

    def show(self, shown: list[list[Any]]) -> None:
        """Take in the answers to the fixed words."""
        if shown:
            self.shown_first = self.shown_first or shown
            self.shown_last = shown

    def rewards(self) -> list[float]:
        return [step["reward"] for step in self.steps]

    def first_and_last_reward(self) -> tuple[float, float]:
        """Mean reward of the first and of the last steps: 10 each, fewer where there are few."""
        rewards = self.rewards()
        if not rewards:
            return 0.0, 0.0
        window = max(1, min(REWARD_STEPS, len(rewards) // 3))
        return float(np.mean(rewards[:window])), float(np.mean(rewards[-window:]))

    @property
    def payload_bytes(self) -> int:
        """Bytes sent for all versions together."""
        return sum(step["payload_bytes"] for step in self.steps)

    @property
    def full_bytes(self) -> int:
        """Bytes that full checkpoints for all versions would have taken."""
        return sum(step["full_bytes"] for step in self.steps)

    @property
    def changed_share(self) -> float:
        """Changed elements over all elements, over all versions."""
        return float(sum(step["changed"] for step in self.steps) / max(1, sum(step["total"] for step in self.steps)))

    def pause_percentiles(self) -> tuple[float, float] | None:
        """Median and 99th percentile of the pauses, in ms; None if none was seen."""
        if not self.pauses_ms:
            return None
        p50, p99 = np.percentile(list(self.pauses_ms.values()), [50, 99])
        return float(p50), float(p99)

    def summary(self, verdict: Verdict, seconds: float) -> dict[str, Any]:
        """The content of summary.json."""
        first, last = self.first_and_last_reward()
        p50, p99 = self.pause_percentiles() or (None, None)
        return {
            "verdict": verdict.claims(),
            "reward": {"first": round(first, 4), "last": round(last, 4)},
            "versions": self.versions,
            "payload_bytes": self.payload_bytes,
            "full_bytes": self.full_bytes,
            "changed_share": round(self.changed_share, 6),
            "pause_ms": {"p50": _rounded(p50), "p99": _rounded(p99)},
            "seconds": round(seconds, 1),
        }

    def details(self, verdict: Verdict) -> dict[str, Any]:
        """The content of details.json: how the verdict came about, and every step."""
        return {
            "parameters": self.parameters,
            "fingerprints": verdict.fingerprints,
            "compared_tokens": verdict.compared_tokens,
            "largest_logprob_difference": verdict.largest_logprob_difference,
            "mean_lag": round(self.mean_lag(), 3),
            "shown": {"first": self.shown_first, "last": self.shown_last},
            "steps": self.steps,
        }

    def mean_lag(self) -> float:
        """Versions between the weights trained and those that sampled, averaged over steps."""
        return float(np.mean([step["lag"] for step in self.steps] or [0.0]))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
