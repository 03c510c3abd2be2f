"""The committed run: today's reader gets the tensors it was made from, today's writer makes the same bytes."""

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tests.golden.regenerate import (
    DIRECTORY,
    KINDS,
    SIGNED,
    TREE,
    key_pair,
    table,
    versions,
    write,
    write_signed,
    write_tree,
)
from tests.support.reference import moved
from tests.support.reference_tiles import read_object
from tests.support.signed import assert_all_signed
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_reader import decode
from vllm_delta_sync.errors import SignatureError
from vllm_delta_sync.format.safetensors_file import Container
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.changes import Changes, Sparse
from vllm_delta_sync.tensors.torch_views import bits_of
from vllm_delta_sync.trust import Keyring

FINGERPRINTS = [
    "291827a3b04e1109c22c962c4026f63d",
    "642fcb47f207fd470d16db5ecfaf92e6",
    "1212eb647683fa55d9a7bffc8ecfa9ef",
    "a678f622346c78f7883dd3a723322fb8",
    "a678f622346c78f7883dd3a723322fb8",
    "478bf69514344fe5f60e50edb3396b09",
]
TENSORS = "12fb934cee37599301e3b249bdebefefcc654746770dbe932902fef0942743d2"
WITHOUT_ZSTD = [
    "run.json",
    "tensors.json",
    "versions/0000000000.json",
    # The objects of versions 0, 2 and 3.
    "objects/a8aa42e0464777c11b9544b77f0a5e67b05a3ee25ab9f80420ffb03a53811af7.safetensors",
    "objects/f54dcfde98f475c9bc09b23c750b0b19dcc1c4bd2b756904438438e84c58ca97.safetensors",
    "objects/642b596f01d46b5e0e0fbede86aef6cdc1dfb926155829c40b092e3fb9d9e7c2.safetensors",
]


@pytest.fixture(scope="module")
def run() -> Run:
    return open_run(str(DIRECTORY))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("golden") / "run"
    write(directory)
    return directory


def test_the_reader_gets_what_was_published(run: Run) -> None:
    for version, expected in enumerate(versions()):
        state = run.snapshot(version)
        assert all(np.array_equal(found, bits) for found, bits in zip(state.bits, expected, strict=True))
        assert state.fingerprint.hex() == FINGERPRINTS[version]
    last = dict(run.tensors())
    assert [bits_of(last[spec.name]).tobytes() for spec in run.table] == [bits.tobytes() for bits in versions()[-1]]


def test_expected_tensors_are_pinned_by_their_bytes() -> None:
    content = b"".join(bits.tobytes() for version in versions() for bits in version)
    assert sha256(content).hexdigest() == TENSORS


def test_the_run_verifies(run: Run) -> None:
    report = run.verify()
    assert (report.versions, report.head, report.replayed, report.notes) == (len(KINDS), 5, True, [])


def test_each_kind_is_there(run: Run) -> None:
    log = list(run.log())
    assert [manifest.kind for manifest in log] == ["anchor"] + ["delta"] * 5
    ways = [(manifest.codec, manifest.compression) for manifest in log[1:4]]
    assert ways == [("plain", "zstd"), ("plain", "none"), ("raw", "none")]
    assert run.changes(log[4]) == Changes()
    assert (log[4].changed, log[4].objects, log[4].codec) == (0, [], None)
    assert [spec.id for spec in run.changes(log[5]).full] == [0, 5]
    assert sorted(_kinds(run, 5)) == ["full", "full", "tiles", "tiles", "tiles"]
    assert set(_kinds(run, 1)) == set(_kinds(run, 2)) == {"tiles"}


def _kinds(run: Run, version: int) -> list[str]:
    data = run.fetch(run.manifest(version).objects[0])
    return [block["kind"] for block in json.loads(Container(data).metadata["delta_sync"])["blocks"]]


@pytest.mark.parametrize("version", [1, 2, 5])
def test_the_specification_reads_the_same(version: int, run: Run) -> None:
    """Whose tiles are plain: no bits of the version before are needed."""
    before, after = versions()[version - 1 : version + 1]
    data = run.fetch(run.manifest(version).objects[0])
    found = read_object(data, [(spec.dtype, spec.shape) for spec in run.table], None)
    whole = {full.id for full in run.changes(run.manifest(version)).full}
    changed = {tensor for tensor in range(len(run.table)) if not np.array_equal(before[tensor], after[tensor])}
    assert found.keys() == changed - whole
    for tensor, steps in found.items():
        assert_moved(run.table[tensor], before[tensor], after[tensor], steps)


def assert_moved(spec: TensorSpec, before: np.ndarray, after: np.ndarray, steps: dict[int, int]) -> None:
    """Steps by element lead from one to the other."""
    bits, width = before.tolist(), 8 * spec.element.itemsize
    for place, step in steps.items():
        assert step != 0
        bits[place] = moved(bits[place], step, width, spec.element.is_float)
    assert bits == after.tolist(), spec.name


def test_what_zstd_has_no_part_in_is_written_byte_by_byte(written: Path, run: Run) -> None:
    for key in WITHOUT_ZSTD:
        assert (written / key).read_bytes() == (DIRECTORY / key).read_bytes(), key
    assert [run.manifest(version).objects[0].key for version in (0, 2, 3)] == WITHOUT_ZSTD[3:]


@pytest.mark.parametrize("version", [1, 5])
def test_objects_with_zstd_hold_the_same_planes(version: int, written: Path, run: Run) -> None:
    # Frames may differ between releases of the zstd library, and with them sizes, digests and parents.
    context = DeltaContext(run.info.run, version, version - 1)
    ours, golden = open_run(str(written)), run
    data = [source.fetch(source.manifest(version).objects[0]) for source in (ours, golden)]
    first, second = (decode(item, run.table, context) for item in data)
    assert first.fingerprints == second.fingerprints
    assert all(same_group(one, two) for one, two in zip(first.sparse, second.sparse, strict=True))
    assert all(np.array_equal(one.bits, two.bits) for one, two in zip(first.full, second.full, strict=True))
    assert list(Container(data[0]).entries) == list(Container(data[1]).entries)
    assert Container(data[0]).metadata == Container(data[1]).metadata


def same_group(one: Sparse, two: Sparse) -> bool:
    arrays = ("ids", "counts", "positions", "data")
    assert all(np.array_equal(getattr(one, name), getattr(two, name)) for name in arrays)
    return (one.dtype, one.relative) == (two.dtype, two.relative)


def test_the_golden_run_is_small_and_complete() -> None:
    files = [path for path in DIRECTORY.rglob("*") if path.is_file()]
    assert len(files) == 3 + 2 * len(KINDS) - 1  # what changes nothing has no object
    assert sum(path.stat().st_size for path in files) < 200_000
    assert table().total == 4870


def test_what_lies_beside_the_chain_is_read() -> None:
    run, bits = open_run(str(TREE)), versions()
    # The objects of version 3 are gone, and the delta after it leads back to it.
    meant = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 3, 7: 1}
    for version, right in meant.items():
        state = run.snapshot(version)
        assert all(np.array_equal(found, expected) for found, expected in zip(state.bits, bits[right], strict=True))
    assert (run.merged_deltas(), run.anchors(), run.newest_epoch()) == ([(0, 4)], [5], 1)
    assert run.resolve("tag:best").version == run.tag("best").version == run.claim(1).version == 5
    retention = run.retention()
    assert retention is not None
    assert retention.gone == [[3, 3]]


def test_the_tree_is_written_with_the_same_documents(tmp_path: Path) -> None:
    write_tree(tmp_path / "tree")
    for path in TREE.rglob("*.json"):
        ours = json.loads((tmp_path / "tree" / path.relative_to(TREE)).read_bytes())
        golden = json.loads(path.read_bytes())
        # What other releases of zstd compress differently shows in sizes and digests.
        odd = {"objects", "payload_bytes", "parent", "manifest", "first_manifest", "last_manifest"}
        assert {k: v for k, v in ours.items() if k not in odd} == {k: v for k, v in golden.items() if k not in odd}


def test_the_signed_run_is_read_with_both_keys_and_not_without_one() -> None:
    first, second = (Keyring([], key_pair(number)).public or "" for number in (1, 2))
    run = open_run(str(SIGNED), Keyring([first, second]))
    assert run.head().version == 2
    assert run.tag("best").version == 2
    assert run.anchor(2).fingerprint == run.merged_delta(0, 2).last_fingerprint == FINGERPRINTS[2]
    assert [manifest.signature.key for manifest in run.log() if manifest.signature] == [first, first, second]
    with pytest.raises(SignatureError, match=r"run\.json is signed by key .* which is not trusted"):
        open_run(str(SIGNED), Keyring([second]))
    only_first = open_run(str(SIGNED), Keyring([first]))
    with pytest.raises(SignatureError, match="is not trusted"):
        only_first.head()
    with pytest.raises(SignatureError, match="is not trusted"):
        only_first.tag("best")


def test_signatures_are_over_the_bytes_that_the_format_says() -> None:
    keys = [Keyring([], key_pair(number)).public or "" for number in (1, 2)]
    kinds = {"run.json", "HEAD.json", "versions", "anchors", "merged", "tags"}
    assert assert_all_signed(SIGNED, *keys) == kinds | {"objects", "tensors.json"}


def test_signed_documents_are_written_byte_by_byte(tmp_path: Path) -> None:
    write_signed(tmp_path)
    for key in ("run.json", "versions/0000000000.json", "versions/0000000001.json"):
        assert (tmp_path / key).read_bytes() == (SIGNED / key).read_bytes()
