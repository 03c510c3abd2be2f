"""``BucketTransferEngine`` refuses weight transfer calls that reach a worker.

The receiver updates all ranks together, so calls end at the engine's client (``engine.api.weight_transfer``). A call
that reaches a worker must fail instead of silently doing nothing.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from vllm_delta_sync.engine.names import TRANSFER_BACKEND
from vllm_delta_sync.errors import EngineError


def _refusal(call: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *arguments: object) -> NoReturn:
        raise EngineError(
            f"{call} reached a worker, and the weight transfer backend {TRANSFER_BACKEND} is served by the receiver, "
            "which updates all ranks together: on a server name delta_sync in VLLM_PLUGINS and set DELTA_SYNC_BUCKET "
            "(delta-sync serve does both), otherwise call attach(llm, bucket) or attach_async(engine, bucket), and "
            "to() of what it returns; nothing was changed"
        )

    return refuse


class BucketTransferEngine(WeightTransferEngine[dict[str, Any], dict[str, Any]]):
    """Refuses every update, by an EngineError."""

    init_info_cls = dict
    update_info_cls = dict
    supports_draft_weight_update = False
    init_transfer_engine = _refusal("init_weight_transfer_engine")
    start_weight_update = _refusal("start_weight_update")
    update_weights = receive_weights = _refusal("update_weights")
    finish_weight_update = _refusal("finish_weight_update")

    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""
