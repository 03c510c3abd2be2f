"""``WorkerExtension`` receives the controller's calls in every worker process and passes them to ``RankWorker``.

Calls arrive through the executor's message queues, or by ``collective_rpc`` (``core/rank_rpc.py``).

vLLM mixes this class into its worker and refuses attribute names that the worker has, so all names begin with
``delta_sync_`` and all state is in one object.
"""

import threading
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.protocol import serve

if TYPE_CHECKING:
    from vllm_delta_sync.engine.worker.rank_worker import RankWorker


CONTACT_SECONDS = 300.0
"""How long a worker waits for its controller before each warning that none has called."""


class WorkerExtension:
    """Mixed into vLLM's worker by ``--worker-extension-cls``."""

    delta_sync_receiver: "RankWorker | None" = None

    def delta_sync_call(self, request: bytes, number: int) -> dict[str, Any]:
        """Return the call's number, and this rank's encoded answer to an encoded request."""
        contacted.set()
        return {"call": number, "answer": serve(request, lambda decoded: self._delta_sync_rank().answer(decoded))}

    def _delta_sync_rank(self) -> "RankWorker":
        # Imported here: numba must not be loaded before vLLM has initialized its worker.
        from vllm_delta_sync.engine.compat import patches, write_hooks
        from vllm_delta_sync.engine.model import load_record
        from vllm_delta_sync.engine.worker.rank_worker import RankWorker

        if self.delta_sync_receiver is None:
            model = self.get_model()  # type: ignore[attr-defined]
            folder = self.model_config.model  # type: ignore[attr-defined]
            self.delta_sync_receiver = RankWorker(model, self.rank, folder)  # type: ignore[attr-defined]
            write_hooks.watch_writes(self, model, self.delta_sync_receiver)
            record = load_record.load_record_of(model)
            if record is not None and record.changed:
                patches.keep_current_config(self.vllm_config)  # type: ignore[attr-defined]
        return self.delta_sync_receiver


contacted = threading.Event()


def watch_for_controller() -> None:
    """Log a warning every CONTACT_SECONDS until a controller has called."""

    def watch() -> None:
        while not contacted.wait(CONTACT_SECONDS):
            logger.warning(
                "vllm-delta-sync: the worker extension is loaded but no controller has contacted it. Name delta_sync "
                "in VLLM_PLUGINS and set DELTA_SYNC_BUCKET (delta-sync serve does both), or call attach(llm, bucket)."
            )

    threading.Thread(target=watch, name="delta-sync-contact", daemon=True).start()
