"""Who may continue a run: ``claim`` begins a writer epoch; ``find_tail`` and ``check_tail`` find and check its end.

A publisher that takes over a run writes claims/<e>.json, if absent, and finds the head after that, even if it has read
the head before. A writer looks for the claim after its own before each commit, after the last one. So at most one more
version of the former writer can appear, the one whose check (``RunWriter.check_not_fenced``) ran before the claim.

Where create-if-absent is not atomic (``Bucket.supports_conditional_put`` is False), two writers may both believe that
they were first. Users must then run one publisher at a time, and these checks keep mistakes from doing harm: a claim
and run.json count as ours only if they read back as ours after a settling time; before and after each commit a writer
checks that claim, run.json and its manifests are still its own, and stops if not; no writer overwrites another's
objects. What remains: a write that the network delays beyond the settling time, after its writer's last check, may
replace another writer's object. That writer notices at its next commit at the latest, and stops.
"""

import secrets
from dataclasses import dataclass

from trainer_side.writer import stored_digest
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.base import exists
from vllm_delta_sync.bucket.conditional_put import confirm_created, create_if_absent
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import (
    ChainError,
    DataError,
    DeltaSyncError,
    ForkError,
    FormatError,
    NotFoundError,
    SignatureError,
    StoreError,
    UnsupportedError,
)
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.documents import Claim, claim_key
from vllm_delta_sync.format.manifest import RUN_KEY, Manifest, RunInfo, version_key
from vllm_delta_sync.run.checks import check_follows
from vllm_delta_sync.run.newest_good import last_consecutive
from vllm_delta_sync.trust import Keyring


@dataclass
class HistoryTail:
    """The end of a run.

    Attributes:
        version: the highest number that has a manifest, without a gap before it.
        digest: SHA-256 of that manifest as stored.
        manifest: the newest good manifest; None if there is none.
        problem: why ``manifest`` is not that of ``version``; None if it is.
    """

    version: int
    digest: str
    manifest: Manifest | None
    problem: DeltaSyncError | None


def find_tail(run: Run) -> HistoryTail:
    """Find the newest version, even a damaged one.

    Raises:
        NotFoundError: the run has no version. UnsupportedError: a later release wrote it.
        StoreError: the store failed, or returned different bytes on a second read.
    """
    tail = _find_tail(run)
    if tail.problem is not None:
        # Damage in the store persists; bytes that flipped on the way do not.
        tail = _find_tail(run)
    for key, same in (
        (RUN_KEY, run.is_current),
        (version_key(tail.version), lambda: stored_digest(run.bucket, version_key(tail.version)) == tail.digest),
    ):
        if not same():
            raise StoreError(
                f"{key} of {run.bucket.url} reads differently than a moment ago: it was overwritten, or the store or "
                "the network damages what it delivers; start this publisher again"
            )
    return tail


def _find_tail(run: Run) -> HistoryTail:
    manifest: Manifest | None = None
    try:
        manifest, problem = run.reachable_head()
    except DataError as error:
        problem = error
    if manifest is not None and problem is None:
        return HistoryTail(manifest.version, manifest.digest, manifest, None)
    if isinstance(problem, UnsupportedError):
        raise problem
    highest = _highest(run, manifest)
    last = _verified(run, highest)
    if last is not None:
        # Only HEAD.json, or what it points at, is wrong, and a writer has continued after that.
        return HistoryTail(last.version, last.digest, last, None)
    return HistoryTail(highest, stored_digest(run.bucket, version_key(highest)), manifest, problem)


def _highest(run: Run, newest: Manifest | None) -> int:
    """Return the highest version without a gap from ``newest``, or from the first if no manifest is good.

    A run has no gaps: a version beyond one was not written by its writer, and must not stop a takeover. A lost manifest
    that HEAD.json names is no gap.
    """
    versions = run.versions()
    if not versions:
        raise NotFoundError(f"{run.bucket.url} has no version yet")
    lost = run.pointer.version if run.pointer is not None else versions[0]
    highest = last_consecutive({*versions, lost}, versions[0] if newest is None else newest.version)
    if highest not in versions:
        highest -= 1
    # A listing may not show the latest versions yet.
    while exists(run.bucket, version_key(highest + 1)):
        highest += 1
    return highest


def _verified(run: Run, version: int) -> Manifest | None:
    """Return a version's manifest if it is good and names the previous manifest as it is stored, good or not."""
    try:
        manifest = run.manifest(version)
        if version:
            _check_link(run, manifest)
        return manifest
    except DataError:
        return None


def _check_link(run: Run, manifest: Manifest) -> None:
    before = manifest.version - 1
    if manifest.parent != stored_digest(run.bucket, version_key(before)):
        raise ChainError(f"version {manifest.version} does not follow version {before} as that is stored")
    try:
        parent = run.manifest(before)
    except (FormatError, SignatureError):
        # Damaged, or its key is not trusted any more: the writer that continued after it named it as it is stored.
        return
    check_follows(parent, manifest)


def claim(run: Run, tail: HistoryTail) -> tuple[int, bytes]:
    """Begin the next epoch; return its number, and its claim as it is stored.

    Once this returns, the former writer commits at most one more version.

    Raises:
        StoreError: the store failed; at worst a claim is left that fences the former writer.
    """
    bucket, writer = run.bucket, secrets.token_hex(16)
    epoch = max(run.newest_epoch(), 0 if tail.manifest is None else tail.manifest.epoch) + 1
    while True:
        document = run.keyring.signed(
            Claim(
                run=run.info.run,
                epoch=epoch,
                version=tail.version,
                manifest=tail.digest,
                writer=writer,
                created_at=timestamp(),
            )
        )
        data = document.to_bytes()
        if create_if_absent(bucket, claim_key(epoch), data) and confirm_created(bucket, claim_key(epoch), data):
            return epoch, data
        epoch += 1


def open_trusted(bucket: Bucket, keyring: Keyring) -> Run:
    """Open a run in order to continue it.

    Raises:
        SignatureError: it is signed and there is no signing key, or the reverse; or a key is not trusted.
        DeltaSyncError: run.json or tensors.json is missing or damaged.
    """
    info = RunInfo.from_bytes(bucket.get(RUN_KEY, max_bytes=limits.MAX_JSON_BYTES), RUN_KEY)
    if keyring.has_signing_key and info.signature is None:
        raise SignatureError(
            f"the run at {bucket.url} is not signed, and signing_key is set: its content cannot be trusted; "
            "publish to a new run URL, or without signing_key"
        )
    if info.signature is not None:
        _check_has_key(bucket, keyring)
    keyring.check_signing_key()
    return Run(bucket, keyring)


def check_tail(run: Run, tail: HistoryTail) -> None:
    """Raise SignatureError if a signed run ends with data that no trusted key has signed.

    Continuing after it would sign it, and publish its weights as ours. Damaged data count too: they may replace a
    version that receivers have, which would take the next version for another history.
    """
    if not run.keyring.has_signing_key:
        if tail.manifest is not None and tail.manifest.signature is not None:
            _check_has_key(run.bucket, run.keyring)
    elif tail.problem is not None or tail.manifest is None:
        raise _untrusted_error(run, tail, tail.problem)


def forgery_cause(error: BaseException | None) -> DeltaSyncError | None:
    """Return the signature or fork error that caused ``error``; None if something else did."""
    seen: list[BaseException] = []
    # An error may have been raised from itself.
    while error is not None and error not in seen:
        if isinstance(error, SignatureError | ForkError):
            return error
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None


def raise_if_forged(run: Run, tail: HistoryTail, error: DeltaSyncError) -> None:
    """Raise SignatureError if a version cannot be rebuilt because it needs data that no trusted key has signed."""
    reason = forgery_cause(error) if run.keyring.checks_signatures else None
    if reason is not None:
        raise _untrusted_error(run, tail, reason) from error


def _check_has_key(bucket: Bucket, keyring: Keyring) -> None:
    if not keyring.has_signing_key:
        raise SignatureError(
            f"the run at {bucket.url} is signed, and its receivers would refuse a version without a signature; "
            "pass signing_key= with a key that may sign it, or publish to a new run URL"
        )


def _untrusted_error(run: Run, tail: HistoryTail, problem: DeltaSyncError | None) -> SignatureError:
    url, last = run.bucket.url, tail.manifest
    remedy = "restore the original objects (delta-sync repair, with a mirror), or publish to a new run URL"
    if last is not None and last.version < tail.version:
        remedy = (
            f"remove {version_key(last.version + 1)} and what follows to continue from version {last.version}, {remedy}"
        )
    return SignatureError(
        f"version {tail.version} of {url} is not signed by a trusted key, so nothing is built on it: {problem}. "
        f"Another party may have written to the bucket: find out who. Then {remedy}"
    )
