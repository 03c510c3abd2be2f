"""``rebuild`` rebuilds the newest reachable version's weights for an engine, from a root and verified steps.

``load_time_bits`` finds the bits a model was loaded with, for the few tensors that memory cannot give back.
``RunCache`` opens the runs that one rank reads from, and refuses any that its controller has not read.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_delta_sync.bucket import StoreOptions
from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.planning.trusted_head import TrustedHead
from vllm_delta_sync.errors import (
    BaseUnavailableError,
    ChainError,
    DataError,
    DeltaSyncError,
    DigestError,
    ModelError,
    NotFoundError,
    TensorMismatchError,
    UnsupportedError,
    UsageError,
)
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.logs import LogThrottle
from vllm_delta_sync.run.read_plan import ReadPlanner, Root
from vllm_delta_sync.run.restore import restore
from vllm_delta_sync.run.service_policy import ServicePolicy, newest_to_serve
from vllm_delta_sync.tensors.changes import Bits
from vllm_delta_sync.tensors.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint, names_model, resolve_base
from vllm_delta_sync.tensors.state import ModelState
from vllm_delta_sync.tensors.torch_views import tensor_from_bits
from vllm_delta_sync.trust import Keyring

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


class RunCache:
    """Opens runs by URL and digest of run.json, each once, so that controller and rank are not shown different runs.

    Args:
        trusted: public keys that a rank trusts where it reads documents itself.
        store: values of ``StoreOptions``; None means those of the settings.
        cache: the object cache to read through; if None, every read downloads.
    """

    def __init__(
        self, trusted: Sequence[str] = (), store: Mapping[str, Any] | None = None, cache: ObjectCache | None = None
    ) -> None:
        self._keyring = Keyring(trusted)
        self._store = None if store is None else StoreOptions(**store)
        self._cache = cache
        self._opened: dict[tuple[str, str | None], Run] = {}

    def open(self, url: str, info: str | None = None) -> Run:
        """Return the run at a URL, opened at the first call.

        Args:
            info: required digest of its run.json; None accepts any run.

        Raises:
            DigestError: another run is there. DeltaSyncError: as ``open_run``.
        """
        if (url, info) in self._opened:
            return self._opened[url, info]
        try:
            run = open_run(url, self._keyring, self._store, self._cache)
        except (ChainError, TensorMismatchError, UnsupportedError) as error:
            # The controller refuses runs with these errors, so here they mean that the bucket shows another run.
            raise DigestError(
                f"{url!r} shows this rank another run than its controller has read: {error.message}"
            ) from error
        if info is not None and run.info.digest != info:
            run.close()
            raise DigestError(f"run.json at {url!r} has SHA-256 {run.info.digest}, this rank's controller read {info}")
        self._opened[url, info] = run
        return run


def load_time_bits(
    model: Any,
    folders: Mapping[str, str],
    run: Run,
    runs: RunCache,
    previous_routes: RouteMap | None,
    tensors: list[int],
) -> dict[int, Bits]:
    """Find the bits that a model was loaded with, for tensors of a run that memory cannot give back.

    Looks in the host copies of earlier routes, in the version that the model was started from, and in the model folder.
    The caller must prove that the bits are right.

    Args:
        folders: "" → model folder, or a public model; a prefix → that of the tensors whose names begin with it, and
            have none there.

    Returns:
        tensor id → (numel,) bits, each an array that the caller may keep.

    Raises:
        ModelError: they cannot be found. DeltaSyncError: what reading the bucket raises.
    """
    specs = [run.table[tensor] for tensor in tensors]
    if previous_routes is not None and previous_routes.reload_units is not None:
        numbers = {
            previous_routes.table[tensor]: number
            for unit in previous_routes.reload_units.units
            for tensor, number in unit.inputs.items()
        }
        if all(spec in numbers for spec in specs):
            destinations = previous_routes.destinations
            return {tensor: destinations[numbers[spec]].bits for tensor, spec in zip(tensors, specs, strict=True)}
    loaded = getattr(model, "delta_sync_loaded", None)
    if loaded is None:
        return _from_folders(folders, dict(zip(tensors, specs, strict=True)))
    source = run if loaded.run == run.info.run else runs.open(loaded.url)
    if source.info.run != loaded.run or source.table.digest != run.table.digest:
        raise ModelError(
            f"this model was started from run {loaded.run} at {loaded.url!r}, which is gone or has other tensors, and "
            f"tensor {specs[0].name!r} cannot be read back from memory; start the server again"
        )
    state = restore_version(source, source.manifest(loaded.version), folders[""])
    return {tensor: np.array(state.bits[tensor]) for tensor in tensors}


def _from_folders(folders: Mapping[str, str], specs: dict[int, TensorSpec]) -> dict[int, Bits]:
    found: dict[int, Bits] = {}
    for prefix in sorted(folders, reverse=True):
        inside = {i: spec for i, spec in specs.items() if i not in found and spec.name.startswith(prefix)}
        if inside:
            found |= _from_folder(folders[prefix], prefix, inside)
    return found


def _from_folder(folder: str, prefix: str, specs: dict[int, TensorSpec]) -> dict[int, Bits]:
    try:
        named = folder if names_model(folder) or Path(folder).is_dir() else f"{folder}@main"
        checkpoint = Checkpoint(resolve_base(named).path)
    except DeltaSyncError as error:
        raise ModelError(
            f"tensor {next(iter(specs.values())).name!r} cannot be read back from memory, and the model folder cannot "
            f"be read: {error.message}"
        ) from error
    found: dict[int, Bits] = {}
    for tensor, spec in specs.items():
        name = spec.name.removeprefix(prefix)
        found_spec = checkpoint.specs.get(name)
        if found_spec is None or (found_spec.dtype, found_spec.shape) != (spec.dtype, spec.shape):
            difference = "lacks it" if found_spec is None else f"has it as {found_spec.dtype} {found_spec.shape}"
            raise ModelError(
                f"tensor {spec.name!r} is {spec.dtype} {spec.shape} in the run, cannot be read back from memory, "
                f"and the model folder {difference}; start vLLM from the checkpoint that the run refers to, or "
                "with --load-format delta_sync"
            )
        found[tensor] = np.array(checkpoint.bits(name))
    return found
