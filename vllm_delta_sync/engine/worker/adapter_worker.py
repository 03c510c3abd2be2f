"""``AdapterWorker`` is a ``RankWorker`` for a LoRA adapter: a host copy that each commit hands to vLLM.

Every rank holds the whole adapter in host memory, in the form of its checkpoint. Versions are staged, committed,
measured and reverted there as those of a model are. Within the same pause the copy is written to a folder in PEFT's
form, and vLLM loads it from there in place of the adapter of the same name. So there are three more copies: the files,
which vLLM may read again; what vLLM holds in host memory; and what it computes with. A right host copy proves nothing
about them, so an adapter is measured by all four.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from vllm_delta_sync.client import Run
from vllm_delta_sync.engine import protocol
from vllm_delta_sync.engine.compat import loaded_adapters, lora
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.engine.worker.rank_worker import RankWorker
from vllm_delta_sync.errors import DataError, EngineError, ModelError, WeightsLostError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.safetensors_file import read_anchor, write_container
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.process_folders import hold_folder, remove_abandoned
from vllm_delta_sync.tensors.checkpoint import ADAPTER_CONFIG_NAME, ADAPTER_NAME
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES, bits_of

RELOAD = "add_lora"
"""Names, in messages, a load of the adapter that this package did not make: vLLM's name of the call."""
BLANK = 0xFF
"""Bytes before the first version: no version begins with weights that are all NaN."""


class AdapterWeights(nn.Module):
    """The tensors of an adapter's run in host memory; ``load_weights`` is what routes are traced through."""

    def __init__(self, table: TensorTable) -> None:
        super().__init__()
        self._index = {spec.name: index for index, spec in enumerate(table)}
        for index, spec in enumerate(table):
            size = spec.numel * spec.element.itemsize
            memory = torch.full((size,), BLANK, dtype=torch.uint8, device="cpu")
            memory = memory.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
            self.register_parameter(f"tensor_{index}", nn.Parameter(memory, requires_grad=False))

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors in the order of the run's table."""
        return [self.get_parameter(f"tensor_{index}").data for index in self._index.values()]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy tensors by name, as vLLM's models do."""
        loaded = set()
        for name, tensor in weights:
            self.get_parameter(f"tensor_{self._index[name]}").data.copy_(tensor)
            loaded.add(name)
        return loaded


class AdapterWorker(RankWorker):
    """One adapter on one rank.

    Args:
        worker: vLLM's worker. index, memory: as ``RankWorker``; ``memory`` is that of the worker, where vLLM computes.

    Attributes:
        adapter: its name, number and folder, as of the last call.
    """

    def __init__(self, worker: Any, adapter: protocol.Adapter, index: int, memory: WeightMemory) -> None:
        self._weights = AdapterWeights(TensorTable([]))
        super().__init__(self._weights, index, memory=memory)
        self._worker = worker
        self.adapter = adapter
        # adapter_config.json of the run followed, of what vLLM has loaded (None: nothing), and of what it had loaded
        # when the run was identified.
        self._config = b""
        self._loaded: bytes | None = None
        self._loaded_before: bytes | None = None
        # What vLLM held when last asked: a new object each time that it loads the adapter, for any reason.
        self._held: Any = None
        # The folder that is kept, and the descriptor that keeps it: on another node, this process is its owner.
        self._kept: tuple[Path, int] | None = None

    def prepare(self, run: Run) -> None:
        """Check that vLLM can take the run's adapter, and make room for its tensors.

        Raises:
            ModelError: it cannot; the message says why. Otherwise as ``Run.file``.
        """
        if ADAPTER_CONFIG_NAME not in {file.name for file in run.info.files}:
            raise ModelError(
                f"run {run.info.run} has no {ADAPTER_CONFIG_NAME}, so it is not that of an adapter; publish one with "
                "trainer_side.integrations.peft, or leave out lora_name"
            )
        config = run.file(ADAPTER_CONFIG_NAME)
        lora.check_adapter(self._worker, self.adapter.name, run.table, config)
        self._loaded_before = self._loaded
        if self.run is None or self.run.table.digest != run.table.digest:
            self.model = self._weights = AdapterWeights(run.table)
            self._loaded_before = None
        self._config = config

    def identify(self, request: protocol.Identify) -> protocol.Identified:
        """As ``RankWorker``; a tensor that vLLM does not compute with gets fingerprint zero, which matches nothing."""
        found = super().identify(request)
        stale = self._stale_tensors(self._require_routes()[1])
        measured = [_zeros(each) if tensor in stale else each for tensor, each in enumerate(found.measured)]
        return msgspec.structs.replace(found, measured=measured)

    def describe(self, request: protocol.Describe | None = None) -> protocol.RankState:
        """As ``RankWorker``; notices that vLLM has loaded the adapter again, from its folder or from elsewhere."""
        held = lora.held_adapter(self._worker, self.adapter)
        if held is not self._held:
            self._held = held
            # One that vLLM has dropped changes no answer: it is loaded again, and then noticed.
            if held is not None and self._loaded is not None:
                self.note_external_write(RELOAD)
        return super().describe(request)

    def _rescan(self, routes: RouteMap, tensors: list[int]) -> protocol.Scanned:
        """As ``RankWorker``. A rescan of all tensors also compares what vLLM computes with, as ``identify`` does.

        A rescan of some tensors hashes the host copy only, because to compare them the whole adapter must be loaded
        again.
        """
        found = super()._rescan(routes, tensors)
        stale = self._stale_tensors(routes) if len(tensors) == len(routes.table) else set()
        measured = {tensor: _zeros(each) if tensor in stale else each for tensor, each in found.measured.items()}
        return msgspec.structs.replace(found, measured=measured)

    def _stale_tensors(self, routes: RouteMap) -> set[int]:
        """Return the ids of the tensors that differ from the host copy where vLLM computes with them, or would load
        them from.

        Raises:
            BusyError, EngineError: see ``differing_modules``.
        """
        everything = set(range(len(routes.table)))
        if self._loaded is None or self._loaded != self._config:
            return everything
        problem = self._folder_problem(routes.table)
        if problem is not None:
            logger.warning("adapter %r: %s in %r", self.adapter.name, problem, self.adapter.folder)
            return everything
        modules = loaded_adapters.differing_modules(self._worker, self.adapter, self.memory)
        if not modules:
            return set()
        logger.warning(
            "adapter %r: in %d layers, first %r, vLLM computes with something else than it was given",
            self.adapter.name,
            len(modules),
            min(modules),
        )
        return lora.tensors_of_modules(self._worker, routes.table, modules)

    def _folder_problem(self, table: TensorTable) -> str | None:
        """Return what is wrong with the adapter's files; None if they hold the host copy."""
        folder = Path(self.adapter.folder)
        try:
            if (folder / ADAPTER_CONFIG_NAME).read_bytes() != self._loaded:
                return f"{ADAPTER_CONFIG_NAME} was changed"
            container = read_anchor((folder / ADAPTER_NAME).read_bytes(), table, ADAPTER_NAME)
            for spec, tensor in zip(table, self._weights.tensors(), strict=True):
                if not np.array_equal(container.bits(spec.name), bits_of(tensor).reshape(-1)):
                    return f"tensor {spec.name!r} is not the one that was written"
        except OSError as error:
            return f"a file cannot be read ({error})"
        except DataError as error:
            return f"the weights cannot be read ({error.message})"
        return None

    def commit(self, request: protocol.Commit) -> protocol.Committed:
        """Apply the staged version, and let vLLM load it."""
        committed = super().commit(request)
        self._load(self._config)
        return committed

    def revert(self, request: protocol.Revert) -> protocol.Done:
        """Return to a version of the undo log, and let vLLM load it; if there was none, vLLM forgets the adapter.

        Raises:
            EngineError: vLLM does not load it; the adapter is as before. WeightsLostError: nor does it load that.
        """
        before, proven = self.version, self.confirmed
        done = super().revert(request)
        try:
            self._load_version()
        except Exception as error:  # whatever it is, vLLM may hold something else than this copy
            self.intact = False
            if proven and self._returns_to(before):
                raise
            raise WeightsLostError(f"adapter {self.adapter.name!r} could not be put back: {error}") from error
        return done

    def _returns_to(self, version: int | None) -> bool:
        """Take back a revert that vLLM did not follow; returns whether vLLM has that version again."""
        self.intact = True
        try:
            super().revert(protocol.Revert(version))
            self._load_version()
        except Exception:  # as above
            logger.exception("adapter %r could not be put back", self.adapter.name)
            self.intact = False
        return self.intact

    def _load_version(self) -> None:
        """Let vLLM load the version of the host copy; without one, what it had before this run's first commit."""
        self._load(self._config if self.version is not None else self._loaded_before)

    def _load(self, config: bytes | None) -> None:
        """Let vLLM load the host copy with a configuration; None: let it forget the adapter."""
        self._loaded = None
        if config is None:
            self._worker.remove_lora(self.adapter.number)
            return
        arrays = {
            spec.name: (spec.dtype, bits_of(tensor).reshape(spec.shape))
            for spec, tensor in zip(self._require_routes()[0].table, self._weights.tensors(), strict=True)
        }
        folder = Path(self.adapter.folder)
        try:
            self._keep(folder.parent)
            folder.mkdir(mode=0o700, exist_ok=True)
            _write(folder / ADAPTER_CONFIG_NAME, config)
            _write(folder / ADAPTER_NAME, write_container(arrays, {"format": "pt"}))
        except OSError as error:
            raise EngineError(f"the files of adapter {self.adapter.name!r} cannot be written: {error}") from error
        loaded_adapters.SlotChanges.watch(lora.manager_of(self._worker))
        lora.load(self._worker, self.adapter)
        self._loaded, self._held = config, lora.held_adapter(self._worker, self.adapter)

    def _keep(self, folder: Path) -> None:
        """Make the folder of the adapter's files where there is none, and keep it from being removed as abandoned."""
        kept = self._kept
        if kept is not None and kept[0] == folder and folder.exists():
            return
        remove_abandoned(folder.parent)
        self._kept = folder, hold_folder(folder)
        if kept is not None:
            os.close(kept[1])


def _zeros(measured: list[Fingerprint]) -> list[Fingerprint]:
    return [Fingerprint()] * len(measured)


def _write(path: Path, data: bytes) -> None:
    """Replace a file, and check what a reader finds. Ranks of one node write the same file with the same bytes."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        # A commit that fails on a full disk leaves the file as it was, and a revert must not fail there too.
        if not path.exists() or path.read_bytes() != data:
            raise
    if path.read_bytes() != data:
        raise EngineError(f"{str(path)!r} has other bytes than were written to it")
