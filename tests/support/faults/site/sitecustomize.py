"""Faults for real processes: put this folder on PYTHONPATH of a server, and name the fault in a file.

FAULT_FILE  file with one line "AT DO [RANK]". A fault happens once: the file is renamed to NAME.taken first. Write it
            again for the next. tests/support/faults/inject.py does that.
            AT: one of POINTS. DO: hang (this thread, for ever), wait (until NAME.taken is removed), stop (SIGSTOP to
            this process), exit (at once), raise (RuntimeError), memory (MemoryError). RANK: of rank.* points, 0 if not
            given.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

POINTS = {
    "controller.before_pause": ("vllm_delta_sync.engine.commit.transaction", "Transaction.commit", "before"),
    "controller.after_pause": ("vllm_delta_sync.engine.core.ports", "ServerEnginePort.pause", "after"),
    "controller.after_commit": ("vllm_delta_sync.engine.commit.transaction", "Transaction.commit", "after"),
    "rank.in_stage": ("vllm_delta_sync.engine.worker.rank_worker", "RankWorker.stage", "before"),
    "rank.before_scatter": ("vllm_delta_sync.engine.commit.apply", "apply_patch", "before"),
    "rank.after_scatter": ("vllm_delta_sync.engine.commit.apply", "apply_patch", "after"),
}


def happen(point: str) -> None:
    """The fault, if it is this one's turn, on this rank."""
    file = Path(os.environ["FAULT_FILE"])
    taken = file.with_name(file.name + ".taken")
    try:
        at, action, *rank = file.read_text().split()
        if at != point or (point.startswith("rank.") and own_rank() != int(*rank or "0")):
            return
        file.rename(taken)
    except FileNotFoundError:
        return
    print(f"fault: {action} at {point} in process {os.getpid()}", file=sys.stderr, flush=True)
    if action == "hang":
        threading.Event().wait()
    elif action == "wait":
        while taken.exists():
            time.sleep(0.01)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "exit":
        os._exit(70)
    elif action == "raise":
        raise RuntimeError(f"fault injected at {point}")
    elif action == "memory":
        raise MemoryError(f"fault injected at {point}")
    else:
        raise ValueError(f"{action!r} is no known fault")


def own_rank() -> int:
    from torch import distributed

    return distributed.get_rank() if distributed.is_initialized() else 0


def break_function(module: ModuleType, path: str, when: str, point: str) -> None:
    """Replace ``path`` in a module by itself with the fault before or after."""
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, module)
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def broken(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            happen(point)
        result = original(*args, **kwargs)
        if when == "after":
            happen(point)
        return result

    setattr(owner, name, broken)


class Saboteur(importlib.abc.MetaPathFinder):
    """Changes modules right after their import."""

    def __init__(self, changes: dict[str, list[Callable[[ModuleType], None]]]) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._changes:
            return None
        changes = self._changes.pop(name)
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            for change in changes:
                change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def install() -> None:
    changes: dict[str, list[Callable[[ModuleType], None]]] = {}
    if "FAULT_FILE" in os.environ:
        for point, (module, path, when) in POINTS.items():
            change = functools.partial(break_function, path=path, when=when, point=point)
            changes.setdefault(module, []).append(change)
    if changes:
        sys.meta_path.insert(0, Saboteur(changes))


install()
