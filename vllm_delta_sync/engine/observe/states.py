"""``STATES`` are the receiver's states; docs/architecture.md draws the changes between them.

``StatusBoard.enter`` is the only place where the state changes. A receiver that does not act is in the state that
``StatusBoard.settle`` finds.
"""

from typing import Literal

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

ACTING: tuple[State, ...] = ("identifying", "staging", "draining", "committing", "verifying", "repairing")
"""The states that end with ``StatusBoard.settle``, whether the action succeeded or failed."""
