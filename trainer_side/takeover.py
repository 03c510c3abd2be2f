"""``open_or_begin``: open a run for publishing, by beginning one (``run_start``) or taking one over (``Takeover``).

A takeover first does everything that has no effect: it checks whether the keys, the model and the base fit, finds the
head, and reads the weights back, on every rank. Only then it claims the run, which fences the former writer. So a
takeover that cannot succeed leaves the former writer alone; if the store fails after the claim, a claim is left, and
the next takeover continues.

``claim`` begins a writer epoch: it writes claims/<e>.json, if absent. ``find_tail`` finds the end of the run and checks
it, after the claim even if it has done so before. A writer looks for the claim after its own before each commit, after
the last one. So at most one more version of the former writer can appear, the one whose check
(``RunWriter.check_not_fenced``) ran before the claim.

Where create-if-absent is not atomic (``Bucket.supports_conditional_put`` is False), two writers may both believe that
they were first. Users must then run one publisher at a time, and these checks keep mistakes from doing harm: a claim
and run.json count as ours only if they read back as ours after a settling time; before and after each commit a writer
checks that claim, run.json and its manifests are still its own, and stops if not; no writer overwrites another's
objects. What remains: a write that the network delays beyond the settling time, after its writer's last check, may
replace another writer's object. That writer notices at its next commit at the latest, and stops.
"""

import os
import secrets
import traceback
from dataclasses import dataclass
from pathlib import Path

from trainer_side.background_thread import BackgroundThread
from trainer_side.encode.update_gate import judge_state
from trainer_side.options import PublisherOptions
from trainer_side.ranks.group import Json, ProcessGroup, check_same
from trainer_side.run_files import check_adapter
from trainer_side.run_start import CollectFiles, OpenedRun, begin
from trainer_side.run_weights import RunWeights
from trainer_side.writer import (
    FormerVersionError,
    RunWriter,
    check_breaks,
    full_manifest,
    quarantine,
    stored_digest,
    with_break,
)
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.base import confirm_created, create_if_absent, exists
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import (
    ChainError,
    ConflictError,
    DataError,
    DeltaSyncError,
    FingerprintError,
    ForkError,
    FormatError,
    LimitError,
    NotFoundError,
    SignatureError,
    StoreError,
    TensorMismatchError,
    UnsupportedError,
    UsageError,
)
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.documents import CLAIMS_PREFIX, Claim, claim_key
from vllm_delta_sync.format.manifest import (
    HEAD_KEY,
    RUN_KEY,
    TABLE_KEY,
    VERSIONS_PREFIX,
    Manifest,
    RunInfo,
    version_key,
)
from vllm_delta_sync.format.safetensors_file import shard_tables
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.run.checks import check_base_exists
from vllm_delta_sync.run.graph import check_follows
from vllm_delta_sync.run.run_reader import last_consecutive, read_info
from vllm_delta_sync.tensors.checkpoint import Checkpoint, ResolvedBase, resolve_base
from vllm_delta_sync.trust import Keyring

logger = guarded_logger(__name__)

UNREADABLE = (NotFoundError, FormatError, ChainError, FingerprintError, TensorMismatchError)
"""Errors that mean bad data in the bucket. A StoreError or BaseUnavailableError says nothing about it."""

_ATTEMPTS = 8


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


def open_or_begin(
    bucket: Bucket,
    weights: RunWeights,
    files: CollectFiles,
    options: PublisherOptions,
    group: ProcessGroup,
    background: BackgroundThread,
) -> OpenedRun:
    """Take over the run in the bucket, or begin one. Every rank calls it, and raises the same error.

    On ranks other than 0 the writer of the run stores objects only.

    Args:
        files: returns the model's small files; called on rank 0, if a run begins.
        background: a thread that no interrupt hits.
    """
    unfinished: bytes | None = None
    opened: list[OpenedRun] = []

    def inspect() -> bool:
        nonlocal unfinished
        exists, unfinished = inspect_url(bucket, options.resume, options.expect_run)
        return exists

    exists: bool = group.from_rank0("opening", inspect)
    resolved = _locate_base(weights, options.base, exists, group)
    begun = None if exists else weights.begin()

    def open_on_rank0() -> str:
        if begun is None:
            opened.append(Takeover(bucket, weights, options, background).take_over())
        else:
            opened.append(begin(bucket, weights, *begun, resolved, options, files, unfinished))
        return opened[0].current.to_bytes().decode()

    text = weights.run_on_rank0("taking over" if exists else "beginning", open_on_rank0)

    def own() -> OpenedRun:
        return opened[0] if group.is_rank0 else _follow(bucket, weights, text, options, group.rank)

    ready = group.on_every_rank("ready", own)
    ready.began = not exists
    return ready


def _locate_base(
    weights: RunWeights, base: str | Path | None, exists: bool, group: ProcessGroup
) -> ResolvedBase | None:
    """Set ``weights.base`` from the argument ``base``; return the base of a new run.

    Raises:
        NotFoundError: there is no such checkpoint. UsageError: ``base`` is not given on every rank of a new run.
    """
    found: list[ResolvedBase] = []

    def locate() -> bool:
        if base is None:
            return False
        # Of a branch this may be the URL of the parent run.
        if exists and "://" in str(base):
            weights.base = base
            return True
        found.append(resolve_base(base))
        weights.base = found[0].path
        if exists:
            check_base_exists(found[0].path)
        return True

    # If rank 0 has to download it, ranks that share its cache find it there.
    given = group.from_rank0("base", locate)

    def judge(reports: list[Json]) -> None:
        if not exists:
            check_same("whether base= is given", reports)

    group.all_or_raise("base of each", lambda: given if group.is_rank0 else locate(), judge)
    return found[0] if found else None


def _follow(bucket: Bucket, weights: RunWeights, text: str, options: PublisherOptions, rank: int) -> OpenedRun:
    """Open, on another rank, the run that rank 0 has opened at the manifest with this text."""
    current, run = Manifest.from_bytes(text.encode()), weights.run
    if run.info.run != current.run:
        raise UsageError(
            f"rank {rank} finds another run in the bucket than rank 0 has written: give every rank the URL of one "
            "bucket that all of them reach"
        )
    writer = RunWriter(bucket, run.info, 0, options, run.document_limit)
    writer.set_newest(current)
    return OpenedRun(weights, writer, current)


def inspect_url(bucket: Bucket, resume: bool, expect_run: str | None = None) -> tuple[bool, bytes | None]:
    """Find out what is at a run URL.

    Args:
        resume: whether an existing run may be continued. expect_run: id of the only one that may be.

    Returns:
        Whether there is a run, intact or damaged; run.json of a start that ended before version 0, None if there is
        none.

    Raises:
        ConflictError: a run that must not be continued; or part of one that an interrupted start does not explain.
        UsageError: ``expect_run`` is given, and there is no run.
    """
    found = [key for key in (RUN_KEY, TABLE_KEY, HEAD_KEY) if exists(bucket, key)]
    versions = exists(bucket, version_key(0)) or next(iter(bucket.list(VERSIONS_PREFIX)), None) is not None
    if versions and RUN_KEY in found:
        if not resume:
            raise ConflictError(
                f"{bucket.url} holds a run already; publish to a new run URL, or pass resume=True to continue that run"
            )
        if expect_run is not None:
            info = RunInfo.from_bytes(bucket.get(RUN_KEY, max_bytes=limits.MAX_JSON_BYTES), RUN_KEY)
            check_expected_run(bucket.url, info.run, expect_run)
        return True, None
    if expect_run is not None:
        check_expected_run(bucket.url, None, expect_run)
    found += [VERSIONS_PREFIX] if versions else []
    # Claims of a removed run would fence the writer of a new one.
    found += [CLAIMS_PREFIX] if next(iter(bucket.list(CLAIMS_PREFIX)), None) is not None else []
    if not found:
        return False, None
    if resume and found in ([RUN_KEY], [RUN_KEY, TABLE_KEY]):
        try:
            return False, bucket.get(RUN_KEY, max_bytes=limits.MAX_JSON_BYTES)
        except NotFoundError:
            return False, None
    keys = ", ".join(found)
    raise ConflictError(
        f"{bucket.url} holds {keys} but no complete run: another publisher is starting there, or a start crashed, or a "
        f"run was partly removed; publish to a new run URL, or, if this one is unused, remove "
        f"{keys} by hand"
    )


def check_expected_run(url: str, found: str | None, expected: str) -> None:
    """Raise unless the run at a URL is the one that the caller expects. Args: found: id of that run; None if none.

    Raises:
        ConflictError: it is another run. UsageError: there is none.
    """
    if found is None:
        raise UsageError(
            f"expect_run is {expected!r}, but {url} holds no run; correct the URL, or leave expect_run out to begin a "
            "new run there"
        )
    if found != expected:
        raise ConflictError(
            f"expect_run is {expected!r}, but {url} holds run {found!r}; correct the URL, or pass the id of the run to "
            "continue"
        )


class Takeover:
    """Takes over a run: ``take_over``.

    Of several ranks, rank 0 takes over for all. What ``weights`` does for it, every rank does on its own parts and its
    own copy of the base; an error on any of them ends the takeover on all.

    Args:
        weights: receives those of the newest version.
        background: see ``open_or_begin``.
    """

    def __init__(
        self, bucket: Bucket, weights: RunWeights, options: PublisherOptions, background: BackgroundThread
    ) -> None:
        self._bucket, self._weights = bucket, weights
        self._options, self._background = options, background
        self._run = open_trusted(bucket, options.keyring)
        self._epoch, self._claim = 0, b""
        # Why the weights that replace a lost version are quarantined, if they are.
        self._reasons: list[str] = []
        weights.fit(self._run)
        check_adapter(self._run, options.files)

    def take_over(self) -> OpenedRun:
        """Read the newest version back, claim the run, and continue after it.

        If that version is lost, the current weights are committed after it. If the former writer commits while it is
        read, the newest version is read again after the claim.

        Raises:
            BaseUnavailableError: the base that was given or recorded is missing, damaged or another one.
            ConflictError: another publisher has taken over the run meanwhile.
            DeltaSyncError: the newest version is lost, for the reason in the message, and the model lacks tensors.
            GateError: the newest version is lost, and the gate refuses the weights that would replace it.
            LimitError: the newest version is lost, and a full snapshot would exceed a limit, such as that of breaks.
            SignatureError: the run ends with, or needs, data that no trusted key has signed.
            StoreError: the store failed. Only this and ConflictError are possible once the run is claimed, unless
                another writer commits at the same time.
        """
        found = self._background.call(lambda: find_tail(self._run))
        logger.info(
            "taking over run %s at %s: this reads version %d back; then it claims the run, and writes nothing else "
            "unless that version is lost",
            self._run.info.run, self._bucket.url, found.version,
        )  # fmt: skip
        # Also if it is not needed now: it would be needed later, such as for a rebase.
        if self._weights.base is not None:
            self._background.call(self._weights.check_base)
        head = self._check_out(found)
        self._epoch, self._claim = self._background.call(lambda: claim(self._run, found))
        newest = self._background.call(lambda: find_tail(self._run))
        if (newest.version, newest.digest) != (found.version, found.digest):
            found, head = newest, self._check_out(newest)
        return self._background.call(lambda: self._start_over(found) if head is None else self._continue(head))

    def _check_out(self, found: HistoryTail) -> Manifest | None:
        """Fill ``weights`` with the newest version, and return it; or, if it is lost, with the model's weights."""
        problem = self._background.call(lambda: self._read_back(found))
        if problem is None:
            return found.manifest
        self._capture_instead(found, problem)
        return None

    def _read_back(self, found: HistoryTail) -> DeltaSyncError | None:
        """Fill ``weights`` with the newest version; return why it is lost, or None."""
        try:
            if found.problem is not None or found.manifest is None:
                raise found.problem or ChainError("no manifest is good")
            self._weights.checkout(found.manifest)
        except (*UNREADABLE, SignatureError) as error:
            if found.problem is None:
                raise_if_forged(self._run, found, error)
            _release_frames(error)
            return error
        return None

    def _continue(self, head: Manifest) -> OpenedRun:
        """Continue from the newest version, which ``weights`` holds."""
        writer = self._writer()
        writer.set_newest(head)
        writer.update_head()
        logger.info(
            "run %s continues from version %d, step %d, in epoch %d", writer.run, head.version, head.step, writer.epoch
        )
        return OpenedRun(self._weights, writer, head)

    def _writer(self) -> RunWriter:
        limit = self._run.document_limit
        return RunWriter(self._bucket, self._run.info, self._epoch, self._options, limit, self._claim)

    # If the newest version is lost

    def _capture_instead(self, found: HistoryTail, problem: DeltaSyncError) -> None:
        """Copy the model's weights, which are to be committed after the lost version, if they can be."""
        if not self._weights.live.has_values:
            raise type(problem)(
                f"version {found.version} cannot be rebuilt ({problem}), and this publisher gets the weights for a new "
                "start only later; repair the run, or start a new one"
            ) from problem
        check_breaks([] if found.manifest is None else found.manifest.breaks)
        shard_tables(self._run.table, self._options.shard_bytes)  # raises if they are too many
        logger.error(
            "version %d of %s cannot be rebuilt, so the current weights are committed as a full snapshot after it, of "
            "%s bytes: %s",
            found.version, self._bucket.url, f"{self._run.table.full_bytes:,}", problem,
        )  # fmt: skip
        absent, rest = self._weights.baseline.absent(), None
        if absent:
            base = self._weights.base
            rest = Checkpoint(base) if base is not None and os.path.isdir(base) else None
            known = {} if rest is None else rest.specs
            odd = [name for name in absent if known.get(name) != self._run.table.by_name(name)]
            if odd:
                raise type(problem)(
                    f"version {found.version} cannot be rebuilt ({problem}), and for a full snapshot the model lacks "
                    f"tensor {odd[0]!r} ({len(odd)} in all); pass base= with a checkpoint that has it, repair the run, "
                    "or start a new one"
                ) from problem
            logger.warning("tensors that the model does not have are taken from base: %s", ", ".join(absent[:5]))
        self._weights.capture(rest)
        weights = self._weights
        self._reasons = self._background.call(lambda: judge_state(self._options.gate, weights.table, weights.nonfinite))

    def _start_over(self, found: HistoryTail) -> OpenedRun:
        """Commit the weights that ``_capture_instead`` copied as a full snapshot after the lost version."""
        writer = self._writer()
        state, objects = self._weights.put_shards(writer.put)
        for _ in range(_ATTEMPTS):
            good, version = found.manifest, found.version + 1
            anchor = full_manifest(
                writer.run, state, objects, version=version, step=0 if good is None else good.step,
                parent=found.digest, epoch=self._epoch, quarantine=quarantine(self._reasons, good),
                breaks=with_break([] if good is None else good.breaks, version, None),
            )  # fmt: skip
            manifest = self._run.keyring.signed(anchor)
            try:
                writer.commit(manifest)
            except (ConflictError, FormerVersionError):
                before, found = found, find_tail(self._run)
                theirs = found.manifest if found.problem is None else None
                if found.version == before.version or (theirs is not None and theirs.epoch >= self._epoch):
                    raise
                # The former writer's last commit arrived in between.
                writer = self._writer()
                continue
            writer.announce()
            return OpenedRun(self._weights, writer, manifest)
        raise ConflictError(f"versions keep appearing at {self._bucket.url}; another publisher writes there")


def _release_frames(error: BaseException | None) -> None:
    """Free the weights that frames of the failed calls still hold, before others are captured."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def find_tail(run: Run) -> HistoryTail:
    """Find the newest version, even a damaged one.

    Raises:
        NotFoundError: the run has no version. UnsupportedError: a later release wrote it.
        StoreError: the store failed, or returned different bytes on a second read.
        SignatureError: a signed run ends with data that no trusted key has signed. Continuing after it would sign it,
            and publish its weights as ours. Damaged data count too: they may replace a version that receivers have,
            which would take the next version for another history.
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
    if not run.keyring.has_signing_key:
        if tail.manifest is not None and tail.manifest.signature is not None:
            _check_has_key(run.bucket, run.keyring)
    elif tail.problem is not None or tail.manifest is None:
        raise _untrusted_error(run, tail, tail.problem)
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
        LimitError: a claim has the last number.
        StoreError: the store failed; at worst a claim is left that fences the former writer.
    """
    bucket, writer = run.bucket, secrets.token_hex(16)
    epoch = max(run.newest_epoch(), 0 if tail.manifest is None else tail.manifest.epoch) + 1
    while True:
        if epoch > limits.MAX_VERSION:
            # A key of more digits would be no claim: this run would read as damaged from here on.
            raise LimitError(
                f"{CLAIMS_PREFIX} of {bucket.url} has no numbers left: a claim or a manifest there has a number that "
                "no publisher reaches; find out who wrote it, and remove it"
            )
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
    info = read_info(bucket, keyring)
    if keyring.has_signing_key and info.signature is None:
        raise SignatureError(
            f"the run at {bucket.url} is not signed, and signing_key is set: its content cannot be trusted; "
            "publish to a new run URL, or without signing_key"
        )
    if info.signature is not None:
        _check_has_key(bucket, keyring)
    keyring.check_signing_key()
    return Run(bucket, keyring)


def raise_if_forged(run: Run, tail: HistoryTail, error: DeltaSyncError) -> None:
    """Raise SignatureError if a version cannot be rebuilt because it needs data that no trusted key has signed."""
    seen: list[BaseException] = []
    cause: BaseException | None = error if run.keyring.checks_signatures else None
    # An error may have been raised from itself.
    while cause is not None and cause not in seen:
        if isinstance(cause, SignatureError | ForkError):
            raise _untrusted_error(run, tail, cause) from error
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__


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
