"""The process that reads for all tests of this directory, and a run to attack."""

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.security.reader import Reader, started
from tests.support.written import Written
from vllm_delta_sync.bucket import open_bucket


@pytest.fixture(scope="session")
def reader() -> Iterator[Reader]:
    with started() as found:
        yield found


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("attacks") / "run", 4)


@pytest.fixture
def written(template: Written, tmp_path: Path) -> Written:
    """A run with an anchor and four deltas. A copy: to write one takes many syncs of the disk."""
    mine = copy.copy(template)
    mine.folder = tmp_path / "run"
    shutil.copytree(template.folder, mine.folder)
    mine.bucket, mine.random = open_bucket(mine.folder), np.random.default_rng(2)
    mine.writer = copy.copy(template.writer)
    mine.writer.bucket = mine.bucket
    mine.writer.manifests, mine.writer.bits = list(template.writer.manifests), list(template.writer.bits)
    return mine
