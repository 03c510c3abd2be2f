"""Rebuild a version's weights for an engine: from a root and steps, every one verified; the newest that can be."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from vllm_delta_sync.client import Run
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.planning.trusted_head import TrustedHead
from vllm_delta_sync.engine.planning.update_planner import reachable_stops
from vllm_delta_sync.errors import DeltaSyncError, FingerprintError, NotFoundError, StoreError, TensorMismatchError
from vllm_delta_sync.format.documents import anchor_key
from vllm_delta_sync.format.manifest import Manifest, version_key
from vllm_delta_sync.run.plan import Planner
from vllm_delta_sync.run.restore import BaseError, restore
from vllm_delta_sync.tensors.checkpoint import INDEX_NAME, SINGLE_NAME
from vllm_delta_sync.tensors.state import ModelState

SECONDS_BETWEEN_LINES = 5.0


def newest(run: Run, quarantined: bool = False, witness: TrustedHead | None = None) -> Manifest:
    """The newest good manifest of a run.

    Args:
        quarantined: whether that of a quarantined version will do. witness: refuses what contradicts what it has seen.

    Raises:
        NotFoundError: nothing is published yet, or all of it is quarantined. ReplayError, ForkError, ExpiredError: see
            ``TrustedHead``. DeltaSyncError: no version is good, or the store failed.
    """
    if witness is not None:
        witness.reload_last_seen()
    try:
        manifest, error = run.reachable_head()
    except NotFoundError as missing:
        raise NotFoundError(
            f"run {run.info.run} at {run.bucket.url!r} has no version to load: {missing}; start its publisher first"
        ) from missing
    if witness is not None:
        expired = witness.check_expiry(run, error)
        witness.accept_head(run, manifest, error, None)
        witness.check_fresh(run, error, expired)
    if error is not None:
        logger.error("what follows version %d cannot be used: %s", manifest.version, error)
    if manifest.quarantine is None or quarantined:
        return manifest
    if manifest.sound is None:
        raise NotFoundError(
            f"every version of run {run.info.run} at {run.bucket.url!r} is quarantined; publish a sound one, or set "
            'quarantined = "serve"'
        )
    logger.warning("version %d is quarantined and skipped: %s", manifest.version, manifest.quarantine.summary())
    sound = run.manifest(manifest.sound)
    run.authentic.descends(manifest, sound)
    return sound


def rebuild(run: Run, head: Manifest, folder: str, quarantined: bool = False) -> tuple[Manifest, ModelState]:
    """Rebuild ``head``, or the last version before it that can be reached.

    Args:
        folder: model folder given to vLLM; see ``restored``.
        quarantined: whether a version before it that is quarantined will do.

    Returns:
        the manifest of what was rebuilt, and the weights, which have its fingerprint.

    Raises:
        DeltaSyncError: as ``restored``, where no version before it can be reached either.
    """
    avoid: set[str] = set()
    first: DeltaSyncError | None = None
    target = head
    while True:
        try:
            return target, restored(run, target, folder, avoid)
        except StoreError:
            raise
        except DeltaSyncError as error:
            if isinstance(error.__cause__, BaseError):
                raise
            first, failed = first or error, error
        lower = _before(run, target, avoid)
        while lower is not None and lower.quarantine is not None and not quarantined:
            lower = None if lower.sound is None else run.manifest(lower.sound)
        if lower is None:
            raise first
        run.authentic.descends(head, lower)
        logger.error("version %d cannot be used, starting with version %d: %s", target.version, lower.version, failed)
        target = lower


def restored(run: Run, target: Manifest, folder: str, avoid: set[str] | None = None) -> ModelState:
    """Rebuild a version: O(model) memory, or disk where the model is large; see ``run.restore.restore``.

    Args:
        folder: model folder given to vLLM. If it holds safetensors they are the base of a run by reference,
            otherwise the base is looked for where the run says.
        avoid: keys of documents known to be bad; those that turn out to be are added.

    Raises:
        NotFoundError: a version that is needed is not kept, or the base is not at hand.
        FingerprintError, TensorMismatchError: the base is another checkpoint, or weights are not as declared.
        DeltaSyncError: something that is needed is damaged, or the store failed.
    """
    has_weights = any((Path(folder) / name).is_file() for name in (SINGLE_NAME, INDEX_NAME))
    try:
        found = restore(run, target, folder if has_weights else None, progress=_Lines(target), avoid=avoid)
    except BaseError as error:
        raise NotFoundError(
            f"{error.message.partition('; pass base')[0]}, and the model folder {folder!r} holds no safetensors; put "
            "the original checkpoint's safetensors into the model folder, or make the recorded path readable"
        ) from error
    except (FingerprintError, TensorMismatchError) as error:
        fact, _, mend = error.message.partition("; pass --base")
        if not mend:
            raise
        raise type(error)(f"{fact}; start from a model folder with the original safetensors, or with none") from error
    logger.info(
        "rebuilt version %d of run %s: %s of version %d, then %d steps",
        target.version,
        target.run,
        "anchor" if found.plan.beside else found.plan.root.kind,
        found.plan.root.version,
        len(found.plan.steps),
    )
    return found.state


class _Lines:
    """A line in the log now and then."""

    def __init__(self, target: Manifest) -> None:
        self._target = target
        self._spoken = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._spoken >= SECONDS_BETWEEN_LINES:
            self._spoken = time.monotonic()
            logger.info("rebuilding version %d: %.1f of %.1f MB", self._target.version, done / 1e6, total / 1e6)


def _before(run: Run, target: Manifest, avoid: set[str]) -> Manifest | None:
    """The newest version before ``target`` that a way leads to from a root that is left."""
    planner = Planner(run, avoid)
    planner.know(target)
    bottoms = [item.version for item in target.breaks if item.base_version is None]
    roots = [(version, version_key(version)) for version in (0, *bottoms)]
    roots += [(version, anchor_key(version)) for version in run.anchors()]
    found: Manifest | None = None
    for version, key in sorted(roots, reverse=True):
        if version >= target.version or key in avoid:
            continue
        try:
            manifest = planner.manifest([version, *reachable_stops(planner, version, target.version - 1)][-1])
        except StoreError:
            raise
        except DeltaSyncError:
            continue
        if found is None or manifest.version > found.version:
            found = manifest
    return found


def drain(run: Run, state: ModelState) -> Iterator[tuple[str, torch.Tensor]]:
    """(checkpoint name, CPU tensor of the served dtype and shape) of all tensors; the state gives up each in turn."""
    from vllm_delta_sync.tensors.torch_views import tensor_from_bits

    for position, spec in enumerate(run.table):
        bits = state.bits[position]
        state.bits[position] = np.empty(0, bits.dtype)
        yield spec.name, tensor_from_bits(bits, spec)
