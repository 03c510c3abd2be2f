"""Rebuild a version's weights from the bucket: base or anchor, then deltas, every step verified."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from vllm_delta_sync.chain import Run, check_declared, check_follows
from vllm_delta_sync.chain_checks import check_fingerprint, check_tensors
from vllm_delta_sync.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint
from vllm_delta_sync.errors import (
    DeltaSyncError,
    FingerprintError,
    NotFoundError,
    StoreError,
    TensorMismatchError,
)
from vllm_delta_sync.wire.manifest import Manifest
from vllm_delta_sync.wire.state import ModelState

# A child of vLLM's logger, the only one that vLLM gives a handler.
logger = logging.getLogger("vllm.delta_sync")

SECONDS_BETWEEN_LINES = 5.0


def newest(run: Run) -> Manifest:
    """The newest good manifest of a run.

    Raises:
        NotFoundError: nothing is published yet. DeltaSyncError: no version is good, or the store failed.
    """
    try:
        manifest, error = run.reachable_head()
    except NotFoundError as missing:
        raise NotFoundError(
            f"run {run.info.run} at {run.bucket.url!r} has no version to load: {missing}; start its publisher first"
        ) from missing
    if error is not None:
        logger.error("what follows version %d cannot be used: %s", manifest.version, error)
    return manifest


def rebuild(run: Run, head: Manifest, folder: str) -> tuple[Manifest, ModelState]:
    """Rebuild ``head``, or the last version before it that can be reached: O(model) bytes, twice that for an anchor.

    Args:
        folder: model folder given to vLLM. If it holds safetensors they are the base of a run by reference,
            otherwise the base is looked for where the run says.

    Returns:
        the manifest of what was rebuilt, and the weights, which have its fingerprint.

    Raises:
        NotFoundError: a version before ``head`` is not kept, or the base is not at hand.
        FingerprintError, TensorMismatchError: the base is another checkpoint, or weights are not as declared.
        DeltaSyncError: the first version needed is damaged, or the store failed.
    """
    manifests = [head]
    while manifests[-1].kind == "delta":
        parent = run.manifest(manifests[-1].version - 1)
        check_follows(parent, manifests[-1])
        manifests.append(parent)
    held = manifests.pop()
    logger.info("loading version %d of run %s: %s, then %d deltas", head.version, head.run, held.kind, len(manifests))
    state = _whole(run, held, folder)
    check_fingerprint(held, state.fingerprint)
    spoken = time.monotonic()
    for manifest in reversed(manifests):
        try:
            changes = run.changes(manifest)
            check_declared(held, manifest, changes)
        except StoreError:
            raise
        except DeltaSyncError as error:
            logger.error(
                "version %d cannot be used, starting with version %d: %s", manifest.version, held.version, error
            )
            break
        state.apply(changes)
        check_fingerprint(manifest, state.fingerprint)
        held = manifest
        if time.monotonic() - spoken >= SECONDS_BETWEEN_LINES:
            spoken = time.monotonic()
            logger.info("rebuilt version %d of %d", held.version, head.version)
    return held, state


def _whole(run: Run, manifest: Manifest, folder: str) -> ModelState:
    """Weights of an anchor or a reference, each tensor held against the manifest."""
    if manifest.kind == "anchor":
        full = run.changes(manifest).full
        state = ModelState(run.table, ((run.table[item.id].name, item.bits) for item in full))
        check_tensors(manifest, state)
        return state
    path = _base(manifest, folder)
    checkpoint = Checkpoint(path)
    try:
        state = ModelState(run.table, ((spec.name, checkpoint.bits(spec.name)) for spec in run.table))
        check_tensors(manifest, state)
    except (FingerprintError, TensorMismatchError) as error:
        raise type(error)(
            f"{error}: the checkpoint in {str(path)!r} is not the one that the run started from, or was overwritten "
            "since; start from a model folder with the original safetensors, or with none"
        ) from error
    return state


def _base(manifest: Manifest, folder: str) -> Path:
    recorded = manifest.base.location if manifest.base is not None else None
    if any((Path(folder) / name).is_file() for name in (SINGLE_NAME, INDEX_NAME)):
        return Path(folder)
    if recorded is not None and Path(recorded).is_dir():
        return Path(recorded)
    raise NotFoundError(
        f"version {manifest.version} refers to the checkpoint {recorded!r}, which is not here, and the model folder "
        f"{folder!r} holds no safetensors; put the original checkpoint's safetensors into the model folder, or make "
        "the recorded path readable"
    )


def drain(run: Run, state: ModelState) -> Iterator[tuple[str, torch.Tensor]]:
    """(checkpoint name, CPU tensor of the served dtype and shape) of all tensors; the state gives up each in turn."""
    from vllm_delta_sync.torch_bits import tensor_from_bits

    for position, spec in enumerate(run.table):
        bits = state.bits[position]
        state.bits[position] = np.empty(0, bits.dtype)
        yield spec.name, tensor_from_bits(bits, spec)
