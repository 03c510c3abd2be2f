"""What checking a run finds, and what it says at the end."""

from dataclasses import dataclass, field

from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format.manifest import ObjectRef, RunFile, Sidecar


@dataclass(frozen=True)
class Finding:
    """One thing that does not hold.

    Attributes:
        key: of the object or document that is bad. error: what is wrong with it.
        version: of the chain, if it belongs to one. document: key of what lists it, if it is an object.
        ref: how that lists it. tensor: the first one that is not as declared, where that can be told.
        sidecar: how its version lists it, if it is one. run_file: how run.json lists it, if it is one.
    """

    key: str
    error: DeltaSyncError
    version: int | None = None
    document: str | None = None
    ref: ObjectRef | None = None
    tensor: str | None = None
    sidecar: Sidecar | None = None
    run_file: RunFile | None = None


class Findings:
    """Takes findings: keeps them all, or raises the first.

    Attributes:
        items: those taken.
    """

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self.items: list[Finding] = []

    def add(self, finding: Finding) -> None:
        """Keep the finding, and raise its error if one is enough."""
        self.items.append(finding)
        if not self._keep:
            raise finding.error

    def contains(self, error: DeltaSyncError) -> bool:
        """Whether an error is that of a finding, rather than of something that kept the check from being made."""
        return any(finding.error is error for finding in self.items)


@dataclass
class VerifyReport:
    """Outcome of ``Run.verify``.

    Attributes:
        versions: how many versions were walked, from 0 to the head.
        head: newest version number; the newest good one where findings are kept.
        files, objects, sidecars, bytes: run files, objects and sidecars read, and their size in all.
        replayed: True if the weights of every version that is kept were rebuilt and compared with its fingerprint;
            False if the run's base is not at hand, in which case digests, chain and declared fingerprints were checked.
        anchors, folds: documents beside the chain that hold, with their objects.
        gone: versions whose own objects were removed by retention.
        unreadable: versions that nothing leads to any more, though retention kept them.
        refused: versions that the chain went past, since the key that signed them was retired or revoked before them.
        signed: public key of run.json's signature; None if it has none. checked: whether signatures were asked for.
        pointed: version that HEAD.json names; None if it is missing or damaged.
        undecoded: keys of documents of codec ``context`` whose streams were not read, since the weights that they build
            on were not at hand; their digests, tables and declared fingerprints were checked.
        notes: what is worth knowing and no error.
        findings: all that does not hold, where they are kept.
    """

    versions: int = 0
    head: int = -1
    files: int = 0
    objects: int = 0
    sidecars: int = 0
    bytes: int = 0
    replayed: bool = False
    anchors: int = 0
    folds: int = 0
    gone: int = 0
    unreadable: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    signed: str | None = None
    checked: bool = False
    pointed: int | None = None
    undecoded: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
