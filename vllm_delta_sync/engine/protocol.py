"""``OPERATIONS``: what a controller may ask of the ranks, with the type of each request and answer.

A controller runs in the API server, a rank in a worker process. ``encode_request`` and ``decode_answers`` are the
controller's side, ``serve`` is the rank's. What lies between passes bytes on. They are msgpack of the types below,
which each side checks when it decodes.

Calls are short. A ``BackgroundRequest`` only starts an operation; ``Poll`` says whether it still runs, and ``Outcome``
fetches its answer, which may be megabytes and crosses once.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar, Union, get_args

import msgspec

from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.model.route import Region
from vllm_delta_sync.errors import DeltaSyncError, EngineError, MemoryLimitError, error_kinds
from vllm_delta_sync.format.fingerprint import Fingerprint

_RELEASES_DIFFER = "this worker and its controller are of different releases"

# Parts of messages


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter of an engine, whose weights a run of its own holds.

    Attributes:
        name: under which requests ask for it.
        number: vLLM's ``lora_int_id``, the same on every rank.
        folder: where each node keeps the adapter's files as they are loaded now; vLLM may read them again.
    """

    name: str
    number: int
    folder: str


class ClaimedVersion(msgspec.Struct, frozen=True):
    """The version that a rank's weights should be: run id, its URL, version, fingerprints per tensor id of that run."""

    run: str
    url: str
    version: int
    fingerprints: list[Fingerprint]


class PlainStep(msgspec.Struct, frozen=True):
    """A ``Step`` to send.

    Attributes:
        document: bytes of a manifest, or of a merged delta if ``merged``.
        run: URL and digest of run.json; None means the run followed.
    """

    document: bytes
    merged: bool
    backwards: bool
    run: tuple[str, str] | None


# Answers


class RankAnswer(msgspec.Struct, frozen=True, tag=True):
    """What a rank answers."""


class Done(RankAnswer, frozen=True):
    """The operation is done, or has started in the background."""


class RankFailure(RankAnswer, frozen=True):
    """The operation failed.

    Attributes:
        step: index of the step, among those staged together, that caused it; None if unknown.
    """

    kind: str
    message: str
    step: int | None = None

    @classmethod
    def of(cls, error: DeltaSyncError) -> "RankFailure":
        """Describe an error."""
        return cls(error.kind, error.message, failed_step(error))

    def to_error(self) -> DeltaSyncError:
        """Return the error, as an instance of its own class."""
        error = error_kinds().get(self.kind, EngineError)(self.message)
        set_failed_step(error, self.step)
        return error


class RankState(RankAnswer, frozen=True):
    """What one rank holds.

    Attributes:
        version: None if the weights are no version of the run followed.
        intact: whether that is certain.
        confirmed: False from a commit until the controller has found it right on all ranks.
        undo: versions that the rank can revert to, newest first.
        external_writer: last call from outside that may have written weights since the controller last checked them.
        external_writes: number of such calls.
    """

    version: int | None
    intact: bool
    confirmed: bool
    undo: list[int | None]
    undo_bytes: int
    external_writer: str | None
    external_writes: int
    asleep: bool


class Committed(RankAnswer, frozen=True):
    """A commit that was applied.

    Attributes:
        measured: change of fingerprint per group of ranks. If it is wrong, send ``Revert``.
    """

    measured: dict[int, Fingerprint]


class Progress(RankAnswer, frozen=True):
    """Whether the last background operation is still running."""

    running: bool


class Identified(RankAnswer, frozen=True):
    """The rank's weights.

    Attributes:
        regions: per tensor id, per route: the part of the tensor that the route loads.
        measured: per tensor id, per route: its fingerprint.
        claimed: the version that the weights should be; None if unknown.
        unloaded, derived: names of tensors that the loader leaves out, and that reload units compute weights from.
    """

    regions: list[list[Region]]
    measured: list[list[Fingerprint]]
    claimed: ClaimedVersion | None
    unloaded: list[str]
    derived: list[str]
    ms: dict[str, float]


class Scanned(RankAnswer, frozen=True):
    """Rescanned tensors.

    Attributes:
        measured: per tensor id, per route: its fingerprint.
        expected: per tensor id: the fingerprint of the whole tensor.
        dead: names of tensors whose memory the model no longer uses.
    """

    measured: dict[int, list[Fingerprint]]
    expected: dict[int, Fingerprint]
    dead: list[str]


class Staged(RankAnswer, frozen=True):
    """A version ready to commit.

    Attributes:
        declared: the change of fingerprint that its commit should make, over all ranks.
        nbytes, elements: of this rank's patch.
        store: see ``store_usage``.
        rescanned: the tensors that were rescanned beside staging.
    """

    version: int
    declared: Fingerprint
    nbytes: int
    elements: int
    ms: dict[str, float]
    store: dict[str, Any]
    rescanned: Scanned


# Requests

A = TypeVar("A", bound=RankAnswer)
A_co = TypeVar("A_co", bound=RankAnswer, covariant=True)


def _snake_case(name: str) -> str:
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_")


class RankRequest(msgspec.Struct, Generic[A_co], frozen=True, tag_field="operation", tag=_snake_case, kw_only=True):
    """What a controller asks of every rank, which answers with an A_co.

    Attributes:
        paused: whether it may run only while generation is paused.
        per_rank: the field that has one entry per rank, over all engines. Each engine gets the entries of its ranks.
        adapter: whose weights it is about; None for the model's own.
    """

    paused: ClassVar[bool] = False
    per_rank: ClassVar[str | None] = None
    adapter: Adapter | None = None

    @property
    def operation(self) -> str:
        """Name of the operation, such as ``set_version``."""
        return str(type(self).__struct_config__.tag)


class BackgroundRequest(RankRequest[Done], Generic[A_co], frozen=True):
    """Starts an operation whose ``Outcome`` is an A_co."""


class Describe(RankRequest[RankState], frozen=True):
    """Report what the rank holds."""


class SetVersion(RankRequest[Done], frozen=True):
    """Store what the controller found out about all ranks together.

    Attributes:
        version: the version of the weights; None means no version of the run followed.
        fingerprints, loaded: per tensor id; see ``RouteMap``.
        groups: per rank, per tensor id, per route.
        claimed: if ``version`` is None: what the weights are instead, for a later ``Identify``.
    """

    per_rank: ClassVar[str | None] = "groups"
    version: int | None
    fingerprints: list[Fingerprint]
    groups: list[list[list[int]]]
    loaded: list[bool]
    claimed: ClaimedVersion | None = None


class Commit(RankRequest[Committed], frozen=True):
    """Apply the staged version."""

    paused: ClassVar[bool] = True
    version: int


class Revert(RankRequest[Done], frozen=True):
    """Return to a version of the undo log."""

    paused: ClassVar[bool] = True
    version: int | None


class Confirm(RankRequest[RankState], frozen=True):
    """Keep the last commit, which was right on all ranks; trim the undo log."""

    undo_bytes: int


class ClearExternalWrite(RankRequest[Done], frozen=True):
    """Forget external writes: the weights were rescanned and are right.

    Attributes:
        external_writes: per rank, the number known when the rescan began. A newer write is not cleared.
    """

    per_rank: ClassVar[str | None] = "external_writes"
    external_writes: list[int]


class Poll(RankRequest[Progress], frozen=True):
    """Report whether the last background operation still runs."""


class Outcome(RankRequest[A_co], Generic[A_co], frozen=True):
    """Fetch the answer of the last background operation, which must have that name."""

    started: str

    @staticmethod
    def of(request: BackgroundRequest[A]) -> "Outcome[A]":
        """Fetch what a request sent before led to."""
        return Outcome(request.operation)


class Identify(BackgroundRequest[Identified], frozen=True):
    """Trace routes, and hash every tensor through them.

    Attributes:
        info, trusted, store: see ``RunCache``.
        device_staging_bytes: see ``Accelerator.staging_bytes``.
    """

    url: str
    cache_dir: str | None = None
    cache_bytes: int = 0
    info: str | None = None
    trusted: list[str] = []
    store: dict[str, Any] | None = None
    device_staging_bytes: int | None = None


class Stage(BackgroundRequest[Staged], frozen=True):
    """Fetch and route what one commit needs.

    Attributes:
        target, steps, anchor, rebuild: an ``UpdatePlan``; target and anchor are the bytes of their documents.
        current: the version that the controller expects on this rank.
        rescan: tensor ids to rescan.
    """

    target: bytes
    steps: list[PlainStep]
    anchor: bytes | None
    rebuild: bool
    current: int | None
    rescan: list[int]


class Repair(BackgroundRequest[Staged], frozen=True):
    """Stage a version from any state of the weights; ``manifest`` is its bytes."""

    manifest: bytes


class Scan(BackgroundRequest[Scanned], frozen=True):
    """Hash tensors as they lie in memory now."""

    tensors: list[int]


_REQUESTS: tuple[type[RankRequest[Any]], ...] = (
    *(Describe, SetVersion, Commit, Revert, Confirm, ClearExternalWrite, Poll, Outcome),
    *(Identify, Stage, Repair, Scan),
)
OPERATIONS = {str(request.__struct_config__.tag): request for request in _REQUESTS}
"""The request of every operation, by name."""
_REQUEST_DECODER = msgspec.msgpack.Decoder(Union[_REQUESTS])  # noqa: UP007  not a literal


def answer_type(request: RankRequest[Any]) -> type[RankAnswer]:
    """Return the type with which a rank answers a request, as its class declares it."""
    if isinstance(request, BackgroundRequest):
        return Done
    declared = OPERATIONS[request.started] if isinstance(request, Outcome) else type(request)
    found: type[RankAnswer] = get_args(declared.__orig_bases__[0])[0]  # type: ignore[attr-defined]
    return found


def encode_request(request: RankRequest[Any], first: int = 0, end: int | None = None) -> bytes:
    """Encode a request for the ranks from ``first`` to before ``end`` (None: to the last)."""
    if (field := request.per_rank) is not None:
        request = msgspec.structs.replace(request, **{field: getattr(request, field)[first:end]})
    return msgspec.msgpack.encode(request)


def decode_request(payload: bytes) -> RankRequest[Any]:
    """Decode ``encode_request``. Raises EngineError: this release does not know the request."""
    try:
        request: RankRequest[Any] = _REQUEST_DECODER.decode(payload)
    except msgspec.DecodeError as error:
        raise EngineError(f"a request is unknown ({error}); {_RELEASES_DIFFER}") from error
    return request


def encode_answer(answer: RankAnswer) -> bytes:
    """Encode an answer."""
    return msgspec.msgpack.encode(answer)


def decode_answers(request: RankRequest[A], payloads: list[bytes]) -> list[A | RankFailure]:
    """Decode the answers of all ranks to a request. Raises EngineError: one is no answer to it."""
    try:
        answer: Any = answer_type(request) | RankFailure
        decoded: list[Any] = [msgspec.msgpack.decode(payload, type=answer) for payload in payloads]
    except msgspec.DecodeError as error:
        raise EngineError(f"a rank did not answer {request.operation} ({error}); {_RELEASES_DIFFER}") from error
    return decoded


def serve(payload: bytes, answer: Callable[[RankRequest[Any]], RankAnswer]) -> bytes:
    """Return a rank's encoded answer to an encoded request; any error becomes a ``RankFailure``."""
    try:
        return encode_answer(answer(decode_request(payload)))
    except DeltaSyncError as error:
        failure = RankFailure.of(error)
    except Exception as error:  # an exception would end the worker under some executors
        logger.exception("the rank worker failed unexpectedly")
        failure = RankFailure(EngineError.kind, f"unexpected {type(error).__name__}: {error}")
    return encode_answer(failure)


def unwrap(answers: list[A | RankFailure]) -> list[A]:
    """Return the answers if all ranks succeeded. Raises the first failure."""
    found = []
    for answer in answers:
        if isinstance(answer, RankFailure):
            raise answer.to_error()
        found.append(answer)
    return found


# Errors


def set_failed_step(error: DeltaSyncError, step: int | None) -> None:
    """Attach to an error the index of the step, among those staged together, that caused it."""
    vars(error)["step"] = step


def failed_step(error: DeltaSyncError) -> int | None:
    """Return the index of the step that caused an error, if known."""
    step: int | None = vars(error).get("step")
    return step


def wrap_error(error: Exception) -> DeltaSyncError:
    """Wrap an error of torch or Python in a DeltaSyncError."""
    # torch's out-of-memory error for devices derives from RuntimeError and has this name in every release; on the CPU
    # it is a plain RuntimeError.
    out_of_memory = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    if out_of_memory or isinstance(error, MemoryError):
        return MemoryLimitError(f"this rank is out of memory ({error}); free some, the weights are unchanged")
    return EngineError(f"unexpected {type(error).__name__}: {error}")
