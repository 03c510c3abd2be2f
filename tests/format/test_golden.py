"""The committed runs: today's reader gets the tensors it was made from, today's writer makes the same bytes."""

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tests.golden import regenerate
from tests.golden.regenerate import DIRECTORY, KINDS, SIGNED, TILES, TREE, key_pair, table, versions
from tests.support.reference import moved
from tests.support.reference_tiles import read_object
from tests.support.signed import assert_all_signed
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_reader import decode
from vllm_delta_sync.errors import SignatureError
from vllm_delta_sync.format.safetensors_file import Container
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, Changes, Sparse
from vllm_delta_sync.tensors.torch_views import bits_of
from vllm_delta_sync.trust import Keyring

FINGERPRINTS = [
    "291827a3b04e1109c22c962c4026f63d", "642fcb47f207fd470d16db5ecfaf92e6", "1212eb647683fa55d9a7bffc8ecfa9ef",
    "a678f622346c78f7883dd3a723322fb8", "a678f622346c78f7883dd3a723322fb8", "478bf69514344fe5f60e50edb3396b09",
]  # fmt: skip
TENSORS = "12fb934cee37599301e3b249bdebefefcc654746770dbe932902fef0942743d2"
TILES_FINGERPRINTS = [
    "8eb4480a8a9ddf3ba0b957dd1ce50e7d", "82d0fdc1b84c6ae99da3376df29ade43", "2baccd42aefde04c20028d4423bf3518",
    "e14c59a2e7eae867ac6c33e2f09da4aa",
]  # fmt: skip
TILES_TENSORS = "244faa2fa098ec22543f9a3ef2fafae2c9e7e3fc68e61ebc85621354bbdcbcf7"
WITHOUT_ZSTD = [
    "run.json",
    "tensors.json",
    "versions/0000000000.json",
    # The objects of versions 0, 2 and 3.
    "objects/a8aa42e0464777c11b9544b77f0a5e67b05a3ee25ab9f80420ffb03a53811af7.safetensors",
    "objects/b0af48b5b4f7492f41cb8bc821233db58f450f08b8f61b8eedaa1ad0ed3d9cbf.safetensors",
    "objects/642b596f01d46b5e0e0fbede86aef6cdc1dfb926155829c40b092e3fb9d9e7c2.safetensors",
]


@pytest.fixture(scope="module")
def run() -> Run:
    return open_run(str(DIRECTORY))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("golden") / "run"
    regenerate.write(directory)
    return directory


@pytest.fixture(scope="module")
def tiles() -> Run:
    """In codec tiled."""
    return open_run(str(TILES))


def check_run(run: Run, expected: list[list[Bits]], fingerprints: list[str], digest: str) -> None:
    """Each version has the tensors that it was made from, which are pinned by their bytes, and the run verifies."""
    assert sha256(b"".join(bits.tobytes() for version in expected for bits in version)).hexdigest() == digest
    for version, tensors in enumerate(expected):
        state = run.snapshot(version)
        assert all(np.array_equal(found, bits) for found, bits in zip(state.bits, tensors, strict=True))
        assert state.fingerprint.hex() == fingerprints[version]
    last = dict(run.tensors())
    assert [bits_of(last[spec.name]).tobytes() for spec in run.table] == [bits.tobytes() for bits in expected[-1]]
    report, count = run.verify(), len(expected)
    assert (report.versions, report.head, report.replayed, report.notes) == (count, count - 1, True, [])


def test_the_reader_gets_what_was_published(run: Run, tiles: Run) -> None:
    check_run(run, versions(), FINGERPRINTS, TENSORS)
    check_run(tiles, regenerate.tiles_versions(), TILES_FINGERPRINTS, TILES_TENSORS)


def test_each_kind_is_there(run: Run, tiles: Run) -> None:
    log = list(run.log())
    assert [manifest.kind for manifest in log] == ["anchor"] + ["delta"] * 5
    ways = [(manifest.codec, manifest.compression) for manifest in log[1:4]]
    assert ways == [("plain", "zstd"), ("plain", "none"), ("raw", "none")]
    assert run.changes(log[4]) == Changes()
    assert (log[4].changed, log[4].objects, log[4].codec) == (0, [], None)
    assert [spec.id for spec in run.changes(log[5]).full] == [0, 5]
    assert sorted(_kinds(run, 5)) == ["full", "full", "tiles", "tiles", "tiles"]
    assert set(_kinds(run, 1)) == set(_kinds(run, 2)) == {"tiles"}
    assert _kinds(tiles, 2) == ["tiles"] * 6
    coded = [(item.codec, item.compression, item.reversible) for item in list(tiles.log())[1:]]
    assert coded == [("tiled", how, False) for how in ("zstd", "none", "none")]


def _kinds(run: Run, version: int) -> list[str]:
    data = run.fetch(run.manifest(version).objects[0])
    return [block["kind"] for block in json.loads(Container(data).metadata["delta_sync"])["blocks"]]


def objects_of(run: Run, version: int) -> list[bytes]:
    return [bytes(run.fetch(ref)) for ref in run.manifest(version).objects]


@pytest.mark.parametrize(("tiled", "version"), [(False, 1), (False, 2), (False, 5), (True, 1), (True, 2), (True, 3)])
def test_the_specification_reads_the_same(tiled: bool, version: int, run: Run, tiles: Run) -> None:
    """Where tiles are plain, no bits of the version before are needed."""
    source, expected = (tiles, regenerate.tiles_versions()) if tiled else (run, versions())
    before, after = expected[version - 1 : version + 1]
    rows = [(spec.dtype, spec.shape) for spec in source.table]
    found: dict[int, dict[int, int]] = {}
    for data in objects_of(source, version):
        for tensor, steps in read_object(data, rows, before.__getitem__ if tiled else None).items():
            assert not found.get(tensor, {}).keys() & steps.keys()
            found[tensor] = found.get(tensor, {}) | steps
    whole = set() if tiled else {full.id for full in run.changes(run.manifest(version)).full}
    changed = {tensor for tensor in range(len(rows)) if not np.array_equal(before[tensor], after[tensor])}
    assert found.keys() == changed - whole
    assert not tiled or len(found) == len(rows)
    for tensor, steps in found.items():
        assert_moved(source.table[tensor], before[tensor], after[tensor], steps)


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


@pytest.mark.parametrize("version", [1, 2, 3])
def test_the_writer_of_tiles_writes_what_reads_the_same(version: int, tmp_path: Path, tiles: Run) -> None:
    # Classes are chosen by logarithms, which the last bit of a library may change, and with them the bytes.
    regenerate.write_tiles(tmp_path / "run")
    context = DeltaContext(tiles.info.run, version, version - 1)
    old = regenerate.tiles_versions()[version - 1]

    def read(source: Run) -> list[Changes]:
        objects = objects_of(source, version)
        return [decode(data, source.table, context, lambda tensor: BaseTensor(old[tensor])) for data in objects]

    for one, two in zip(read(open_run(str(tmp_path / "run"))), read(tiles), strict=True):
        assert one.fingerprints == two.fingerprints
        assert all(same_group(left, right) for left, right in zip(one.sparse, two.sparse, strict=True))


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
    regenerate.write_tree(tmp_path / "tree")
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
    regenerate.write_signed(tmp_path)
    for key in ("run.json", "versions/0000000000.json", "versions/0000000001.json"):
        assert (tmp_path / key).read_bytes() == (SIGNED / key).read_bytes()
