"""The receiver's logic: follow a run through whatever engine it is given, forward by commits, back by the undo log.

Knows buckets and manifests, and an engine only as an ``EnginePort``; so the vLLM server and the offline ``LLM`` share
it. One thread drives it; ``status`` may be called from any.
"""

import logging
from collections.abc import Callable

from vllm_delta_sync.config import Settings
from vllm_delta_sync.engine.history import History
from vllm_delta_sync.engine.mover import Mover, not_served
from vllm_delta_sync.engine.ranks import Held, Ranks
from vllm_delta_sync.engine.rotation import Rotation
from vllm_delta_sync.engine.status import STATES, Board
from vllm_delta_sync.engine.transaction import Answer, EnginePort
from vllm_delta_sync.errors import (
    BusyError,
    ChainError,
    DeltaSyncError,
    EngineError,
    ModelError,
    NotFoundError,
    TensorMismatchError,
    UnsupportedError,
    WeightsLostError,
)
from vllm_delta_sync.wire.fingerprint import Fingerprint
from vllm_delta_sync.wire.manifest import Manifest

# A child of vLLM's logger, the only one that vLLM gives a handler.
logger = logging.getLogger("vllm.delta_sync")

REFUSALS = (ModelError, ChainError, TensorMismatchError, UnsupportedError)
"""What no later look can mend before the first version is served, short of another run or another server."""
STAGE_SECONDS = 1800.0
"""Longest that staging or a scan may take before the receiver says that it hangs."""


class Receiver:
    """Follows one run URL with one engine."""

    def __init__(self, port: EnginePort, settings: Settings, stage_seconds: float = STAGE_SECONDS) -> None:
        self.port = port
        self.settings = settings
        self.history = History(settings.bucket)
        self.board = Board(settings.policy)
        self._ranks = Ranks(port, stage_seconds)
        self._mover = Mover(port, settings, self.board, self.history, self._ranks)

    @property
    def served_version(self) -> int | None:
        """The version that answers now; None until the weights are proven to be one."""
        served = self.board.served
        return None if served is None else served.version

    @property
    def run_id(self) -> str | None:
        """The run followed, once known."""
        return self.board.run

    @property
    def served_run(self) -> str | None:
        """The run that ``served_version`` counts in."""
        served = self.board.served
        return None if served is None else served.run

    def status(self) -> Answer:
        """The body of ``GET /delta_sync/status``."""
        return self.board.document()

    def advance(self, version: int | None = None, until: Callable[[], bool] = lambda: False) -> None:
        """Bring the engine to a version, the head if None; versions in between are folded into few commits.

        Args:
            until: asked between two commits; if True, what is left waits for the next call.

        Raises:
            DeltaSyncError: the first thing that failed; what is served then is ``served_version``.
        """
        stopped_by = self._look()
        if self._mover.damaged is not None:
            with self._failing():
                self._mover.repair(self._mover.damaged)
        target = self._target(version)
        with self._failing():
            if self.board.served is None:
                self._prove()
            else:
                self._mover.check_touched()
            if self.board.holding and version is None:
                target = 0
            while self.board.served is not None and self.board.served.version < target and not until():
                self._mover.step(self.board.served, target)
            if version is None and stopped_by is not None:
                raise stopped_by
        self.board.rest(error=None)

    def mend(self) -> None:
        """Bring weights that somebody changed back to the version served before, held or not; see ``can_repair``."""
        self._look()
        if self._mover.damaged is not None:
            with self._failing():
                self._mover.repair(self._mover.damaged)
            self.board.rest(error=None)

    def _look(self) -> DeltaSyncError | None:
        self._refuse_lost()
        try:
            return self._refresh()
        except DeltaSyncError as error:
            self.fail(error)
            raise

    def rollback(self, version: int) -> None:
        """Go back to a version in the undo log, in the time of one commit and without the bucket; then hold.

        Raises:
            ChainError: no commit ended at that version, or it fell out of the log. DeltaSyncError: what failed.
        """
        self._refuse_lost()
        served = self.board.served
        if served is None:
            raise EngineError("no version is served yet; there is nothing to go back from")
        if version != served.version:
            with self._failing():
                self._mover.check_touched()
                self._mover.go_back(version, served)
        self.hold()

    def check(self) -> None:
        """Look after what is served, where no new version makes that happen: did anybody else write weights?"""
        self._refuse_lost()
        try:
            with self._failing():
                self._mover.check_touched()
        except BusyError:
            # Asleep: nothing is wanted of it now.
            self.board.rest(error=None)

    def hold(self) -> None:
        """Keep what is served, whatever is published, until ``release``."""
        self.board.set(holding=True)
        if self.board.state == "idle":
            self.board.rest()

    def release(self) -> None:
        """Follow again."""
        self.board.set(holding=False)
        if self.board.state == "held":
            self.board.rest()

    def verify(self) -> Answer:
        """Rescan every rank's weights: ``verdict`` is True only if they are the served version's, bit for bit."""
        self._refuse_lost()
        served = self.board.served
        if served is None:
            raise EngineError("no version is served yet; there is nothing to verify against")
        outcome = self._mover.rescan(served)
        if not outcome["verdict"]:
            self._mover.distrust(not_served(served, outcome["mismatched"]))
        return outcome

    def is_replaced(self) -> bool:
        """Whether another run lies at the URL than the one known. Raises DeltaSyncError if that cannot be read."""
        return self.history.is_replaced()

    @property
    def can_repair(self) -> bool:
        """Whether weights were changed from outside and can be brought back to the version served before."""
        return self._mover.damaged is not None

    def fail(self, error: DeltaSyncError) -> None:
        """Show an error in status until something succeeds; end an engine that cannot tell its weights."""
        if not isinstance(error, WeightsLostError):
            self.board.show_error(error)
        elif self.board.state != "lost":
            self.board.show_error(error, "lost")
            logger.critical("%s: %s", error.kind, error.message)
            try:
                self.port.end(error.message)
            except DeltaSyncError as second:
                logger.critical("%s: %s", second.kind, second.message)

    def _failing(self) -> "_Failing":
        return _Failing(self)

    def _refuse_lost(self) -> None:
        if self.board.state == "lost":
            raise WeightsLostError(STATES["lost"])

    def _target(self, version: int | None) -> int:
        """The version to go to. What the caller got wrong is not recorded as the receiver's last error."""
        head, served = self.board.head, self.served_version
        if head is None:
            raise NotFoundError(f"no version is published at {self.settings.bucket!r} yet")
        if version is None and self.board.holding and served is not None:
            raise BusyError(f"this server is held at version {served}; POST /delta_sync/release to follow again")
        if version is None:
            # What is served may be newer than the newest manifest that can still be read.
            return max(head.version, served or 0)
        target = version
        if target > head.version:
            raise NotFoundError(f"version {target} is not published; the head is {head.version}")
        if served is not None and target < served:
            raise ChainError(f"version {target} precedes the served version {served}; go back with rollback")
        return target

    def _refresh(self) -> DeltaSyncError | None:
        """Open the run, notice if it was replaced, find the newest good manifest; returns what is wrong beyond it."""
        if self.is_replaced():
            before = self.run_id
            run = self.history.open()
            if before is not None:
                logger.warning("run %s was replaced by run %s in the same place", before, run.info.run)
            known = self.board.served is not None
            self._mover.rotation = Rotation([spec.nbytes for spec in run.table], self.settings.rescan_bytes)
            self._mover.damaged = None
            # Before the label, which may fail: what is served is no version of this run.
            self.board.set(run=run.info.run, served=None, head=None, undo=[], broken=False)
            if known:
                self.port.label(None)
        if self.board.state == "waiting_for_run":
            self.board.set(state="proving" if self.board.served is None else "idle")
        stopped_by = self.history.look()
        self.board.set(head=self.history.head)
        return stopped_by

    def _prove(self) -> None:
        """Establish what the engine holds: a version, or something that an anchor can replace."""
        self.board.set(state="proving")
        cache = self.settings.cache_dir
        arguments = {
            "url": self.settings.bucket,
            "cache_dir": None if cache is None else str(cache),
            "cache_bytes": self.settings.cache_bytes,
        }
        try:
            held = self._ranks.gather(self.history.run.table, arguments)
        except REFUSALS as error:
            self._mover.distrust(error)
            raise
        self.board.set(
            undo=[],
            ranks=[
                {"rank": rank, "tensors": len(held.fingerprints), "unloaded": answer["unloaded"], "ms": answer["ms"]}
                for rank, answer in enumerate(held.answers)
            ],
        )
        ownership = self._ranks.ownership
        unloaded = [s.name for i, s in enumerate(self.history.run.table) if ownership and not ownership.is_loaded(i)]
        if unloaded:
            logger.info("tensors that this model does not load: %s", ", ".join(unloaded))
        self._recognize(held)

    def _recognize(self, held: Held) -> None:
        """Find out which version an engine's weights are."""
        first, base = self.history.base()
        table = self.history.run.table
        if held.noted is not None:
            version, noted = held.noted
            manifest = self.history.manifest(version)
            right = sum(noted, Fingerprint()) == manifest.model_fingerprint and len(noted) == len(table)
            if right and not held.different(noted):
                self._serve_proven(manifest, noted)
                return
        different = held.different(base)
        if not different:
            self._serve_proven(first, base)
        elif first.kind == "anchor":
            logger.info("%d tensors differ from version 0; taking its anchor", len(different))
            self._ranks.adopt(None, base)
            self._mover.commit([first], self._mover.stage(None, [first]))
        else:
            unlike = ChainError(
                f"this server's weights are not the run's base: {len(different)} of {len(table)} "
                f"tensors differ, first {table[different[0]].name!r}. Start vLLM from the checkpoint the run refers to "
                f"({first.base.location if first.base else 'unknown'}); if it was, this model keeps those tensors in "
                "another layout than it loads them in, and cannot be patched in place"
            )
            self._mover.distrust(unlike)
            raise unlike

    def _serve_proven(self, manifest: Manifest, fingerprints: list[Fingerprint]) -> None:
        self._ranks.adopt(manifest.version, fingerprints)
        self.port.label(manifest.version)
        self.board.set(served=manifest, broken=False)
        logger.info(
            "weights proven: %d tensors are version %d of run %s", len(fingerprints), manifest.version, manifest.run
        )


class _Failing:
    """Whatever is raised inside is shown in status, and the state comes to rest."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DeltaSyncError):
            self._receiver.fail(error)
        if self._receiver.board.state in ("proving", "staging", "committing", "verifying", "repairing"):
            self._receiver.board.rest()
