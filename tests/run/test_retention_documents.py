"""What a collection makes of documents that are damaged, foreign, or of no use."""

from pathlib import Path

import pytest

from tests.support.collecting import HOUR, Grown, MemoryBucket, long_run, objects
from vllm_delta_sync.errors import ChainError, FormatError
from vllm_delta_sync.upkeep.retention import Policy, collect
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire import manifest as keys
from vllm_delta_sync.wire.documents import FoldedRange, Tag

FEW = Policy(keep_last=3)


def test_what_cannot_be_read_stops_a_collection_or_spares_orphans(tmp_path: Path) -> None:
    grown = long_run(tmp_path)
    held = dict(grown.memory.held)
    for key in (keys.version_key(5), keys.version_key(40), side.tag_key("bad")):
        grown.memory.held = {**held, key: (b"{", 0.0)}
        with pytest.raises(FormatError):
            collect(grown.run_, FEW)
        assert objects(grown.memory) == {key for key in held if key.startswith("objects/")}
    grown.memory.held = {key: value for key, value in held.items() if key != keys.version_key(5)}
    with pytest.raises(ChainError, match=r"0000000005\.json is missing"):
        collect(grown.run_, FEW)
    grown.memory.held = {**held, side.fold_key(0, 4): (b"{", 0.0)}
    orphan = grown._put(b"whose is it")
    grown.memory.clock += 2 * HOUR
    report = collect(grown.run_, FEW)
    assert any("folds/0000000000-0000000004.json stays" in note for note in report.notes)
    assert orphan.key in grown.memory.held
    assert side.fold_key(0, 4) in grown.memory.held
    assert report.objects


def test_documents_of_another_run_are_not_believed(tmp_path: Path) -> None:
    grown = long_run(tmp_path, 12)
    manifest, elsewhere = grown.manifests[4], "0" * 32
    tag = Tag(run=elsewhere, name="foreign", version=4, manifest=manifest.digest, created_at=manifest.created_at)
    grown.bucket.put(side.tag_key("foreign"), tag.to_bytes())
    report = collect(grown.run_, FEW)
    assert 4 not in report.kept
    assert any("tag ignored" in note for note in report.notes)


def test_a_document_that_does_not_fit_the_chain_is_no_way_and_stays(tmp_path: Path) -> None:
    grown = long_run(tmp_path, 12)
    folded = grown.run_.folded(0, 4)
    other = FoldedRange.model_validate({**folded.model_dump(), "last_manifest": "0" * 64})
    grown.bucket.put(side.fold_key(0, 4), other.to_bytes())
    grown.memory.clock += 2 * HOUR
    report = collect(grown.run_, FEW)
    assert "folds/0000000000-0000000004.json does not fit the chain, and stays" in report.notes
    assert {ref.key for ref in other.objects} <= objects(grown.memory)
    assert grown.run_.folded(0, 4).last_manifest == "0" * 64
    assert grown.equals(12)


@pytest.mark.parametrize("ends", [(1, 7), (4, 8), (2, 4)])
def test_ranges_that_readers_do_not_look_for_are_no_way(tmp_path: Path, ends: tuple[int, int]) -> None:
    """Not aligned, or across a version that builds on an older one."""
    grown = Grown(MemoryBucket(), tmp_path, 7)
    for _ in range(5):
        grown.grow()
    if ends == (4, 8):
        grown.grow(base=3)
    for _ in range(9 - grown.newest):
        grown.grow()
    grown.fold(*ends)
    grown.memory.clock += 2 * HOUR
    report = collect(grown.run_, FEW)
    assert report.folds == [ends]
    assert grown.equals(9)
