"""``WorkerExtension`` receives the controller's calls in a worker process, and hands each to a ``RankWorker``.

vLLM imports this module before it initializes its worker, which must not find numba loaded, so the modules used here
import their compiled loops late.
"""

import threading
from typing import Any

from vllm_delta_sync.engine import protocol
from vllm_delta_sync.engine.compat import patches, write_hooks
from vllm_delta_sync.engine.compat.speculation import draft_of, folder_of
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.model.load_record import load_record_of
from vllm_delta_sync.engine.model.tied_head import TiedHead
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.engine.worker.adapter_worker import AdapterWorker
from vllm_delta_sync.engine.worker.rank_worker import RankWorker

CONTACT_SECONDS = 300.0
"""How long a worker waits for its controller before each warning that none has called."""
contacted = threading.Event()


class WorkerExtension:
    """Mixed into vLLM's worker by ``--worker-extension-cls``; receives the controller's calls.

    vLLM refuses attribute names that the worker has, so all names begin with ``delta_sync_`` and all state is in one
    object.
    """

    delta_sync_memory: "WeightMemory | None" = None
    delta_sync_receiver: "RankWorker | None" = None
    delta_sync_adapters: "dict[str, AdapterWorker] | None" = None

    def delta_sync_call(self, request: bytes, number: int) -> dict[str, Any]:
        """Return the call's number, and this rank's encoded answer to an encoded request."""
        contacted.set()
        return {
            "call": number,
            "answer": protocol.serve(request, lambda decoded: self._delta_sync_rank(decoded.adapter).answer(decoded)),
        }

    def _delta_sync_rank(self, adapter: protocol.Adapter | None) -> "RankWorker":
        if adapter is not None:
            return self._delta_sync_adapter(adapter)
        if self.delta_sync_receiver is None:
            model = self.get_model()  # type: ignore[attr-defined]
            config = self.model_config  # type: ignore[attr-defined]
            self.delta_sync_receiver = RankWorker(
                model,
                self.rank,  # type: ignore[attr-defined]
                folder_of(config),
                self._delta_sync_memory(),
                TiedHead(config),
                draft_of(self),
            )
            record = load_record_of(model)
            if record is not None and record.changed:
                patches.keep_current_config(self.vllm_config)  # type: ignore[attr-defined]
        return self.delta_sync_receiver

    def _delta_sync_adapter(self, adapter: protocol.Adapter) -> "RankWorker":
        if self.delta_sync_adapters is None:
            self.delta_sync_adapters = {}
        known = self.delta_sync_adapters.get(adapter.name)
        if known is None:
            known = AdapterWorker(self, adapter, self.rank, self._delta_sync_memory())  # type: ignore[attr-defined]
            self.delta_sync_adapters[adapter.name] = known
        known.adapter = adapter
        return known

    def _delta_sync_memory(self) -> WeightMemory:
        """Return the guard of this worker's memory, which everything followed here shares."""
        if self.delta_sync_memory is None:
            model = self.get_model()  # type: ignore[attr-defined]
            self.delta_sync_memory = WeightMemory.for_model(model)
            write_hooks.watch_writes(self, model, self.delta_sync_memory)
            patches.keep_queries(self)
        return self.delta_sync_memory


def watch_for_controller() -> None:
    """Log a warning every CONTACT_SECONDS until a controller has called."""

    def watch() -> None:
        while not contacted.wait(CONTACT_SECONDS):
            logger.warning(
                "vllm-delta-sync: the worker extension is loaded but no controller has contacted it. Name delta_sync "
                "in VLLM_PLUGINS and set DELTA_SYNC_BUCKET (delta-sync serve does both), or call attach(llm, bucket)."
            )

    threading.Thread(target=watch, name="delta-sync-contact", daemon=True).start()
