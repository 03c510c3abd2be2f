"""``stage_update`` stages one commit on one rank: merged steps, an anchor, or a rebuild. It writes no weight.

``PhaseTimer`` times what it does.
"""

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_delta_sync.bucket.middleware.usage import PROCESS
from vllm_delta_sync.bucket.verified import hashing_seconds
from vllm_delta_sync.client import Run
from vllm_delta_sync.codec.delta_reader import DeltaReader
from vllm_delta_sync.codec.merge import RollingBase, merge
from vllm_delta_sync.engine.model.patch import PatchBuilder, StagedPatch
from vllm_delta_sync.engine.model.route import DensePatch, Route, RoutePatch, region_view, signed_view, split_regions
from vllm_delta_sync.engine.model.route_map import READ_ELEMENTS, LiveBaseReader, RouteMap
from vllm_delta_sync.engine.planning.update_planner import UpdatePlan
from vllm_delta_sync.engine.protocol import set_failed_step
from vllm_delta_sync.engine.staging.reconstruct import restore_version
from vllm_delta_sync.errors import ChainError, DataError, FingerprintError, FormatError
from vllm_delta_sync.format.documents import Anchor
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.safetensors_file import Buffer
from vllm_delta_sync.run.checks import check_tensor, read_shard
from vllm_delta_sync.run.decode import declared_changes, open_objects
from vllm_delta_sync.run.objects import declared_change, read_object, read_steps, step_objects
from vllm_delta_sync.run.read_plan import Step
from vllm_delta_sync.run.restore import check_step
from vllm_delta_sync.tensors.changes import BaseLookup, Bits


def store_usage() -> dict[str, Any]:
    """Return how this process has used stores so far, see ``StoreUsage``; ``process`` identifies the process."""
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
        verified = min(hashed - self._hashed, now - self._last)  # several objects may be hashed at once
        self.ms["verify"] += 1e3 * verified
        self.ms[phase] = self.ms.get(phase, 0.0) + 1e3 * (now - self._last - verified)
        self._last, self._hashed = now, hashed


def stage_update(
    plan: UpdatePlan,
    run: Run,
    routes: RouteMap,
    fingerprints: list[Fingerprint],
    folder: str,
    timer: PhaseTimer,
    weights_stamp: Callable[[], object],
) -> StagedPatch:
    """Build the patch with everything that a rank writes for one commit.

    Args:
        run: the run followed.
        fingerprints: per tensor id, before the commit.
        folder: model folder that vLLM was started with; see ``restore_version``, which a rebuild calls.
        weights_stamp: see ``LiveBaseReader``.

    Raises:
        ChainError: the target is of another run. FingerprintError: the current weights are not those it was made
        against. Also what ``open_steps``, ``build_patch``, ``stage_anchor`` and ``restore_version`` raise.
    """
    target = plan.target
    if target.run != run.info.run:
        raise ChainError(f"version {target.version} is of run {target.run}, this rank follows {run.info.run}")
    if plan.steps:
        live = LiveBaseReader(routes, weights_stamp)
        base = RollingBase(live)
        steps = open_steps(plan.steps, fingerprints, timer, base)
        routed: Iterator[RoutePatch] = iter(())
        accelerator = routes.memory.accelerator
        if accelerator is not None and accelerator.has_triton and len(steps) == 1 and not plan.steps[0].backwards:
            from vllm_delta_sync.engine.staging.device_decoder import decode_on_device

            routed = decode_on_device(steps[0], routes, accelerator.workspace, live)
        patch = build_patch(target.version, steps, routes, fingerprints, base, timer, routed)
    elif plan.rebuild:
        # A rebuild reads and decodes piece by piece, so all of its time counts as ``fetch``.
        state = restore_version(run, target, folder)
        dense = [patch for tensor, bits in enumerate(state.bits) for patch in _dense_patches(tensor, bits, routes)]
        patch = StagedPatch(target.version, [], Fingerprint(), dense, state.fingerprints)
        timer.tick("fetch")
        timer.tick("decode")
    else:
        patch = stage_anchor(plan.anchor or target, run, routes, timer)
    total = sum(patch.fingerprints, Fingerprint())
    if total != target.model_fingerprint:
        raise FingerprintError(
            f"version {target.version} would lead to fingerprint {total.hex()}, its manifest says "
            f"{target.fingerprint}: the current weights are not those it was made against"
        )
    if routes.reload_units is not None:
        patch.dense += routes.reload_units.outputs_after(patch.sparse, patch.dense, everything=not plan.steps)
    timer.tick("route")
    return patch


def open_steps(
    steps: list[Step], fingerprints: list[Fingerprint], timer: PhaseTimer, old: BaseLookup
) -> list[list[DeltaReader]]:
    """Fetch the objects of consecutive steps, and check that each step starts where the one before ends.

    Args:
        steps: of runs with the tensors of the one followed: the controller has compared them.
        fingerprints: per tensor id, before the first step.
        old: see ``DeltaReader``, for the objects of all steps.

    Raises:
        FingerprintError: a step does not follow from the current weights or from the step before. NotFoundError,
            DigestError, FormatError, TensorMismatchError, ChainError: see ``open_objects``. All of them carry the index
            of the step.
    """
    fetched: list[list[Buffer]] = []
    early = read_steps(steps)
    for number, step in enumerate(steps):
        with attribute_errors(number):
            fetched.append(list(step_objects(step, next(early))))
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


def build_patch(
    version: int,
    steps: list[list[DeltaReader]],
    routes: RouteMap,
    fingerprints: list[Fingerprint],
    base: RollingBase,
    timer: PhaseTimer,
    routed: Iterable[RoutePatch] = (),
) -> StagedPatch:
    """Decode, merge and route the changes of steps, piece by piece: memory is the patch and what a few tensors take.

    Args:
        version: that they lead to. steps: the objects of each.
        fingerprints: per tensor id, before the first step.
        base: the ``old`` of all objects; starts from what this rank holds before the first step.
        routed: what a device decodes of the first step.

    Raises:
        DeltaSyncError: as ``merge`` and ``PatchBuilder``.
    """
    declared = declared_changes(reader for readers in steps for reader in readers)
    builder = PatchBuilder(version, routes, fingerprints, declared)
    with attribute_errors(0):
        for patch in routed:
            builder.add_routed(patch)
    for piece in merge(steps, routes.table, base, attribute_errors):
        timer.tick("decode")
        builder.add(piece)
        timer.tick("route")
    timer.tick("decode")
    return builder.finish()


def stage_anchor(document: Manifest | Anchor, run: Run, routes: RouteMap, timer: PhaseTimer) -> StagedPatch:
    """Return a patch that turns any weights of a rank into an anchor's version. Memory: one shard and the patch.

    Raises:
        FormatError: a tensor is missing or carried twice. FingerprintError: a tensor is not as declared.
        NotFoundError, DigestError, TensorMismatchError: an object is missing or damaged.
    """
    found: dict[int, Fingerprint] = {}
    dense: list[DensePatch] = []
    for ref in document.objects:
        data = read_object(run, ref)
        timer.tick("fetch")
        for name, bits in read_shard(data, routes.table, ref.key):
            tensor = routes.table.index(name)
            if tensor in found:
                raise FormatError(f"{ref.key}: tensor {name!r} is carried twice")
            found[tensor] = fingerprint_tensor(name, bits)
            check_tensor(document, name, found[tensor])
            dense += _dense_patches(tensor, bits, routes)
        timer.tick("decode")
    absent = next((spec.name for tensor, spec in enumerate(routes.table) if tensor not in found), None)
    if absent is not None:
        raise FormatError(f"anchor of version {document.version} lacks tensor {absent!r}")
    fingerprints = [found[tensor] for tensor in range(len(routes.table))]
    return StagedPatch(document.version, [], Fingerprint(), dense, fingerprints)


def _dense_patches(tensor: int, bits: Bits, routes: RouteMap) -> list[DensePatch]:
    """Return patches that give a tensor these bits, where the model does not hold them already."""
    flat = signed_view(bits)
    return [DensePatch.of(route, flat) for route in routes.routes[tensor] if not _model_has(flat, route, routes)]


def _model_has(flat: torch.Tensor, route: Route, routes: RouteMap) -> bool:
    """Return whether the model, through a route, holds the same bits as a flat (numel,) tensor in host memory."""
    live = routes.destinations[route.destination].flat
    for source, target in split_regions(route.source, route.target, READ_ELEMENTS):
        with routes.memory.reading():
            if not torch.equal(region_view(flat, source), region_view(live, target).to(flat.device)):
                return False
    return True
