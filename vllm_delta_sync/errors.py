"""``DeltaSyncError`` and its subclasses: every error that this project raises on purpose, with stable kinds.

Programs match on ``kind``: it appears in ``GET /delta_sync/status``, in ``--json`` output and in logs, and never
changes. The message is for people: it names the field, the value and the remedy. ``exit_code`` is the exit code of the
``delta-sync`` command.
"""

from typing import ClassVar

from vllm_delta_sync.logs import redact


class DeltaSyncError(Exception):
    """Base of all errors raised on purpose by this project."""

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, *args: object) -> None:
        """Remove credentials from the message, so that code that shows errors need not."""
        super().__init__(*(redact(arg) if isinstance(arg, str) else arg for arg in args))

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else self.kind


class UsageError(DeltaSyncError):
    """The caller passed an argument that is invalid or makes no sense."""

    kind = "usage"
    exit_code = 2


class SettingsError(UsageError):
    """A setting is unknown or has an invalid value."""

    kind = "settings"


class DataError(DeltaSyncError):
    """What was read or given is missing, damaged, contradictory, unsupported or not trusted: retrying does not help.

    A handler may use something else instead: another document, path or version. It must not conclude that from a
    ``StoreError``, which says nothing about the data. Raise a subclass; this class has no kind of its own.
    """


class NotFoundError(DataError):
    """A requested object, version or run is not in the bucket."""

    kind = "not_found"
    exit_code = 3


class LostError(NotFoundError):
    """What a published version needs is missing, and no garbage collection removed it: the run is damaged."""

    exit_code = 1


class BaseUnavailableError(DataError):
    """The checkpoint or run that version 0 refers to is missing, unreadable or another one; the bucket is not at fault.

    No handler may take it for damage in the bucket: the remedy is another ``base``.
    """

    kind = "base"
    exit_code = 3


class StoreError(DeltaSyncError):
    """The store failed: disk full, permission denied, network down. A later retry may succeed."""

    kind = "store"
    exit_code = 4


class AccessError(StoreError):
    """The store refuses access: credentials are missing, expired, or lack a permission."""

    kind = "access"


class UnavailableError(StoreError):
    """The store did not answer, or the connection broke; an immediate retry may succeed."""

    kind = "unavailable"


class DeadlineError(StoreError):
    """The store did not complete a request before its deadline, including retries."""

    kind = "deadline"


class NoticeError(DeltaSyncError):
    """The notice socket cannot be used. Polling continues without it."""

    kind = "notice"
    exit_code = 4


class ConflictError(DeltaSyncError):
    """Another writer was first: a key that must be new already exists."""

    kind = "conflict"
    exit_code = 5


class FormatError(DataError):
    """Bytes do not follow docs/FORMAT.md: truncated, corrupt, or hostile."""

    kind = "format"


class LimitError(FormatError):
    """A declared size is above a named limit; nothing was allocated."""

    kind = "limit"


class DigestError(FormatError):
    """Bytes do not have the SHA-256 that a document declares."""

    kind = "digest"


class UnsupportedError(DataError):
    """The data requires a feature that this release does not know."""

    kind = "unsupported"


class ChainError(DataError):
    """A version does not continue the known history: wrong run, base version or parent digest."""

    kind = "chain"


class SignatureError(DataError):
    """A document is not signed by a key that is trusted for it; it was not used."""

    kind = "signature"


class ForkError(ChainError):
    """One version has two different signed histories; the newly found one was not used."""

    kind = "fork"


class ReplayError(ChainError):
    """The bucket shows an older state than seen before: it was restored, or newer objects are hidden."""

    kind = "replay"


class ExpiredError(DataError):
    """HEAD.json has expired: its publisher has ended, or newer versions are hidden."""

    kind = "expired"


class FingerprintError(DataError):
    """Weights would not have the fingerprint that their version declares; they were not changed."""

    kind = "fingerprint"


class TensorMismatchError(DataError):
    """A tensor is not in the run's tensor table, or has another dtype or shape than the table says."""

    kind = "tensor"


class ModelError(DeltaSyncError):
    """A model cannot be published or patched exactly; the message names the tensor and the reason."""

    kind = "model"


class EngineError(DeltaSyncError):
    """The inference engine refused or failed an operation, or is misconfigured."""

    kind = "engine"


class WeightsLostError(EngineError):
    """The state of a rank's weights is unknown; the engine stays paused until it is restarted."""

    kind = "weights_lost"


class MemoryLimitError(EngineError):
    """A rank has too little memory for an operation; weights were not changed."""

    kind = "memory"


class BusyError(DeltaSyncError):
    """Another operation is in progress; retry later."""

    kind = "busy"


class IncompleteError(DeltaSyncError):
    """A command did what it could, and something is left: lost versions, unmade merged deltas, refused checkpoints."""

    kind = "incomplete"


class PublishError(DeltaSyncError):
    """A version could not be made durable; the baseline was rolled back, so the next publish carries its changes."""

    kind = "publish"


class GateError(PublishError):
    """The publisher's update gate refused a version; its changes are part of the next version's check."""

    kind = "gate"


class PublishTimeoutError(PublishError):
    """A version, or a call that waits for the store, was not done in the time given; it goes on in the background."""

    kind = "publish_timeout"


def error_kinds() -> dict[str, type[DeltaSyncError]]:
    """Map each stable kind to its class, for documentation and for errors that cross a process boundary."""
    found: dict[str, type[DeltaSyncError]] = {}
    pending: list[type[DeltaSyncError]] = [DeltaSyncError]
    while pending:
        cls = pending.pop()
        if "kind" in vars(cls):
            found[cls.kind] = cls
        pending.extend(cls.__subclasses__())
    return dict(sorted(found.items()))
