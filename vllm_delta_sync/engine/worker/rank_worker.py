"""``RankWorker`` identifies one rank's weights, stages versions beside generation, commits and reverts.

It runs inside a worker process. Long operations run in one background thread that is started and polled, because a
long remote call would block the engine; all other calls are short and run on the caller's thread. ``commit`` and
``revert`` need a paused engine.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.client import Run
from vllm_delta_sync.codec.merge import warm_up
from vllm_delta_sync.engine.commit import apply
from vllm_delta_sync.engine.commit.interrupts import postpone_interrupts
from vllm_delta_sync.engine.commit.transaction import Answer, error_answer, wrap_error
from vllm_delta_sync.engine.commit.undo_log import UndoEntry, UndoLog
from vllm_delta_sync.engine.model.loader_trace import LoadableModel
from vllm_delta_sync.engine.model.patch import StagedPatch
from vllm_delta_sync.engine.model.route_compiler import trace_routes
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.model.shard_ownership import region_to_plain
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.engine.planning.commit_plan import UpdatePlan
from vllm_delta_sync.engine.staging.loaded_bits import LoadTimeBits
from vllm_delta_sync.engine.staging.read_steps import PhaseTimer, store_usage
from vllm_delta_sync.engine.staging.run_cache import RunCache
from vllm_delta_sync.engine.staging.stage import stage_update
from vllm_delta_sync.errors import (
    BusyError,
    ChainError,
    DeltaSyncError,
    EngineError,
    FingerprintError,
    WeightsLostError,
)
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest


class Background:
    """Runs one operation at a time in a thread, and keeps the outcome of the last one.

    Args:
        context: entered in the thread around each operation.
    """

    def __init__(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._context = context
        self._thread: threading.Thread | None = None
        self._outcome: Answer = {}

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, name: str, operation: Callable[..., Answer], arguments: Answer) -> None:
        """Start an operation. Raises BusyError: another one is still running."""
        if self.is_busy:
            raise BusyError(f"operation {name!r} must wait: another one is running")
        self._outcome = {}
        self._thread = threading.Thread(
            target=self._run, args=(operation, arguments), name="delta-sync-stage", daemon=True
        )
        self._thread.start()

    def _run(self, operation: Callable[..., Answer], arguments: Answer) -> None:
        try:
            with self._context():
                self._outcome = operation(**arguments)
        except DeltaSyncError as error:
            self._outcome = error_answer(error)
        except Exception as error:  # noqa: BLE001  a thread's error would be lost; the controller must receive it
            self._outcome = error_answer(wrap_error(error))

    def outcome(self) -> Answer:
        """Return the last operation's answer or error. Raises BusyError: it is still running."""
        if self.is_busy:
            raise BusyError("the operation has no outcome yet: it is still running")
        return self._outcome


class RankWorker:
    """State of one rank.

    Attributes:
        index: position of this rank among the ranks that one call reaches.
        folder: what vLLM loaded the model from.
        routes: None until traced.
        fingerprints: per tensor id of the run: fingerprint of the whole tensor, over all ranks, at ``version``.
        version: the version of the weights; None if unknown, or if they are no version of the run followed.
        confirmed: False from a commit until the controller has found it right on all ranks.
        intact: False once a commit could neither be finished nor taken back.
        external_writer: name of the last call from outside that wrote, or may have written, weights since the
            controller last checked them; None if there was none.
        external_writes: number of such calls.
        memory: decides which thread may access the weights when.
    """

    def __init__(
        self, model: LoadableModel, index: int = 0, folder: str = "", memory: WeightMemory | None = None
    ) -> None:
        self.model = model
        self.index = index
        self.folder = folder
        self.run: Run | None = None
        self.routes: RouteMap | None = None
        self.fingerprints: list[Fingerprint] = []
        self.version: int | None = None
        self.intact = True
        self.confirmed = True
        self.external_writer: str | None = None
        self.external_writes = 0
        self.memory = WeightMemory.for_model(model) if memory is None else memory
        self._claimed: Answer | None = None
        self._runs = RunCache()
        self._staged: StagedPatch | None = None
        self._undo_log = UndoLog()
        self._staged_stamp = self._weights_stamp()
        self._background = Background(self.memory.background_thread)

    @property
    def asleep(self) -> bool:
        """True while the weights are not in memory."""
        return self.memory.asleep

    def start(self, operation: str, arguments: Answer) -> Answer:
        """Start ``identify``, ``stage``, ``repair`` or ``scan`` in the background.

        Raises:
            BusyError: an operation is still running. EngineError: the operation is unknown.
        """
        operations: dict[str, Callable[..., Answer]] = {
            "identify": self.identify,
            "stage": self.stage,
            "repair": self.repair,
            "scan": self.scan,
        }
        if operation not in operations:
            raise EngineError(f"operation {operation!r} is unknown; known are {', '.join(operations)}")
        self._background.start(operation, operations[operation], arguments)
        return {}

    def poll(self) -> Answer:
        """Return {"running": whether the last operation started is still running}."""
        return {"running": self._background.is_busy}

    def outcome(self) -> Answer:
        """Return the last operation's answer or error. It may be megabytes, so it is not part of ``poll``."""
        return self._background.outcome()

    def identify(
        self,
        url: str,
        cache_dir: str | None = None,
        cache_bytes: int = 0,
        info: str | None = None,
        trusted: Sequence[str] = (),
        store: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Trace routes, and fingerprint every tensor through them.

        Args:
            info, trusted, store: see ``RunCache``.

        Returns:
            per tensor id, the source regions of this rank's routes and the fingerprint of each; and as "claimed" the
            version that the weights should be: {"run", "url", "version", "fingerprints"}, or None if unknown.
        """
        began = time.perf_counter()
        self._check_awake()
        runs = RunCache(trusted, store, None if cache_dir is None else ObjectCache(Path(cache_dir), cache_bytes))
        run = runs.open(url, info)
        claimed = self._claimed_version()
        load_time_bits = LoadTimeBits(self.model, self.folder, run, runs, self.routes)
        routes = trace_routes(self.model, run.table, load_time_bits, self.memory)
        # Tracing calls the model's loader, which counts as an external write. Reset here; later ones count.
        self.external_writer = None
        traced = time.perf_counter()
        measured = [
            [value.hex() for value in routes.fingerprint_routes(position)] for position in range(len(run.table))
        ]
        apply.compile_kernels({spec.element for spec in run.table})
        warm_up({spec.element for spec in run.table})
        self.run, self.routes, self._runs = run, routes, runs
        self.version, self.fingerprints, self._staged = None, [], None
        self._undo_log.clear()
        reloaded = [] if routes.reload_units is None else routes.reload_units.tensors
        # Kept until the controller has used it.
        self._claimed = claimed
        return {
            "regions": [[region_to_plain(route.source) for route in of_tensor] for of_tensor in routes.routes],
            "measured": measured,
            "claimed": claimed,
            "unloaded": routes.unloaded,
            "derived": [run.table[tensor].name for tensor in reloaded],
            "ms": {"trace": 1e3 * (traced - began), "scan": 1e3 * (time.perf_counter() - traced)},
        }

    def _claimed_version(self) -> Answer | None:
        """Return the version that this rank last had, or that it was loaded with; None if unknown."""
        if self._claimed is not None and self.version is None:
            return self._claimed
        if self.run is not None and self.version is not None:
            current = [value.hex() for value in self.fingerprints]
            return _claim(self.run.info.run, self.run.bucket.url, self.version, current)
        loaded = getattr(self.model, "delta_sync_loaded", None)
        if loaded is None:
            return None
        return _claim(loaded.run, loaded.url, loaded.version, list(loaded.fingerprints))

    def set_version(
        self,
        version: int | None,
        fingerprints: list[str],
        groups: list[list[list[int]]],
        loaded: list[bool],
        claimed: Answer | None = None,
    ) -> Answer:
        """Store what the controller found out about all ranks together.

        Args:
            version: the version of the weights; None means no version of the run followed.
            fingerprints, loaded: per tensor id. groups: per rank, per tensor id, per route.
            claimed: if ``version`` is None, what the weights are instead, for a later ``identify``: {"run", "url",
                "version"}.
        """
        _, routes = self._require_routes()
        routes.groups, routes.loaded = groups[self.index], loaded
        self.fingerprints = [Fingerprint.from_hex(value) for value in fingerprints]
        self.version, self.confirmed = version, True
        self._claimed = None if claimed is None else {**claimed, "fingerprints": fingerprints}
        return {}

    def stage(self, plan: Answer, current: int | None, rescan: list[int], keys: int = 0) -> Answer:
        """Fetch, verify, decode, merge and route the objects of one commit. Writes nothing to the model.

        Args:
            plan: see ``UpdatePlan.to_plain``.
            current: the version that the controller expects on this rank.
            rescan: tensor ids to rescan, as ``scan`` does.
            keys: see ``RankGroup``.
        """
        run, routes = self._require_unchanged()
        self._staged = None
        update = UpdatePlan.from_plain(plan, self._open_run)
        if current != self.version:
            raise ChainError(f"version {update.target.version} is to follow version {current}; here is {self.version}")
        if update.rebuild:
            run.verifier.refresh(keys)
        timer = PhaseTimer()
        stamp = self._weights_stamp()
        patch = stage_update(update, run, routes, self.fingerprints, self.folder, timer, self._weights_stamp)
        scanned = self._rescan(routes, rescan)
        timer.tick("rescan")
        self._staged, self._staged_stamp = patch, stamp
        return self._staged_answer(patch, timer.ms, scanned)

    def repair(self, manifest: str, keys: int = 0) -> Answer:
        """Stage a version from any state of the weights, even after external writes.

        Returns:
            as ``stage``; no change is declared, so the weights must be scanned after the commit.
        """
        run, routes = self._require_routes()
        self._check_awake()
        routes.check_live()
        run.verifier.refresh(keys)
        target = Manifest.from_bytes(manifest.encode())
        # From here the weights are no version: no commit returns to them, and none waits to be confirmed.
        self.version, self.confirmed, self.external_writer, self._staged = None, True, None, None
        self._undo_log.clear()
        timer = PhaseTimer()
        rebuilt = UpdatePlan(target, rebuild=True)
        stamp = self._weights_stamp()
        self._staged = stage_update(rebuilt, run, routes, self.fingerprints, self.folder, timer, self._weights_stamp)
        self._staged_stamp = stamp
        return self._staged_answer(self._staged, timer.ms, self._rescan(routes, []))

    def _staged_answer(self, patch: StagedPatch, ms: dict[str, float], scanned: Answer) -> Answer:
        declared = patch.declared.hex()
        return {
            "staged": patch.version,
            "declared": declared,
            "bytes": patch.nbytes,
            "elements": patch.elements,
            "ms": ms,
            "store": store_usage(),
            **scanned,
        }

    def _open_run(self, where: tuple[str, str] | None) -> Run:
        """Return the run followed (None), or another run by its URL and the digest of its run.json."""
        return self._require_routes()[0] if where is None else self._runs.open_cached(*where)

    def commit(self, version: int) -> Answer:
        """Apply the staged version in place. The engine must be paused.

        Returns:
            {"measured": change of fingerprint per group of ranks, "ms"}. If it is wrong, call ``revert``.
        """
        _, routes = self._require_unchanged()
        patch = self._staged
        if patch is None or patch.version != version or self._staged_stamp != self._weights_stamp():
            raise EngineError(f"version {version} is not staged on this rank; stage it first")
        began = time.perf_counter()
        with postpone_interrupts():
            try:
                measured = apply.apply_patch(patch, routes)
            except BaseException as error:
                self._mark_lost_or_wrap(error)
                raise
            finally:
                # Also after a failure: the version of the weights must be known.
                if patch.applied:
                    self.confirmed = False
                    self._undo_log.push(UndoEntry(patch, patch.measured, self.fingerprints, self.version))
                    self._staged = None
                    self.fingerprints, self.version = patch.fingerprints, version
        return {
            "measured": {group: value.hex() for group, value in measured.items()},
            "ms": 1e3 * (time.perf_counter() - began),
        }

    def revert(self, version: int | None) -> Answer:
        """Return to an older version, commit by commit, or go forward again. The engine must be paused.

        Does nothing if the rank has the version already. If a step fails, the steps before it stay done, and the
        weights are the version that ``describe`` reports.

        Raises:
            EngineError: the undo log does not reach the version. FingerprintError: the weights are not those that the
            commits left; weights and version are as before the call.
        """
        _, routes = self._require_routes()
        self._check_awake()
        if version == self.version:
            return {"version": version}
        path = self._undo_log.path(version, self.version)
        applied: list[UndoEntry] = []
        with postpone_interrupts():
            for step in path.steps:
                matched = self._apply_logged(step, routes, path.reverse)
                applied.append(step)
                if not matched:
                    try:
                        for entry in reversed(applied):
                            self._apply_logged(entry, routes, not path.reverse)
                    except BaseException:  # after any failure here the weights are no version
                        self.intact = False
                        raise
                    raise FingerprintError(
                        f"reverting to version {version} did not change the weights as declared: they were "
                        "changed from outside"
                    )
            self.confirmed, self._staged = True, None
        return {"version": self.version}

    def _apply_logged(self, step: UndoEntry, routes: RouteMap, reverse: bool) -> bool:
        """Take back one commit of the log, or apply it again. Returns whether it measured the expected change."""
        try:
            measured = apply.apply_patch(step.patch, routes, reverse)
        except BaseException as error:
            self._mark_lost_or_wrap(error)
            raise
        finally:
            # Also after a failure: the version of the weights must be known.
            if step.patch.applied != reverse:
                self._undo_log.record_step(reverse)
                self.fingerprints = step.fingerprints if reverse else step.patch.fingerprints
                self.version = step.version if reverse else step.patch.version
        return measured == step.expected(reverse)

    def confirm(self, undo_bytes: int) -> Answer:
        """Confirm the last commit, which was right on all ranks: trim the undo log, and drop device copies that only a
        revert within the same pause needs. Returns ``describe``."""
        self.confirmed = True
        self._undo_log.confirm()
        if self.version is not None:
            self._claimed = None
        self._undo_log.trim(undo_bytes)
        return self.describe()

    def _mark_lost_or_wrap(self, error: BaseException) -> None:
        if isinstance(error, WeightsLostError):
            self.intact = False
        elif isinstance(error, Exception) and not isinstance(error, DeltaSyncError):
            raise wrap_error(error) from error

    def describe(self) -> Answer:
        """Return the rank's version, whether that is certain, the versions that it can revert to (newest first), and
        external writes."""
        return {
            "version": self.version,
            "intact": self.intact,
            "confirmed": self.confirmed,
            "undo": self._undo_log.versions,
            "undo_bytes": self._undo_log.nbytes,
            "external_writer": self.external_writer,
            "external_writes": self.external_writes,
            "asleep": self.asleep,
        }

    def clear_external_write(self, external_writes: list[int]) -> Answer:
        """Forget external writes: the controller has rescanned the weights and found them unchanged.

        Args:
            external_writes: per rank, the number known when the rescan began. A newer write is not cleared.
        """
        if external_writes[self.index] == self.external_writes:
            self.external_writer = None
        return {}

    def note_external_write(self, writer: str) -> None:
        """Record that a call from outside writes weights, or may."""
        self.external_writer, self.external_writes = writer, self.external_writes + 1

    def scan(self, tensors: list[int]) -> Answer:
        """Rescan tensors: {"measured": {tensor id: fingerprint per route}, "expected": {tensor id: fingerprint of the
        whole tensor}, "dead": names of tensors whose memory the model no longer uses}."""
        _, routes = self._require_routes()
        self._check_awake()
        return {"version": self.version, **self._rescan(routes, tensors)}

    def _rescan(self, routes: RouteMap, tensors: list[int]) -> Answer:
        return {
            "measured": {tensor: [value.hex() for value in found] for tensor, found in routes.measure(tensors)},
            "expected": {tensor: self.fingerprints[tensor].hex() for tensor in tensors},
            "dead": [routes.table[tensor].name for tensor in tensors if not routes.is_live(tensor)],
        }

    def _weights_stamp(self) -> tuple[int, int, bool]:
        """Return a stamp that changes when weights may have been written or left memory; staged patches then expire."""
        return self.external_writes, self._undo_log.writes, self.asleep

    def _require_unchanged(self) -> tuple[Run, RouteMap]:
        """Return the run and routes. Raises EngineError if a call from outside may have written weights."""
        run, routes = self._require_routes()
        self._check_awake()
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

    def _check_awake(self) -> None:
        self.memory.check_awake()


def _claim(run: str, url: str, version: int, fingerprints: list[str]) -> Answer:
    return {"run": run, "url": url, "version": version, "fingerprints": fingerprints}
