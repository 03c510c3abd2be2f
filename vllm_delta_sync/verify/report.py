"""``VerifyReport``: the outcome of checking a run, with its findings."""

from dataclasses import dataclass, field

from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format.manifest import Stored


@dataclass(frozen=True)
class Finding:
    """One problem in a run.

    Attributes:
        key: of the bad object or document. error: what is wrong with it.
        version: the version that it belongs to, if any. document: key of the document that lists it, for an object.
        stored: the entry of an object, a sidecar or a run file in the document that lists it.
        tensor: the first tensor that has another fingerprint than declared, if that is what is wrong.
    """

    key: str
    error: DeltaSyncError
    version: int | None = None
    document: str | None = None
    stored: Stored | None = None
    tensor: str | None = None


class Findings:
    """Collects findings: keeps all of them, or raises the first.

    Attributes:
        items: the findings so far.
    """

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self.items: list[Finding] = []

    def add(self, finding: Finding) -> None:
        """Add the finding, and raise its error unless all findings are kept."""
        self.items.append(finding)
        if not self._keep:
            raise finding.error


@dataclass
class VerifyReport:
    """Outcome of ``Run.verify``.

    Attributes:
        versions: how many versions were checked, from 0 to the head.
        head: newest version; if findings are kept, the newest good one.
        files, objects, sidecars, bytes: run files, objects and sidecars read, and their total size.
        replayed: True if the weights of every kept version were rebuilt and compared with its fingerprint. False if
            the run's base is not there; then only digests, history and declared fingerprints were checked.
        anchors, merged_deltas: how many standalone anchors and merged deltas are good, with their objects.
        gone: how many versions had their own objects removed by retention.
        unreadable: kept versions that can no longer be rebuilt.
        signed: public key of run.json's signature; None if it has none. checked: whether signatures were checked.
        pointed: version that HEAD.json names; None if it is missing or damaged.
        undecoded: keys of documents of codec ``tiled`` whose streams were not decoded, because their base bits were
            not available; their digests, tables and declared fingerprints were checked.
        notes: remarks that are not errors.
        findings: all problems, if findings are kept.
    """

    versions: int = 0
    head: int = -1
    files: int = 0
    objects: int = 0
    sidecars: int = 0
    bytes: int = 0
    replayed: bool = False
    anchors: int = 0
    merged_deltas: int = 0
    gone: int = 0
    unreadable: list[int] = field(default_factory=list)
    signed: str | None = None
    checked: bool = False
    pointed: int | None = None
    undecoded: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
