"""Read from the bucket for one rank: fetch, check, decode, keep what the rank holds, fold."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_delta_sync.bucket.hash_timing import hashed_seconds
from vllm_delta_sync.bucket.middleware.metrics import PROCESS
from vllm_delta_sync.codec.merge import merge_changes
from vllm_delta_sync.engine.commit.transaction import blame
from vllm_delta_sync.engine.model.patch import local_part
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.staging.live_base import moved
from vllm_delta_sync.errors import ChainError, DeltaSyncError, StoreError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import ObjectRef
from vllm_delta_sync.format.safetensors_file import Buffer
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.lazy_objects import MAPPED_BYTES, mapped
from vllm_delta_sync.run.plan import Step
from vllm_delta_sync.run.restore import check_step, step_changes
from vllm_delta_sync.tensors.bits import BaseLookup
from vllm_delta_sync.tensors.changes import Changes


def store_use() -> dict[str, Any]:
    """What this process has used stores for so far, see ``Metrics``; ``process`` tells it from others."""
    return {"process": f"{socket.gethostname()}:{os.getpid()}", **PROCESS.snapshot()}


class PhaseTimer:
    """Milliseconds per phase, of one thread.

    ``verify`` is what digests of objects took, whichever phase they were computed in.
    """

    def __init__(self) -> None:
        self.ms: dict[str, float] = {"fetch": 0.0, "verify": 0.0}
        self._last, self._hashed = time.perf_counter(), hashed_seconds()

    def tick(self, phase: str) -> None:
        """A phase, or a part of it, is over."""
        now, hashed = time.perf_counter(), hashed_seconds()
        verified = hashed - self._hashed
        self.ms["verify"] += 1e3 * verified
        self.ms[phase] = self.ms.get(phase, 0.0) + 1e3 * (now - self._last - verified)
        self._last, self._hashed = now, hashed

    def fetching(self, read: Callable[[ObjectRef], Buffer], within: str) -> Callable[[ObjectRef], Buffer]:
        """Reads objects in the middle of another phase: what it takes counts as ``fetch``."""

        def fetch(ref: ObjectRef) -> Buffer:
            self.tick(within)
            data = read(ref)
            self.tick("fetch")
            return data

        return fetch


def reader(run: RunDocuments) -> Callable[[ObjectRef], Buffer]:
    """Reads objects of a run; large ones are mapped if they are in the cache, so that ranks of a node share memory."""

    def read(ref: ObjectRef) -> Buffer:
        found = mapped(run, ref) if ref.bytes > MAPPED_BYTES else None
        return run.fetch(ref) if found is None else found

    return read


def read_steps(
    steps: list[Step], held: list[Fingerprint], routes: RouteMap, clock: PhaseTimer, old: BaseLookup
) -> Changes:
    """What consecutive steps change, folded into one, each checked by itself.

    Args:
        held: per tensor id, before the first step. old: the bits that this rank holds then; asked only where a step
            cannot be decoded without.

    Raises:
        FingerprintError: a step does not follow from what is held, or from the one before. NotFoundError, DigestError,
            FormatError, TensorMismatchError, ChainError: see ``step_changes``. UnsupportedError: a step cannot be
            decoded with what this rank holds. All of them blame a step.
    """
    fetched: list[list[Buffer]] = []
    for number, step in enumerate(steps):
        with _blaming(number):
            _check_run(step.run, routes)
            fetch = reader(step.run)
            fetched.append([fetch(ref) for ref in step.objects])
    clock.tick("fetch")
    parts: list[Changes] = []
    in_full: set[int] = set()
    total = sum(held, Fingerprint())
    for number, step in enumerate(steps):
        with _blaming(number):
            changes = step_changes(step, _handed_out(fetched[number]), moved(old, parts))
            fetched[number].clear()
            total = check_step(step, total, changes)
        in_full |= {full.id for full in changes.full}
        parts.append(local_part(changes, routes, in_full) if len(steps) > 1 else changes)
    folded = parts[0] if len(parts) == 1 else merge_changes(parts, routes.table)
    clock.tick("decode")
    return folded


def _handed_out(objects: list[Buffer]) -> Callable[[ObjectRef], Buffer]:
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
