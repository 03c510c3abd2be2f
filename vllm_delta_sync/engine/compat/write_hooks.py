"""``watch_writes`` notices vLLM's calls that write or move weights, and keeps them apart from reads beside generation.

A commit hashes only what it changes, so it would not notice a weight that was changed elsewhere. Therefore every such
call makes each receiver of the worker, also those of LoRA adapters, rescan all weights before the next version. Code
that writes into parameters directly is found by the rescan beside each staging (``rescan_bytes``) and by ``verify``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vllm_delta_sync.engine.compat import lora, patches
from vllm_delta_sync.engine.compat.speculation import draft_of
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.engine.names import TRANSFER_BACKEND

TRANSFER_METHODS = ("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update")
"""Methods of vLLM's weight transfer API. If the backend is ours, workers refuse these, and nothing is written."""
WRITE_METHODS = ("load_model", "reload_weights", "reset_weights", *TRANSFER_METHODS)
"""Methods of vLLM's workers that write weights. Some releases lack some of them."""
WAKE = "wake_up"


def watch_writes(worker: Any, model: Any, memory: WeightMemory) -> None:
    """Wrap these methods of one worker, its model and its draft, on the instances, for all listeners of its memory.

    Cause: vLLM has no hook for written or unmapped weights. Symptom: a patch is committed on top of other weights, so
    that the result is no version; or a kernel of the background thread reads memory that ``sleep`` has unmapped, which
    ends the process. Remove when: vLLM notifies extensions of weight updates and of sleep.

    Sleep at level 2 loses the weights, and vLLM brings only buffers back. What the run cannot rebuild, such as a vision
    tower that it has no tensors of, waits in host memory.
    """
    loses_weights = False
    kept: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def note_write(name: str) -> None:
        for listener in memory.listeners:
            listener.note_external_write(name)

    def write(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with memory.exclusive():
            note_write(name)
            try:
                return original(*args, **kwargs)
            finally:
                note_write(name)

    def sleep(original: Callable[..., Any], level: int = 1) -> Any:
        nonlocal loses_weights
        with memory.exclusive():
            # Of what sleeps already nothing can be read.
            can_keep, memory.asleep = not memory.asleep, True
            loses_weights = level > 1
            for listener in memory.listeners:
                listener.leave_device()
            try:
                if loses_weights and can_keep:
                    lost = {each._cdata: each for listener in memory.listeners for each in listener.not_rebuilt()}
                    kept.extend((each, torch.UntypedStorage(each.nbytes()).copy_(each)) for each in lost.values())
                return original(level)
            except BaseException:
                # vLLM takes the engine for awake then, so that no wake-up follows.
                note_write("sleep")
                memory.asleep = loses_weights = False
                kept.clear()
                raise

    def wake(original: Callable[..., Any], tags: list[str] | None = None) -> Any:
        nonlocal loses_weights
        with memory.exclusive():
            result = original(tags)
            if tags is None or "weights" in tags:
                # Only now: until then the weights are not in place, and level 2 brings back other weights.
                for storage, copied in kept:
                    storage.copy_(copied)
                kept.clear()
                if loses_weights:
                    lora.forget_all(worker)
                    loses_weights = False
                note_write(WAKE)
                memory.asleep = False
            return result

    def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        if hasattr(owner, name):
            patches.wrap_method(owner, name, wrapper)

    ours = patches.transfer_backend(getattr(worker, "vllm_config", None)) == TRANSFER_BACKEND
    for name in WRITE_METHODS:
        if not (ours and name in TRANSFER_METHODS):
            wrap(worker, name, partial(write, name))
    wrap(getattr(worker, "model_runner", None), "reload_weights", partial(write, "reload_weights"))
    drafting = draft_of(worker)
    for each in (model, *(() if drafting is None else (drafting.model,))):
        wrap(each, "load_weights", partial(write, "load_weights"))
    wrap(worker, "sleep", sleep)
    wrap(worker, WAKE, wake)
