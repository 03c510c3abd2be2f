"""One rank's receiver: proves what its model holds, stages versions beside generation, commits or takes back.

Runs inside a worker process. Long operations run in one background thread that is started and polled, because a
long remote call would block the engine; ``commit`` and ``revert`` are short and run on the caller's thread, while
the engine is paused.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_delta_sync.chain import Run, check_declared, check_follows, decode_version, open_run
from vllm_delta_sync.engine import commit as commits
from vllm_delta_sync.engine.patch import StagedPatch, stage
from vllm_delta_sync.engine.routes import RouteMap
from vllm_delta_sync.engine.trace import LoadableModel, trace_routes
from vllm_delta_sync.errors import (
    BusyError,
    ChainError,
    DeltaSyncError,
    EngineError,
    FingerprintError,
    WeightsLostError,
)
from vllm_delta_sync.wire.fingerprint import Fingerprint
from vllm_delta_sync.wire.manifest import Manifest

Answer = dict[str, Any]


def error_answer(error: DeltaSyncError) -> Answer:
    """An error as plain data, for the way from a worker to the controller."""
    return {"error": {"kind": error.kind, "message": error.message}}


class RankReceiver:
    """State of one rank.

    Attributes:
        routes: None until proven.
        fingerprints: per tensor id of the run, what this rank holds (for tensors it does not load: what the
            history declares).
        version: the version held; None until proven.
        intact: False once a commit could neither be finished nor taken back.
    """

    def __init__(self, model: LoadableModel) -> None:
        self.model = model
        self.run: Run | None = None
        self.routes: RouteMap | None = None
        self.fingerprints: list[Fingerprint] = []
        self.version: int | None = None
        self.intact = True
        self._staged: StagedPatch | None = None
        self._applied: tuple[StagedPatch, commits.Undo, list[Fingerprint], int | None] | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Answer = {}

    def start(self, operation: str, arguments: Answer) -> None:
        """Begin ``prove``, ``stage`` or ``verify`` in the background.

        Raises:
            BusyError: an operation is still running. EngineError: there is no such operation.
        """
        operations: dict[str, Callable[..., Answer]] = {
            "prove": self.prove,
            "stage": self.stage,
            "verify": self.verify,
        }
        if operation not in operations:
            raise EngineError(f"operation {operation!r} is unknown; known are {', '.join(operations)}")
        if self._thread is not None and self._thread.is_alive():
            raise BusyError(f"operation {operation!r} must wait: another one is running")
        self._outcome = {}
        self._thread = threading.Thread(
            target=self._run_operation,
            args=(operations[operation], arguments),
            name="delta-sync-stage",
            daemon=True,
        )
        self._thread.start()

    def _run_operation(self, operation: Callable[..., Answer], arguments: Answer) -> None:
        try:
            self._outcome = operation(**arguments)
        except DeltaSyncError as error:
            self._outcome = error_answer(error)
        except Exception as error:  # noqa: BLE001  a thread's error would be lost; the controller must hear of it
            self._outcome = error_answer(EngineError(f"unexpected {type(error).__name__}: {error}"))

    def poll(self) -> Answer:
        """{"running": True}, or the outcome of the last operation with "running" False."""
        if self._thread is not None and self._thread.is_alive():
            return {"running": True}
        return {"running": False, **self._outcome}

    def prove(self, url: str, manifest: str) -> Answer:
        """Trace routes, gather every tensor through them, and compare with version 0.

        Args:
            manifest: canonical text of version 0's manifest.
        """
        began = time.perf_counter()
        first = Manifest.from_bytes(manifest.encode())
        run = open_run(url)
        routes = trace_routes(self.model, run.table)
        traced = time.perf_counter()
        declared = first.tensor_fingerprints or {}
        held, different = [], []
        for position, spec in enumerate(run.table):
            expected = Fingerprint.from_hex(declared[spec.name]) if spec.name in declared else None
            if expected is None:
                raise ChainError(f"version 0 has no fingerprint for tensor {spec.name!r}")
            measured = routes.fingerprint(position) if routes.routes[position] else expected
            held.append(measured)
            if measured != expected:
                different.append(spec.name)
        commits.warm_up({spec.element for spec in run.table})
        self.run, self.routes, self.fingerprints = run, routes, held
        self.version = None if different else 0
        self._staged = self._applied = None
        return {
            "matches_base": not different,
            "different": different[:10],
            "different_count": len(different),
            "unloaded": routes.unloaded,
            "tensors": len(run.table),
            "ms": {"trace": 1e3 * (traced - began), "scan": 1e3 * (time.perf_counter() - traced)},
        }

    def stage(self, manifest: str, parent: str | None) -> Answer:
        """Fetch, verify, decode and route one version; nothing is written to the model.

        Args:
            manifest, parent: canonical texts; parent is None for version 0.
        """
        run, routes = self._proven()
        routes.check_live()
        self._staged = None
        target = Manifest.from_bytes(manifest.encode())
        before = None if parent is None else Manifest.from_bytes(parent.encode())
        if target.kind == "delta":
            if before is None or target.base_version != self.version:
                raise ChainError(
                    f"version {target.version} builds on version {target.base_version}, this rank holds {self.version}"
                )
            check_follows(before, target)
        clock = [time.perf_counter()]
        objects = [run.fetch(ref) for ref in target.objects]
        clock.append(time.perf_counter())
        changes = decode_version(target, run.table, objects)
        if target.kind == "delta" and before is not None:
            check_declared(before, target, changes)
        clock.append(time.perf_counter())
        patch = stage(target.version, changes, routes, self.fingerprints)
        self._check_total(target, patch)
        clock.append(time.perf_counter())
        self._staged = patch
        spans = [1e3 * (end - start) for start, end in itertools.pairwise(clock)]
        return {
            "staged": target.version,
            "bytes": patch.nbytes,
            "changed": target.changed,
            "ms": dict(zip(("fetch", "decode", "route"), spans, strict=True)),
        }

    def _check_total(self, target: Manifest, patch: StagedPatch) -> None:
        total = Fingerprint()
        for value in patch.fingerprints:
            total += value
        if total != target.model_fingerprint:
            raise FingerprintError(
                f"version {target.version} would lead to fingerprint {total.hex()}, its manifest says "
                f"{target.fingerprint}: the weights held are not those it was made against"
            )

    def commit(self, version: int) -> Answer:
        """Apply the staged version in place. The engine must be paused.

        Returns:
            {"matched": whether the weights changed as declared, "ms": time}. If not, call ``revert``.
        """
        _, routes = self._proven()
        routes.check_live()
        patch = self._staged
        if patch is None or patch.version != version:
            raise EngineError(f"version {version} is not staged on this rank; stage it first")
        began = time.perf_counter()
        with self._guarded():
            measured, undo = commits.commit(patch, routes)
        self._applied = (patch, undo, self.fingerprints, self.version)
        self._staged = None
        self.fingerprints, self.version = patch.fingerprints, version
        return {"matched": measured == patch.declared, "ms": 1e3 * (time.perf_counter() - began)}

    def revert(self) -> Answer:
        """Take the last commit back; bits, fingerprints and version are as before it."""
        _, routes = self._proven()
        if self._applied is None:
            raise EngineError("there is no commit to take back")
        patch, undo, fingerprints, version = self._applied
        with self._guarded():
            commits.revert_or_give_up(patch, routes, undo)
        self._applied, self.fingerprints, self.version = None, fingerprints, version
        return {"version": self.version}

    def forget(self) -> Answer:
        """Give up the way back from the last commit, and the memory it takes."""
        self._applied = None
        return {}

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Remember if weights were lost."""
        try:
            yield
        except WeightsLostError:
            self.intact = False
            raise

    def describe(self) -> Answer:
        """{"version": what this rank holds, "intact": whether it can tell}."""
        return {"version": self.version, "intact": self.intact}

    def verify(self) -> Answer:
        """Gather and hash every loaded tensor again and compare with what this rank should hold."""
        _, routes = self._proven()
        total = Fingerprint()
        mismatched = []
        for position, spec in enumerate(routes.table):
            expected = self.fingerprints[position]
            measured = routes.fingerprint(position) if routes.routes[position] else expected
            total += measured
            if measured != expected or not routes.is_live(position):
                mismatched.append(spec.name)
        return {"version": self.version, "fingerprint": total.hex(), "mismatched": mismatched}

    def _proven(self) -> tuple[Run, RouteMap]:
        if not self.intact:
            raise WeightsLostError("this rank cannot tell what its weights are; start the server again")
        if self.run is None or self.routes is None:
            raise EngineError("this rank has not proven its routes yet")
        return self.run, self.routes
