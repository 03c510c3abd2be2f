"""What a publisher was asked for, checked."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer_side.gate import Gate
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.head import HEAD_SECONDS, MAX_HEAD_SECONDS
from vllm_delta_sync.wire.compression import Compression
from vllm_delta_sync.wire.delta import CODECS, Codec


@dataclass(frozen=True)
class Options:
    """See ``Publisher``; ``codec`` is the one that is used."""

    codec: Codec
    compression: Compression
    every: int
    resume: bool
    read_back: bool
    rescan_bytes: int
    anchor_every: int | None
    fold: bool
    shard_bytes: int
    gate: Gate | None = None
    keyring: Keyring = field(default_factory=Keyring)
    head_seconds: int = HEAD_SECONDS


def checked(
    codec: str,
    compression: str,
    *,
    every: int,
    resume: bool,
    read_back: bool,
    rescan_bytes: int,
    anchor_every: int | None,
    fold: bool,
    shard_bytes: int,
    gate: Gate | None = None,
    signing_key: str | Path | None = None,
    trusted_keys: str | Sequence[str | Path] | None = None,
    head_seconds: int = HEAD_SECONDS,
) -> Options:
    """Raise UsageError for an option that makes no sense, SettingsError for a key file that holds no such key."""
    if codec not in ("auto", *CODECS):
        raise UsageError(f"codec is {codec!r}; give 'auto' or one of {', '.join(map(repr, CODECS))}")
    if compression not in ("zstd", "none"):
        raise UsageError(f"compression is {compression!r}; give 'zstd' or 'none'")
    _check_number("every", every, 1, "a number of calls")
    _check_number("rescan_bytes", rescan_bytes, 0, "a number of bytes for each version, 0 for none")
    _check_number("shard_bytes", shard_bytes, 1, "a number of bytes")
    _check_number("head_seconds", head_seconds, 1, "a number of seconds")
    if head_seconds > MAX_HEAD_SECONDS:
        raise UsageError(f"head_seconds is {head_seconds}; give at most {MAX_HEAD_SECONDS}")
    if trusted_keys is not None and signing_key is None:
        raise UsageError(
            "trusted_keys is set without signing_key: what this publisher wrote would be refused by whoever asks for "
            "signatures; give both, or neither"
        )
    if anchor_every is not None:
        _check_number("anchor_every", anchor_every, 1, "a number of versions, or None")
    if gate is not None and not isinstance(gate, Gate):
        raise UsageError(f"gate is {gate!r}; give a trainer_side.Gate, or None")
    return Options(
        codec="raw" if codec == "raw" else "packed",
        compression="zstd" if compression == "zstd" else "none",
        every=every,
        resume=bool(resume),
        read_back=bool(read_back),
        rescan_bytes=rescan_bytes,
        anchor_every=anchor_every,
        fold=bool(fold),
        shard_bytes=shard_bytes,
        gate=gate,
        keyring=Keyring.load(trusted_keys, signing_key),
        head_seconds=head_seconds,
    )


def check_step(step: int) -> int:
    """The optimizer step as an int; raises UsageError if it is none."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 2**53:
        raise UsageError(f"step is {step!r}; give the optimizer step as an integer from 0 to 2^53 - 1")
    return number


def check_version(version: int) -> int:
    """A version's number as an int; raises UsageError if it is none."""
    try:
        number = operator.index(version)
    except TypeError:
        number = -1
    if isinstance(version, bool) or number < 0:
        raise UsageError(f"version is {version!r}; give the number of a version")
    return number


def _check_number(name: str, value: int, least: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} is {value!r}; give {what}, at least {least}")
