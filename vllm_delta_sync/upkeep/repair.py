"""Repair a run: bring back from a mirror, or rebuild, what checking it finds wrong; say what is lost.

Nothing is written that the digests and fingerprints of the chain do not prove, and nothing that is good is
overwritten. Each thing is mended by itself and in one step, so that an end in the middle leaves a run that is no worse,
and the next repair goes on.
"""

from dataclasses import dataclass, field
from pathlib import Path

from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.bucket.overlay import OverlayBucket
from vllm_delta_sync.chain.census import Census
from vllm_delta_sync.chain.documents import RunDocuments
from vllm_delta_sync.chain.findings import VerifyReport
from vllm_delta_sync.chain.verify import Progress, examine
from vllm_delta_sync.errors import DeltaSyncError, StoreError
from vllm_delta_sync.upkeep.repair_from_mirror import Mirror, mend_identity
from vllm_delta_sync.upkeep.repair_objects import Rebuilder
from vllm_delta_sync.upkeep.retention_record import spelled
from vllm_delta_sync.wire import limits
from vllm_delta_sync.wire import manifest as keys
from vllm_delta_sync.wire.manifest import Head

ROUNDS = 16
"""What one round mends shows what lies behind it; a run that needs more rounds is repaired again."""

HELP = (
    "a mirror that has them would bring them back (--mirror); where there is none, publisher.anchor() of a live "
    "publisher, or its next start, goes on with an anchor"
)


@dataclass
class RepairReport:
    """Outcome of ``repair``.

    Attributes:
        repaired: what was written, a line each: key, and how it was known.
        lost: what is still wrong, a line each, then the versions that cannot be read, and what would help.
        unreadable: those versions. notes: as ``VerifyReport.notes``, after the repair.
    """

    repaired: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unreadable: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def repair(
    run: RunDocuments | Bucket,
    mirror: Bucket | str | None = None,
    base: str | Path | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RepairReport:
    """Mend everything that ``verify_run`` finds, as far as it can be proven right.

    Args:
        run: the run, or its bucket if it cannot even be opened.
        mirror: a copy of the run, possibly damaged itself, to take from.
        base: as ``Run.snapshot``.
        dry_run: write to a temporary directory, and only say what could be repaired.
        progress: as ``verify_run``; each round begins anew.

    Raises:
        NotFoundError: there is no run, or ``base`` is given and not there. StoreError: a store failed.
        DeltaSyncError: run.json or tensors.json is damaged, and no mirror has them.
    """
    source = open_bucket(mirror) if isinstance(mirror, str) else mirror
    bucket = run.bucket if isinstance(run, RunDocuments) else run
    if not dry_run:
        return _repair(bucket, source, base, progress)
    with OverlayBucket(bucket) as overlay:
        return _repair(overlay, source, base, progress)


def _repair(bucket: Bucket, mirror: Bucket | None, base: str | Path | None, progress: Progress | None) -> RepairReport:
    outcome = RepairReport()
    if mirror is not None:
        outcome.repaired += [f"{key}: from the mirror" for key in mend_identity(bucket, mirror)]
    run = RunDocuments(bucket)
    for _ in range(ROUNDS):
        report, census = examine(run, base, progress, findings=True)
        done = _round(run, mirror, base, report, census)
        new = [line for line in done if line not in outcome.repaired]
        outcome.repaired += new
        if not new:
            break
    else:
        report, census = examine(run, base, progress, findings=True)
    outcome.notes = report.notes
    outcome.unreadable = report.unreadable
    outcome.lost = _lost(report, census)
    return outcome


def _round(
    run: RunDocuments, mirror: Bucket | None, base: str | Path | None, report: VerifyReport, census: Census
) -> list[str]:
    """Mend what one examination found, the surest first; what was written."""
    done: list[str] = []
    if mirror is not None:
        source = Mirror(run, mirror, census)
        # From the newest manifest down: each names the one before it.
        for finding in sorted(report.findings, key=lambda finding: finding.key, reverse=True):
            key = source.mend(finding)
            if key is not None and f"{key}: from the mirror" not in done:
                done.append(f"{key}: from the mirror")
    if done:
        return done
    done += _mend_head(run, report, census)
    rebuilder = Rebuilder(run, base, report, census)
    rebuilder.versions()
    if not rebuilder.done:
        rebuilder.beside()
    return done + rebuilder.done


def _mend_head(run: RunDocuments, report: VerifyReport, census: Census) -> list[str]:
    """Point HEAD.json at the newest good manifest, unless it proves that there was a newer one."""
    damaged = any(finding.key == keys.HEAD_KEY for finding in report.findings)
    behind = report.pointed is None or report.pointed < report.head
    if report.head < 0 or not (damaged or behind):
        return []
    head = Head(run=run.info.run, version=report.head, manifest=census.digests[report.head])
    try:
        if run.bucket.get(keys.HEAD_KEY, max_bytes=limits.MAX_HEAD_BYTES) == head.to_bytes():
            return []  # a publisher was first
    except StoreError:
        raise
    except DeltaSyncError:
        pass  # missing, or larger than any that is good
    run.bucket.put(keys.HEAD_KEY, head.to_bytes())
    return [f"{keys.HEAD_KEY}: points at version {report.head}, the newest that is good"]


def _lost(report: VerifyReport, census: Census) -> list[str]:
    lines = []
    for finding in report.findings:
        where = "" if finding.document is None else f" (listed by {finding.document})"
        lines.append(f"{finding.key}{where}: {finding.error.message}")
    if report.unreadable:
        lines.append(f"versions that cannot be read: {spelled(report.unreadable)}; {HELP}")
    unreadable = set(report.unreadable)
    lines += [
        f"tag {name!r} is on version {version}, which cannot be read"
        for name, version in sorted(census.tags.items())
        if version in unreadable
    ]
    return lines
