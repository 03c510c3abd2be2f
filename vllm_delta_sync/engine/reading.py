"""Read versions from the bucket for one rank: fetch, check, decode, keep what the rank holds, fold."""

import time

from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.chain import Run, check_declared, check_follows, decode_version
from vllm_delta_sync.engine.patch import local_part
from vllm_delta_sync.engine.routes import RouteMap
from vllm_delta_sync.errors import ChainError
from vllm_delta_sync.wire.changes import Changes
from vllm_delta_sync.wire.fold import fold
from vllm_delta_sync.wire.manifest import Manifest, ObjectRef


class Clock:
    """Milliseconds per phase."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._last = time.perf_counter()

    def tick(self, phase: str) -> None:
        """A phase is over."""
        now = time.perf_counter()
        self.ms[phase], self._last = 1e3 * (now - self._last), now


def read_versions(
    run: Run,
    cache: ObjectCache | None,
    targets: list[Manifest],
    parent: Manifest | None,
    held: int | None,
    routes: RouteMap,
    clock: Clock,
) -> Changes:
    """What consecutive versions change, folded into one, each checked by itself.

    Args:
        targets: several must all be deltas. parent: the version before the first, None for version 0.
        held: the version that the rank holds.

    Raises:
        ChainError: the versions do not follow from what is held. Else as ``Run.fetch`` and ``decode_version``.
    """

    def fetch(ref: ObjectRef) -> bytes:
        return run.fetch(ref) if cache is None else cache.get(ref, lambda: run.fetch(ref))

    objects = [[fetch(ref) for ref in target.objects] for target in targets]
    clock.tick("fetch")
    parts: list[Changes] = []
    in_full: set[int] = set()
    before = parent
    for target, fetched in zip(targets, objects, strict=True):
        _check_order(before, target, held, first=not parts)
        changes = decode_version(target, run.table, fetched)
        fetched.clear()
        if target.kind == "delta" and before is not None:
            check_declared(before, target, changes)
        in_full |= {full.id for full in changes.full}
        parts.append(local_part(changes, routes, in_full) if len(targets) > 1 else changes)
        before = target
    folded = parts[0] if len(parts) == 1 else fold(parts, run.table)
    clock.tick("decode")
    return folded


def _check_order(before: Manifest | None, target: Manifest, held: int | None, first: bool) -> None:
    if target.kind != "delta":
        if not first:
            raise ChainError(f"version {target.version} is of kind {target.kind!r} and cannot be folded")
        return
    if before is None or (first and target.base_version != held):
        raise ChainError(f"version {target.version} builds on version {target.base_version}, this rank holds {held}")
    check_follows(before, target)
