"""``STATES`` are the receiver's states; docs/architecture.md draws the changes between them.

``StatusBoard.enter`` is the only place where the state changes. A receiver that does not act is in the state that
``StatusBoard.settle`` finds. ``readiness`` and ``unreachable`` judge by a server's status: may requests be sent, and
will a version be served?
"""

from typing import Any, Literal

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
Answer = dict[str, Any]
"""A JSON document: a status, or the answer to a request."""
FINAL_STATES: tuple[State, ...] = ("lost", "refused")
"""States in which the server serves no version, and does not look for one."""
ENDING = "this server is ending; ask another server"
SYNC = "POST /delta_sync/sync"
RELEASE = "POST /delta_sync/release to follow again"


def readiness(status: Answer, max_lag: int | None, asleep: bool, ended: bool = False) -> Answer:
    """Return ``ready`` and, where it is False, ``reasons``: short texts with cause and remedy.

    Args:
        status: as in ``GET /delta_sync/status``. max_lag: the setting. asleep: whether the engine sleeps.
        ended: whether the engine has died or is being stopped.
    """
    reasons = [*_reasons(status, max_lag, asleep), *([ENDING] if ended else [])]
    return {"ready": not reasons, "reasons": reasons}


def _reasons(status: Answer, max_lag: int | None, asleep: bool) -> list[str]:
    served, lag, state = _served(status), lag_to_target(status), status["state"]
    if state in FINAL_STATES:
        remedy = "restart the server"
        if state == "refused" and status["repairable"]:
            remedy = f"{SYNC if status['policy'] == 'manual' else 'wait'}: the weights are rebuilt from the bucket"
        return [f"the state is {state}{_error(status)}; {remedy}"]
    reasons = []
    if asleep:
        reasons.append("the engine is asleep; wake it up (POST /wake_up)")
    if served is None:
        remedy = SYNC if _waits_for_request(status) else "wait"
        reasons.append(f"no version is served yet, the state is {state}{_error(status)}; {remedy}")
    if status["holding"]:
        reasons.append(f"held{'' if served is None else f' at version {served}'}; {RELEASE}")
    elif state == "held":
        reasons.append(f"version {served} is newer than the target {status['target']}; use rollback")
    if max_lag is not None and lag is not None and lag > max_lag:
        reasons.append(f"{lag} versions behind, max_lag is {max_lag}; {_catches_up(status)}")
    return reasons


def unreachable(status: Answer, version: int) -> str | None:
    """Return why a version will not be served without an operator's action; None if it may be."""
    served, target, state = _served(status), str(status["target"]), status["state"]
    head = (status["head"] or {}).get("version")
    wanted = f"version {version} is wanted, {served} is served, the head is {head}"
    repairs = state == "refused" and status["repairable"]
    if state in FINAL_STATES and not repairs:
        return f"{wanted}, and the state is {state}{_error(status)}; ask another server"
    if status["requested"] or (served is not None and served >= version):
        return None
    if target.isdecimal() and int(target) < version:
        return f"{wanted}, and the target is {target}; ask another server, or change it (POST /delta_sync/target)"
    if status["holding"] and served is not None:
        return f"{wanted}, and this server is held; {RELEASE}, or ask another server"
    if _waits_for_request(status):
        return f"{wanted}, and the setting policy is manual; {SYNC} first"
    return None


def _waits_for_request(status: Answer) -> bool:
    """Return whether the server does nothing until a request, by policy ``manual``."""
    idle = status["state"] in ("idle", "waiting_for_run", "refused") and not status["requested"]
    return status["policy"] == "manual" and idle


def _served(status: Answer) -> int | None:
    point: dict[str, Any] | None = status["served"]
    return None if point is None else point["version"]


def lag_to_target(status: Answer) -> int | None:
    """Count the versions from the served one to the target; None if unknown, as where the target is a tag."""
    served, target = _served(status), str(status["target"])
    if served is None:
        return None
    if target.isdecimal():
        return max(0, int(target) - served)
    lag: int | None = status["lag"] if target == "head" else None
    return lag


def _error(status: Answer) -> str:
    error = status["last_error"]
    return "" if error is None else f" ({error['message']})"


def _catches_up(status: Answer) -> str:
    if status["holding"]:
        return RELEASE
    return SYNC if status["policy"] == "manual" else "it catches up by itself"
