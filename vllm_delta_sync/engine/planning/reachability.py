"""How far steps lead, where they do not lead all the way; and where what leads around would begin."""

from collections.abc import Iterator

from vllm_delta_sync.errors import DeltaSyncError, StoreError
from vllm_delta_sync.run.read_plan import MERGE_WIDTH, ReadPlanner

GALLOP = 1024
"""Versions that are first tried at once."""


def reach(planner: ReadPlanner, start: int, target: int) -> list[int]:
    """Versions up to ``target`` that steps lead to, each from the one before, the first from ``start``; by galloping.

    From one version there may be a way that there is not from the one before it: a folded range back, for example.

    Raises:
        StoreError: the store failed.
    """
    stops: list[int] = []
    at, span = start, GALLOP
    while at < target and span:
        aim = min(target, at + span)
        try:
            planner.path(at, aim)
        except StoreError:
            raise
        except DeltaSyncError:
            span = (aim - at) // 2
            continue
        stops.append(aim)
        at = aim
    return stops


def crossing(version: int, target: int) -> Iterator[int]:
    """Where folded ranges that lead across a version, and not beyond the target, would begin."""
    size = MERGE_WIDTH
    while (first := (version - 1) // size * size) + size <= target:
        yield first
        size *= MERGE_WIDTH
