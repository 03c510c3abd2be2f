"""``rebuild`` rebuilds the newest reachable version's weights for an engine, from a root and verified steps."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from vllm_delta_sync.client import Run
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.planning.trusted_head import TrustedHead
from vllm_delta_sync.errors import BaseUnavailableError, DataError, DeltaSyncError, NotFoundError, UsageError
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.logs import LogThrottle
from vllm_delta_sync.run.read_plan import ReadPlanner, Root
from vllm_delta_sync.run.restore import restore
from vllm_delta_sync.run.service_policy import ServicePolicy, newest_to_serve
from vllm_delta_sync.tensors.checkpoint import INDEX_NAME, SINGLE_NAME
from vllm_delta_sync.tensors.state import ModelState
from vllm_delta_sync.tensors.torch_views import tensor_from_bits

SECONDS_BETWEEN_LINES = 5.0


def newest_good_manifest(
    run: Run, policy: ServicePolicy | None = None, trusted_head: TrustedHead | None = None
) -> Manifest:
    """Return the newest good manifest of a run.

    Args:
        policy: which versions are acceptable.
        trusted_head: refuses what contradicts what it has seen before.

    Raises:
        NotFoundError: nothing is published yet, or everything is quarantined. ReplayError, ForkError, ExpiredError: see
            ``TrustedHead``. DeltaSyncError: no version is good, or the store failed.
    """
    if trusted_head is not None:
        trusted_head.reload_last_seen()
    try:
        manifest, error = run.reachable_head()
    except NotFoundError as missing:
        raise NotFoundError(
            f"run {run.info.run} at {run.bucket.url!r} has no version to load: {missing}; start its publisher first"
        ) from missing
    if trusted_head is not None:
        expired = trusted_head.check_expiry(run, error)
        trusted_head.accept_head(run, manifest, error, None)
        trusted_head.check_fresh(run, error, expired)
    if error is not None:
        logger.error("what follows version %d cannot be used: %s", manifest.version, error)
    newest = newest_to_serve(run, manifest, policy or ServicePolicy())
    if newest == manifest.version:
        return manifest
    if newest is None:
        raise NotFoundError(
            f"every version of run {run.info.run} at {run.bucket.url!r} is quarantined; publish a sound one, or set "
            'quarantined = "serve"'
        )
    if manifest.quarantine is not None:
        logger.warning("quarantined and skipped: version %d: %s", manifest.version, manifest.quarantine.summary())
    elif manifest.held_back is not None:
        logger.info("version %d is not exact and skipped: %s", manifest.version, manifest.held_back.summary())
    found = run.manifest(newest)
    run.check_descends(manifest, found)
    return found


def rebuild(run: Run, head: Manifest, folder: str, policy: ServicePolicy | None = None) -> tuple[Manifest, ModelState]:
    """Rebuild ``head``, or the last version before it that can be reached.

    Args:
        folder: model folder given to vLLM; see ``restore_version``.
        policy: which earlier versions are acceptable.

    Returns:
        the manifest of the rebuilt version, and its weights, whose fingerprint was checked.

    Raises:
        BaseUnavailableError: as ``restore_version``. DeltaSyncError: as ``restore_version``, if no earlier version can
            be reached either.
    """
    avoid: set[str] = set()
    first: DeltaSyncError | None = None
    target = head
    while True:
        try:
            return target, restore_version(run, target, folder, avoid)
        except BaseUnavailableError:
            # No version is damaged: the operator has to give the model folder that the run started from.
            raise
        except (DataError, UsageError) as error:
            first, failed = first or error, error
        earlier = ReadPlanner(run, avoid).newest_before(target)
        newest = None if earlier is None else newest_to_serve(run, earlier, policy or ServicePolicy())
        earlier = None if newest is None else run.manifest(newest)
        if earlier is None:
            raise first
        run.check_descends(head, earlier)
        logger.error("version %d cannot be used, starting with version %d: %s", target.version, earlier.version, failed)
        target = earlier


def restore_version(run: Run, target: Manifest, folder: str, avoid: set[str] | None = None) -> ModelState:
    """Rebuild a version: O(model) memory, or disk where the model is large; see ``run.restore.restore``.

    Args:
        folder: model folder given to vLLM. If it contains safetensors, they are the base of a run by reference;
            otherwise the base is read from where the run says.
        avoid: keys of documents known to be bad; newly found ones are added.

    Raises:
        BaseUnavailableError: the base is needed, and missing, damaged or another checkpoint.
        NotFoundError: a version that is needed is not retained.
        DeltaSyncError: a document or object is damaged, or the store failed.
    """
    throttle = LogThrottle(logger, SECONDS_BETWEEN_LINES)
    throttle.is_due("progress")  # not at once

    def log_progress(done: int, total: int) -> None:
        if throttle.is_due("progress"):
            logger.info("rebuilding version %d: %.1f of %.1f MB", target.version, done / 1e6, total / 1e6)

    has_weights = any((Path(folder) / name).is_file() for name in (SINGLE_NAME, INDEX_NAME))
    try:
        found = restore(run, target, folder if has_weights else None, progress=log_progress, avoid=avoid)
    except BaseUnavailableError as error:
        if Root(run.manifest(0)).is_branch:
            raise
        fact = error.message.partition("; pass base=")[0]
        remedy = "; start from a model folder with the original safetensors, or with none"
        if not has_weights:
            remedy = (
                f", and the model folder {folder!r} holds no safetensors; put the original checkpoint's safetensors "
                "into the model folder, or make the recorded path readable"
            )
        raise BaseUnavailableError(f"{fact}{remedy}") from error
    root, kind = found.plan.root, "anchor" if found.plan.root.is_stored else found.plan.root.manifest.kind
    path = f"{kind} of version {root.version}, then {len(found.plan.steps)} steps"
    logger.info("rebuilt version %d of run %s: %s", target.version, target.run, path)
    return found.state


def drain_tensors(run: Run, state: ModelState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (checkpoint name, CPU tensor of the served dtype and shape) of all tensors; frees each in the state."""
    for position, spec in enumerate(run.table):
        bits = state.bits[position]
        state.bits[position] = np.empty(0, bits.dtype)
        yield spec.name, tensor_from_bits(bits, spec)
