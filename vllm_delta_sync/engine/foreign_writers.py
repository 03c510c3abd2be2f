"""Notice when somebody else writes weights, through any of vLLM's own doors.

A commit hashes only what it changes, so a weight that was changed elsewhere would go unnoticed. The doors that vLLM
has are watched here: whatever passes one makes the receiver rescan all weights before the next version. Code that
writes into parameters directly is found by the rescan in turns (setting ``rescan_bytes``) and by ``verify``.
"""

from collections.abc import Callable
from typing import Any, Protocol

from vllm_delta_sync.engine import transfer

TRANSFERS = ("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update")
"""What vLLM's weight transfer API calls. Where its backend is ours, workers refuse these, and nothing is written."""
WRITERS = ("load_model", "reload_weights", "reset_weights", *TRANSFERS)
"""Methods of vLLM's workers that write weights. Absent ones are passed over: releases differ."""
SLEEP = "sleep"
WAKE = "wake_up"


class Watched(Protocol):
    """What is told; see RankReceiver."""

    asleep: bool

    def touch(self, who: str) -> None: ...


def watch(worker: Any, model: Any, receiver: Watched) -> None:
    """Wrap the doors of one worker and its model, on the instances.

    Cause: vLLM has no hook for written weights. Symptom without: a patch is committed on top of other weights and what
    is served is no version. Remove when: vLLM tells extensions about weight updates.
    """

    def touch(name: str) -> Callable[[], None]:
        def note() -> None:
            receiver.touch(name)

        return note

    ours = transfer.backend_of(getattr(worker, "vllm_config", None)) == transfer.BACKEND
    for name in WRITERS:
        if ours and name in TRANSFERS:
            continue
        _wrap(worker, name, touch(name), touch(name))
    _wrap(getattr(worker, "model_runner", None), "reload_weights", touch("reload_weights"), touch("reload_weights"))
    _wrap(model, "load_weights", touch("load_weights"), touch("load_weights"))

    def sleep() -> None:
        receiver.asleep = True

    _wrap(worker, SLEEP, sleep, lambda: None)
    _wrap_wake(worker, receiver)


def _wrap_wake(worker: Any, receiver: Watched) -> None:
    original = getattr(worker, WAKE, None)
    if original is None:
        return

    def wake(tags: list[str] | None = None) -> Any:
        result = original(tags)
        if tags is None or "weights" in tags:
            # Only now: until then weights are not where they were, and level 2 brings back others.
            receiver.touch(WAKE)
            receiver.asleep = False
        return result

    setattr(worker, WAKE, wake)


def _wrap(owner: Any, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
    original = getattr(owner, name, None)
    if original is None:
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return original(*args, **kwargs)
        finally:
            after()

    setattr(owner, name, call)
