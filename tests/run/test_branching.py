"""Branches: they begin at the very bits of a version, copy nothing, and keep what they need, wherever that lies."""

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.support.answers import closed_port
from tests.support.collecting import TABLE
from tests.support.hub_buckets import ID
from tests.support.hub_store import Hub
from tests.support.marked import Marking
from tests.support.running import closes_all_stores
from tests.support.samples import RunWriter, nudge, random_bits
from tests.support.store_faults import failing_put
from trainer_side import Publisher
from vllm_delta_sync.bucket import StoreOptions, open_bucket
from vllm_delta_sync.bucket import base as bucket_base
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.errors import (
    BaseUnavailableError,
    ChainError,
    ConflictError,
    DigestError,
    NotFoundError,
    StoreError,
    UsageError,
)
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.format.base_document import Document
from vllm_delta_sync.format.manifest import Manifest, RunInfo, version_key
from vllm_delta_sync.maintenance.branch import branch, branch_tag
from vllm_delta_sync.maintenance.compact import compact
from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy, collect
from vllm_delta_sync.maintenance.tags import delete_tag, set_tag
from vllm_delta_sync.run.partial import restore_boxes
from vllm_delta_sync.tensors.boxes import Box
from vllm_delta_sync.tensors.changes import Bits

VERSIONS = 10


Source = tuple[Run, list[list[Bits]]]


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """A run whose base is nowhere: a version in full, one that builds on an older one, merged deltas, an anchor."""
    random = np.random.default_rng(5)
    writer = RunWriter(open_bucket(str(tmp_path / "source")), TABLE)
    writer.reference(random_bits(TABLE, random), "/nowhere")
    for version in range(1, VERSIONS + 1):
        base = 4 if version == 6 else version - 1
        writer.delta(nudge(writer.bits[base], random, 0.2), full=[1] if version == 3 else [], base=base)
    writer.merge(0, 4)
    writer.beside(8, tmp_path)
    return Run(writer.bucket), writer.bits


def files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def same(run: Run, base: str | None, bits: list[Bits]) -> bool:
    return all(np.array_equal(found, wanted) for found, wanted in zip(run.snapshot(base=base).bits, bits, strict=True))


@pytest.mark.parametrize(("version", "number"), [(9, 9), (None, 10), ("tag:best", 8)])
def test_a_branch_is_the_version(source: Source, tmp_path: Path, version: int | str | None, number: int) -> None:
    run, bits = source
    set_tag(run, "best", 8)
    made = branch(run, version, str(tmp_path / "branch"))
    assert made.info.run != run.info.run
    assert files(tmp_path / "branch") == ["HEAD.json", "run.json", "tensors.json", "versions/0000000000.json"]
    first = open_run(str(tmp_path / "branch")).head()
    assert (first.kind, first.version, first.step) == ("reference", 0, run.manifest(number).step)
    assert first.base is not None
    assert (first.base.location, first.base.run, first.base.version) == (run.bucket.url, run.info.run, number)
    tag = run.tag(branch_tag(made.info.run))
    assert (tag.version, tag.branch) == (number, made.bucket.url)
    assert same(made, None, bits[number])


def test_a_branch_begins_at_a_quarantined_version_only_where_it_is_named(tmp_path: Path) -> None:
    """Its version 0 is quarantined no more, so servers would serve it."""
    random = np.random.default_rng(6)
    writer = Marking(open_bucket(str(tmp_path / "source")), TABLE)
    for sign in "!.!!":
        writer.mark(sign)
        writer.anchor(random_bits(TABLE, random))
        run = Run(writer.bucket)
        if len(writer.bits) == 1:
            with pytest.raises(NotFoundError, match="quarantined"):
                branch(run, None, str(tmp_path / "none"))
    assert same(branch(run, None, str(tmp_path / "newest")), None, writer.bits[1])
    assert same(branch(run, 3, str(tmp_path / "named")), None, writer.bits[3])


def test_a_branch_that_stores_its_first_version_outlives_its_source(source: Source, tmp_path: Path) -> None:
    """As docs/targets.md advises: a milestone, which stays also when a later anchor leads to the newest version."""
    run, bits = source
    made = branch(run, 9, str(tmp_path / "branch"))
    set_tag(made, "start", 0, milestone=True)
    compact(made, merged_deltas=False, anchor="tag:start")
    shutil.rmtree(tmp_path / "source")
    tensors = dict(made.tensors())
    with Publisher(list(tensors.items()), made.bucket.url) as publisher:
        for tensor in tensors.values():
            tensor.view(-1)[0] += 1
        publisher.publish(1, wait=True)
        publisher.anchor()
    collect(made, RetentionPolicy(keep_last=2, min_age=0.0))
    assert made.anchors() == [0, 1]
    assert all(map(np.array_equal, made.snapshot(0).bits, bits[9]))


def test_a_branch_keeps_its_version(source: Source, tmp_path: Path) -> None:
    run, bits = source
    made = branch(run, 9, str(tmp_path / "branch"))
    other = branch(made, 0, str(tmp_path / "other"))
    policy = RetentionPolicy(keep_last=1, keep_tagged=False, min_age=0.0)
    for each in (run, made):
        collect(each, policy)
    assert same(made, None, bits[9])
    assert same(other, None, bits[9])
    delete_tag(run, branch_tag(made.info.run))
    assert 9 not in collect(run, policy).kept


def test_urls_that_are_refused(source: Source, tmp_path: Path) -> None:
    run, _ = source
    before = files(tmp_path)
    for url in (run.bucket.url, str(tmp_path / "source" / "." / "")):
        with pytest.raises(UsageError):
            branch(run, 9, url)
    branch(run, 9, str(tmp_path / "branch"))
    taken = files(tmp_path)
    with pytest.raises(ConflictError, match=r"run\.json"):
        branch(run, 9, str(tmp_path / "branch"))
    (tmp_path / "part" / "versions").mkdir(parents=True)
    (tmp_path / "part" / "versions" / "0000000000.json").write_bytes(b"{}")
    with pytest.raises(ConflictError, match="versions/"):
        branch(run, 9, str(tmp_path / "part"))
    with pytest.raises(NotFoundError):
        branch(run, 11, str(tmp_path / "never"))
    assert files(tmp_path) == sorted([*taken, "part/versions/0000000000.json"])
    assert set(before) < set(taken)


def test_a_damaged_version_or_one_before_a_damaged_manifest_has_no_branch(source: Source, tmp_path: Path) -> None:
    run, _ = source
    key = run.manifest(9).objects[0].key
    damaged = run.bucket.get(key)[:-1] + b"?"
    for version, at, data, error, named in (
        (9, key, damaged[:-1], DigestError, key),
        (9, key, damaged, DigestError, key),
        (7, version_key(8), b"{", ChainError, "version 8"),
    ):
        run.bucket.put(at, data)
        with pytest.raises(error, match=named):
            branch(run, version, str(tmp_path / "branch"))
        assert run.tags() == {}
        assert not (tmp_path / "branch").exists()


@pytest.mark.parametrize(("late", "error"), [(False, StoreError("full")), (True, KeyboardInterrupt())])
@pytest.mark.parametrize("key", [keys.RUN_KEY, keys.TABLE_KEY, keys.version_key(0)])
def test_a_branch_that_fails_is_taken_back(
    source: Source, tmp_path: Path, key: str, error: BaseException, late: bool
) -> None:
    run, _ = source
    with failing_put(key, late, error), pytest.raises(type(error)):
        branch(run, 9, str(tmp_path / "branch"))
    assert files(tmp_path / "branch") == []
    assert run.tags() == {}
    assert branch(run, 9, str(tmp_path / "branch")).head().version == 0


def test_a_branch_without_a_head_file_stands(source: Source, tmp_path: Path) -> None:
    run, _ = source
    with failing_put(keys.HEAD_KEY, False, StoreError("full")):
        made = branch(run, 9, str(tmp_path / "branch"))
    assert made.head().version == 0
    assert len(run.tags()) == 1


def test_where_nobody_knows_whether_the_branch_stands_its_tag_stays(source: Source, tmp_path: Path) -> None:
    run, _ = source
    with (
        failing_put(keys.version_key(0), True, KeyboardInterrupt()),
        mock.patch.object(LocalBucket, "delete", side_effect=StoreError("gone")),
        pytest.raises(KeyboardInterrupt),
    ):
        branch(run, 9, str(tmp_path / "branch"))
    assert len(run.tags()) == 1
    assert open_run(str(tmp_path / "branch")).head().version == 0


def test_a_branch_whose_last_answer_was_lost_stands(source: Source, tmp_path: Path) -> None:
    run, _ = source
    with failing_put(keys.version_key(0), True, StoreError("timed out")):
        branch(run, 9, str(tmp_path / "branch"))
    assert len(run.tags()) == 1
    assert open_run(str(tmp_path / "branch")).head().version == 0


class Late:
    """Another writer's object comes right after ours under the same key, as where create-if-absent does not hold."""

    def __init__(self, folder: Path, after: str, key: str) -> None:
        self.folder, self.after, self.key = str(folder), after, key
        self.put = LocalBucket.put
        self.theirs: bytes | None = None

    def __call__(self, bucket: LocalBucket, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        self.put(bucket, key, data, if_absent=if_absent)
        if key == self.after and bucket.url.endswith(self.folder):
            kind: type[Document] = RunInfo if self.key == keys.RUN_KEY else Manifest
            ours = kind.from_bytes(bucket.get(self.key))
            self.theirs = kind.model_validate({**ours.model_dump(), "run": "e" * 32}).to_bytes()
            self.put(bucket, self.key, self.theirs)


@pytest.mark.parametrize(
    ("after", "key", "exclusive"),
    [
        (keys.RUN_KEY, keys.RUN_KEY, False),
        (keys.TABLE_KEY, keys.RUN_KEY, False),
        (keys.version_key(0), keys.version_key(0), False),
        # As of a publisher that took the branch for a start that was cut short.
        (keys.TABLE_KEY, keys.RUN_KEY, True),
    ],
)
def test_the_run_whose_documents_stay_counts(
    source: Source,
    tmp_path: Path,
    after: str,
    key: str,
    exclusive: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, _ = source
    late = Late(tmp_path / "branch", after, key)
    monkeypatch.setattr(bucket_base, "SETTLING_SECONDS", 0.0)
    monkeypatch.setattr(LocalBucket, "supports_conditional_put", exclusive)
    with mock.patch.object(LocalBucket, "put", lambda *args, **options: late(*args, **options)):
        with pytest.raises(ConflictError, match=f"holds {key} of another writer; branch to a new URL"):
            branch(run, 9, str(tmp_path / "branch"))
    with open_bucket(str(tmp_path / "branch")) as bucket:
        assert late.theirs is not None
        assert bucket.get(key) == late.theirs, "it was removed or written over"
    assert run.tags() == {}


# A base that lies elsewhere is opened as the branch itself is


@pytest.fixture
def branched(source: Source, tmp_path: Path) -> tuple[Path, Path, list[Bits]]:
    """A run's folder, that of a branch at its version 9, and the bits of that."""
    run, bits = source
    branch(run, 9, str(tmp_path / "branch"))
    return tmp_path / "source", tmp_path / "branch", bits[9]


def copied(folder: Path, url: str, store: StoreOptions | None = None) -> str:
    """Copy a run into another bucket; its URL there."""
    with open_bucket(str(folder)) as source, open_bucket(url, store) as target:
        for item in source.list():
            target.put(item.key, source.get(item.key))
    return url


def restored_in_boxes(run: Run, base: str, bits: list[Bits]) -> bool:
    found = restore_boxes(run, run.head(), {spec.name: [Box.all_of(spec.shape)] for spec in TABLE}, base)
    return all(np.array_equal(found[spec.name][0].reshape(-1), bits[n]) for n, spec in enumerate(TABLE))


def test_base_is_opened_with_the_options_of_the_branch(
    hub: Hub, branched: tuple[Path, Path, list[Bits]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder, bits = branched
    store = StoreOptions(store_endpoint=hub.endpoint)
    moved = copied(source, f"hf://buckets/{ID}/moved", store)
    url = copied(folder, f"hf://buckets/{ID}/branch", store)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setenv("DELTA_SYNC_STORE_DEADLINE", "0.2")
    assert same(open_run(url, store=store), moved, bits)
    # A store that fails is not taken for one that has no run.
    with pytest.raises(StoreError):
        open_run(str(folder)).snapshot(base=moved)


def test_base_that_is_no_run_is_said_to_be_missing(branched: tuple[Path, Path, list[Bits]], tmp_path: Path) -> None:
    source, folder, _ = branched
    (source / "run.json").unlink()
    with pytest.raises(BaseUnavailableError, match="base="):
        open_run(str(folder)).snapshot(base=str(tmp_path))


@pytest.mark.parametrize("read", [same, restored_in_boxes])
def test_nothing_that_was_opened_for_a_branch_stays_open(
    branched: tuple[Path, Path, list[Bits]], read: Callable[[Run, str, list[Bits]], bool]
) -> None:
    source, folder, bits = branched
    moved = copied(source, f"memory://{source.parent.name}")
    with closes_all_stores():
        assert read(open_run(str(folder)), moved, bits)
    # Nor where the version is not there.
    other = RunWriter(open_bucket(str(source.parent / "other")), TABLE)
    other.reference(random_bits(TABLE, np.random.default_rng(1)), "/nowhere")
    stranger = copied(source.parent / "other", f"memory://{source.parent.name}-other")
    with closes_all_stores(), pytest.raises(BaseUnavailableError, match=r"versions/0000000009\.json"):
        open_run(str(folder)).snapshot(base=stranger)
