"""``STATES`` are the receiver's states, and ``TRANSITIONS`` the allowed changes; docs/architecture.md draws them.

``StatusBoard.enter`` is the only place where the state changes. A receiver that does not act is in one of ``RESTING``,
and ``StatusBoard.settle`` says in which one.
"""

from typing import Literal

from vllm_delta_sync.engine.logger import logger

State = Literal[
    "waiting_for_run",
    "identifying",
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
    "identifying": "tracing the model's loader and comparing its weights with the run's",
    "refused": "this model cannot follow this run, or its weights are no longer a version; see last_error",
    "idle": "serving; no update in progress",
    "held": "serving one version and not following, until POST /delta_sync/release; or serving a newer version than "
    "the setting target names, see last_error",
    "staging": "fetching, verifying, decoding and routing versions, beside generation",
    "draining": "waiting for requests in flight to finish (setting pause_mode), while new ones wait for the commit",
    "committing": "the engine is paused and weights are being patched",
    "verifying": "rescanning all weights against what the history declares",
    "repairing": "weights were changed from outside; the version served before is being rebuilt from the bucket",
    "lost": "a commit could neither be finished nor reverted, or generation does not resume: the engine has ended, "
    "restart the server",
}

SERVING: tuple[State, ...] = ("idle", "held")
UPDATING: tuple[State, ...] = ("staging", "draining", "committing")
RESTING: tuple[State, ...] = ("waiting_for_run", "refused", *SERVING)
ACTING: tuple[State, ...] = ("identifying", *UPDATING, "verifying", "repairing")
"""The states that end with ``StatusBoard.settle``, whether the action succeeded or failed."""

# A commit begins in ``draining`` with the setting pause_mode wait, else in ``committing``. ``verifying`` goes back to
# the state before. ``_any`` of them may turn out to be lost.
_PAUSING: tuple[State, ...] = ("draining", "committing")
_FROM_SERVING: tuple[State, ...] = (
    "staging",
    *_PAUSING,
    "verifying",
    "refused",
    "waiting_for_run",
    "lost",
)
TRANSITIONS: dict[State, tuple[State, ...]] = {
    "waiting_for_run": ("identifying", "lost"),
    "identifying": (*RESTING, "staging", "lost"),
    "idle": ("held", *_FROM_SERVING),
    "held": ("idle", *_FROM_SERVING),
    "staging": (*RESTING, *_PAUSING, "verifying", "lost"),
    "draining": (*RESTING, "committing", "lost"),
    "committing": (*RESTING, "staging", "verifying", "lost"),
    "verifying": (*SERVING, "staging", "committing", "repairing", "lost"),
    "refused": ("repairing", "identifying", "waiting_for_run", "lost"),
    "repairing": ("refused", *SERVING, "verifying", "lost"),
    "lost": (),
}

undeclared: set[tuple[State, State]] = set()
"""Changes of state in this process that ``TRANSITIONS`` lacks; the tests fail if there is one."""


def check_transition(before: State, after: State) -> None:
    """Log, once for each pair of states, a change that is not in ``TRANSITIONS``. It is an error in this program."""
    if after == before or after in TRANSITIONS[before] or (before, after) in undeclared:
        return
    undeclared.add((before, after))
    logger.error("the receiver's state changed from %s to %s, which is not declared; please report this", before, after)
