"""Ships changed weights from a trainer to running vLLM servers through a bucket.

``open_run(url)`` reads a run; ``follow(url, folder)`` keeps a checkpoint folder at its newest version;
``trainer_side.Publisher`` writes one; ``vllm_delta_sync.engine`` follows one inside vLLM. Imports point one way; from
the bottom: ``errors``, ``format``, ``tensors``, ``codec``, ``trust``, ``settings``, ``bucket``, ``run``, ``verify``,
``maintenance``, then ``engine`` and ``cli``.
"""

from typing import TYPE_CHECKING

from vllm_delta_sync.errors import DeltaSyncError

if TYPE_CHECKING:
    from vllm_delta_sync.client import Run, open_run
    from vllm_delta_sync.maintenance.follow import follow
    from vllm_delta_sync.maintenance.follow_folder import FollowedVersion

__all__ = ["DeltaSyncError", "FollowedVersion", "Run", "follow", "open_run"]
__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    # Imported lazily: vLLM imports this package in every process, and the client loads many modules.
    if name in ("Run", "open_run"):
        from vllm_delta_sync import client

        return getattr(client, name)
    if name in ("FollowedVersion", "follow"):
        from vllm_delta_sync.maintenance import follow

        return getattr(follow, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
