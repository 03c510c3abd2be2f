"""What the tests of sidecars share."""

import io
import os
from contextlib import redirect_stdout
from hashlib import sha256
from pathlib import Path

import pytest

from tests.trainer.faults.hooks import Hooked, Trainer, small_trainer
from trainer_side import Publisher
from vllm_delta_sync import cli
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.wire.manifest import SIDECARS_PREFIX, sidecar_key

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


def held(url: str) -> set[str]:
    with open_bucket(url) as bucket:
        return {item.key for item in bucket.list(SIDECARS_PREFIX)}


def key_of(data: bytes) -> str:
    return sidecar_key(sha256(data).hexdigest())


def age(folder: Path, seconds: float) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            found = file.stat()
            os.utime(file, (found.st_atime, found.st_mtime - seconds))


def call(*arguments: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert cli.run(arguments) == 0
    return out.getvalue()
