"""A branch whose source lies elsewhere: ``base`` names a run or a checkpoint, and is opened as the branch itself is."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.answers import closed_port
from tests.support.collecting import TABLE
from tests.support.hub_buckets import ID
from tests.support.hub_store import Hub
from tests.support.running import stores_are_closed, stores_of_before_end
from tests.support.samples import RunWriter, nudge, random_bits
from vllm_delta_sync.bucket import StoreOptions, open_bucket
from vllm_delta_sync.chain import Run, open_run
from vllm_delta_sync.errors import NotFoundError, StoreError
from vllm_delta_sync.upkeep.branching import branch
from vllm_delta_sync.wire.bits import Bits


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, list[Bits]]:
    """A run's folder, that of a branch at its version 2, and the bits of that."""
    random = np.random.default_rng(5)
    writer = RunWriter(open_bucket(str(tmp_path / "source")), TABLE)
    writer.reference(random_bits(TABLE, random), "/nowhere")
    for _ in range(3):
        writer.delta(nudge(writer.bits[-1], random, 0.2))
    writer.beside(1, tmp_path)
    branch(Run(writer.bucket), 2, str(tmp_path / "branch"))
    return tmp_path / "source", tmp_path / "branch", writer.bits[2]


def copied(folder: Path, url: str, store: StoreOptions | None = None) -> str:
    """Copy a run into another bucket; its URL there."""
    with open_bucket(str(folder)) as source, open_bucket(url, store) as target:
        for item in source.list():
            target.put(item.key, source.get(item.key))
    return url


def same(run: Run, base: str | None, bits: list[Bits]) -> bool:
    return all(np.array_equal(found, wanted) for found, wanted in zip(run.snapshot(base=base).bits, bits, strict=True))


def test_base_is_opened_with_the_options_of_the_branch(
    hub: Hub, folders: tuple[Path, Path, list[Bits]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, branched, bits = folders
    store = StoreOptions(store_endpoint=hub.endpoint)
    moved = copied(source, f"hf://buckets/{ID}/moved", store)
    url = copied(branched, f"hf://buckets/{ID}/branch", store)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setenv("DELTA_SYNC_STORE_DEADLINE", "0.2")
    assert same(open_run(url, store=store), moved, bits)


def test_store_of_a_base_that_fails_is_not_taken_for_one_that_has_no_run(
    folders: tuple[Path, Path, list[Bits]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setenv("DELTA_SYNC_STORE_DEADLINE", "0.2")
    with pytest.raises(StoreError):
        open_run(str(folders[1])).snapshot(base=f"hf://buckets/{ID}/moved")


def test_base_that_is_no_run_is_said_to_be_missing(folders: tuple[Path, Path, list[Bits]], tmp_path: Path) -> None:
    source, branched, _ = folders
    (source / "run.json").unlink()
    with pytest.raises(NotFoundError, match=r"branches from a run at .* which is not there; pass base= with its URL"):
        open_run(str(branched)).snapshot(base=str(tmp_path))


def _forwards(run: Run, base: str, bits: list[Bits]) -> None:
    assert same(run, base, bits)


def _boxes(run: Run, base: str, bits: list[Bits]) -> None:
    from vllm_delta_sync.chain.slices import restore_boxes
    from vllm_delta_sync.wire.boxes import Box

    wanted = {spec.name: [Box.all_of(spec.shape)] for spec in TABLE}
    found = restore_boxes(run, run.head(), wanted, base)
    assert all(np.array_equal(found[spec.name][0].reshape(-1), bits[n]) for n, spec in enumerate(TABLE))


@pytest.mark.parametrize("read", [_forwards, _boxes])
def test_nothing_that_was_opened_for_a_branch_stays_open(
    folders: tuple[Path, Path, list[Bits]], read: Callable[[Run, str, list[Bits]], None]
) -> None:
    source, branched, bits = folders
    moved = copied(source, f"memory://{source.parent.name}")
    stores_of_before_end()
    read(open_run(str(branched)), moved, bits)
    assert stores_are_closed()


def test_nothing_stays_open_where_the_version_is_not_there(
    folders: tuple[Path, Path, list[Bits]], tmp_path: Path
) -> None:
    other = RunWriter(open_bucket(str(tmp_path / "other")), TABLE)
    other.reference(random_bits(TABLE, np.random.default_rng(1)), "/nowhere")
    stranger = copied(tmp_path / "other", f"memory://{tmp_path.name}-other")
    stores_of_before_end()
    with pytest.raises(NotFoundError, match=r"which is not there; .* no object 'versions/0000000002\.json'"):
        open_run(str(folders[1])).snapshot(base=stranger)
    assert stores_are_closed()
