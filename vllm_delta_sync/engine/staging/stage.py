"""Stage one commit on one rank: steps folded and routed, an anchor, or a rebuild."""

from collections.abc import Callable

from vllm_delta_sync.client import Run
from vllm_delta_sync.engine.model.patch import StagedPatch, stage
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.planning.commit_plan import UpdatePlan
from vllm_delta_sync.engine.staging.live_base import LiveBaseReader
from vllm_delta_sync.engine.staging.read_steps import PhaseTimer, read_steps, reader
from vllm_delta_sync.engine.staging.stage_full import stage_anchor, stage_rebuilt
from vllm_delta_sync.errors import ChainError, FingerprintError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest


def stage_leg(
    leg: UpdatePlan,
    run: Run,
    routes: RouteMap,
    held: list[Fingerprint],
    folder: str,
    clock: PhaseTimer,
    moves: Callable[[], object],
) -> StagedPatch:
    """Everything that a rank writes for one commit; nothing is written yet.

    Args:
        run: the one followed. held: per tensor id, the fingerprint before the commit. folder: see ``stage_rebuilt``.
        moves: see ``LiveBaseReader``.

    Raises:
        ChainError: the target is of another run. FingerprintError: the weights held are not what it was made against.
        Else as ``read_steps``, ``stage``, ``stage_anchor`` and ``stage_rebuilt``.
    """
    target = leg.target
    if target.run != run.info.run:
        raise ChainError(f"version {target.version} is of run {target.run}, this rank follows {run.info.run}")
    if leg.steps:
        changes = read_steps(leg.steps, held, routes, clock, LiveBaseReader(routes, moves))
        patch = stage(target.version, changes, routes, held)
    elif leg.rebuild:
        # Read, decoded and applied piece by piece, wherever it comes from.
        patch = stage_rebuilt(run, target, folder, routes)
        clock.tick("fetch")
        clock.tick("decode")
    else:
        patch = stage_anchor(leg.anchor or target, clock.fetching(reader(run), "decode"), routes)
        clock.tick("decode")
    _check_total(target, patch)
    if routes.derived is not None:
        routes.derived.add_to(patch, routes, everything=not leg.steps)
    clock.tick("route")
    return patch


def _check_total(target: Manifest, patch: StagedPatch) -> None:
    total = sum(patch.fingerprints, Fingerprint())
    if total != target.model_fingerprint:
        raise FingerprintError(
            f"version {target.version} would lead to fingerprint {total.hex()}, its manifest says "
            f"{target.fingerprint}: the weights held are not those it was made against"
        )
