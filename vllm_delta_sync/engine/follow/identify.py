"""``WeightIdentifier`` finds out which version an engine's weights are, of the run followed or of its source runs."""

from collections.abc import Callable, Iterator

from vllm_delta_sync.engine.follow.rank_group import HeldWeights, RankGroup
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.observe.status import StatusBoard
from vllm_delta_sync.engine.planning.run_history import (
    History,
    RunVersion,
    WeightPosition,
    ancestry,
    connect_runs,
    open_expected_run,
    version_0_of,
)
from vllm_delta_sync.engine.protocol import ClaimedVersion, Identify
from vllm_delta_sync.errors import (
    ChainError,
    DataError,
    DeltaSyncError,
    ModelError,
    NotFoundError,
    TensorMismatchError,
    UnsupportedError,
)
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.settings import Settings

REFUSALS = (ModelError, ChainError, TensorMismatchError, UnsupportedError)
"""Errors that no later poll resolves before a version is served; another run or another server does."""

SHOWN_TENSORS = 64
"""Names of one kind in the status, which is sent at each change: a quantized model may compute from 100,000 tensors."""


class WeightIdentifier:
    """Compares hashes of the weights with the bucket's fingerprints. What ranks claim to hold is only a hint.

    Args:
        refuse: called with an error that ends following.
    """

    def __init__(
        self,
        settings: Settings,
        board: StatusBoard,
        history: History,
        ranks: RankGroup,
        refuse: Callable[[DeltaSyncError], None],
    ) -> None:
        self._settings = settings
        self._board = board
        self._history = history
        self._ranks = ranks
        self._refuse = refuse
        self._unread: DeltaSyncError | None = None

    def identify(self, is_due: Callable[[WeightPosition], bool]) -> WeightPosition | None:
        """Trace and hash the engine's weights, find the version, and set it as the ranks' baseline.

        Args:
            is_due: whether a version of this run is one to serve now. If not, an update leads on from it, as from a
                version of another run.

        Returns:
            the position; None if an anchor, or a rebuild, has to replace the weights.

        Raises:
            ModelError: the model cannot be patched exactly.
            ChainError: the weights are no version, and nothing in the run may replace them.
            NotFoundError: the run that this one branches from is missing.
            StoreError: the store failed.
            DeltaSyncError: the version that the ranks claim to hold cannot be read, which may be temporary.
        """
        self._board.enter("identifying")
        self._unread = None
        held = self._gather()
        first, base = version_0_of(self._history.run)
        for position, fingerprints in self._candidates(held.claimed, first, base):
            if not held.mismatches(fingerprints):
                return self._accept(position, fingerprints, is_due)
        if self._engines_differ(held):
            logger.info(
                "the engines loaded different versions, because the head moved meanwhile; replacing all weights"
            )
        else:
            mismatches = held.mismatches(base)
            self._require_anchor_start(first, mismatches)
            logger.info("%d tensors differ from version 0; taking an anchor", len(mismatches))
        self._ranks.set_baseline(None, base)
        return None

    def _candidates(
        self, claimed: ClaimedVersion | None, first: Manifest, base: list[Fingerprint]
    ) -> Iterator[tuple[WeightPosition, list[Fingerprint]]]:
        """Yield versions that the weights may be, the likeliest first, with their fingerprints per tensor id."""
        own = claimed is not None and claimed.run == first.run
        if claimed is not None and own and (position := self._claimed_position(claimed)) is not None:
            yield position, claimed.fingerprints
        yield WeightPosition(self._history.run, first), base
        if claimed is not None and not own and (position := self._claimed_position(claimed)) is not None:
            yield position, claimed.fingerprints
        for source, _ in self._history.origins():
            version_0, of_source = version_0_of(source)
            yield WeightPosition(source, version_0), of_source

    def _gather(self) -> HeldWeights:
        cache = self._settings.cache_folder()
        request = Identify(
            url=self._settings.bucket,
            cache_dir=None if cache is None else str(cache),
            cache_bytes=self._settings.cache_bytes,
            info=self._history.run.info.digest,
            trusted=sorted(self._history.keyring.trusted),
            store=self._settings.store().model_dump(),
            device_staging_bytes=self._settings.device_staging_bytes,
        )
        table = self._history.run.table
        try:
            held = self._ranks.identify(table, request)
        except REFUSALS as error:
            self._refuse(error)
            raise
        # What a rank does not load, another one may.
        unloaded = sorted(set.intersection(*(set(answer.unloaded) for answer in held.answers)))
        self._board.set(
            undo=[],
            ranks=[
                {
                    "rank": rank,
                    "tensors": len(held.fingerprints),
                    "unloaded": unloaded[:SHOWN_TENSORS],
                    "derived": answer.derived[:SHOWN_TENSORS],
                    "ms": answer.ms,
                }
                for rank, answer in enumerate(held.answers)
            ],
        )
        if unloaded:
            shown = ", ".join(unloaded[:SHOWN_TENSORS])
            logger.info("this model does not load %d tensors, first %s", len(unloaded), shown)
        derived = {name for answer in held.answers for name in answer.derived}
        if derived:
            logger.info(
                "the model computes its weights from %d tensors, which are kept in host memory, first %s",
                len(derived), ", ".join(sorted(derived)[:8]),
            )  # fmt: skip
        return held

    def _claimed_position(self, claimed: ClaimedVersion) -> WeightPosition | None:
        """Return the position that ranks claim; None if it has other fingerprints, or no update leads to this run."""
        run = self._history.run
        try:
            if claimed.run == run.info.run:
                position = WeightPosition(run, self._history.manifest(claimed.version))
            else:
                known = next((source for source, _ in self._history.origins() if source.info.run == claimed.run), None)
                source = known or open_expected_run(
                    claimed.url, claimed.run, self._history.keyring, self._history.store
                )
                if source is None or source.table.digest != run.table.digest:
                    return None
                position = WeightPosition(source, source.manifest(claimed.version))
                ahead = [RunVersion(run, 0), *self._history.origins()]
                if known is None and connect_runs(ancestry(source, position.version), ahead) is None:
                    return None
        except DataError as error:
            logger.warning(
                "ranks claim to hold version %d of run %s, which cannot be checked: %s",
                claimed.version,
                claimed.run,
                error.message,
            )
            self._unread = error
            return None
        right = sum(claimed.fingerprints, Fingerprint()) == position.manifest.model_fingerprint
        return position if right and len(claimed.fingerprints) == len(run.table) else None

    def _engines_differ(self, held: HeldWeights) -> bool:
        """Return whether each data parallel engine holds a version of this run, proven, but not all the same one.

        Engines of a dense model load independently, each the head of its moment (``--load-format delta_sync``).
        """
        try:
            engines = held.by_claim(self._history.run.table)
        except ModelError:
            return False
        run = self._history.run.info.run
        return len(engines) > 1 and all(
            engine.claimed is not None
            and engine.claimed.run == run
            and self._claimed_position(engine.claimed) is not None
            and not engine.mismatches(engine.claimed.fingerprints)
            for engine in engines
        )

    def _accept(
        self, position: WeightPosition, fingerprints: list[Fingerprint], is_due: Callable[[WeightPosition], bool]
    ) -> WeightPosition:
        own = self._history.is_followed_run(position) and is_due(position)
        self._ranks.set_baseline(position.version if own else None, fingerprints, None if own else position)
        logger.info(
            "weights identified: %d tensors are version %d of run %s",
            len(fingerprints),
            position.version,
            position.run.info.run,
        )
        return position

    def _require_anchor_start(self, first: Manifest, mismatches: list[int]) -> None:
        """Raise unless the run begins with an anchor, which may replace any weights."""
        table = self._history.run.table
        origins = self._history.origins()
        if first.base is not None and first.base.run is not None and not origins:
            raise NotFoundError(
                f"this server's weights are not those that run {first.run} begins with, and the run that it branches "
                f"from is not at {first.base.location!r}; make that readable, or load with --load-format delta_sync"
            )
        root = origins[-1].run.manifest(0) if origins else first
        if root.kind == "anchor":
            return
        if self._unread is not None:
            # Not refused for good: the unreadable version may become readable.
            raise self._unread
        unlike = ChainError(
            f"this server's weights are not the run's base: {len(mismatches)} of {len(table)} "
            f"tensors differ, first {table[mismatches[0]].name!r}. Restart vLLM from the checkpoint the run refers to "
            f"({root.base.location if root.base else 'unknown'}), also if another run was here before; if this error "
            "is back, this model keeps those tensors in another layout than it loads them in, and cannot be patched "
            "in place"
        )
        self._refuse(unlike)
        raise unlike
