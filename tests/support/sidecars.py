"""What the tests of run files and sidecars share."""

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.support.publishers import Hooked, Trainer, small_trainer
from trainer_side import Publisher
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.errors import DeltaSyncError, DigestError, LimitError, NotFoundError

STATE = b'{"learning_rate":1e-4,"step":7}'


@pytest.fixture
def trainer() -> Trainer:
    return small_trainer()


@pytest.fixture
def bucket(tmp_path: Path) -> Hooked:
    return Hooked(tmp_path / "run")


def publish(publisher: Publisher, trainer: Trainer, step: int, **sidecars: bytes) -> int | None:
    trainer.step()
    result = publisher.publish(step, wait=True, sidecars=sidecars)
    publisher.flush()
    return result.version


def held(url: str, prefix: str) -> set[str]:
    with open_bucket(url) as bucket:
        return {item.key for item in bucket.list(prefix)}


def listed(data: bytes, name: str, key: str) -> dict[str, Any]:
    """How a document lists a file with that content."""
    return {"name": name, "key": key, "bytes": len(data), "sha256": sha256(data).hexdigest()}


def edited(bucket: Bucket, key: str, **members: Any) -> bytes:
    """A document with other members, in canonical form."""
    value = json.loads(bucket.get(key)) | members
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def copy_of(bucket: Bucket, folder: Path) -> Bucket:
    """A mirror."""
    mirror = open_bucket(str(folder))
    for item in bucket.list():
        mirror.put(item.key, bucket.get(item.key))
    return mirror


def spoil(bucket: Bucket, key: str, way: str) -> type[DeltaSyncError]:
    """Make other bytes of an object: damaged, cut, longer or lost. Returns the error of who reads it."""
    data = bucket.get(key)
    if way == "lost":
        bucket.delete(key)
    else:
        bucket.put(key, {"damaged": data[:-1] + b"?", "cut": data[:-1], "longer": data + b" "}[way])
    errors: dict[str, type[DeltaSyncError]] = {"longer": LimitError, "lost": NotFoundError}
    return errors.get(way, DigestError)


def age(folder: Path, seconds: float = 24 * 3600) -> None:
    """Let everything have been put long ago."""
    for file in folder.rglob("*"):
        if file.is_file():
            found = file.stat()
            os.utime(file, (found.st_atime, found.st_mtime - seconds))
