"""``RankWorker`` does what the controller asks of one rank.

It identifies the rank's weights, stages versions beside generation, commits and reverts. Long operations run in one
background thread that is started and polled, because a long remote call would block the engine; all other calls are
short and run on the caller's thread. ``commit`` and ``revert`` need a paused engine.

vLLM imports this module before it initializes its worker, which must not find numba loaded, so the modules used here
import their compiled loops late.
"""

import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.client import Run
from vllm_delta_sync.codec import delta_reader, merge
from vllm_delta_sync.engine import protocol
from vllm_delta_sync.engine.commit import apply
from vllm_delta_sync.engine.commit.apply import UndoEntry, UndoLog
from vllm_delta_sync.engine.commit.interrupts import postpone_interrupts
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.model import device_patch
from vllm_delta_sync.engine.model.draft import Draft
from vllm_delta_sync.engine.model.load_record import load_record_of
from vllm_delta_sync.engine.model.model_replica import is_plain
from vllm_delta_sync.engine.model.patch import StagedPatch, compile_routing
from vllm_delta_sync.engine.model.route import NARROW_ELEMENTS
from vllm_delta_sync.engine.model.route_compiler import trace_routes
from vllm_delta_sync.engine.model.route_map import RouteMap, cut_tensors
from vllm_delta_sync.engine.model.tied_head import TiedHead
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.engine.planning.update_planner import UpdatePlan
from vllm_delta_sync.engine.staging.reconstruct import RunCache, load_time_bits
from vllm_delta_sync.engine.staging.stage import PhaseTimer, stage_update, store_usage
from vllm_delta_sync.errors import (
    BusyError,
    ChainError,
    DeltaSyncError,
    EngineError,
    FingerprintError,
    WeightsLostError,
)
from vllm_delta_sync.format import fingerprint
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import DRAFT_PREFIX, DType


class Background:
    """Runs one operation at a time in a thread, and keeps the outcome of the last one.

    Args:
        context: entered in the thread around each operation.
        settle: called in the thread after each operation, when nothing refers any more to what the operation used.
    """

    def __init__(self, context: Callable[[], AbstractContextManager[None]], settle: Callable[[], None]) -> None:
        self._context, self._settle = context, settle
        self._thread: threading.Thread | None = None
        self._name = ""
        self._outcome: protocol.RankAnswer | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, name: str, operation: Callable[[], protocol.RankAnswer]) -> None:
        """Start an operation. Raises BusyError: another one is still running."""
        if self.is_busy:
            raise BusyError(f"operation {name!r} must wait: another one is running")
        self._name, self._outcome = name, None
        self._thread = threading.Thread(target=self._run, args=(operation,), name="delta-sync-stage", daemon=True)
        self._thread.start()

    def _run(self, operation: Callable[[], protocol.RankAnswer]) -> None:
        try:
            with self._context():
                self._outcome = operation()
        except DeltaSyncError as error:
            self._outcome = protocol.RankFailure.of(error)
        except Exception as error:  # noqa: BLE001  a thread's error would be lost; the controller must receive it
            self._outcome = protocol.RankFailure.of(protocol.wrap_error(error))
        self._settle()

    def outcome(self, name: str) -> protocol.RankAnswer:
        """Return the answer or error of the last operation.

        Raises:
            BusyError: it is still running. EngineError: it has another name.
        """
        if self.is_busy:
            raise BusyError("the operation has no outcome yet: it is still running")
        if self._outcome is None or name != self._name:
            raise EngineError(f"operation {name!r} has no outcome: the last one was {self._name!r}")
        return self._outcome


class RankWorker:
    """State of one rank.

    Attributes:
        index: position of this rank among the ranks that one call reaches.
        folder: what vLLM loaded the model from.
        draft: the model that drafts for it, if there is one.
        tied_head: see ``trace_routes``.
        routes: None until traced.
        fingerprints: per tensor id of the run: fingerprint of the whole tensor, over all ranks, at ``version``.
        version: the version of the weights; None if unknown, or if they are no version of the run followed.
        confirmed: False from a commit until the controller has found it right on all ranks.
        intact: False once a commit could neither be finished nor taken back.
        external_writer: name of the last call from outside that wrote, or may have written, weights since the
            controller last checked them; None if there was none.
        external_writes: number of such calls.
        memory: decides which thread may access the weights when; shared by everything followed in this worker.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        index: int = 0,
        folder: str = "",
        memory: WeightMemory | None = None,
        tied_head: TiedHead | None = None,
        draft: Draft | None = None,
    ) -> None:
        self.model = model
        self.index = index
        self.folder = folder
        self.tied_head = tied_head
        self.draft = draft
        self.run: Run | None = None
        self.routes: RouteMap | None = None
        self.fingerprints: list[Fingerprint] = []
        self.version: int | None = None
        self.intact = True
        self.confirmed = True
        self.external_writer: str | None = None
        self.external_writes = 0
        self.memory = WeightMemory.for_model(model) if memory is None else memory
        self.memory.listeners.append(self)
        self._claimed: protocol.ClaimedVersion | None = None
        self._runs = RunCache()
        self._staged: StagedPatch | None = None
        self._undo_log = UndoLog()
        self._staged_stamp = self._weights_stamp()
        self._background = Background(self.memory.background_thread, self._settle)

    def answer(self, request: protocol.RankRequest[Any]) -> protocol.RankAnswer:
        """Do what the controller asks, by the method that has the operation's name.

        Raises:
            BusyError: a background operation is still running. DeltaSyncError: see the methods.
        """
        match request:
            case protocol.Poll():
                return protocol.Progress(self._background.is_busy)
            case protocol.Outcome(started):
                return self._background.outcome(started)
        operation: Callable[[Any], protocol.RankAnswer] = getattr(self, request.operation)
        if isinstance(request, protocol.BackgroundRequest):
            self._background.start(request.operation, lambda: operation(request))
            return protocol.Done()
        return operation(request)

    def identify(self, request: protocol.Identify) -> protocol.Identified:
        """Trace routes, and fingerprint every tensor through them."""
        began = time.perf_counter()
        self.memory.check_awake()
        if self.memory.accelerator is not None:
            self.memory.accelerator.staging_bytes = request.device_staging_bytes
        folder = request.cache_dir
        cache = None if folder is None else ObjectCache(Path(folder), request.cache_bytes)
        runs = RunCache(request.trusted, request.store, cache)
        run = runs.open(request.url, request.info)
        self.prepare(run)
        # One of each width: loops do not tell the others apart.
        elements = {spec.element.uint: spec.element for spec in run.table}.values()
        compiling = threading.Thread(target=_compile_loops, args=(elements,), name="delta-sync-compile", daemon=True)
        compiling.start()
        claimed = self._claimed_version()
        folders = {"": self.folder} if self.draft is None else {"": self.folder, DRAFT_PREFIX: self.draft.folder}
        bits = partial(load_time_bits, self.model, folders, run, runs, self.routes)
        model = self.model if self.draft is None else self.draft.join(self.model, run.table)
        routes = trace_routes(model, run.table, bits, self.memory, self.tied_head)
        # Tracing calls the model's loader, which counts as an external write. Reset here; later ones count.
        self.external_writer = None
        traced = time.perf_counter()
        measured = routes.fingerprint_routes(range(len(run.table)))
        cut = cut_tensors(routes)
        if cut:
            logger.warning(
                "of %d tensors (the first is %r) this rank holds a share that ends inside a tile of codec 'tiled', so "
                "versions that change it are rebuilt from the bucket: publish with codec='plain', or serve with other "
                "numbers of ranks",
                len(cut), cut[0],
            )  # fmt: skip
        wide = any(destination.flat.numel() >= NARROW_ELEMENTS for destination in routes.destinations)
        device_patch.compile_kernels({spec.element for spec in run.table}, routes)
        accelerator = self.memory.accelerator
        if accelerator is not None and accelerator.has_triton:
            from vllm_delta_sync.engine.staging.device_decoder import compile_decoder

            compile_decoder({spec.element for spec in run.table}, routes, accelerator.workspace)
        compiling.join()
        if wide:
            apply.compile_kernels(elements, wide)
        self.run, self.routes, self._runs = run, routes, runs
        self.version, self.fingerprints, self._staged = None, [], None
        self._undo_log.clear()
        reloaded = [] if routes.reload_units is None else routes.reload_units.tensors
        # Kept until the controller has used it.
        self._claimed = claimed
        return protocol.Identified(
            regions=[[route.source for route in of_tensor] for of_tensor in routes.routes],
            measured=measured,
            claimed=claimed,
            unloaded=routes.unloaded,
            derived=[run.table[tensor].name for tensor in reloaded],
            ms={"trace": 1e3 * (traced - began), "scan": 1e3 * (time.perf_counter() - traced)},
        )

    def prepare(self, run: Run) -> None:
        """Prepare to hold versions of a run, before its routes are traced; nothing to do for the model itself."""

    def _claimed_version(self) -> protocol.ClaimedVersion | None:
        """Return the version that this rank last had, or that it was loaded with; None if unknown."""
        if self._claimed is not None and self.version is None:
            return self._claimed
        if self.run is not None and self.version is not None:
            return protocol.ClaimedVersion(self.run.info.run, self.run.bucket.url, self.version, self.fingerprints)
        loaded: protocol.ClaimedVersion | None = getattr(self.model, "delta_sync_loaded", None)
        return loaded

    def set_version(self, request: protocol.SetVersion) -> protocol.Done:
        """Store what the controller found out about all ranks together."""
        _, routes = self._require_routes()
        routes.groups, routes.loaded = request.groups[self.index], request.loaded
        self.fingerprints = request.fingerprints
        self.version, self.confirmed = request.version, True
        self._claimed = request.claimed
        return protocol.Done()

    def stage(self, request: protocol.Stage) -> protocol.Staged:
        """Fetch, verify, decode, merge and route the objects of one commit. Writes nothing to the model."""
        run, routes = self._require_unchanged()
        self._staged = None
        update = UpdatePlan.of_request(request, self._open_run)
        target, current = update.target.version, request.current
        if current != self.version:
            raise ChainError(f"version {target} is to follow version {current}; here is {self.version}")
        return self._stage(update, run, routes, request.rescan)

    def repair(self, request: protocol.Repair) -> protocol.Staged:
        """Stage a version from any state of the weights, even after external writes.

        No change is declared, so the weights must be scanned after the commit.
        """
        run, routes = self._require_routes()
        self.memory.check_awake()
        routes.check_live()
        target = Manifest.from_bytes(request.manifest)
        # From here the weights are no version: no commit returns to them, and none waits to be confirmed.
        self.version, self.confirmed, self.external_writer, self._staged = None, True, None, None
        self._undo_log.clear()
        return self._stage(UpdatePlan(target, rebuild=True), run, routes, [])

    def _stage(self, update: UpdatePlan, run: Run, routes: RouteMap, rescan: list[int]) -> protocol.Staged:
        timer, stamp = PhaseTimer(), self._weights_stamp()
        patch = stage_update(update, run, routes, self.fingerprints, self.folder, timer, self._weights_stamp)
        rescanned = self._rescan(routes, rescan)
        timer.tick("rescan")
        # Last: what came before may need the device's memory for a moment.
        patch.prepare(routes)
        timer.tick("route")
        self._staged, self._staged_stamp = patch, stamp
        return protocol.Staged(
            patch.version, patch.declared, patch.nbytes, patch.elements, timer.ms, store_usage(), rescanned
        )

    def _open_run(self, where: tuple[str, str] | None) -> Run:
        """Return the run followed (None), or another run by its URL and the digest of its run.json."""
        return self._require_routes()[0] if where is None else self._runs.open(*where)

    def commit(self, request: protocol.Commit) -> protocol.Committed:
        """Apply the staged version in place. The engine must be paused."""
        _, routes = self._require_unchanged()
        version, patch = request.version, self._staged
        if patch is None or patch.version != version or self._staged_stamp != self._weights_stamp():
            raise EngineError(f"version {version} is not staged on this rank; stage it first")

        def record() -> None:
            self.confirmed = False
            self._undo_log.push(UndoEntry(patch, patch.measured, self.fingerprints, self.version))
            self._staged = None
            self.fingerprints, self.version = patch.fingerprints, version

        with postpone_interrupts():
            return protocol.Committed(self._apply(patch, routes, False, record))

    def revert(self, request: protocol.Revert) -> protocol.Done:
        """Return to an older version, commit by commit, or go forward again. The engine must be paused.

        Does nothing if the rank has the version already. If a step fails, the steps before it stay done, and the
        weights are the version that ``describe`` reports.

        Raises:
            EngineError: the undo log does not reach the version. FingerprintError: the weights are not those that the
            commits left; weights and version are as before the call.
        """
        _, routes = self._require_routes()
        self.memory.check_awake()
        version = request.version
        if version == self.version:
            return protocol.Done()
        steps, reverse = self._undo_log.path(version, self.version)
        applied: list[UndoEntry] = []
        with postpone_interrupts():
            for step in steps:
                matched = self._apply_logged(step, routes, reverse)
                applied.append(step)
                if not matched:
                    try:
                        for entry in reversed(applied):
                            self._apply_logged(entry, routes, not reverse)
                    except BaseException:  # after any failure here the weights are no version
                        self.intact = False
                        raise
                    raise FingerprintError(
                        f"reverting to version {version} did not change the weights as declared: they were "
                        "changed from outside"
                    )
            self.confirmed, self._staged = True, None
            # What a failed commit has uploaded is not needed again: a revert can do without.
            self._undo_log.confirm()
        return protocol.Done()

    def _apply_logged(self, step: UndoEntry, routes: RouteMap, reverse: bool) -> bool:
        """Take back one commit of the log, or apply it again. Returns whether it measured the expected change."""

        def record() -> None:
            self._undo_log.record_step(reverse)
            self.fingerprints = step.fingerprints if reverse else step.patch.fingerprints
            self.version = step.version if reverse else step.patch.version

        return self._apply(step.patch, routes, reverse, record) == step.expected(reverse)

    def _apply(
        self, patch: StagedPatch, routes: RouteMap, reverse: bool, record: Callable[[], None]
    ) -> apply.GroupChanges:
        """Apply a patch or take it back, and call ``record`` if that is done, also where an error follows."""
        try:
            return apply.apply_patch(patch, routes, reverse)
        except WeightsLostError:
            self.intact = False
            raise
        except DeltaSyncError:
            raise
        except Exception as error:  # a rank answers with errors of kinds that the controller knows
            raise protocol.wrap_error(error) from error
        finally:
            # The version of the weights must be known.
            if patch.applied != reverse:
                record()

    def confirm(self, request: protocol.Confirm) -> protocol.RankState:
        """Confirm the last commit, which was right on all ranks: trim the undo log, and drop device copies that only a
        revert within the same pause needs. Returns ``describe``."""
        self.confirmed = True
        self._undo_log.confirm()
        if self.memory.accelerator is not None:
            self.memory.accelerator.free_idle_memory(keeps_usual=True)
        if self.version is not None:
            self._claimed = None
        self._undo_log.trim(request.undo_bytes)
        return self.describe()

    def describe(self, request: protocol.Describe | None = None) -> protocol.RankState:
        """Return what this rank holds."""
        return protocol.RankState(
            version=self.version,
            intact=self.intact,
            confirmed=self.confirmed,
            undo=self._undo_log.versions,
            undo_bytes=self._undo_log.nbytes,
            external_writer=self.external_writer,
            external_writes=self.external_writes,
            asleep=self.memory.asleep,
        )

    def clear_external_write(self, request: protocol.ClearExternalWrite) -> protocol.Done:
        """Forget external writes: the controller has rescanned the weights and found them unchanged."""
        if request.external_writes[self.index] == self.external_writes:
            self.external_writer = None
        return protocol.Done()

    def leave_device(self) -> None:
        """Give up what staging keeps on the device, before the engine sleeps: what is staged expires then."""
        self._staged = None
        self._undo_log.confirm()
        if self.memory.accelerator is not None:
            self.memory.accelerator.free_idle_memory()

    def not_rebuilt(self) -> list[torch.UntypedStorage]:
        """Return what the model has had since loading and a rebuild would not bring back, were the weights lost."""
        if self.routes is None:
            return []
        rebuilt = self.routes.whole_storages
        records = [load_record_of(self.model), None if self.draft is None else load_record_of(self.draft.model)]
        held = (seen() for record in records if record is not None for seen in record.live.values())
        found = [each.untyped_storage() for each in held if each is not None and is_plain(each) and not each.is_meta]
        return list({each._cdata: each for each in found if each.nbytes() and each._cdata not in rebuilt}.values())

    def _settle(self) -> None:
        """Give up what a background operation still had, or has staged, when the engine fell asleep."""
        if self.memory.asleep:
            self._staged = None
            if self.memory.accelerator is not None:
                self.memory.accelerator.free_idle_memory()
                # Also what torch keeps of other tensors that the operation made.
                self.memory.accelerator.release([])

    def note_external_write(self, writer: str) -> None:
        """Record that a call from outside writes weights, or may."""
        self.external_writer, self.external_writes = writer, self.external_writes + 1

    def scan(self, request: protocol.Scan) -> protocol.Scanned:
        """Hash tensors as they lie in memory now."""
        _, routes = self._require_routes()
        self.memory.check_awake()
        return self._rescan(routes, request.tensors)

    def _rescan(self, routes: RouteMap, tensors: list[int]) -> protocol.Scanned:
        return protocol.Scanned(
            measured=routes.measure(tensors),
            expected={tensor: self.fingerprints[tensor] for tensor in tensors},
            dead=[routes.table[tensor].name for tensor in tensors if not routes.is_live(tensor)],
        )

    def _weights_stamp(self) -> tuple[int, int, bool]:
        """Return a stamp that changes when weights may have been written or left memory; staged patches then expire."""
        return self.external_writes, self._undo_log.writes, self.memory.asleep

    def _require_unchanged(self) -> tuple[Run, RouteMap]:
        """Return the run and routes. Raises EngineError if a call from outside may have written weights."""
        run, routes = self._require_routes()
        self.memory.check_awake()
        if self.external_writer is not None:
            raise EngineError(
                f"weights may have been changed from outside ({self.external_writer}); they must be rescanned first"
            )
        routes.check_live()
        return run, routes

    def _require_routes(self) -> tuple[Run, RouteMap]:
        if not self.intact:
            raise WeightsLostError("this rank's weights are unknown; start the server again")
        if self.run is None or self.routes is None:
            raise EngineError("this rank has not traced its routes yet")
        return self.run, self.routes


def _compile_loops(elements: Collection[DType]) -> None:
    """Compile every loop that staging and commits of such elements use, or load it from numba's cache.

    In a thread beside tracing and hashing. Otherwise the first version would wait for them, or a pause would.
    """
    try:
        # First, because hashing waits for it.
        fingerprint.compile_kernels(elements)
        apply.compile_kernels(elements)
        compile_routing(elements)
        delta_reader.compile_kernels(elements)
        merge.warm_up(elements)
    except Exception:  # whatever cannot be compiled raises again where it is used, which reports it
        logger.exception("the loops for a run's versions could not be compiled in advance")
