"""``branch`` starts a new run at a version of another run, without copying weights.

Version 0 of the branch refers to that version, and a tag in the source run keeps the version. The tag is set first and
deleted last, so gc can never remove the version of a branch.
"""

import secrets
from contextlib import ExitStack

from vllm_delta_sync.bucket import Bucket, open_beside
from vllm_delta_sync.bucket.base import confirm_created, create_if_absent, has_content
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import ChainError, ConflictError, DeltaSyncError, FingerprintError, UsageError
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import (
    HEAD_KEY,
    RUN_KEY,
    TABLE_KEY,
    VERSIONS_PREFIX,
    Base,
    Manifest,
    RunInfo,
    version_key,
)
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.maintenance.export import choose_version
from vllm_delta_sync.maintenance.gc.record import lasting_plan
from vllm_delta_sync.maintenance.tags import delete_tag, set_tag
from vllm_delta_sync.run.model_files import fetch_run_file
from vllm_delta_sync.run.objects import summarize_changes
from vllm_delta_sync.run.restore import check_step
from vllm_delta_sync.trust.keyring import make_head

logger = guarded_logger(__name__)


def branch_tag(run_id: str) -> str:
    """Return the name of the tag that a branch sets in its source run. Args: run_id: of the branch."""
    return f"branch-{run_id[:12]}"


def branch(run: Run, version: int | str | None, url: str) -> Run:
    """Start a new run at a version of ``run``. Reads deltas only; weights are neither read nor copied.

    The new run, and the tag in ``run``, are signed with the keyring of ``run``.

    Args:
        version: a number, ``tag:NAME``, or None for the newest that is not quarantined. url: of the new run.

    Raises:
        UsageError: the URL is that of ``run``. ConflictError: the URL holds a run, or part of one.
        NotFoundError: no such version, or it was removed, or a run file is missing.
        StoreError: the store failed; what was written is removed again, unless the branch may exist already.
        DigestError, LimitError: a run file, or an object of a delta, is damaged.
        SignatureError: the signing key must not start a run.
    """
    run.keyring.check_signing_key()
    with ExitStack() as failing:
        bucket = failing.enter_context(open_beside(run.bucket, url))
        _begin(run, version, bucket)
        made = Run(bucket, run.keyring)
        failing.pop_all()
    return made


def _begin(run: Run, version: int | str | None, bucket: Bucket) -> None:
    if bucket.url == run.bucket.url:
        raise UsageError(f"{bucket.url!r} is the run to branch from; choose another URL for the branch")
    for prefix in (RUN_KEY, TABLE_KEY, HEAD_KEY, VERSIONS_PREFIX):
        if (found := next(iter(bucket.list(prefix)), None)) is not None:
            raise ConflictError(f"{bucket.url} already holds {found.key} of a run; branch to a new URL")
    source, _ = choose_version(run, version)
    info = RunInfo(
        run=secrets.token_hex(16),
        created_at=timestamp(),
        tensors=run.table.digest,
        total=run.table.total,
        full_bytes=run.table.full_bytes,
        files=run.info.files,
    )
    info = run.keyring.signed(info)
    first = Manifest(
        run=info.run,
        version=0,
        step=source.step,
        kind="reference",
        base=Base(location=run.bucket.url, run=run.info.run, version=source.version, manifest=source.digest),
        changed=0,
        total=info.total,
        payload_bytes=0,
        full_bytes=info.full_bytes,
        fingerprint=source.fingerprint,
        tensor_fingerprints=tensor_fingerprints(run, source),
        created_at=timestamp(),
    )
    first = run.keyring.signed(first)
    files = {item.key: fetch_run_file(run, item) for item in info.files}
    name = branch_tag(info.run)
    set_tag(run, name, source.version, branch=bucket.url)
    try:
        _create(bucket, {RUN_KEY: info.to_bytes(), TABLE_KEY: run.table.to_bytes()}, files, first)
    except BaseException:  # including interrupts: release the URL and the tag
        if _undo(bucket, info, first):
            delete_tag(run, name)
        raise
    try:
        bucket.put(HEAD_KEY, make_head(first, run.keyring).to_bytes())
    except DeltaSyncError as error:
        # Readers find version 0 without HEAD.json.
        logger.warning("the branch was created, but its %s was not written: %s", HEAD_KEY, error)


def tensor_fingerprints(run: Run, version: Manifest) -> dict[str, str]:
    """Return tensor name → fingerprint in hex at a version: its root's plus the changes that deltas declare.

    Reads the deltas, but neither weights nor the base; for codec ``tiled``, only the part that is readable without
    weights.

    Raises:
        NotFoundError: the version was removed. DeltaSyncError: an object of a delta is damaged.
        FingerprintError: the result differs from the version's declared fingerprint.
    """
    found = lasting_plan(run, version)
    declared = found.root.document.tensor_fingerprints
    if declared is None:
        raise ChainError(f"version {found.root.version} does not declare the fingerprints of its tensors")
    values = {run.table.index(name): Fingerprint.from_hex(value) for name, value in declared.items()}
    reached = found.root.manifest.model_fingerprint
    for step in found.steps:
        objects = [step.run.fetch(ref) for ref in step.objects]
        changes = summarize_changes(step.document, step.run.table, objects).fingerprints
        if step.backwards:
            changes = {tensor: Fingerprint() - change for tensor, change in changes.items()}
        reached = check_step(step, reached, sum(changes.values(), Fingerprint()))
        for tensor, change in changes.items():
            values[tensor] += change
    if sum(values.values(), Fingerprint()) != version.model_fingerprint:
        raise FingerprintError(
            f"version {version.version}: the fingerprints of its tensors do not add up to {version.fingerprint}; run "
            "`delta-sync verify`"
        )
    return {spec.name: values[tensor].hex() for tensor, spec in enumerate(run.table)}


def _create(bucket: Bucket, documents: dict[str, bytes], files: dict[str, bytes], first: Manifest) -> None:
    """Claim the URL and commit version 0. An existing object counts as ours if its bytes equal ours.

    run.json must still be ours right before version 0: another writer may have replaced it, taking it for an
    interrupted start. On a store without create-if-absent, both must read back as ours after a while.
    """
    for key, data in documents.items():
        _check_ours(bucket, key, create_if_absent(bucket, key, data))
    for key, data in files.items():
        bucket.put(key, data)  # named by its content, so an existing one is equal or damaged
    info = documents[RUN_KEY]
    _check_ours(bucket, RUN_KEY, confirm_created(bucket, RUN_KEY, info) and has_content(bucket, RUN_KEY, info))
    key, data = version_key(0), first.to_bytes()
    _check_ours(bucket, key, create_if_absent(bucket, key, data) and confirm_created(bucket, key, data))


def _check_ours(bucket: Bucket, key: str, ours: bool) -> None:
    if not ours:
        raise ConflictError(f"{bucket.url} holds {key} of another writer; branch to a new URL")


def _undo(bucket: Bucket, info: RunInfo, first: Manifest) -> bool:
    """Remove what a failed branch has written. Returns whether it is certain that no branch exists."""
    try:
        if not has_content(bucket, RUN_KEY, info.to_bytes()):
            return True
        if has_content(bucket, version_key(0), first.to_bytes()):
            bucket.delete(version_key(0))
        for item in info.files:
            bucket.delete(item.key)
        bucket.delete(TABLE_KEY)
        # Delete run.json last: it keeps other writers away.
        bucket.delete(RUN_KEY)
    except DeltaSyncError as error:
        logger.warning("%s may hold part of a failed branch; its tag stays: %s", bucket.url, error)
        return False
    return True
