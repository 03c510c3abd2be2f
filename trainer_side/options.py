"""Options of a publisher, checked: ``Options``, the update gate's bounds ``Gate``, and ``Budget``."""

import logging
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError

from trainer_side.diff.buffers import BaselineLocation
from trainer_side.model.selection import Selection
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.limits import MAX_SIDECAR_BYTES, MAX_SIDECARS
from vllm_delta_sync.format.manifest import FILE_NAME
from vllm_delta_sync.json_log import log_as_json
from vllm_delta_sync.settings import client_settings
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.head import HEAD_SECONDS, MAX_HEAD_SECONDS

Action = Literal["refuse", "quarantine"]
ACTIONS = ("refuse", "quarantine")


@dataclass(frozen=True)
class Gate:
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
            is published with the reasons, and servers skip it unless told to serve it.

    Raises:
        UsageError: a bound or the action is invalid.
    """

    nonfinite: bool = True
    max_changed_share: float | None = None
    max_norm_jump: float | None = None
    action: Action = "refuse"

    def __post_init__(self) -> None:
        if not isinstance(self.nonfinite, bool):
            raise UsageError(f"gate: nonfinite is {self.nonfinite!r}; give True or False")
        if not _is_bound(self.max_changed_share, 1.0):
            raise UsageError(
                f"gate: max_changed_share is {self.max_changed_share!r}; give a share above 0 and at most 1, or None"
            )
        if not _is_bound(self.max_norm_jump, math.inf):
            raise UsageError(f"gate: max_norm_jump is {self.max_norm_jump!r}; give a ratio above 0, or None")
        if self.action not in ACTIONS:
            raise UsageError(f"gate: action is {self.action!r}; give one of {', '.join(map(repr, ACTIONS))}")


def _is_bound(value: object, maximum: float) -> bool:
    if value is None:
        return True
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and 0 < float(value) <= maximum and math.isfinite(value)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Budget:
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

    max_bytes: int | None = None
    max_share: float | None = None
    min_change: float | None = None
    exact_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_bytes", "exact_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"budget: {name} is {value!r}; give an integer of at least 1, or None")
        if not _is_bound(self.max_share, 1.0):
            raise UsageError(f"budget: max_share is {self.max_share!r}; give a share above 0 and at most 1, or None")
        if not _is_bound(self.min_change, math.inf):
            raise UsageError(f"budget: min_change is {self.min_change!r}; give a ratio above 0, or None")
        if self.max_bytes is None and self.max_share is None and self.min_change is None:
            raise UsageError("budget: there is no bound; give max_bytes, max_share or min_change")


RESCAN_BYTES = 64 * 1024**2

SidecarData = bytes | bytearray | memoryview


class Options(BaseModel):
    """The arguments of ``Publisher``, checked; see there. ``checked`` makes one."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    codec: Codec
    compression: Compression
    every: Annotated[int, Field(ge=1, strict=True)]
    resume: bool
    read_back: bool
    rescan_bytes: Annotated[int, Field(ge=0, strict=True)]
    anchor_every: Annotated[int, Field(ge=1, strict=True)] | None
    merge: bool
    shard_bytes: Annotated[int, Field(ge=1, strict=True)]
    # Without InstanceOf, pydantic would also make a Gate of a dictionary.
    gate: InstanceOf[Gate] | None = None
    budget: InstanceOf[Budget] | None = None
    selection: InstanceOf[Selection] = Field(default_factory=Selection)
    keyring: InstanceOf[Keyring] = Field(default_factory=Keyring)
    head_seconds: Annotated[int, Field(ge=1, le=MAX_HEAD_SECONDS, strict=True)] = HEAD_SECONDS
    baseline: BaselineLocation = "host"
    first_step: Annotated[int, Field(ge=0, lt=2**53, strict=True)] = 0
    expect_run: Annotated[str, Field(strict=True)] | None = None
    diff_threads: Annotated[int, Field(ge=1, strict=True)] | None = None


def checked(
    signing_key: str | Path | None, trusted_keys: str | Sequence[str | Path] | None, **given: object
) -> Options:
    """Return the options, with the keys read from their files.

    Args:
        given: fields of ``Options``.

    Raises:
        UsageError: an option is invalid; the message names the first. SettingsError: a key file cannot be used.
    """
    if trusted_keys is not None and signing_key is None:
        raise UsageError(
            "trusted_keys is set without signing_key: readers that ask for signatures would refuse what this publisher "
            "writes; give both, or neither (by argument, environment or settings file)"
        )
    if given.get("expect_run") is not None and not given.get("resume"):
        raise UsageError(
            "expect_run is given with resume=False, which refuses every existing run; leave out one of the two"
        )
    try:
        options = Options.model_validate(given)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        raise UsageError(f"{problem['loc'][0]} is {repr(problem['input'])[:80]}: {problem['msg']}") from error
    return options.model_copy(update={"keyring": Keyring.load(trusted_keys, signing_key)})


def chosen_keys(
    signing_key: str | Path | None, trusted_keys: str | Sequence[str | Path] | None
) -> tuple[str | Path | None, str | Sequence[str | Path] | None]:
    """Return signing key and trusted keys: the arguments, else the settings; raise SettingsError if invalid."""
    settings = client_settings()
    return (
        settings.signing_key if signing_key is None else signing_key,
        settings.trusted_keys if trusted_keys is None else trusted_keys,
    )


def set_log_format() -> None:
    """Write JSON lines in this process if the setting ``log_format`` says so. Raises SettingsError."""
    if client_settings().log_format == "json":
        log_as_json("trainer_side", "vllm_delta_sync", level=logging.INFO)


def check_step(step: int) -> int:
    """Return the optimizer step as an int; raise UsageError if it is invalid."""
    number = _integer(step)
    if not 0 <= number < 2**53:
        raise UsageError(f"step is {step!r}; give the optimizer step as an integer from 0 to 2^53 - 1")
    return number


def check_version(version: int) -> int:
    """Return a version number as an int; raise UsageError if it is invalid."""
    number = _integer(version)
    if isinstance(version, bool) or number < 0:
        raise UsageError(f"version is {version!r}; give the number of a version")
    return number


def _integer(value: int) -> int:
    """Return the value of an integer of any kind, such as numpy's; -1 for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        return -1


def checked_sidecars(sidecars: Mapping[str, SidecarData] | None) -> dict[str, bytes]:
    """Return name → bytes, copied so that later writes by the caller have no effect."""
    if sidecars is None:
        return {}
    if not isinstance(sidecars, Mapping):
        raise UsageError(f"sidecars is a {type(sidecars).__name__}; give a mapping of names to bytes, or None")
    if len(sidecars) > MAX_SIDECARS:
        raise UsageError(f"sidecars has {len(sidecars)} entries; give at most {MAX_SIDECARS}, and join small ones")
    return {_checked_name(name): _checked_bytes(name, data) for name, data in sidecars.items()}


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not re.fullmatch(FILE_NAME, name):
        raise UsageError(
            f"sidecar name {str(name)[:120]!r} is invalid; give 1 to 100 of A-Z a-z 0-9 . _ -, beginning with a letter "
            "or a digit"
        )
    return name


def _checked_bytes(name: str, data: SidecarData) -> bytes:
    if not isinstance(data, SidecarData):
        raise UsageError(f"sidecar {name!r} is a {type(data).__name__}; give bytes, such as torch.save writes")
    size = memoryview(data).nbytes
    if size > MAX_SIDECAR_BYTES:
        raise UsageError(
            f"sidecar {name!r} has {size:,} bytes; give at most {MAX_SIDECAR_BYTES:,} each, and keep larger data in "
            "checkpoints of your own"
        )
    return bytes(data)
