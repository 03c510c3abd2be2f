"""slime: a hook for ``--custom-update-weight-post-write-path`` that publishes the checkpoint that slime just wrote.

Written against slime's ``docs/en/get_started/customization.md`` (section 19, at 138eb42) and
``slime/backends/megatron_utils/update_weight/update_weight_from_disk.py``: with ``--update-weight-transport disk``
and ``--update-weight-mode full`` slime gathers, converts Megatron's names to those of ``--hf-checkpoint``, writes
safetensors files, and calls the hook on every rank.

Copy this file into a module of your project and name its function:

    export DELTA_SYNC_BUCKET=s3://bucket/run
    python train.py ... --custom-update-weight-post-write-path my_project.delta_sync_hook.publish_checkpoint
"""

import json
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from trainer_side import Publisher
from trainer_side.integrations.gathered import gathered_publisher, publish_gathered
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.tensors.checkpoint import INDEX_NAME, Checkpoint
from vllm_delta_sync.tensors.torch_views import tensor_from_bits

_VERSION = re.compile(r"weight_v(\d+)")


def publish_checkpoint(args: Any, version_dir: str, rollout_engines: Sequence[object]) -> None:
    """Publish a directory that slime wrote, from rank 0; durable when this returns.

    Args:
        args: slime's arguments; ``hf_checkpoint`` is the checkpoint that the servers start from.
        version_dir: ``.../weight_v000017``; its number becomes the step.
        rollout_engines: passed by slime, not used.

    Raises:
        UsageError: the directory is not a complete checkpoint (slime's delta mode), or DELTA_SYNC_BUCKET is not set.
        Also what ``Publisher`` raises.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    folder = Path(version_dir)
    number = _VERSION.fullmatch(folder.name)
    index = folder / INDEX_NAME
    if number is None or (index.is_file() and "delta_encoding" in json.loads(index.read_bytes()).get("metadata", {})):
        raise UsageError(
            f"{version_dir} holds no complete checkpoint, but the output of slime's delta mode, which this hook does "
            "not read; run delta-sync publish --watch on its folder instead, or use --update-weight-mode full"
        )
    written = Checkpoint(folder)
    weights = ((name, tensor_from_bits(written.bits(name).copy(), spec)) for name, spec in written.specs.items())
    publish_gathered(publisher_of(args.hf_checkpoint), int(number.group(1)), weights)


@lru_cache(maxsize=1)
def publisher_of(base: str) -> Publisher | None:
    """The publisher of this process, cached here because slime calls a function and keeps no state for it."""
    bucket = os.environ.get("DELTA_SYNC_BUCKET")
    if not bucket:
        raise UsageError("DELTA_SYNC_BUCKET is not set; export the URL of the run on the trainer's machines")
    return gathered_publisher(bucket, base)
