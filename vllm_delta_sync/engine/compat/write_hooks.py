"""``watch_writes`` notices vLLM's calls that write or move weights, and keeps them apart from reads beside generation.

A commit hashes only what it changes, so it would not notice a weight that was changed elsewhere. Therefore every such
call makes the receiver rescan all weights before the next version. Code that writes into parameters directly is found
by the scrubbing rescan (setting ``rescan_bytes``) and by ``verify``.
"""

from typing import Any, Protocol

from vllm_delta_sync.engine.compat import patches
from vllm_delta_sync.engine.model.weight_memory import WeightMemory

TRANSFER_METHODS = ("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update")
"""Methods of vLLM's weight transfer API. If the backend is ours, workers refuse these, and nothing is written."""
WRITE_METHODS = ("load_model", "reload_weights", "reset_weights", *TRANSFER_METHODS)
"""Methods of vLLM's workers that write weights. Some releases lack some of them."""
SLEEP = "sleep"
WAKE = "wake_up"


class WriteListener(Protocol):
    """Receives notifications; see RankWorker."""

    memory: WeightMemory

    def note_external_write(self, writer: str) -> None: ...


def watch_writes(worker: Any, model: Any, listener: WriteListener) -> None:
    """Wrap these methods of one worker and its model, on the instances.

    Cause: vLLM has no hook for written or unmapped weights. Symptom: a patch is committed on top of other weights, so
    that the result is no version; or a kernel of the background thread reads memory that ``sleep`` has unmapped, which
    ends the process. Remove when: vLLM notifies extensions of weight updates and of sleep.
    """
    ours = patches.transfer_backend(getattr(worker, "vllm_config", None)) == patches.TRANSFER_BACKEND
    for name in WRITE_METHODS:
        if not (ours and name in TRANSFER_METHODS):
            _wrap_writer(worker, name, listener)
    _wrap_writer(getattr(worker, "model_runner", None), "reload_weights", listener)
    _wrap_writer(model, "load_weights", listener)
    if hasattr(worker, SLEEP):
        _wrap_sleep(worker, listener)
    if hasattr(worker, WAKE):
        _wrap_wake(worker, listener)


def _wrap_writer(owner: Any, name: str, listener: WriteListener) -> None:
    original = getattr(owner, name, None)
    if original is None:
        return

    def write(*args: Any, **kwargs: Any) -> Any:
        with listener.memory.exclusive():
            listener.note_external_write(name)
            try:
                return original(*args, **kwargs)
            finally:
                listener.note_external_write(name)

    setattr(owner, name, write)


def _wrap_sleep(worker: Any, listener: WriteListener) -> None:
    original = getattr(worker, SLEEP)

    def sleep(*args: Any, **kwargs: Any) -> Any:
        with listener.memory.exclusive():
            listener.memory.asleep = True
            return original(*args, **kwargs)

    setattr(worker, SLEEP, sleep)


def _wrap_wake(worker: Any, listener: WriteListener) -> None:
    original = getattr(worker, WAKE)

    def wake(tags: list[str] | None = None) -> Any:
        with listener.memory.exclusive():
            result = original(tags)
            if tags is None or "weights" in tags:
                # Only now: until then the weights are not in place, and level 2 brings back other weights.
                listener.note_external_write(WAKE)
                listener.memory.asleep = False
            return result

    setattr(worker, WAKE, wake)
