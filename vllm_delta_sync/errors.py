"""Every error this project raises on purpose, as one tree with stable kinds.

A ``kind`` is what programs match on: it appears in ``GET /delta_sync/status``, in ``--json`` output and
in logs, and does not change between releases. The message is for people: it names the field, the value
and the mend. ``exit_code`` is what the ``delta-sync`` command returns.
"""

from typing import ClassVar

from vllm_delta_sync.redaction import redact


class DeltaSyncError(Exception):
    """Base of all errors raised on purpose by this project."""

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, *args: object) -> None:
        """Credentials in the message are taken out here, so that nothing that shows an error has to think of it."""
        super().__init__(*(redact(arg) if isinstance(arg, str) else arg for arg in args))

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else self.kind


class UsageError(DeltaSyncError):
    """The caller asked for something that does not exist or makes no sense."""

    kind = "usage"
    exit_code = 2


class SettingsError(UsageError):
    """A setting is unknown or has a value that cannot be used."""

    kind = "settings"


class NotFoundError(DeltaSyncError):
    """An object, a version or a run that was asked for is not in the bucket."""

    kind = "not_found"
    exit_code = 3


class StoreError(DeltaSyncError):
    """The store failed: disk full, permission denied, network gone. Trying again later may help."""

    kind = "store"
    exit_code = 4


class AccessError(StoreError):
    """The store refuses the credentials: there are none, they have run out, or they lack the right."""

    kind = "access"


class UnavailableError(StoreError):
    """The store did not answer, or broke off: what is worth trying again at once."""

    kind = "unavailable"


class DeadlineError(StoreError):
    """The store did not do what it was asked for in the time that it was given, with all tries."""

    kind = "deadline"


class NoticeError(DeltaSyncError):
    """The notice socket cannot be used. Polling carries on without it."""

    kind = "notice"
    exit_code = 4


class ConflictError(DeltaSyncError):
    """Another writer was first: a key that must be new exists already."""

    kind = "conflict"
    exit_code = 5


class FormatError(DeltaSyncError):
    """Bytes do not follow docs/FORMAT.md: truncated, corrupt, or hostile."""

    kind = "format"


class LimitError(FormatError):
    """A declared size is above a named limit; nothing was allocated."""

    kind = "limit"


class DigestError(FormatError):
    """Bytes do not have the SHA-256 that the manifest declares."""

    kind = "digest"


class UnsupportedError(DeltaSyncError):
    """The data requires a feature that this release does not know."""

    kind = "unsupported"


class ChainError(DeltaSyncError):
    """A version does not follow from the one held: wrong run, base version or parent digest."""

    kind = "chain"


class SignatureError(DeltaSyncError):
    """A document is not signed by a key that is trusted for it; nothing of it was used."""

    kind = "signature"


class ForkError(ChainError):
    """There are two histories for one version, both signed; nothing of the newly found one was used."""

    kind = "fork"


class ReplayError(ChainError):
    """The bucket shows an older state than was seen before: it was put back, or something was hidden."""

    kind = "replay"


class ExpiredError(DeltaSyncError):
    """HEAD.json has run out: its publisher has ended, or somebody hides what came later."""

    kind = "expired"


class FingerprintError(DeltaSyncError):
    """Weights do not have the fingerprint that their version declares; they were left as they were."""

    kind = "fingerprint"


class TensorMismatchError(DeltaSyncError):
    """A tensor is unknown, or has another dtype or shape than the run's tensor table says."""

    kind = "tensor"


class ModelError(DeltaSyncError):
    """A model cannot be published or patched exactly; the message names the tensor and the reason."""

    kind = "model"


class EngineError(DeltaSyncError):
    """The inference engine refused or failed an operation, or was set up wrongly."""

    kind = "engine"


class WeightsLostError(EngineError):
    """A rank cannot tell what its weights are any more; the engine stays paused until it is started again."""

    kind = "weights_lost"


class MemoryLimitError(EngineError):
    """A rank has no memory for what it was asked to do; weights were left as they were."""

    kind = "memory"


class BusyError(DeltaSyncError):
    """Another operation is under way; ask again later."""

    kind = "busy"


class PublishError(DeltaSyncError):
    """A version could not be made durable; the baseline was put back, the next publish carries its changes."""

    kind = "publish"


class GateError(PublishError):
    """A version is beyond the publisher's gate and was refused; its changes are judged again with the next."""

    kind = "gate"


def error_kinds() -> dict[str, type[DeltaSyncError]]:
    """Map each stable kind to its class, for documentation and for errors that cross a process border."""
    found: dict[str, type[DeltaSyncError]] = {}
    pending: list[type[DeltaSyncError]] = [DeltaSyncError]
    while pending:
        cls = pending.pop()
        if "kind" in vars(cls):
            found[cls.kind] = cls
        pending.extend(cls.__subclasses__())
    return dict(sorted(found.items()))
