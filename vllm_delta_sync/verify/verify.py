"""Walk a run and check all of it: documents, digests, contents, declared sums, and the weights themselves."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from vllm_delta_sync.run.checks import check_base
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.trust.keyring import short
from vllm_delta_sync.verify.document_audit import DocumentAudit
from vllm_delta_sync.verify.object_audit import check_files, check_sidecars
from vllm_delta_sync.verify.replay_audit import ReplayAudit
from vllm_delta_sync.verify.report import Finding, Findings, VerifyReport

__all__ = ["Finding", "VerifyReport", "examine", "verify_run"]

Progress = Callable[[VerifyReport], None]


def verify_run(
    run: RunDocuments,
    base: str | Path | None = None,
    progress: Progress | None = None,
    findings: bool | Findings = False,
) -> VerifyReport:
    """Walk the run from version 0 to the head and check all of it.

    First the documents: each manifest against what names it by digest, anchors, folded ranges, tags and claims
    against the manifests. Then the run's files and the objects of every version in order, the weights that they lead
    to, and beside them anchors (bit for bit), folded ranges (what they would make of the weights, tensor by tensor) and
    sidecars. Versions
    whose objects retention removed are no error; those that it keeps have to be reachable. Holds the weights of one
    version: O(model) memory, or O(model) of the temporary directory's disk for large ones.

    Objects of codec ``context`` are decoded with the weights that they build on; where these are not at hand, the
    report lists the documents as ``undecoded``.

    Where the run's keyring has trusted keys, every document but the hints (claims, leases, retention.json) has to be
    signed by a key whose word holds for it; objects are bound by their digests.

    Args:
        base: as ``Run.snapshot``. progress: called with the report so far after each version.
        findings: True: keep every finding in the report and continue; False: raise the first one; or a ``Findings``.

    Raises:
        NotFoundError: nothing is published, or ``base`` is given and not there. Without one, a recorded base that is
            not at hand is noted.
        StoreError: the store failed.
        DeltaSyncError: the first thing that does not hold, naming version, object, tensor or base.
    """
    return examine(run, base, progress, findings)[0]


def examine(
    run: RunDocuments,
    base: str | Path | None = None,
    progress: Progress | None = None,
    findings: bool | Findings = False,
) -> tuple[VerifyReport, DocumentAudit]:
    """As ``verify_run``; also the documents as they were read."""
    check_base(base)
    with run.caching_manifests():
        return _examine(run, base, progress, findings if isinstance(findings, Findings) else Findings(findings))


def _examine(
    run: RunDocuments, base: str | Path | None, progress: Progress | None, found: Findings
) -> tuple[VerifyReport, DocumentAudit]:
    census = DocumentAudit(run)
    for finding in census.findings:
        found.add(finding)
    signature = run.info.signature
    signed = None if signature is None else signature.key
    report = VerifyReport(
        findings=found.items, pointed=census.pointed, signed=signed, checked=run.keyring.checks_signatures
    )
    for finding in check_files(run, report):
        found.add(finding)
    everything, good = True, set[str]()
    walk = ReplayAudit(run, census, base, found, report)
    for version, manifest in enumerate(census.manifests()):
        walk.visit(version, manifest)
        for finding in check_sidecars(run, manifest, report, good) if manifest is not None else ():
            found.add(finding)
        report.versions += 1
        if version in census.digests:
            report.head = version
        everything &= walk.causes.get(version) not in ("bad", "base")
        report.replayed = everything
        if progress is not None:
            progress(report)
    report.unreadable = sorted(walk.unreadable)
    report.refused = sorted(census.refused)
    if report.undecoded:
        report.notes.append(
            f"{len(report.undecoded)} documents of codec 'context' (the first is {report.undecoded[0]}) were read "
            "without the weights that they build on, which are not at hand: digests, tables and declared fingerprints "
            "were checked, the changes themselves were not"
        )
    report.notes += _signature_notes(run, census, report)
    if not any(finding.key == "HEAD.json" for finding in found.items) and census.pointed != report.head:
        behind = "is missing" if census.pointed is None else f"is behind: it names version {census.pointed}"
        report.notes.append(f"HEAD.json {behind}, the newest is {report.head}; readers find it all the same")
    return report, census


def _signature_notes(run: RunDocuments, census: DocumentAudit, report: VerifyReport) -> list[str]:
    notes: list[str] = []
    if not report.checked:
        if report.signed is not None:
            notes.append(
                f"the run is signed by key {short(report.signed)}, and signatures were not checked: no trusted keys "
                "were given"
            )
        return notes
    if report.refused:
        versions = ", ".join(map(str, report.refused))
        notes.append(
            f"version{'s' if len(report.refused) > 1 else ''} {versions}: signed by a key that was retired or revoked "
            "before; the chain went past, and nobody takes them"
        )
    ends = None if census.head is None else census.head.expires_at
    if ends is not None and has_passed(ends):
        # No failure: a run whose publisher has ended is whole, and only a receiver knows what it has seen.
        notes.append(
            f"HEAD.json has run out at {ends}: its publisher has ended, or somebody hides what came later; the newest "
            f"that can be seen is {report.head}"
        )
    return notes


def has_passed(moment: str) -> bool:
    """Whether a document's time is over by this machine's clock; one that is no time at all is."""
    try:
        return datetime.fromisoformat(moment) < datetime.now(UTC)
    except ValueError:
        return True
