"""Who may write a run: claims of epochs, and what there was when one began.

Whoever takes a run over writes claims/<e>.json first, if absent, and only then looks for the head. A writer looks for
the claim after its own right before each commit. So of the former writer at most one more version can appear, the one
that it looked for just before the claim; see ``RunWriter.commit``.

Where create-if-absent does not hold (``Bucket.supports_conditional_put``), two writers may both be told that they were
first. One publisher at a time is a rule for people there, and what is done here keeps mistakes from doing harm: a claim
and run.json are ours only if they read back as ours after a settling time; before and after each commit a writer looks
whether claim, run.json and its manifests are still its own, and stops if not; and nobody writes over what is another's.
What remains: a write that the network holds back for longer than the settling time, after its writer's last look, may
replace another's. That one notices with its next commit at the latest, and stops.
"""

import secrets
from dataclasses import dataclass
from hashlib import sha256

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.conditional_put import confirm_created, create_if_absent, has_content, reads_back
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import (
    ChainError,
    ConflictError,
    DeltaSyncError,
    FormatError,
    NotFoundError,
    SignatureError,
    StoreError,
    UnsupportedError,
)
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import Claim, claim_key
from vllm_delta_sync.format.manifest import RUN_KEY, Manifest, timestamp, version_key
from vllm_delta_sync.run.checks import check_follows
from vllm_delta_sync.run.head import last_consecutive

_READ_BYTES = 1 << 24


@dataclass
class HistoryTail:
    """The end of a run.

    Attributes:
        version: the highest number that has a manifest, without a gap before it.
        digest: SHA-256 of that manifest as it is stored.
        manifest: the newest one that is good; None if none is.
        problem: why ``manifest`` is not that of ``version``; None if it is.
    """

    version: int
    digest: str
    manifest: Manifest | None
    problem: DeltaSyncError | None


def find_end(run: Run) -> HistoryTail:
    """The newest version, however damaged.

    Raises:
        NotFoundError: the run has no version. UnsupportedError: a later release wrote it.
        StoreError: the store failed, or does not give the same twice.
    """
    found = _find_end(run)
    if found.problem is not None:
        # What is damaged in the store stays so; bytes that flipped on the way do not.
        found = _find_end(run)
    for key, same in (
        (RUN_KEY, run.is_current),
        (version_key(found.version), lambda: stored_digest(run.bucket, version_key(found.version)) == found.digest),
    ):
        if not same():
            raise StoreError(
                f"{key} of {run.bucket.url} reads otherwise than a moment ago: it was written over, or the store or "
                "the network damages what it delivers; start this publisher again"
            )
    return found


def _find_end(run: Run) -> HistoryTail:
    manifest: Manifest | None = None
    try:
        manifest, problem = run.reachable_head()
    except (StoreError, UnsupportedError):
        raise
    except DeltaSyncError as error:
        problem = error
    if manifest is not None and problem is None:
        return HistoryTail(manifest.version, manifest.digest, manifest, None)
    if isinstance(problem, UnsupportedError):
        raise problem
    highest = _highest(run, manifest)
    last = _proven(run, highest)
    if last is not None:
        # Only HEAD.json is wrong, or what it points at, and somebody has gone on behind that.
        return HistoryTail(last.version, last.digest, last, None)
    return HistoryTail(highest, stored_digest(run.bucket, version_key(highest)), manifest, problem)


def _highest(run: Run, newest: Manifest | None) -> int:
    """The highest number of those that follow each other from ``newest`` on, or from the first if none is good.

    A chain has no gaps: what lies beyond one is a stranger's, and must not stop anybody from going on. A manifest that
    HEAD.json names and that is lost is no gap.
    """
    versions = run.versions()
    if not versions:
        raise NotFoundError(f"{run.bucket.url} has no version yet")
    lost = run.pointer.version if run.pointer is not None else versions[0]
    highest = last_consecutive({*versions, lost}, versions[0] if newest is None else newest.version)
    if highest not in versions:
        highest -= 1
    try:
        # What a listing does not show yet.
        while True:
            run.bucket.stat(version_key(highest + 1))
            highest += 1
    except NotFoundError:
        return highest


def _proven(run: Run, version: int) -> Manifest | None:
    """A version's manifest, if it is good and follows the one before it, be that good or not."""
    try:
        manifest = run.manifest(version)
        if version:
            _check_link(run, manifest)
        return manifest
    except StoreError:
        raise
    except DeltaSyncError:
        return None


def _check_link(run: Run, manifest: Manifest) -> None:
    before = manifest.version - 1
    if manifest.parent != stored_digest(run.bucket, version_key(before)):
        raise ChainError(f"version {manifest.version} does not follow version {before} as that is stored")
    try:
        parent = run.manifest(before)
    except (FormatError, SignatureError):
        # Damaged, or of a key that was revoked since: who has gone on behind it has named it as it is stored.
        return
    check_follows(parent, manifest)


@dataclass(frozen=True, slots=True)
class EpochToken:
    """An epoch that was begun, and the claim of it as it is stored."""

    epoch: int
    data: bytes


def claim(run: Run, found: HistoryTail) -> EpochToken:
    """Begin the next epoch; from when this returns the former writer commits one more version at most.

    Raises:
        StoreError: the store failed; at worst a claim is left that fences the former writer.
    """
    bucket, writer = run.bucket, secrets.token_hex(16)
    epoch = max(run.newest_epoch(), 0 if found.manifest is None else found.manifest.epoch) + 1
    while True:
        document = run.keyring.signed(
            Claim(
                run=run.info.run,
                epoch=epoch,
                version=found.version,
                manifest=found.digest,
                writer=writer,
                created_at=timestamp(),
            )
        )
        data = document.to_bytes()
        if create_if_absent(bucket, claim_key(epoch), data) and confirm_created(bucket, claim_key(epoch), data):
            return EpochToken(epoch, data)
        epoch += 1


def check_fence(bucket: Bucket, info: bytes, epoch: int, own: bytes | None = None) -> None:
    """Raise unless the run is still there and nobody has claimed a later epoch: one small get, and one stat.

    Args:
        info: the bytes of the run's ``run.json``.
        own: those of the claim of ``epoch``, None if it has none. Read again where create-if-absent does not hold.

    Raises:
        ConflictError: the run is another writer's, another run, or gone. StoreError: the store does not tell.
    """
    try:
        ours = reads_back(lambda: bucket.get(RUN_KEY, max_bytes=limits.MAX_JSON_BYTES), info)
    except NotFoundError as error:
        raise ConflictError(f"the run at {bucket.url} was removed; this publisher stops: start a new run") from error
    if not ours:
        raise ConflictError(
            f"another run was started at {bucket.url} in place of this one; this publisher stops: publish to another "
            "run URL"
        )
    later = claim_key(epoch + 1)
    try:
        bucket.stat(later)
    except NotFoundError:
        later = claim_key(epoch)
        if own is None or bucket.supports_conditional_put or has_content(bucket, later, own, if_missing=True):
            return
    raise ConflictError(
        f"another publisher has taken over the run at {bucket.url} ({later}); this one stops: nothing "
        "it publishes from now on would be kept"
    )


def stored_digest(bucket: Bucket, key: str) -> str:
    """SHA-256 of an object as it is stored, read piece by piece.

    Raises:
        NotFoundError: no such object. StoreError: the store failed.
    """
    digest, start = sha256(), 0
    while True:
        piece = bucket.get_range(key, start, _READ_BYTES)
        digest.update(piece)
        if len(piece) < _READ_BYTES:
            return digest.hexdigest()
        start += len(piece)
