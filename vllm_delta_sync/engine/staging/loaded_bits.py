"""``LoadTimeBits`` finds the bits a model was loaded with, for the few tensors that memory cannot give back."""

from pathlib import Path
from typing import Any

import numpy as np

from vllm_delta_sync.client import Run
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.staging.reconstruct import restore_version
from vllm_delta_sync.engine.staging.run_cache import RunCache
from vllm_delta_sync.errors import DeltaSyncError, ModelError
from vllm_delta_sync.tensors.bits import Bits
from vllm_delta_sync.tensors.checkpoint import Checkpoint, resolve_base


class LoadTimeBits:
    """Looks in the host copies of earlier routes, in the version that the model was started from, and in the model
    folder. The caller must prove that the bits are right."""

    def __init__(self, model: Any, folder: str, run: Run, runs: RunCache, previous_routes: RouteMap | None) -> None:
        self._model, self._folder, self._run, self._runs, self._previous_routes = (
            model,
            folder,
            run,
            runs,
            previous_routes,
        )

    def __call__(self, tensors: list[int]) -> dict[int, Bits]:
        """Map tensor ids of the run → (numel,) bits, each an array that the caller may keep.

        Raises:
            ModelError: they cannot be found. DeltaSyncError: what reading the bucket raises.
        """
        found = self._from_previous_routes(tensors)
        if found is not None:
            return found
        loaded = getattr(self._model, "delta_sync_loaded", None)
        return self._from_folder(tensors) if loaded is None else self._from_version(tensors, loaded)

    def _from_previous_routes(self, tensors: list[int]) -> dict[int, Bits] | None:
        if self._previous_routes is None or self._previous_routes.reload_units is None:
            return None
        table = self._previous_routes.table
        numbers = {
            table[tensor]: number
            for unit in self._previous_routes.reload_units.units
            for tensor, number in unit.inputs.items()
        }
        specs = [self._run.table[tensor] for tensor in tensors]
        if not all(spec in numbers for spec in specs):
            return None
        destinations = self._previous_routes.destinations
        return {tensor: destinations[numbers[spec]].bits for tensor, spec in zip(tensors, specs, strict=True)}

    def _from_version(self, tensors: list[int], loaded: Any) -> dict[int, Bits]:
        run = self._run if loaded.run == self._run.info.run else self._runs.open(loaded.url)
        if run.info.run != loaded.run or run.table.digest != self._run.table.digest:
            raise ModelError(
                f"this model was started from run {loaded.run} at {loaded.url!r}, which is gone or has other tensors, "
                f"and tensor {self._run.table[tensors[0]].name!r} cannot be read back from memory; start the server "
                "again"
            )
        state = restore_version(run, run.manifest(loaded.version), self._folder)
        return {tensor: np.array(state.bits[tensor]) for tensor in tensors}

    def _from_folder(self, tensors: list[int]) -> dict[int, Bits]:
        first = self._run.table[tensors[0]].name
        try:
            folder = Path(self._folder)
            checkpoint = Checkpoint(folder if folder.is_dir() else resolve_base(f"{self._folder}@main").path)
        except DeltaSyncError as error:
            raise ModelError(
                f"tensor {first!r} cannot be read back from memory, and the model folder cannot be read: "
                f"{error.message}"
            ) from error
        found: dict[int, Bits] = {}
        for tensor in tensors:
            spec = self._run.table[tensor]
            found_spec = checkpoint.specs.get(spec.name)
            if found_spec != spec:
                difference = "lacks it" if found_spec is None else f"has it as {found_spec.dtype} {found_spec.shape}"
                raise ModelError(
                    f"tensor {spec.name!r} is {spec.dtype} {spec.shape} in the run, cannot be read back from memory, "
                    f"and the model folder {difference}; start vLLM from the checkpoint that the run refers to, or "
                    "with --load-format delta_sync"
                )
            found[tensor] = np.array(checkpoint.bits(spec.name))
        return found
