"""Weights that changed, from a trainer to running vLLM servers, through a bucket.

``open_run(url)`` reads a run; ``trainer_side.Publisher`` writes one; ``vllm_delta_sync.engine`` follows one inside
vLLM. The modules build on each other in one direction: errors, wire, bucket, chain and notice, then engine and cli.
"""

from typing import TYPE_CHECKING

from vllm_delta_sync.errors import DeltaSyncError

if TYPE_CHECKING:
    from vllm_delta_sync.client import Run, open_run

__all__ = ["DeltaSyncError", "Run", "open_run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # vLLM imports this package in every process; reading runs needs more than that import should cost.
    if name in ("Run", "open_run"):
        from vllm_delta_sync import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
