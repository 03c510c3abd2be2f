"""Read from the bucket for one rank: fetch, check, decode, keep what the rank holds, fold."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.chain.checks import object_limit
from vllm_delta_sync.chain.documents import RunDocuments
from vllm_delta_sync.chain.plan import Step
from vllm_delta_sync.chain.read import check_step, step_changes
from vllm_delta_sync.engine.patch import local_part
from vllm_delta_sync.engine.routes import RouteMap
from vllm_delta_sync.engine.transaction import blame
from vllm_delta_sync.errors import ChainError, DeltaSyncError, StoreError
from vllm_delta_sync.wire.changes import Changes
from vllm_delta_sync.wire.fingerprint import Fingerprint
from vllm_delta_sync.wire.fold import fold
from vllm_delta_sync.wire.limits import check_limit
from vllm_delta_sync.wire.manifest import ObjectRef


class Clock:
    """Milliseconds per phase."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._last = time.perf_counter()

    def tick(self, phase: str) -> None:
        """A phase is over."""
        now = time.perf_counter()
        self.ms[phase], self._last = 1e3 * (now - self._last), now


def fetcher(run: RunDocuments, cache: ObjectCache | None) -> Callable[[ObjectRef], bytes]:
    """Reads objects of a run, through the cache if there is one."""
    if cache is None:
        return run.fetch

    def read(ref: ObjectRef) -> bytes:
        # Before the cache makes room for what is listed.
        check_limit(f"{ref.key}: bytes", ref.bytes, object_limit(run.table), "object_limit")
        return cache.get(ref, lambda: run.fetch(ref))

    return read


def read_steps(
    steps: list[Step], cache: ObjectCache | None, held: list[Fingerprint], routes: RouteMap, clock: Clock
) -> Changes:
    """What consecutive steps change, folded into one, each checked by itself.

    Args:
        held: per tensor id, before the first step.

    Raises:
        FingerprintError: a step does not follow from what is held, or from the one before. NotFoundError, DigestError,
            FormatError, TensorMismatchError, ChainError: see ``step_changes``. All of them blame a step.
    """
    fetched: list[list[bytes]] = []
    for number, step in enumerate(steps):
        with _blaming(number):
            _check_run(step.run, routes)
            fetch = fetcher(step.run, cache)
            fetched.append([fetch(ref) for ref in step.objects])
    clock.tick("fetch")
    parts: list[Changes] = []
    in_full: set[int] = set()
    total = sum(held, Fingerprint())
    for number, step in enumerate(steps):
        with _blaming(number):
            changes = step_changes(step, _handed_out(fetched[number]))
            fetched[number].clear()
            total = check_step(step, total, changes)
        in_full |= {full.id for full in changes.full}
        parts.append(local_part(changes, routes, in_full) if len(steps) > 1 else changes)
    folded = parts[0] if len(parts) == 1 else fold(parts, routes.table)
    clock.tick("decode")
    return folded


def _handed_out(objects: list[bytes]) -> Callable[[ObjectRef], bytes]:
    waiting = iter(objects)
    return lambda ref: next(waiting)


@contextmanager
def _blaming(step: int) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except DeltaSyncError as error:
        blame(error, step)
        raise


def _check_run(run: RunDocuments, routes: RouteMap) -> None:
    if run.table.digest != routes.table.digest:
        raise ChainError(f"run {run.info.run} has other tensors than the run followed")
