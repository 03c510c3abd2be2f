"""``open_steps`` fetches and opens the deltas of an update for one rank, and ``PhaseTimer`` times what staging does."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_delta_sync.bucket.middleware.usage import PROCESS
from vllm_delta_sync.bucket.verified import hashing_seconds
from vllm_delta_sync.codec.delta_reader import DeltaReader
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.protocol import set_failed_step
from vllm_delta_sync.errors import ChainError, DataError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import ObjectRef
from vllm_delta_sync.format.safetensors_file import Buffer
from vllm_delta_sync.run.decode import open_objects
from vllm_delta_sync.run.objects import declared_change, read_object
from vllm_delta_sync.run.read_plan import Step
from vllm_delta_sync.run.restore import check_step
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.tensors.bits import BaseLookup


def store_usage() -> dict[str, Any]:
    """Return how this process has used stores so far, see ``Metrics``; ``process`` identifies the process."""
    return {"process": f"{socket.gethostname()}:{os.getpid()}", **PROCESS.snapshot()}


class PhaseTimer:
    """Milliseconds per phase, of one thread.

    ``verify`` is the time spent on digests of objects, in whichever phase.
    """

    def __init__(self) -> None:
        self.ms: dict[str, float] = {"fetch": 0.0, "verify": 0.0}
        self._last, self._hashed = time.perf_counter(), hashing_seconds()

    def tick(self, phase: str) -> None:
        """Count the time since the last call to a phase."""
        now, hashed = time.perf_counter(), hashing_seconds()
        verified = hashed - self._hashed
        self.ms["verify"] += 1e3 * verified
        self.ms[phase] = self.ms.get(phase, 0.0) + 1e3 * (now - self._last - verified)
        self._last, self._hashed = now, hashed

    def fetching(self, read: Callable[[ObjectRef], Buffer]) -> Callable[[ObjectRef], Buffer]:
        """Wrap ``read`` so that its time counts as ``fetch``, and the time before it as ``decode``."""

        def fetch(ref: ObjectRef) -> Buffer:
            self.tick("decode")
            data = read(ref)
            self.tick("fetch")
            return data

        return fetch


def open_steps(
    steps: list[Step], fingerprints: list[Fingerprint], routes: RouteMap, timer: PhaseTimer, old: BaseLookup
) -> list[list[DeltaReader]]:
    """Fetch the objects of consecutive steps, and check that each step starts where the one before ends.

    Args:
        fingerprints: per tensor id, before the first step.
        old: see ``DeltaReader``, for the objects of all steps.

    Raises:
        FingerprintError: a step does not follow from the current weights or from the step before. NotFoundError,
            DigestError, FormatError, TensorMismatchError, ChainError: see ``open_objects``. All of them carry the index
            of the step.
    """
    fetched: list[list[Buffer]] = []
    for number, step in enumerate(steps):
        with attribute_errors(number):
            _check_run(step.run, routes)
            fetched.append([read_object(step.run, ref) for ref in step.objects])
    timer.tick("fetch")
    opened: list[list[DeltaReader]] = []
    total = sum(fingerprints, Fingerprint())
    for number, (step, objects) in enumerate(zip(steps, fetched, strict=True)):
        with attribute_errors(number):
            opened.append(open_objects(step.document, step.run.table, objects, old, step.backwards))
            total = check_step(step, total, declared_change(opened[-1]))
    return opened


@contextmanager
def attribute_errors(step: int) -> Iterator[None]:
    """Attach the index of a step to the errors of the block that its data cause."""
    try:
        yield
    except DataError as error:
        set_failed_step(error, step)
        raise


def _check_run(run: RunReader, routes: RouteMap) -> None:
    if run.table.digest != routes.table.digest:
        raise ChainError(f"run {run.info.run} has other tensors than the run followed")
