"""What the example keeps of TRL's log, and the summary made of it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from examples.demo import record
from examples.demo.verdict import Verdict
from examples.trl_async.names import SERVED_VERSION, TRL_STALENESS, WEIGHT_SYNC
from trainer_side.result import METRICS

Log = dict[str, Any]


@dataclass
class Proof(Verdict):
    """The demo's three claims, and two about TRL."""

    each_sync_is_a_version: bool = False
    sync_metrics_in_trls_log: bool = False


@dataclass
class Record(record.Record):
    """``syncs``: what TRL logged of each version that is durable, by number. ``full_bytes_each``: of all weights."""

    full_bytes_each: int = 0
    syncs: dict[int, Log] = field(default_factory=dict)

    def take(self, step: int, logs: Log) -> Log | None:
        """Take in one line of TRL's log; if it is that of a step, what to show of it.

        The first weight sync is version 1, before step 1: step k trains version k, and syncs version k + 1.
        """
        version = logs.get(f"{METRICS}version")
        if version is not None:
            self.syncs[int(version)] = {name: value for name, value in logs.items() if name.startswith(METRICS)}
        if "reward" not in logs:
            return None
        newest = max(self.syncs)
        sync = self.syncs[newest]
        return {
            "step": step,
            "reward": logs["reward"],
            "lag": step - logs[SERVED_VERSION],
            "trl_lag": logs[TRL_STALENESS],
            "version": newest,
            "changed": sync[f"{METRICS}changed_percent"] / 100 * self.parameters,
            "total": self.parameters,
            "payload_bytes": sync[f"{METRICS}payload_bytes"],
            "full_bytes": self.full_bytes_each,
            "rollout_s": logs["perf/rollout_wait_s"],
            "train_s": logs["perf/fwd_bwd_s"] + logs["perf/optimizer_s"],
            "publish_s": logs[WEIGHT_SYNC],
        }

    @property
    def payload_bytes(self) -> int:
        """Bytes sent for all versions together."""
        return int(sum(sync[f"{METRICS}payload_bytes"] for sync in self.syncs.values()))

    @property
    def full_bytes(self) -> int:
        """Bytes that all weights for all versions would have taken."""
        return len(self.syncs) * self.full_bytes_each

    @property
    def changed_share(self) -> float:
        """Changed elements over all elements, over all versions."""
        return float(np.mean([sync[f"{METRICS}changed_percent"] / 100 for sync in self.syncs.values()] or [0.0]))

    def first_and_last_reward(self) -> tuple[float, float]:
        """Mean reward of the first and of the last tenth of the steps."""
        rewards = self.rewards()
        if not rewards:
            return 0.0, 0.0
        window = max(1, len(rewards) // 10)
        return float(np.mean(rewards[:window])), float(np.mean(rewards[-window:]))

    def mean_trl_lag(self) -> float:
        """Staleness as TRL counts it, averaged over steps: weight syncs since a group of answers was begun."""
        return float(np.mean([step["trl_lag"] for step in self.steps] or [0.0]))

    def weight_sync_seconds(self) -> tuple[float, float]:
        """How long a weight sync kept training waiting, as TRL logs it: the median, and at most."""
        seconds = [step["publish_s"] for step in self.steps] or [0.0]
        return float(np.median(seconds)), float(max(seconds))

    def judge(self, proof: Proof, steps: int, history: list[Log]) -> None:
        """Fill in what is claimed about TRL. ``history``: its own log, as its trainer has kept it."""
        logged = [int(line[f"{METRICS}version"]) for line in history if f"{METRICS}version" in line]
        proof.each_sync_is_a_version = logged == list(range(1, steps + 2)) and self.versions == steps + 1
        learnt = [line for line in history if "reward" in line]
        proof.sync_metrics_in_trls_log = len(learnt) == steps and all(WEIGHT_SYNC in line for line in learnt)

    def summary(self, verdict: Verdict, seconds: float) -> Log:
        """The content of summary.json."""
        median, longest = self.weight_sync_seconds()
        return super().summary(verdict, seconds) | {
            "weight_sync_s": {"p50": round(median, 4), "max": round(longest, 4)},
            "staleness": {"by_spans": round(self.mean_lag(), 3), "by_trl": round(self.mean_trl_lag(), 3)},
        }

    def details(self, verdict: Verdict) -> Log:
        """The content of details.json: how the verdict came about, every step, every version, every pause."""
        syncs = {str(version): sync for version, sync in self.syncs.items()}
        pauses = {str(version): pause for version, pause in self.pauses_ms.items()}
        return super().details(verdict) | {"syncs": syncs, "pauses_ms": pauses}
