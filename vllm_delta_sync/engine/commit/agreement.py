"""Whether the ranks of an engine agree: ``all_hold`` one version, ``common_version``, ``same_declared`` changes."""

from collections.abc import Sequence

from vllm_delta_sync.engine.protocol import RankFailure, RankState, Staged
from vllm_delta_sync.errors import EngineError, WeightsLostError
from vllm_delta_sync.format.fingerprint import Fingerprint

Ranks = Sequence[RankState | RankFailure]
"""What each rank of an engine holds, in the order of ranks."""


def all_hold(ranks: Ranks, version: int | None, *, confirmed: bool = False) -> bool:
    """Return whether every rank holds that version, intact; with ``confirmed``: and its commit was confirmed."""
    return all(
        isinstance(rank, RankState) and rank.intact and rank.version == version and (rank.confirmed or not confirmed)
        for rank in ranks
    )


def common_version(ranks: Ranks) -> int | None:
    """Return the version that all ranks can have: the one they have, else the newest each has or can revert to.

    An unconfirmed version does not count, because the controller has not found it right on all ranks.

    Raises:
        WeightsLostError: a rank's weights are unknown, or there is no such version.
    """
    reachable: set[int | None] | None = None
    held: set[int | None] = set()
    for index, rank in enumerate(ranks):
        if isinstance(rank, RankFailure) or not rank.intact:
            raise WeightsLostError(f"the weights of rank {index} are unknown: {rank}")
        held.add(rank.version)
        own = {*rank.undo, rank.version} if rank.confirmed else set(rank.undo)
        reachable = own if reachable is None else reachable & own
    if not reachable:
        raise WeightsLostError(f"there is no version that every rank has or can revert to: {ranks}")
    if len(held) == 1 and held <= reachable:
        return held.pop()
    return max(reachable, key=lambda version: -1 if version is None else version)


def same_declared(answers: Sequence[Staged]) -> Fingerprint:
    """Return the fingerprint of the changes that all ranks have staged. Raises EngineError: they differ."""
    declared = {answer.declared for answer in answers}
    if len(declared) != 1:
        raise EngineError(f"ranks staged different changes: {', '.join(sorted(map(Fingerprint.hex, declared)))}")
    return declared.pop()


def describe_ranks(ranks: Ranks) -> str:
    """Return the version of each rank, for messages."""
    return ", ".join(
        f"rank {index} holds version {rank.version}"
        if isinstance(rank, RankState) and rank.intact
        else f"rank {index} holds version {getattr(rank, 'version', None)} or cannot tell"
        for index, rank in enumerate(ranks)
    )
