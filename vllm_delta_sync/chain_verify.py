"""Walk a run and check all of it: chain, digests, contents, declared sums, and the weights themselves."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from vllm_delta_sync.chain_checks import check_base, check_declared, check_fingerprint
from vllm_delta_sync.chain_documents import RunDocuments
from vllm_delta_sync.chain_read import BaseError, whole
from vllm_delta_sync.wire.manifest import Manifest
from vllm_delta_sync.wire.state import ModelState


@dataclass
class VerifyReport:
    """Outcome of ``Run.verify``.

    Attributes:
        versions: how many versions were walked, from 0 to the head.
        head: newest version number.
        objects, bytes: objects read, and their size in all.
        replayed: True if weights were rebuilt and compared with every version's fingerprint; False if the run's
            base is not at hand, in which case digests, chain and declared fingerprints were checked.
    """

    versions: int = 0
    head: int = -1
    objects: int = 0
    bytes: int = 0
    replayed: bool = False
    notes: list[str] = field(default_factory=list)


def verify_run(
    run: RunDocuments, base: str | Path | None = None, progress: Callable[[VerifyReport], None] | None = None
) -> VerifyReport:
    """Walk the run from version 0 to the head and check all of it: chain, digests, objects, fingerprints.

    Args:
        base: as ``Run.snapshot``. progress: called with the report so far after each version.

    Raises:
        NotFoundError: ``base`` is given and not there. Without one, a recorded base that is not at hand is noted.
        DeltaSyncError: the first thing that does not hold, naming version, object, tensor or base.
    """
    check_base(base)
    report = VerifyReport()
    state: ModelState | None = None
    parent: Manifest | None = None
    for manifest in run.log():
        changes = run.changes(manifest)
        if manifest.kind != "delta":
            state = _state_or_note(run, manifest, base, report)
        elif parent is not None:
            check_declared(parent, manifest, changes)
            if state is not None:
                state.apply(changes)
        if state is not None:
            check_fingerprint(manifest, state.fingerprint)
        report.versions += 1
        report.head = manifest.version
        report.objects += len(manifest.objects)
        report.bytes += manifest.payload_bytes
        report.replayed = state is not None
        parent = manifest
        if progress is not None:
            progress(report)
    return report


def _state_or_note(
    run: RunDocuments, manifest: Manifest, base: str | Path | None, report: VerifyReport
) -> ModelState | None:
    try:
        return whole(run, manifest, base=base)
    except BaseError as error:
        # Somebody who names a base wants the weights rebuilt; only the recorded one may be elsewhere.
        if base is not None:
            raise
        report.notes.append(f"weights were not rebuilt: {error}")
        return None
