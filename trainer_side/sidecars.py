"""Sidecars: small bytes of the caller's own that are committed with a version, such as what training resumes from."""

import re
from collections.abc import Mapping
from hashlib import sha256

from trainer_side.writer import RunWriter
from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.limits import MAX_SIDECAR_BYTES, MAX_SIDECARS
from vllm_delta_sync.format.manifest import FILE_NAME, Sidecar, sidecar_key

Bytes = bytes | bytearray | memoryview


def checked_sidecars(given: Mapping[str, Bytes] | None) -> dict[str, bytes]:
    """Name → bytes, copied where they could change.

    Raises:
        UsageError: a name, a size, or their number makes no sense.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageError(f"sidecars is a {type(given).__name__}; give a mapping of names to bytes, or None")
    if len(given) > MAX_SIDECARS:
        raise UsageError(f"sidecars has {len(given)} entries; give at most {MAX_SIDECARS}, and join small ones")
    return {_checked_name(name): _checked_bytes(name, data) for name, data in given.items()}


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not re.fullmatch(FILE_NAME, name):
        raise UsageError(
            f"sidecar name {str(name)[:120]!r} is none; give 1 to 100 of A-Z a-z 0-9 . _ -, beginning with a letter or "
            "a digit"
        )
    return name


def _checked_bytes(name: str, data: Bytes) -> bytes:
    if not isinstance(data, Bytes):
        raise UsageError(f"sidecar {name!r} is a {type(data).__name__}; give bytes, such as torch.save writes")
    size = memoryview(data).nbytes
    if size > MAX_SIDECAR_BYTES:
        raise UsageError(
            f"sidecar {name!r} has {size:,} bytes; give at most {MAX_SIDECAR_BYTES:,} each, and keep what is larger in "
            "checkpoints of your own"
        )
    return bytes(data)


def put_sidecars(writer: RunWriter, given: Mapping[str, bytes]) -> list[tuple[Sidecar, bytes]]:
    """Store them under their digests, some at once, before the manifest that lists them. Raises StoreError."""
    stored = []
    for name, data in given.items():
        digest = sha256(data).hexdigest()
        stored.append((Sidecar(name=name, key=sidecar_key(digest), bytes=len(data), sha256=digest), data))
    for _ in in_parallel(lambda item: writer.put_file(*item), stored):
        pass
    return stored
