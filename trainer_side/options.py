"""What a publisher was asked for, checked."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch

from trainer_side.diff.buffers import Place
from trainer_side.gate import Gate
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.settings import client_settings
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.head import HEAD_SECONDS, MAX_HEAD_SECONDS

RESCAN_BYTES = 64 * 1024**2

Choice = Literal["auto", "packed", "context", "raw"]
CHOICES: tuple[Choice, ...] = get_args(Choice)


@dataclass(frozen=True)
class Options:
    """See ``Publisher``."""

    codec: Choice
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
    baseline: Place = "host"
    diff_threads: int = 1
    receiver_bytes_per_second: float | None = None

    @property
    def base_codec(self) -> Codec:
        """The codec that changes are collected for; of relative ones ``auto`` may take another."""
        return "packed" if self.codec == "auto" else self.codec


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
    baseline: str = "host",
    diff_threads: int | None = None,
    receiver_bytes_per_second: float | None = None,
) -> Options:
    """Raise UsageError for an option that makes no sense, SettingsError for a key file that holds no such key."""
    chosen = next((name for name in CHOICES if name == codec), None)
    if chosen is None:
        raise UsageError(f"codec is {codec!r}; give one of {', '.join(map(repr, CHOICES))}")
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
            "trusted_keys is set without signing_key: readers that ask for signatures would refuse what this publisher "
            "writes; give both, or neither (by argument, environment or settings file)"
        )
    if anchor_every is not None:
        _check_number("anchor_every", anchor_every, 1, "a number of versions, or None")
    if gate is not None and not isinstance(gate, Gate):
        raise UsageError(f"gate is {gate!r}; give a trainer_side.Gate, or None")
    if baseline not in ("host", "device"):
        raise UsageError(f"baseline is {baseline!r}; give 'host' or 'device'")
    if diff_threads is not None:
        _check_number("diff_threads", diff_threads, 1, "a number of threads, or None")
    if receiver_bytes_per_second is not None:
        _check_rate("receiver_bytes_per_second", receiver_bytes_per_second)
    return Options(
        codec=chosen,
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
        baseline="device" if baseline == "device" else "host",
        diff_threads=torch.get_num_threads() if diff_threads is None else diff_threads,
        receiver_bytes_per_second=receiver_bytes_per_second,
    )


def chosen_keys(
    signing_key: str | Path | None, trusted_keys: str | Sequence[str | Path] | None
) -> tuple[str | Path | None, str | Sequence[str | Path] | None]:
    """Signing key and trusted keys: as given, else as set. Raises SettingsError: a setting does not fit."""
    settings = client_settings()
    return (
        settings.signing_key if signing_key is None else signing_key,
        settings.trusted_keys if trusted_keys is None else trusted_keys,
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


def _check_rate(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"{name} is {value!r}; give a number of bytes per second above 0, or None")
