"""``load_time_bits`` finds the bits a model was loaded with, for the few tensors that memory cannot give back.

``RunCache`` opens the runs that one rank reads from, and refuses any that its controller has not read.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_delta_sync.bucket import StoreOptions
from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.staging.reconstruct import restore_version
from vllm_delta_sync.errors import (
    ChainError,
    DeltaSyncError,
    DigestError,
    ModelError,
    TensorMismatchError,
    UnsupportedError,
)
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.changes import Bits
from vllm_delta_sync.tensors.checkpoint import Checkpoint, names_model, resolve_base
from vllm_delta_sync.trust import Keyring


class RunCache:
    """Opens runs by URL and digest of run.json, so that controller and rank cannot be shown different runs.

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
        self._opened: dict[tuple[str, str], Run] = {}

    def open(self, url: str, info: str | None = None) -> Run:
        """Open the run at a URL.

        Args:
            info: required digest of its run.json; None accepts any run.

        Raises:
            DigestError: another run is there. DeltaSyncError: as ``open_run``.
        """
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
        return run

    def open_cached(self, url: str, info: str) -> Run:
        """As ``open``, but opens each run only once."""
        if (url, info) not in self._opened:
            self._opened[url, info] = self.open(url, info)
        return self._opened[url, info]


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
