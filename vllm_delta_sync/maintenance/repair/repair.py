"""``repair`` restores from a mirror, or rebuilds, what verification finds wrong, and reports what is lost.

Writes only what the digests and fingerprints of the history prove, and overwrites nothing that is intact. In a signed
run everything written is signed: with trusted keys only validly signed documents are taken from a mirror, and rebuilt
documents are signed with the run's keyring, or not written. Each repair is a single step, so an interrupted run is
never worse than before, and the next call continues.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from vllm_delta_sync.bucket import Bucket, open_beside
from vllm_delta_sync.bucket.factory import OpenedBucket
from vllm_delta_sync.bucket.middleware.dry_run import DryRunBucket
from vllm_delta_sync.errors import BaseUnavailableError, DataError, SettingsError
from vllm_delta_sync.format.manifest import HEAD_KEY
from vllm_delta_sync.maintenance.gc.record import spelled
from vllm_delta_sync.maintenance.repair.from_mirror import Mirror, restore_identity
from vllm_delta_sync.maintenance.repair.rebuild import Rebuilder
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.head import make_head
from vllm_delta_sync.verify.document_audit import DocumentAudit, read_head
from vllm_delta_sync.verify.report import Findings, VerifyReport
from vllm_delta_sync.verify.verify import Progress, examine

ROUNDS = 16
"""Maximum rounds of one call: repairs of a round may reveal further damage. Repeat the call if that is not enough."""

HELP = (
    "a mirror that has them can restore them (--mirror); without one, publisher.anchor() of a running publisher, or "
    "its next start, continues the run with an anchor"
)


@dataclass
class RepairReport:
    """Outcome of ``repair``.

    Attributes:
        repaired: one line for each repair: key and source.
        lost: one line for each remaining problem, then the unreadable versions with a remedy.
        unreadable: these versions. notes: as ``VerifyReport.notes``, after the repair.
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
    keyring: Keyring | None = None,
) -> RepairReport:
    """Repair everything that ``verify_run`` finds, as far as the repair can be proven correct.

    Args:
        run: the run, or its bucket if the run cannot be opened.
        mirror: a copy of the run to restore from; may be damaged itself.
        base: as ``Run.snapshot``.
        dry_run: write to a temporary directory, and only report what could be repaired.
        progress: as ``verify_run``; starts again in each round.
        keyring: trusted keys, and the key that signs rebuilt documents; None means that of ``run``.

    Raises:
        NotFoundError: there is no run, or ``base`` does not exist. StoreError: a store failed.
        BaseUnavailableError: ``base`` is not the run's base; nothing was rebuilt.
        DeltaSyncError: run.json or tensors.json is damaged or has no valid signature, and no mirror has it.
    """
    bucket = run.bucket if isinstance(run, RunDocuments) else run
    # Bypass the mirror in front of the bucket, which would hide damage in the bucket or in the mirror to restore from.
    bucket = bucket.origin if isinstance(bucket, OpenedBucket) else bucket
    if keyring is None:
        keyring = run.keyring if isinstance(run, RunDocuments) else Keyring()
    with ExitStack() as stack:
        if isinstance(mirror, str):
            mirror = stack.enter_context(open_beside(bucket, mirror, mirrored=False))
        target = stack.enter_context(DryRunBucket(bucket)) if dry_run else bucket
        return _repair(target, mirror, base, progress, keyring)


def _repair(
    bucket: Bucket, mirror: Bucket | None, base: str | Path | None, progress: Progress | None, keyring: Keyring
) -> RepairReport:
    outcome = RepairReport()
    if mirror is not None:
        outcome.repaired += [f"{key}: from the mirror" for key in restore_identity(bucket, mirror, keyring)]
    run = RunDocuments(bucket, keyring)
    unsigned: list[str] = []
    for _ in range(ROUNDS):
        report, audit = examine(run, base, progress, Findings(keep=True))
        if base is not None:
            _raise_for_base(report)
        unsigned = []
        done = _round(run, mirror, base, report, audit, unsigned)
        new = [line for line in done if line not in outcome.repaired]
        outcome.repaired += new
        if not new:
            break
    else:
        report, audit = examine(run, base, progress, Findings(keep=True))
    outcome.notes = report.notes
    outcome.unreadable = report.unreadable
    outcome.lost = _lost(report, audit) + (unsigned if report.findings else [])
    return outcome


def _raise_for_base(report: VerifyReport) -> None:
    """Raise the error of a base that the caller gave: it is no damage, and hides what is."""
    for finding in report.findings:
        if isinstance(finding.error, BaseUnavailableError):
            raise finding.error


def _round(
    run: RunDocuments,
    mirror: Bucket | None,
    base: str | Path | None,
    report: VerifyReport,
    audit: DocumentAudit,
    unsigned: list[str],
) -> list[str]:
    """Repair what one examination found, from the mirror first; return a line for each repair.

    Args:
        unsigned: gets a line for each repair that lacks a key to sign with.
    """
    done: list[str] = []
    if mirror is not None:
        source = Mirror(run, mirror, audit)
        if report.pointed is None and (key := source.restore_head()) is not None:
            done.append(f"{key}: from the mirror")
        # From the newest manifest down, because each names the digest of the one before.
        for finding in sorted(report.findings, key=lambda finding: finding.key, reverse=True):
            key = source.restore(finding)
            if key is not None and f"{key}: from the mirror" not in done:
                done.append(f"{key}: from the mirror")
    if done:
        return done
    try:
        run.keyring.check_can_sign(run.info)
        done += _repair_head(run, report)
    except SettingsError as error:
        if any(finding.key == HEAD_KEY for finding in report.findings):
            unsigned.append(f"{HEAD_KEY} was not written: {error.message}")
    rebuilder = Rebuilder(run, base, report, audit)
    rebuilder.versions()
    if not rebuilder.done:
        rebuilder.standalone_documents()
    unsigned += rebuilder.unsigned
    return done + rebuilder.done


def _repair_head(run: RunDocuments, report: VerifyReport) -> list[str]:
    """Point HEAD.json at the newest good manifest if HEAD.json is damaged, missing or behind."""
    damaged = any(finding.key == HEAD_KEY for finding in report.findings)
    behind = report.pointed is None or report.pointed < report.head
    if report.head < 0 or not (damaged or behind):
        return []
    head = make_head(run.manifest(report.head), run.keyring)
    try:
        there = read_head(run)
        if (there.version, there.manifest) == (head.version, head.manifest):
            return []  # a publisher wrote it meanwhile
    except DataError:
        pass  # missing, damaged, or without a valid signature
    run.bucket.put(HEAD_KEY, head.to_bytes())
    return [f"{HEAD_KEY}: points at version {report.head}, the newest good one"]


def _lost(report: VerifyReport, audit: DocumentAudit) -> list[str]:
    lines = []
    for finding in report.findings:
        where = "" if finding.document is None else f" (listed by {finding.document})"
        lines.append(f"{finding.key}{where}: {finding.error.message}")
    if report.unreadable:
        lines.append(f"unreadable versions: {spelled(report.unreadable)}; {HELP}")
    unreadable = set(report.unreadable)
    lines += [
        f"tag {name!r} is on version {version}, which is unreadable"
        for name, version in sorted(audit.tags.items())
        if version in unreadable
    ]
    return lines
