"""``Background`` runs one operation at a time beside the engine: started and polled, as a long call would block it."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from vllm_delta_sync.engine.commit.transaction import Answer, as_ours, error_answer
from vllm_delta_sync.errors import BusyError, DeltaSyncError


class Background:
    """A thread per operation, and the outcome of the last one.

    Args:
        context: entered in the thread around each operation.
    """

    def __init__(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._context = context
        self._thread: threading.Thread | None = None
        self._outcome: Answer = {}

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, name: str, operation: Callable[..., Answer], arguments: Answer) -> None:
        """Begin. Raises BusyError: an operation is still running."""
        if self.is_busy:
            raise BusyError(f"operation {name!r} must wait: another one is running")
        self._outcome = {}
        self._thread = threading.Thread(
            target=self._run, args=(operation, arguments), name="delta-sync-stage", daemon=True
        )
        self._thread.start()

    def _run(self, operation: Callable[..., Answer], arguments: Answer) -> None:
        try:
            with self._context():
                self._outcome = operation(**arguments)
        except DeltaSyncError as error:
            self._outcome = error_answer(error)
        except Exception as error:  # noqa: BLE001  a thread's error would be lost; the controller must hear of it
            self._outcome = error_answer(as_ours(error))

    def outcome(self) -> Answer:
        """What the last operation answered, or its error. Raises BusyError: it is still running."""
        if self.is_busy:
            raise BusyError("the operation has no outcome yet: it is still running")
        return self._outcome
