"""Find out what an engine's weights are: a version of the run followed, or of one that it branches from, or neither."""

from collections.abc import Callable

from vllm_delta_sync.engine.follow.rank_group import ClaimedVersion, GatheredWeights, RankGroup
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.observe.status import StatusBoard
from vllm_delta_sync.engine.planning.commit_plan import WeightPosition
from vllm_delta_sync.engine.planning.lineage import RunVersion, across, line, run_with_id
from vllm_delta_sync.engine.planning.run_history import History, first_of
from vllm_delta_sync.errors import (
    ChainError,
    DeltaSyncError,
    ModelError,
    NotFoundError,
    StoreError,
    TensorMismatchError,
    UnsupportedError,
)
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.settings import Settings

REFUSALS = (ModelError, ChainError, TensorMismatchError, UnsupportedError)
"""What no later look can mend before the first version is served, short of another run or another server."""


class WeightIdentifier:
    """Compares what ranks hold with what the bucket says. Nothing is believed that the weights do not show."""

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

    def prove(self, shown: Callable[[WeightPosition], bool]) -> WeightPosition | None:
        """Trace and hash the engine's weights, and recognize them; the ranks are told what they hold.

        Args:
            shown: whether a version of this run may be served. One that may not is as another run's: a way leads on.

        Returns:
            where they are; None if an anchor has to replace them.

        Raises:
            ModelError: the model cannot be patched exactly. ChainError: the weights are no version, and nothing
            that the run is made of may replace them. NotFoundError: the run that this one branches from is not there.
            StoreError: the store failed. DeltaSyncError: whether they are the version that ranks believe to hold cannot
                be told, as that cannot be read; it may later.
        """
        self._board.set(state="proving")
        self._unread = None
        held = self._gather()
        first, base = self._history.base()
        noted = held.noted
        own = noted is not None and noted.run == first.run
        place = None if noted is None or not own else self._noted_place(noted, held)
        if noted is not None and place is not None:
            return self._adopted(place, noted.fingerprints, shown)
        different = held.different(base)
        if not different:
            return self._adopted(WeightPosition(self._history.run, first), base, shown)
        place = None if noted is None or own else self._noted_place(noted, held)
        if noted is not None and place is not None:
            return self._adopted(place, noted.fingerprints, shown)
        for source, _ in self._history.origins():
            version_0, of_source = first_of(source)
            if not held.different(of_source):
                return self._adopted(WeightPosition(source, version_0), of_source, shown)
        self._refuse_others(first, different)
        logger.info("%d tensors differ from version 0; taking an anchor", len(different))
        self._ranks.adopt(None, base)
        return None

    def _gather(self) -> GatheredWeights:
        cache = self._settings.cache_folder()
        arguments = {
            "url": self._settings.bucket,
            "cache_dir": None if cache is None else str(cache),
            "cache_bytes": self._settings.cache_bytes,
            "info": self._history.run.info.digest,
            "trusted": sorted(self._history.keyring.trusted),
            "store": self._settings.store().model_dump(),
        }
        table = self._history.run.table
        try:
            held = self._ranks.gather(table, arguments)
        except REFUSALS as error:
            self._refuse(error)
            raise
        self._board.set(
            undo=[],
            ranks=[
                {
                    "rank": rank,
                    "tensors": len(held.fingerprints),
                    "unloaded": answer["unloaded"],
                    "derived": answer["derived"],
                    "ms": answer["ms"],
                }
                for rank, answer in enumerate(held.answers)
            ],
        )
        ownership = self._ranks.ownership
        unloaded = [spec.name for i, spec in enumerate(table) if ownership and not ownership.is_loaded(i)]
        if unloaded:
            logger.info("tensors that this model does not load: %s", ", ".join(unloaded))
        derived = {name for answer in held.answers for name in answer["derived"]}
        if derived:
            size = sum(spec.numel * spec.element.itemsize for spec in table if spec.name in derived)
            logger.info(
                "%d tensors that the model computes with (%.1f MB) are kept in host memory and loaded again beside the "
                "model when they change: %s",
                len(derived),
                size / 1e6,
                ", ".join(sorted(derived)[:8]) + (", …" if len(derived) > 8 else ""),
            )
        return held

    def _noted_place(self, noted: ClaimedVersion, held: GatheredWeights) -> WeightPosition | None:
        """Where the ranks believe to be, if that is a version, and what they hold, and on a way to this run."""
        run = self._history.run
        try:
            if noted.run == run.info.run:
                place = WeightPosition(run, self._history.manifest(noted.version))
            else:
                known = next((source for source, _ in self._history.origins() if source.info.run == noted.run), None)
                source = known or run_with_id(noted.url, noted.run, self._history.keyring, self._history.store)
                if source is None or source.table.digest != run.table.digest:
                    return None
                place = WeightPosition(source, source.manifest(noted.version))
                ahead = [RunVersion(run, 0), *self._history.origins()]
                if known is None and across(line(source, place.version), ahead) is None:
                    return None
        except StoreError:
            raise
        except DeltaSyncError as error:
            logger.warning("ranks hold version %d of run %s, of which: %s", noted.version, noted.run, error.message)
            self._unread = error
            return None
        right = sum(noted.fingerprints, Fingerprint()) == place.manifest.model_fingerprint
        if not right or len(noted.fingerprints) != len(run.table) or held.different(noted.fingerprints):
            return None
        return place

    def _adopted(
        self, place: WeightPosition, fingerprints: list[Fingerprint], shown: Callable[[WeightPosition], bool]
    ) -> WeightPosition:
        own = self._history.is_own(place) and shown(place)
        self._ranks.adopt(place.version if own else None, fingerprints, None if own else place)
        logger.info(
            "weights proven: %d tensors are version %d of run %s", len(fingerprints), place.version, place.run.info.run
        )
        return place

    def _refuse_others(self, first: Manifest, different: list[int]) -> None:
        """Raise unless the run begins with an anchor, which is meant to replace whatever a server holds."""
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
            # What is refused stays so; and the bucket may heal.
            raise self._unread
        unlike = ChainError(
            f"this server's weights are not the run's base: {len(different)} of {len(table)} "
            f"tensors differ, first {table[different[0]].name!r}. Start vLLM from the checkpoint the run refers to "
            f"({root.base.location if root.base else 'unknown'}); if it was, this model keeps those tensors in "
            "another layout than it loads them in, and cannot be patched in place"
        )
        self._refuse(unlike)
        raise unlike
