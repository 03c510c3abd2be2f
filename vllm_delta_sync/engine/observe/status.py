"""What a receiver shows of itself: written by its one thread, read by any."""

import functools
import importlib.metadata
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from vllm_delta_sync import __version__
from vllm_delta_sync.bucket.middleware.metrics import PROCESS
from vllm_delta_sync.engine.commit.transaction import Answer
from vllm_delta_sync.engine.compat import patches
from vllm_delta_sync.engine.observe import metrics
from vllm_delta_sync.engine.observe.log_lines import ordered
from vllm_delta_sync.engine.observe.readiness import readiness
from vllm_delta_sync.engine.planning.commit_plan import UpdatePlan
from vllm_delta_sync.engine.staging.read_steps import store_usage
from vllm_delta_sync.errors import DeltaSyncError, EngineError
from vllm_delta_sync.format.manifest import Manifest

State = Literal[
    "waiting_for_run",
    "proving",
    "refused",
    "idle",
    "held",
    "staging",
    "draining",
    "committing",
    "verifying",
    "repairing",
    "lost",
]
STATES: dict[State, str] = {
    "waiting_for_run": "the bucket holds no run yet, or cannot be read; see last_error",
    "proving": "tracing the model's loader and comparing its weights with the run's",
    "refused": "this model cannot follow this run, or its weights are no version any more; see last_error",
    "idle": "serving; nothing under way",
    "held": "serving one version and not following, until POST /delta_sync/release; or serving a newer version than "
    "the setting target names, see last_error",
    "staging": "fetching, verifying, decoding and routing versions, beside generation",
    "draining": "waiting for requests in flight to finish (setting pause_mode), while new ones wait for the commit",
    "committing": "the engine is paused and weights are being patched",
    "verifying": "rescanning all weights against what the history declares",
    "repairing": "weights were changed from outside; the version served before is being rebuilt from the bucket",
    "lost": "a commit could neither be finished nor taken back, or generation does not resume: the engine is ended, "
    "start the server again",
}
RECENT_COMMITS = 64


class StatusBoard:
    """Everything in ``GET /delta_sync/status``.

    Attributes:
        served: the version that answers now; None until the weights are proven to be one. head: newest known.
        goal: newest version that following the head leads to; None if there is none.
        target: what is followed: head, a version, or tag:NAME.
        holding: whether new versions are left alone. beyond: whether what is served is newer than the setting target.
        asleep: whether the engine's weights were in no memory when it was last asked.
        broken: whether the weights were found to be no version any more. looks: how often the bucket was looked into.
        used: what ranks have used stores for, as of the last staging.
        fleet: under which name it is told what is served, and how many may pause at once; None: not. waiting: for its
            turn to pause.
        listens: whether notices are set up. heard: when the last one came, by the monotonic clock.
        looked: when the bucket was last read without an error, by the monotonic clock; None before.
    """

    def __init__(self, policy: str, target: str = "head", max_lag: int | None = None) -> None:
        self._lock = threading.Lock()
        self._policy = policy
        self.target = target
        self._max_lag = max_lag
        self._recent: deque[Answer] = deque(maxlen=RECENT_COMMITS)
        self.run: str | None = None
        self.state: State = "waiting_for_run"
        self.error: dict[str, str] | None = None
        self.served: Manifest | None = None
        self.head: Manifest | None = None
        self.goal: int | None = None
        self.holding = False
        self.beyond = False
        self.broken = False
        self.asleep = False
        self.ranks: list[Answer] = []
        self.undo: list[int] = []
        self.timings: dict[str, float] = {}
        self.commits = 0
        self.looks = 0
        self.looked: float | None = None
        self._since: tuple[Manifest | None, float] = None, 0.0
        self.used: list[Answer] = []
        self.listens = False
        self.heard: float | None = None
        self.fleet: Answer = {"receiver": None, "pauses": None}
        self.waiting = False
        self._watchers: list[Callable[[], None]] = []

    def watch(self, changed: Callable[[], None]) -> None:
        """Call back, from whatever thread, after every change."""
        self._watchers.append(changed)

    def set(self, **values: Any) -> None:
        """Change attributes at once, so that nobody reads half of it."""
        with self._lock:
            for name, value in values.items():
                if not hasattr(self, name):
                    raise AttributeError(name)
                setattr(self, name, value)
            if self.served is not self._since[0]:
                self._since = self.served, time.monotonic()
        for changed in self._watchers:
            changed()

    def rest(self, **values: Any) -> None:
        """Nothing is under way any more."""
        state: State = "refused" if self.broken else "waiting_for_run"
        if self.served is not None:
            state = "held" if self.holding or self.beyond else "idle"
        self.set(state=state, **values)

    def show_error(self, error: DeltaSyncError, state: State | None = None) -> None:
        """Show an error until something succeeds. ``refused`` and ``lost`` stay as they are."""
        metrics.count_failure(error.kind)
        shown = {"kind": error.kind, "message": error.message}
        if state is not None:
            self.set(state=state, error=shown)
        elif self.state in ("refused", "lost"):
            self.set(error=shown)
        else:
            self.rest(error=shown)

    def committed(self, leg: UpdatePlan, timings: dict[str, float]) -> None:
        """Record a commit of one or more versions."""
        rounded = {name: round(value, 3) for name, value in ordered({"turn": 0.0, **timings}).items()}
        entry = {
            "version": leg.target.version,
            "step": leg.target.step,
            "versions": leg.versions,
            "changed": leg.changed,
            "payload_bytes": leg.payload_bytes,
            "timings_ms": rounded,
        }
        with self._lock:
            self.timings = rounded
            self.commits += 1
            self._recent.append(entry)
        for changed in self._watchers:
            changed()

    def document(self) -> Answer:
        """The body of ``GET /delta_sync/status``."""
        with self._lock:
            standing = self._standing()
            return {
                "run": self.run,
                **standing,
                "ready": readiness(standing, self._max_lag, self.asleep),
                "undo": list(self.undo),
                "ranks": list(self.ranks),
                "timings_ms": dict(self.timings),
                "commits": self.commits,
                "looks": self.looks,
                "looked_seconds": _age(self.looked),
                "notice": self._notice(),
                "fleet": {**self.fleet, "waiting": self.waiting},
                "store": self._store(),
                "versions": dict(versions()),
                "recent": list(self._recent),
            }

    def _standing(self) -> Answer:
        return {
            "served": _point(self.served),
            "head": _point(self.head),
            "lag": self._lag(),
            "state": self.state,
            "last_error": self.error,
            "policy": self._policy,
            "target": self.target,
            "holding": self.holding,
        }

    def _lag(self) -> int | None:
        if self.served is None or self.head is None:
            return None
        # The newest manifest that can be read may be older than what is served.
        return 0 if self.goal is None else max(0, self.goal - self.served.version)

    def export(self) -> None:
        """Show all this to Prometheus from now on, after every change."""

        def show() -> None:
            with self._lock:
                ready = readiness(self._standing(), self._max_lag, self.asleep)["ready"]
                served, head, looked = self.served, self.head, self.looked
                values = {
                    "served_version": None if served is None else served.version,
                    "served_step": None if served is None else served.step,
                    "head_version": None if head is None else head.version,
                    "lag_versions": self._lag(),
                    "undo_versions": len(self.undo),
                    "look_timestamp_seconds": None if looked is None else _wall(looked),
                    "served_timestamp_seconds": None if served is None else _wall(self._since[1]),
                }
                state = self.state
            metrics.show({**values, "ready": float(ready)}, state, STATES)

        metrics.register()
        self.watch(show)
        show()

    def _store(self) -> Answer:
        # A rank may live in this process.
        parts = {use["process"]: use for use in [*self.used, store_usage()]}.values()
        return {name: round(sum(part[name] for part in parts), 3) for name in PROCESS.snapshot()}

    def _notice(self) -> Answer:
        # Without the address: it is nobody's business who may ask for the status.
        return {"listens": self.listens, "heard_seconds": _age(self.heard)}


def _wall(moment: float) -> float:
    """A moment of the monotonic clock, by the one that others see."""
    return time.time() - (time.monotonic() - moment)


def _age(moment: float | None) -> float | None:
    return None if moment is None else round(time.monotonic() - moment, 1)


@functools.cache
def versions() -> Answer:
    """What is installed, by name; ``tested``: whether this release was tested with that vLLM. None: not installed."""
    try:
        vllm: str | None = patches.distribution_version()[1]
    except EngineError:
        vllm = None
    try:
        torch: str | None = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    return {"vllm": vllm, "torch": torch, "vllm_delta_sync": __version__, "tested": patches.is_tested(vllm or "")}


def _point(manifest: Manifest | None) -> Answer | None:
    if manifest is None:
        return None
    reasons = [] if manifest.quarantine is None else manifest.quarantine.reasons
    return {
        "version": manifest.version,
        "step": manifest.step,
        "fingerprint": manifest.fingerprint,
        "quarantined": list(reasons),
    }
