"""Routing changes that were decoded at once."""

from vllm_delta_sync.engine.model.patch import PatchBuilder, StagedPatch
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.tensors.changes import Changes


def route_changes(version: int, changes: Changes, routes: RouteMap, before: list[Fingerprint]) -> StagedPatch:
    """The patch of a version with these changes; ``before``: see ``PatchBuilder``."""
    builder = PatchBuilder(version, routes, before, changes.fingerprints)
    for group in changes.sparse:
        builder.add(group)
    for full in changes.full:
        builder.add(full)
    return builder.finish()
