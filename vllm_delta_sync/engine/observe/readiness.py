"""Whether a server may be sent requests, and whether a version can come: judged by what its status shows."""

from typing import Any

from vllm_delta_sync.engine.commit.transaction import Answer

ENDED = ("lost", "refused")
"""States that a server does not leave by following."""
SYNC = "POST /delta_sync/sync"
RELEASE = "POST /delta_sync/release to follow again"


def readiness(status: Answer, max_lag: int | None, asleep: bool) -> Answer:
    """``ready`` and, where that is False, ``reasons``: short texts that name cause and mend.

    Args:
        status: as ``GET /delta_sync/status`` shows it. max_lag: the setting. asleep: whether weights are in no memory.
    """
    reasons = list(_reasons(status, max_lag, asleep))
    return {"ready": not reasons, "reasons": reasons}


def _reasons(status: Answer, max_lag: int | None, asleep: bool) -> list[str]:
    served, lag, state = _served(status), _lag(status), status["state"]
    if state in ENDED:
        return [f"the state is {state}{_error(status)}; start the server again"]
    reasons = []
    if asleep:
        reasons.append("the engine is asleep; wake it up (POST /wake_up)")
    if served is None:
        mend = SYNC if _rests(status) else "wait"
        reasons.append(f"no version is proven yet, the state is {state}{_error(status)}; {mend}")
    if status["holding"]:
        reasons.append(f"held{'' if served is None else f' at version {served}'}; {RELEASE}")
    elif state == "held":
        reasons.append(f"version {served} is newer than the target {status['target']}; go back with rollback")
    if max_lag is not None and lag is not None and lag > max_lag:
        reasons.append(f"{lag} versions behind, max_lag is {max_lag}; {_catches_up(status)}")
    return reasons


def unreachable(status: Answer, version: int) -> str | None:
    """Why a version that is not served yet does not come unless somebody does something; None: it may."""
    served, target, state = _served(status), str(status["target"]), status["state"]
    head = (status["head"] or {}).get("version")
    wanted = f"version {version} is wanted, {served} is served, the head is {head}"
    if state in ENDED:
        return f"{wanted}, and the state is {state}{_error(status)}; ask another server"
    if target.isdecimal() and int(target) < version:
        return f"{wanted}, and the target is {target}; ask another server, or change it (POST /delta_sync/target)"
    if status["holding"] and served is not None:
        return f"{wanted}, and this server is held; {RELEASE}, or ask another server"
    if _rests(status):
        return f"{wanted}, and the setting policy is manual; {SYNC} first"
    return None


def _rests(status: Answer) -> bool:
    """Whether nothing happens before somebody asks for it."""
    return status["policy"] == "manual" and status["state"] in ("idle", "waiting_for_run")


def _served(status: Answer) -> int | None:
    point: dict[str, Any] | None = status["served"]
    return None if point is None else point["version"]


def _lag(status: Answer) -> int | None:
    """Versions between what is served and where following leads; None if that is not known."""
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
