"""Buckets that are opened for a run are closed with it, and at once where there is no run."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.collecting import TABLE
from tests.support.commands import delta_sync
from tests.support.publishing import damage
from tests.support.running import closes_all_stores
from tests.support.samples import RunWriter, nudge, random_bits
from vllm_delta_sync.bucket import StoreOptions, open_bucket
from vllm_delta_sync.client import open_run
from vllm_delta_sync.engine.planning.run_history import open_expected_run
from vllm_delta_sync.engine.staging.reconstruct import RunCache
from vllm_delta_sync.errors import ConflictError, DigestError, NotFoundError
from vllm_delta_sync.format.manifest import RUN_KEY
from vllm_delta_sync.maintenance.branch import branch
from vllm_delta_sync.maintenance.repair.repair import repair
from vllm_delta_sync.trust import Keyring


def copied(source: str, target: str) -> str:
    """Copy a run into another bucket; its URL there."""
    with open_bucket(source) as held, open_bucket(target) as copy:
        for item in held.list():
            copy.put(item.key, held.get(item.key))
    return target


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A run of three versions in a directory."""
    random = np.random.default_rng(3)
    writer = RunWriter(open_bucket(str(tmp_path / "run")), TABLE)
    bits = random_bits(TABLE, random)
    writer.anchor(bits)
    for _ in range(2):
        writer.delta(nudge(writer.bits[-1], random, 0.2))
    return str(tmp_path / "run")


@pytest.fixture
def url(folder: str, tmp_path: Path) -> Iterator[str]:
    """The same run in a store whose buckets have threads while they are open."""
    found = copied(folder, f"memory://{tmp_path.name}")
    with closes_all_stores():
        yield found


def damaged(url: str) -> str:
    """Damage the object of version 1; its key."""
    with open_run(url) as run:
        key = run.manifest(1).objects[0].key
    damage(url, key)
    return key


def test_a_run_is_closed_at_the_end_of_its_block_and_where_it_is_not_the_one_meant(url: str, folder: str) -> None:
    with open_run(url) as run:
        assert run.snapshot().fingerprint == run.head().model_fingerprint
    run.close()
    with pytest.raises(NotFoundError):
        open_run(url + "/elsewhere")
    with pytest.raises(DigestError):
        RunCache().open(url, "0" * 64)
    assert open_expected_run(url, "0" * 32, Keyring()) is None
    with open_run(folder) as run, pytest.raises(ConflictError):
        branch(run, 1, url)


@pytest.mark.parametrize("found", [True, False])
def test_repair_closes_the_mirror_that_it_opened(url: str, folder: str, found: bool) -> None:
    key = damaged(folder)
    with open_bucket(folder) as bucket:
        if found:
            assert repair(bucket, url).repaired == [f"{key}: from the mirror"]
            return
        bucket.delete(RUN_KEY)
        with pytest.raises(NotFoundError):
            repair(bucket, url + "/elsewhere")


def test_verify_and_repair_see_damage_behind_a_mirror_of_the_run(url: str, folder: str) -> None:
    key = damaged(folder)
    with open_run(folder, store=StoreOptions(mirror=url)) as run:
        assert any(line.startswith(key) for line in repair(run).lost)
        assert dict(run.tensors())
        with pytest.raises(DigestError):
            run.verify()


def test_what_repair_takes_from_a_mirror_is_of_that_mirror(
    url: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of one that stands in front of all buckets."""
    copy = copied(folder, str(tmp_path / "copy"))
    key = damaged(folder)
    assert damaged(copy) == key
    monkeypatch.setenv("DELTA_SYNC_MIRROR", url)
    with open_bucket(folder, StoreOptions()) as bucket:
        assert f"{key}: from the mirror" not in repair(bucket, copy).repaired


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("log --bucket {url}", 0),
        ("inspect --bucket {url}", 0),
        ("inspect --bucket {url} --version 1", 0),
        ("inspect --bucket {url} --version 9", 3),
        ("verify --bucket {url}", 0),
        ("repair --bucket {url}", 0),
        ("gc --yes --bucket {url}", 0),
        ("tag set best --bucket {url}", 0),
        ("tag list --bucket {url}", 0),
        ("tag rm missing --bucket {url}", 3),
        ("branch --to {url}/branch --bucket {url}", 0),
        ("branch --to {url} --bucket {url}", 2),
        ("compact --bucket {url}", 0),
        ("fleet list --bucket {url}", 0),
    ],
)
def test_a_command_closes_what_it_opened(url: str, arguments: str, code: int) -> None:
    done = delta_sync(*arguments.format(url=url).split())
    assert done.code == code, done
