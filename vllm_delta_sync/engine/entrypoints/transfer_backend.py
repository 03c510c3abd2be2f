"""``BucketTransferEngine`` refuses weight transfer calls that reach a worker.

The receiver updates all ranks together, so calls end at the engine's client (``engine.api.weight_transfer``). A call
that reaches a worker must fail instead of silently doing nothing.
"""

from typing import Any, NoReturn

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from vllm_delta_sync.engine.names import TRANSFER_BACKEND
from vllm_delta_sync.errors import EngineError


class BucketTransferEngine(WeightTransferEngine[dict[str, Any], dict[str, Any]]):
    """Refuses every update, by an EngineError."""

    init_info_cls = dict
    update_info_cls = dict
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        _refuse("init_weight_transfer_engine")

    def start_weight_update(self) -> None:
        _refuse("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        _refuse("update_weights")

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        _refuse("update_weights")

    def finish_weight_update(self) -> None:
        _refuse("finish_weight_update")

    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""


def _refuse(method: str) -> NoReturn:
    raise EngineError(
        f"{method} reached a worker, and the weight transfer backend {TRANSFER_BACKEND} is served by the receiver, "
        "which updates all ranks together: on a server name delta_sync in VLLM_PLUGINS and set DELTA_SYNC_BUCKET "
        "(delta-sync serve does both), otherwise call attach(llm, bucket) or attach_async(engine, bucket), and to() of "
        "what it returns; nothing was changed"
    )
