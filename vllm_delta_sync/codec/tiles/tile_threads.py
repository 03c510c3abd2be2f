"""``on_threads`` codes parts of a tensor side by side; the compiled loops release the GIL."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

THREADS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
"""Most threads. More would take cores from the training, or from a server's rollouts."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def threads_for(work: int, least: int) -> int:
    """Return on how many threads to do ``work``, if each is to have ``least`` of it."""
    return max(1, min(THREADS, work // least))


def on_threads(call: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Return ``call(item)`` for each item, all at once, the first one in this thread; raise the first error."""
    if len(items) == 1:
        return [call(items[0])]
    found: dict[int, _Result] = {}
    errors: dict[int, BaseException] = {}

    def run(number: int) -> None:
        try:
            found[number] = call(items[number])
        except BaseException as error:  # noqa: BLE001  raised below
            errors[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(1, len(items))]
    started = []
    for number, thread in enumerate(threads, 1):
        try:
            thread.start()
            started.append(thread)
        except RuntimeError:  # the interpreter is shutting down, or there are too many threads
            run(number)
    try:
        run(0)
    finally:
        for thread in started:
            thread.join()
    if errors:
        raise errors[min(errors)]
    return [found[number] for number in range(len(items))]
