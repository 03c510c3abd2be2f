"""``PublisherOptions``: the arguments of a publisher, checked; the update gate's bounds ``Gate``, and ``Budget``."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, field
from functools import partial, wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, Concatenate, Literal, ParamSpec, Self, TypeVar

from pydantic import (
    ConfigDict,
    Field,
    InstanceOf,
    ModelWrapValidatorHandler,
    SkipValidation,
    ValidationError,
    model_validator,
)  # fmt: skip
from pydantic.dataclasses import dataclass

from trainer_side.diff.buffers import BaselineLocation
from trainer_side.model.live_tensors import Patterns, Rename, Selection
from trainer_side.model.module import ModelLike
from trainer_side.ranks.given_parts import GivenParts, PartSource
from trainer_side.result import OnVersion
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.logs import log_as_json
from vllm_delta_sync.settings import client_settings
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keyring import HEAD_SECONDS, MAX_HEAD_SECONDS

SHARD_BYTES = 1024**3
"""Bytes of tensors in one object of an anchor; a larger tensor gets its own object."""

CHECKED = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
Count = Annotated[int, Field(ge=1, strict=True)]
Share = Annotated[float, Field(gt=0, le=1, strict=True)]
Ratio = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
Switch = Annotated[bool, Field(strict=True)]


class Checked:
    """Base of options that pydantic checks: one that is invalid raises UsageError, which names it.

    Attributes:
        where: begins the messages.
    """

    where: ClassVar[str] = ""

    @model_validator(mode="wrap")
    @classmethod
    def _named_error(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(given)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False)[0]
            name = problem["loc"][0]
            if isinstance(name, int):  # given by position
                name = list(signature(cls).parameters)[name]
            text = f"{cls.where}{name} is {repr(problem['input'])[:80]}: {problem['msg']}"
            raise UsageError(text) from error


@dataclass(frozen=True, config=CHECKED)
class Gate(Checked):
    """Bounds that a version must satisfy before servers serve it, and what happens to a version that does not.

    Of a sharded model they apply to all shards together; give every rank the same.

    Each version is compared with the last *sound* one, which is what servers have: the version it builds on or, if that
    is quarantined, the newest one before it that is not. So a model that went bad and recovers is sound again at once,
    and one that stays bad stays quarantined, even if its bad elements no longer change. Defects of the sound version
    are not counted: a NaN that came with the base is counted only if its bits change. Version 0 has nothing to be
    compared with and is not judged; its non-finite elements are logged.

    To leave quarantine: publish weights within the bounds of the sound version, with or without
    ``publisher.rebase(sound)`` first; or restart the publisher with wider bounds or without a gate.

    Attributes:
        nonfinite: no changed element may be NaN or infinite. Applies to every floating-point dtype, and to the scales
            of F8_E8M0; integers have neither.
        max_changed_share: the largest share of elements that may differ, above 0 and at most 1; None means no bound.
        max_norm_jump: the largest ‖new − sound‖₂ / ‖sound‖₂ over all floating-point tensors together, above 0; in fp64,
            without the elements that are not finite in the sound version. None means no bound and no norms.
        action: ``refuse``: the version is not published, and the next call or ``flush`` raises GateError, as for a
            failed upload. The changes go out with the next version, which is judged again. ``quarantine``: the version
            is published with the reasons, and servers skip it unless their setting ``quarantined`` or their target says
            otherwise.

    Raises:
        UsageError: a bound or the action is invalid.
    """

    where: ClassVar[str] = "gate: "
    nonfinite: Switch = True
    max_changed_share: Share | None = None
    max_norm_jump: Ratio | None = None
    action: Literal["refuse", "quarantine"] = "refuse"


@dataclass(frozen=True, config=CHECKED)
class Budget(Checked):
    """Bounds of what a version sends: the largest changes first; the rest goes out with later versions.

    Of a sharded model they apply to all shards together; give every rank the same.

    This is lossy until the next exact version. A version that holds something back is not the trainer's state: its
    manifest has how many elements are held back and how far it is from it, and receivers hold exactly what was
    published. Importance ratios see it: tokens come from weights that the trainer never had.

    The size of a change is |new − old| / |old| of its element, where old is what was published last. A change from or
    to zero, and one from or to NaN or infinity, counts as largest. Of equal changes the first go out, in the order of
    the tensors' names and of their elements. Integer and boolean elements always go out. What is held back stays in the
    difference to the published state: the next call finds it again, with what was added meanwhile, also after a failed
    upload or a restart.

    Exact versions have no bound: version 0, those of ``publish(exact=True)`` and ``exact_every``, and the one that
    ``close`` adds if the last version is not exact.

    Attributes:
        max_bytes: the most bytes of a version's objects. How many changes fit is estimated from the versions before;
            if they take more, fewer are encoded again. So a version exceeds the bound only by integer elements. It has
            no objects if not even one change fits.
        max_share: the largest share of the run's elements that a version sends, above 0 and at most 1. Only integer
            elements can exceed it.
        min_change: elements whose change is smaller than this are held back, above 0.
        exact_every: versions from one exact version to the next, at least 1; None for no limit.

    Raises:
        UsageError: a bound is invalid, or there is none.
    """

    where: ClassVar[str] = "budget: "
    max_bytes: Count | None = None
    max_share: Share | None = None
    min_change: Ratio | None = None
    exact_every: Count | None = None

    def __post_init__(self) -> None:
        if self.max_bytes is None and self.max_share is None and self.min_change is None:
            raise UsageError("budget: there is no bound; give max_bytes, max_share or min_change")


@dataclass(config=CHECKED)
class PublisherOptions(Checked):
    """The arguments of ``Publisher`` beside the model, with their defaults and checks.

    Args:
        bucket: URL or path of a run (or an open bucket, which the caller closes).
        base: checkpoint directory that servers start from, or a public model as ``org/name@revision``. It decides
            names and dtypes; where it is quantized, weights are quantized as it was (docs/quantized.md). If the
            weights equal its bits, version 0 is a reference to it and uploads nothing; otherwise version 0 is a
            full snapshot. For an existing run: the location of the checkpoint of its version 0, if not at the
            recorded place; names and dtypes are those of the run. If version 0 is a reference, a base given here
            must hold its bits; it is read in full before the run is claimed.
        every: publish at every k-th call only.
        codec: ``tiled``: the smallest; readers need the weights before each version, as servers have them.
            ``plain``: about 1.4 times as large, and readers need no weights. ``raw``: plain positions and values,
            which any safetensors reader understands. ``auto`` is ``tiled``.
        compression: ``zstd`` or ``none``.
        notice: where to announce versions: ``tcp://*:5555`` binds, ``connect:tcp://HOST:PORT`` uses a broker.
        files: folder with config.json, tokenizer.json and similar files. A new run keeps them, so that servers
            start from the bucket alone and exports are complete: small files (``*.json``, ``*.txt``, ``*.model``,
            ``*.jinja``, ``*.tiktoken``) of up to 64 MiB, at most 64 of them and 256 MiB in total. The files of the
            base are kept by default, and without a base the configuration of a transformers model; files of this
            folder take precedence. Of ranks that publish together, rank 0 reads it.
        notice_key, notice_allowed: own secret CURVE certificate; public certificates of subscribers, or of the
            broker.
        resume: False refuses an existing run.
        anchor_every: write an anchor of each k-th version; if None, when replaying costs more than an anchor.
        merge: write merged deltas, so that a receiver that is far behind catches up with few objects.
        rescan_bytes: at each version, compare this many bytes of the baseline in memory with what was published,
            rotating over the tensors; 0 for none.
        shard_bytes: bytes of tensors in one object of a full snapshot; a delta that is larger when decoded is
            split too. Objects of one version upload in parallel; a version has at most 65,536.
        gate: bounds that versions must satisfy, and what happens to a version that does not; None means no bounds.
        budget: bounds of what a version sends, see ``Budget``; None means that every version is the exact state.
        signing_key: private key file (``delta-sync keygen``). A run is signed from its beginning, or never. None:
            the setting ``signing_key``; if that is not set either, nothing is signed.
        trusted_keys: public key files whose signatures are accepted in a run that is taken over. None means the
            setting ``trusted_keys``, else the signing key's own public key.
        head_seconds: how long a signed HEAD.json is valid; it is renewed in time while the publisher lives.
        baseline: where to keep the last published bits, which take as many bytes as the model in the served dtypes:
            in ``host`` memory (pinned for tensors on CUDA); for tensors that live on a device, on the ``device``,
            where an H200 compared them in a quarter of the time (docs/gpu.md); or on ``disk``, for models larger
            than memory: in an unnamed file of the temporary directory (TMPDIR), mapped into memory, of which the
            system keeps in memory what there is room for. ``disk`` is not for sharded models.
        first_step: optimizer step that version 0 of a new run records.
        expect_run: id of the run to continue, as ``publisher.run`` gave it. Another run at the URL is refused, and
            a URL without a run, before anything is written; None takes over whatever run is there.
        include, exclude: glob patterns (one, or a sequence) of names of a module's parameters and buffers, without
            what wrappers add: only those that match ``include`` (default: all) and not ``exclude`` are published.
            What the base has under the name of a tensor that is left out must keep the bits that servers have,
            which each ``publish`` checks; without a base, the run has what is published, and servers refuse to load a
            run that lacks parameters of their model.
        rename: applied last, to names as in a checkpoint: a mapping of prefixes, such as ``{"actor.": ""}``, of
            which the longest that matches is replaced; or a function from name to name.
        parts: in place of a model: a function that yields each ``Part`` of checkpoint tensors that this process holds,
            with the current values, whenever it is called. All ranks of a ``torch.distributed`` world publish together;
            ranks may hold different tensors and boxes, and of equal boxes one is published (docs/sharded.md).
        on_version: called with the result of each version once it is durable or has failed (``result.failed``), in
            the background thread. Keep it short, because the next version waits for it; of this publisher it may
            only call ``status``. An exception of it is logged.

    Attributes:
        delta_codec: ``codec``, or what ``auto`` stands for. selection: of ``include``, ``exclude`` and ``rename``.
        keyring: signs, and knows the trusted keys; empty before ``load_keys``.
    """

    bucket: str | Path | Bucket
    base: str | Path | None = None
    every: Count = 1
    codec: Codec | Literal["auto"] = "tiled"
    compression: Compression = "zstd"
    notice: str | None = None
    _: KW_ONLY
    files: str | Path | None = None
    notice_key: str | Path | None = None
    notice_allowed: str | Path | None = None
    resume: bool = True
    anchor_every: Count | None = None
    merge: bool = True
    rescan_bytes: Annotated[int, Field(ge=0, strict=True)] = 1 << 26  # 64 MiB
    shard_bytes: Count = SHARD_BYTES
    # Without InstanceOf, pydantic would also make a Gate of a dictionary.
    gate: InstanceOf[Gate] | None = None
    budget: InstanceOf[Budget] | None = None
    signing_key: str | Path | None = None
    trusted_keys: SkipValidation[str | Path | Sequence[str | Path] | None] = None
    head_seconds: Annotated[int, Field(ge=1, le=MAX_HEAD_SECONDS, strict=True)] = HEAD_SECONDS
    baseline: BaselineLocation = "host"
    first_step: Annotated[int, Field(ge=0, lt=2**53, strict=True)] = 0
    expect_run: Annotated[str, Field(strict=True)] | None = None
    include: SkipValidation[Patterns | None] = None
    exclude: SkipValidation[Patterns | None] = None
    rename: SkipValidation[Rename | None] = None
    parts: SkipValidation[PartSource | None] = None
    on_version: SkipValidation[OnVersion | None] = None
    delta_codec: SkipValidation[Codec] = field(init=False)
    selection: SkipValidation[Selection] = field(init=False)
    keyring: SkipValidation[Keyring] = field(init=False, default_factory=Keyring)

    def __post_init__(self) -> None:
        if self.expect_run is not None and not self.resume:
            raise UsageError(
                "expect_run is given with resume=False, which refuses every existing run; leave out one of the two"
            )
        if self.notice is None and (self.notice_key is not None or self.notice_allowed is not None):
            raise UsageError(
                "notice_key or notice_allowed is given without notice=, so no notices are sent: give it too"
            )
        if self.on_version is not None and not callable(self.on_version):
            raise UsageError(f"on_version is a {type(self.on_version).__name__}; give a function")
        self.delta_codec = "tiled" if self.codec == "auto" else self.codec
        self.selection = Selection(self.include, self.exclude, self.rename)

    def load_keys(self) -> None:
        """Set ``keyring`` from the key files, by default those of the settings.

        Raises:
            SettingsError: a key file or a setting cannot be used. UsageError: keys are trusted, and none signs.
        """
        settings = client_settings()
        signing_key = settings.signing_key if self.signing_key is None else self.signing_key
        trusted_keys = settings.trusted_keys if self.trusted_keys is None else self.trusted_keys
        if trusted_keys is not None and signing_key is None:
            raise UsageError(
                "trusted_keys is set without signing_key: readers that ask for signatures would refuse what this "
                "publisher writes; give both, or neither (by argument, environment or settings file)"
            )
        self.keyring = Keyring.load(trusted_keys, signing_key)


MakeOptions = Callable[[], PublisherOptions]
_Arguments = ParamSpec("_Arguments")
_Publisher = TypeVar("_Publisher")


def takes_options(
    options: Callable[_Arguments, PublisherOptions],
) -> Callable[
    [Callable[[_Publisher, ModelLike, MakeOptions], None]],
    Callable[Concatenate[_Publisher, ModelLike | None, _Arguments], None],
]:
    """Let a constructor take a model and the arguments of ``options``; it calls what makes them when all ranks do."""

    def decorate(
        construct: Callable[[_Publisher, ModelLike, MakeOptions], None],
    ) -> Callable[Concatenate[_Publisher, ModelLike | None, _Arguments], None]:
        @wraps(construct)
        def constructor(
            publisher: _Publisher, model: ModelLike | None = None, *args: _Arguments.args, **given: _Arguments.kwargs
        ) -> None:
            signature(options).bind(*args, **given)  # raises TypeError, as of any function
            parts = given.get("parts")
            if parts is not None and model is None:
                model = GivenParts(parts)  # type: ignore[arg-type]  # checked when it is called
            elif parts is not None or model is None:
                raise UsageError(f"{'model and parts= are both' if parts else 'neither model nor parts= is'} given")
            construct(publisher, model, partial(options, *args, **given))

        own = list(signature(construct).parameters.values())[:2]
        taken = signature(options).parameters.values()
        constructor.__signature__ = Signature([*own, *taken])  # type: ignore[attr-defined]
        return constructor

    return decorate


def set_log_format() -> None:
    """Write JSON lines in this process if the setting ``log_format`` says so. Raises SettingsError."""
    if client_settings().log_format == "json":
        log_as_json("trainer_side", "vllm_delta_sync", level=logging.INFO)
