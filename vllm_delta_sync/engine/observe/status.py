"""``StatusBoard`` holds the receiver's part of ``GET /delta_sync/status``; one thread writes it, any thread reads it.

The API server adds ``role``, ``server`` and ``servers`` (``api/api_servers.py``).
"""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from vllm_delta_sync import __version__
from vllm_delta_sync.bucket.middleware.usage import PROCESS
from vllm_delta_sync.engine.compat import patches
from vllm_delta_sync.engine.observe import metrics
from vllm_delta_sync.engine.observe.states import STATES, Answer, State, lag_to_target, readiness
from vllm_delta_sync.engine.staging.stage import store_usage
from vllm_delta_sync.errors import DeltaSyncError, EngineError
from vllm_delta_sync.format.manifest import Manifest

RECENT_COMMITS = 64


class StatusBoard:
    """The receiver's part of ``GET /delta_sync/status``.

    Attributes:
        served: the version that answers now; None until the weights are identified as one. head: newest known version.
        goal: the version that a receiver of the head serves; None if there is none.
        target: what is followed: head, a version, or tag:NAME.
        holding: whether new versions are ignored.
        requests: those that may lead to another version, and are not answered yet.
        ahead_of_target: whether the served version was newer than the target when the target was last resolved.
        asleep: whether the engine's weights were out of memory when last asked.
        invalidated: whether the weights were found to be no version.
        repair_target: the version served when weights were found changed from outside; None once repaired.
        polls: how often the bucket was polled.
        rank_store_use: the ranks' use of stores, as of the last staging.
        receiver: this receiver's id, None if unset.
        listens: whether notices are set up. notice_heard_at: when the last one came, by the monotonic clock.
        polled_at: when the bucket was last read without an error, by the monotonic clock; None before.
        trust: gives the field ``trust``.
        has_ended: returns whether the engine has died or is being stopped.
    """

    def __init__(self, policy: str, target: str = "head", max_lag: int | None = None) -> None:
        self._lock = threading.Lock()
        self._policy = policy
        self.target = target
        self._max_lag = max_lag
        self._recent: deque[Answer] = deque(maxlen=RECENT_COMMITS)
        self.run: str | None = None
        self._state: State = "waiting_for_run"
        self.error: dict[str, str] | None = None
        self.served: Manifest | None = None
        self.head: Manifest | None = None
        self.goal: int | None = None
        self.holding = False
        self.requests: set[Future[Any]] = set()
        self.ahead_of_target = False
        self.invalidated = False
        self.repair_target: Manifest | None = None
        self.asleep = False
        self.ranks: list[Answer] = []
        self.undo: list[int] = []
        self.timings: dict[str, float] = {}
        self.commits = 0
        self.polls = 0
        self.polled_at: float | None = None
        self._served_since: tuple[Manifest | None, float] = None, 0.0
        self.rank_store_use: list[Answer] = []
        self.listens = False
        self.notice_heard_at: float | None = None
        self.receiver: str | None = None
        self.trust: Callable[[], Answer | None] = lambda: None
        self.has_ended: Callable[[], bool] = lambda: False
        self._watchers: list[Callable[[], None]] = []

    @property
    def served_version(self) -> int | None:
        """The version that answers now; None until the weights are identified as a version."""
        served = self.served
        return None if served is None else served.version

    @property
    def state(self) -> State:
        """What the receiver is doing; ``enter`` changes it."""
        return self._state

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` after every change, from any thread."""
        self._watchers.append(changed)

    def set(self, **values: Any) -> None:
        """Change several attributes atomically."""
        with self._lock:
            for name, value in values.items():
                if not hasattr(self, name):
                    raise AttributeError(name)
                setattr(self, name, value)
            if self.served is not self._served_since[0]:
                self._served_since = self.served, time.monotonic()
        for changed in self._watchers:
            changed()

    def add_request(self, request: "Future[Any]") -> None:
        """Show that a request to serve another version waits or is carried out, until it is answered."""

        def ended(request: "Future[Any]") -> None:
            self.requests.discard(request)
            self.set()

        self.requests.add(request)
        self.set()
        request.add_done_callback(ended)

    def enter(self, state: State, **values: Any) -> None:
        """Change the state, and other attributes with it as ``set`` does; every change of state passes here."""
        self.set(_state=state, **values)

    def settle(self, **values: Any) -> None:
        """Enter the state that the served version implies, after an action has ended; ``values`` as ``set``."""
        state: State = "refused" if self.invalidated else "waiting_for_run"
        if self.served is not None:
            state = "held" if self.holding or self.ahead_of_target else "idle"
        self.enter(state, **values)

    def report_error(self, error: DeltaSyncError, state: State | None = None, *, is_failure: bool = True) -> None:
        """Show an error until something succeeds. The states ``refused`` and ``lost`` stay."""
        if is_failure:
            metrics.count_failure(error.kind)
        shown = {"kind": error.kind, "message": error.message}
        if state is not None:
            self.enter(state, error=shown)
        elif self.state in ("refused", "lost"):
            self.set(error=shown)
        else:
            self.settle(error=shown)

    def record_commit(self, move: str, target: Manifest, timings: dict[str, float], read: dict[str, int]) -> None:
        """Record a change of the weights served.

        Args:
            move: of ``metrics.MOVES``. read: as ``UpdatePlan.read``.
        """
        metrics.count_move(move, timings, **read)
        rounded = {name: round(value, 3) for name, value in timings.items()}
        with self._lock:
            self._recent.append({"version": target.version, "step": target.step, **read, "timings_ms": rounded})
            self.timings, self.commits = rounded, self.commits + 1
        self.set()

    def document(self) -> Answer:
        """Return the body of ``GET /delta_sync/status``."""
        trust = self.trust()
        with self._lock:
            standing = self._core_fields()
            return {
                "run": self.run,
                **standing,
                "ready": self._readiness(standing),
                "undo": list(self.undo),
                "ranks": list(self.ranks),
                "timings_ms": dict(self.timings),
                "commits": self.commits,
                "polls": self.polls,
                "polled_seconds": _age(self.polled_at),
                # Without the address, because anyone may read the status.
                "notice": {"listens": self.listens, "heard_seconds": _age(self.notice_heard_at)},
                "fleet": {"receiver": self.receiver},
                "store": self._store(),
                "versions": dict(versions()),
                "recent": list(self._recent),
                "trust": trust,
            }

    def _core_fields(self) -> Answer:
        return {
            "served": _version_document(self.served),
            "head": _version_document(self.head),
            "lag": self._lag(),
            "state": self.state,
            "last_error": self.error,
            "policy": self._policy,
            "target": self.target,
            "holding": self.holding,
            "requested": bool(self.requests),
            "repairable": self.repair_target is not None,
        }

    def _readiness(self, standing: Answer) -> Answer:
        return readiness(standing, self._max_lag, self.asleep, self.has_ended())

    def _lag(self) -> int | None:
        if self.served is None or self.head is None:
            return None
        # The newest readable manifest may be older than the served version.
        return 0 if self.goal is None else max(0, self.goal - self.served.version)

    def export_metrics(self) -> None:
        """Write the gauges of Prometheus now and after every change."""

        def show() -> None:
            with self._lock:
                standing = self._core_fields()
                ready = self._readiness(standing)["ready"]
                served, head, polled = self.served, self.head, self.polled_at
                values = {
                    "served_version": None if served is None else served.version,
                    "served_step": None if served is None else served.step,
                    "head_version": None if head is None else head.version,
                    "head_quarantined": None if head is None else head.quarantine is not None,
                    "lag_versions": lag_to_target(standing),
                    "undo_versions": len(self.undo),
                    "look_timestamp_seconds": None if polled is None else _wall_clock(polled),
                    "served_timestamp_seconds": None if served is None else _wall_clock(self._served_since[1]),
                }
                # Within the lock, or another thread's older values could be written last, and stay.
                metrics.show({**values, "ready": float(ready)}, self.state, STATES)

        metrics.register()
        self.watch(show)
        show()

    def _store(self) -> Answer:
        # A rank may run in this process, and must not count twice.
        parts = {use["process"]: use for use in [*self.rank_store_use, store_usage()]}.values()
        return {name: round(sum(part[name] for part in parts), 3) for name in PROCESS.snapshot()}


def _wall_clock(moment: float) -> float:
    """Return the Unix time of a moment of the monotonic clock."""
    return time.time() - (time.monotonic() - moment)


def _age(moment: float | None) -> float | None:
    return None if moment is None else round(time.monotonic() - moment, 1)


@functools.cache
def versions() -> Answer:
    """Return installed versions by package name, None for vLLM if missing; ``tested``: whether it was tested."""
    try:
        vllm: str | None = patches.distribution_version()[1]
    except EngineError:
        vllm = None
    tested = patches.is_tested(vllm or "")
    return {"vllm": vllm, "torch": str(torch.__version__), "vllm_delta_sync": __version__, "tested": tested}


def _version_document(manifest: Manifest | None) -> Answer | None:
    if manifest is None:
        return None
    reasons = [] if manifest.quarantine is None else manifest.quarantine.reasons
    return {
        "version": manifest.version,
        "step": manifest.step,
        "fingerprint": manifest.fingerprint,
        "quarantined": list(reasons),
        "held_back": None if manifest.held_back is None else manifest.held_back.model_dump(),
    }
