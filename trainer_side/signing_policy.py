"""Whether a publisher may go on with a run: by its own key, and by the signatures of what is there."""

from trainer_side.epochs import HistoryTail
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import DeltaSyncError, ForkError, SignatureError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.manifest import RUN_KEY, RunInfo, version_key
from vllm_delta_sync.run.documents import revoked_manifest
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keyring import RunKeys, short


def key_refused(keys: RunKeys, keyring: Keyring) -> str | None:
    """Why what the keyring's signing key signs is refused by readers; None if it is not, or if there is none."""
    if keyring.public is None or keyring.public in keys.allowed():
        return None
    entry = None if keys.file is None else keys.file.entry(keyring.public)
    if entry is None:
        return (
            f"signing_key {short(keyring.public)} is neither among trusted_keys nor listed in keys.json; list it "
            "(delta-sync keys), or add its public key file to trusted_keys here and on the receivers"
        )
    return (
        f"keys.json says that signing_key {short(keyring.public)} was {'revoked' if entry.revoked else 'retired'}; "
        "publish with a key that is in use"
    )


def open_vouched(bucket: Bucket, keyring: Keyring) -> Run:
    """Open a run to go on with it.

    Raises:
        SignatureError: it is signed and there is no signing key, or the reverse; or the key may not sign it.
        DeltaSyncError: run.json, tensors.json or keys.json is missing or damaged.
    """
    info = RunInfo.from_bytes(bucket.get(RUN_KEY, max_bytes=limits.MAX_JSON_BYTES), RUN_KEY)
    if keyring.has_signing_key and info.signature is None:
        raise SignatureError(
            f"the run at {bucket.url} is not signed, and signing_key is set: nobody can vouch for what it holds; "
            "publish to a new run URL, or without signing_key"
        )
    if info.signature is not None:
        _check_has_key(bucket, keyring)
    run = Run(bucket, keyring)
    refused = key_refused(run.verifier.keys, keyring)
    if refused is not None:
        raise SignatureError(f"{refused} ({bucket.url})")
    return run


def check_end(run: Run, found: HistoryTail) -> None:
    """Raise SignatureError if a signed run ends with something that nobody trusted has signed.

    Going on behind it would be to sign it, and its weights would be published as ours. What is damaged counts too:
    it may be in the place of what receivers hold, who would take the version after it for another history. What
    keys.json gave up is another thing: receivers that had believed it follow only what goes on behind it.
    """
    if not run.keyring.has_signing_key:
        if found.manifest is not None and found.manifest.signature is not None:
            _check_has_key(run.bucket, run.keyring)
    elif (found.problem is not None or found.manifest is None) and not is_given_up(run, found):
        raise _written_by_others(run, found, found.problem)


def is_given_up(run: Run, found: HistoryTail) -> bool:
    """Whether everything behind the last good version is by a key that was retired or revoked since.

    Raises:
        StoreError: the store failed.
    """
    last = found.manifest
    if found.problem is None or last is None:
        return False
    digest = last.digest
    for version in range(last.version + 1, found.version + 1):
        given_up = revoked_manifest(run, version)
        if given_up is None or given_up.parent != digest:
            return False
        digest = given_up.digest
    return digest == found.digest


def forged(error: BaseException | None) -> DeltaSyncError | None:
    """Why something cannot be rebuilt, if that is because something on the way is signed by nobody who is trusted."""
    seen: list[BaseException] = []
    # An error may be raised from itself.
    while error is not None and error not in seen:
        if isinstance(error, SignatureError | ForkError):
            return error
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None


def refuse_forged(run: Run, found: HistoryTail, error: DeltaSyncError) -> None:
    """Raise SignatureError if a version cannot be rebuilt because of what somebody else has written."""
    reason = forged(error) if run.keyring.checks_signatures else None
    if reason is not None:
        raise _written_by_others(run, found, reason) from error


def _check_has_key(bucket: Bucket, keyring: Keyring) -> None:
    if not keyring.has_signing_key:
        raise SignatureError(
            f"the run at {bucket.url} is signed, and a version without a signature would be refused by its receivers; "
            "pass signing_key= with a key that may sign it, or publish to a new run URL"
        )


def _written_by_others(run: Run, found: HistoryTail, problem: DeltaSyncError | None) -> SignatureError:
    url, last = run.bucket.url, found.manifest
    mend = "put back what belongs there (delta-sync repair, with a mirror), or publish to a new run URL"
    if last is not None and last.version < found.version:
        mend = f"remove {version_key(last.version + 1)} and what follows to go on from version {last.version}, {mend}"
    return SignatureError(
        f"version {found.version} of {url} is not published by anybody who is trusted, so nothing is built on it: "
        f"{problem}. Somebody else may have written to the bucket: find out who. Then {mend}"
    )
