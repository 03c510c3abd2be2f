"""One operation at a time beside the engine: started and polled, because a long remote call would block the engine."""

import threading
from collections.abc import Callable

from vllm_delta_sync.engine.transaction import Answer, as_ours, error_answer
from vllm_delta_sync.errors import BusyError, DeltaSyncError


class Background:
    """A thread per operation, and the outcome of the last one."""

    def __init__(self) -> None:
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
            self._outcome = operation(**arguments)
        except DeltaSyncError as error:
            self._outcome = error_answer(error)
        except Exception as error:  # noqa: BLE001  a thread's error would be lost; the controller must hear of it
            self._outcome = error_answer(as_ours(error))

    def poll(self) -> Answer:
        """{"running": True}, or the outcome of the last operation with "running" False."""
        return {"running": True} if self.is_busy else {"running": False, **self._outcome}
