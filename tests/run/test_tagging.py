"""Tags: set, moved, deleted, and refused where the version is not kept."""

from pathlib import Path
from unittest import mock

import pytest

from tests.support.collecting import Crash, Grown, MemoryBucket, long_run
from vllm_delta_sync.errors import ChainError, ConflictError, DigestError, FormatError, NotFoundError, UsageError
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format.documents import RETENTION_KEY, Tag
from vllm_delta_sync.format.manifest import version_key
from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy, collect
from vllm_delta_sync.maintenance.gc.record import empty_record
from vllm_delta_sync.maintenance.tags import delete_tag, set_tag


@pytest.fixture
def grown(tmp_path: Path) -> Grown:
    made = Grown(MemoryBucket(), tmp_path, 1)
    for _ in range(6):
        made.grow()
    return made


def test_a_tag_is_set_moved_and_deleted(grown: Grown) -> None:
    run = grown.run_
    tag = set_tag(run, "best", 3)
    assert (tag.version, tag.manifest, tag.milestone, tag.branch) == (3, grown.manifests[3].digest, False, None)
    assert run.tag("best") == Tag.from_bytes(tag.to_bytes())
    assert set_tag(run, "best", 5, milestone=True).milestone
    assert run.resolve("tag:best").version == 5
    assert set_tag(run, "newest").version == 6
    assert set_tag(run, "also", "tag:best").version == 5
    delete_tag(run, "best")
    assert sorted(run.tags()) == ["also", "newest"]
    with pytest.raises(NotFoundError, match="no tag 'best'"):
        delete_tag(run, "best")


def test_a_damaged_tag_can_be_deleted_and_replaced(grown: Grown) -> None:
    run = grown.run_
    for data in (b"{", b" " * 100_000):
        grown.memory.put(side.tag_key("best"), data)
        set_tag(run, "best", 2)
        grown.memory.put(side.tag_key("best"), data)
        delete_tag(run, "best")
        assert run.tags() == {}


@pytest.mark.parametrize("version", [3, 6])
def test_a_manifest_that_was_altered_unnoticed_gets_no_tag(grown: Grown, version: int) -> None:
    """Its digest would be wrong once the manifest is repaired."""
    key = version_key(version)
    manifest = grown.memory.get(key)
    year = manifest.index(b'"created_at":"2') + len(b'"created_at":"2')
    grown.memory.put(key, manifest[:year] + b"9" + manifest[year + 1 :])
    with pytest.raises(ChainError, match=r"altered|rewritten"):
        set_tag(grown.run_, "best", version)
    assert grown.run_.tags() == {}
    grown.memory.put(key, manifest)
    assert set_tag(grown.run_, "best", version).manifest == grown.manifests[version].digest


def test_beside_a_damaged_manifest_a_version_gets_no_tag(grown: Grown) -> None:
    """Only the next manifest shows whether this one was altered too."""
    following = grown.memory.get(version_key(4))
    grown.memory.put(version_key(4), following[:-9])
    with pytest.raises(ChainError, match="only the manifest of version 4 shows") as caught:
        set_tag(grown.run_, "best", 3)
    assert isinstance(caught.value.__cause__, FormatError)
    assert grown.run_.tags() == {}
    grown.memory.put(version_key(4), following)
    assert set_tag(grown.run_, "best", 3).version == 3


def test_a_tag_that_is_deleted_while_tags_are_listed_is_left_out(grown: Grown) -> None:
    """Publishers delete tags of their own at any time."""
    for name in ("kept", "rebased"):
        set_tag(grown.run_, name, 2)
    listed = [*grown.memory.list(side.TAGS_PREFIX)]
    delete_tag(grown.run_, "rebased")
    with mock.patch.object(grown.memory, "list", return_value=iter(listed)):
        assert list(grown.run_.tags()) == ["kept"]


def test_names_and_versions_that_are_none(grown: Grown) -> None:
    for name in ("", "a/b", ".hidden", "a b", "a" * 101, "é"):
        for use in (lambda name: set_tag(grown.run_, name, 1), lambda name: delete_tag(grown.run_, name)):
            with pytest.raises(UsageError):
                use(name)
    for version, kind in ((7, NotFoundError), (-1, NotFoundError), ("tag:none", NotFoundError), ("7", UsageError)):
        with pytest.raises(kind):
            set_tag(grown.run_, "best", version)
    assert grown.run_.tags() == {}


def test_a_version_that_is_not_kept_gets_no_tag(tmp_path: Path) -> None:
    grown = long_run(tmp_path)
    set_tag(grown.run_, "best", 40)
    collect(grown.run_, RetentionPolicy(keep_last=3))
    assert set_tag(grown.run_, "kept", 16).version == 16
    with pytest.raises(NotFoundError, match="version 17 cannot be rebuilt"):
        set_tag(grown.run_, "best", 17)
    assert grown.run_.tag("best").version == 40


@pytest.mark.parametrize("truncated", [False, True])
def test_a_version_that_was_damaged_gets_no_tag(grown: Grown, truncated: bool) -> None:
    key = grown.manifests[3].objects[0].key
    data = grown.memory.get(key)
    grown.memory.delete(key)
    if truncated:
        grown.memory.put(key, data[:-1])
    assert set_tag(grown.run_, "before", 2).version == 2
    with pytest.raises(DigestError if truncated else NotFoundError, match="version 4 cannot be rebuilt") as caught:
        set_tag(grown.run_, "after", 4)
    assert key in caught.value.message
    assert "collection" not in caught.value.message
    grown.memory.put(version_key(3), b"{")
    with pytest.raises(FormatError, match=r"version 4 cannot be rebuilt.*versions/0000000003"):
        set_tag(grown.run_, "after", 4)
    grown.beside(4, grown.folder)
    assert set_tag(grown.run_, "after", 4).version == 4


def test_what_a_collection_is_about_to_remove_gets_no_tag(grown: Grown) -> None:
    """The objects are all there; only retention.json says that they will not be."""
    grown.merge_all()
    run = grown.run_
    record = empty_record(run).model_copy(update={"gone": [[1, 3]]})
    grown.memory.put(RETENTION_KEY, record.to_bytes())
    with pytest.raises(NotFoundError):
        set_tag(run, "best", 2)
    assert set_tag(run, "best", 5).version == 5, "over the merged delta from 0 to 4"
    going = record.model_copy(update={"going": [side.merged_delta_key(0, 4)]})
    grown.memory.put(RETENTION_KEY, going.to_bytes())
    with pytest.raises(NotFoundError):
        set_tag(run, "late", 5)
    assert list(run.tags()) == ["best"]


def test_a_version_that_goes_while_it_is_tagged(grown: Grown) -> None:
    """Checked before and after: the tag that was there comes back."""
    run = grown.run_
    set_tag(run, "best", 6)

    def collected(action: str, key: str) -> None:
        grown.memory.after = lambda action, key: None
        grown.memory.put(RETENTION_KEY, empty_record(run).model_copy(update={"gone": [[1, 2]]}).to_bytes())

    for name in ("best", "new"):
        grown.memory.delete(RETENTION_KEY)
        grown.memory.after = collected
        with pytest.raises(NotFoundError):
            set_tag(run, name, 2)
    assert {name: tag.version for name, tag in run.tags().items()} == {"best": 6}


def test_an_interrupted_tag_is_taken_back(grown: Grown) -> None:
    def interrupt(action: str, key: str) -> None:
        grown.memory.after = lambda action, key: None
        raise Crash

    grown.memory.after = interrupt
    with pytest.raises(Crash):
        set_tag(grown.run_, "best", 2)
    assert grown.run_.tags() == {}


def test_the_tag_of_a_branch_is_not_moved(grown: Grown) -> None:
    grown.tag("branch-1", 2, branch="file:///elsewhere")
    with pytest.raises(ConflictError, match="file:///elsewhere"):
        set_tag(grown.run_, "branch-1", 3)
    assert grown.run_.tag("branch-1").version == 2
    delete_tag(grown.run_, "branch-1")
