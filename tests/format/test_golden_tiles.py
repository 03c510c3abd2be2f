"""The committed run in codec tiled: today's reader and the specification's get the tensors it was made from."""

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tests.format.test_golden import assert_moved, same_group
from tests.golden.regenerate import TILES, tiles_versions, write_tiles
from tests.support.reference_tiles import entries_of, read_object
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_reader import decode
from vllm_delta_sync.tensors.bits import BaseTensor

TENSORS = "244faa2fa098ec22543f9a3ef2fafae2c9e7e3fc68e61ebc85621354bbdcbcf7"
FINGERPRINTS = [
    "8eb4480a8a9ddf3ba0b957dd1ce50e7d",
    "82d0fdc1b84c6ae99da3376df29ade43",
    "2baccd42aefde04c20028d4423bf3518",
    "e14c59a2e7eae867ac6c33e2f09da4aa",
]


@pytest.fixture(scope="module")
def run() -> Run:
    return open_run(str(TILES))


def objects_of(run: Run, version: int) -> list[bytes]:
    return [bytes(run.fetch(ref)) for ref in run.manifest(version).objects]


def test_expected_tensors_are_pinned_by_their_bytes() -> None:
    content = b"".join(bits.tobytes() for version in tiles_versions() for bits in version)
    assert sha256(content).hexdigest() == TENSORS


def test_the_reader_gets_what_was_published(run: Run) -> None:
    for version, expected in enumerate(tiles_versions()):
        state = run.snapshot(version)
        assert all(np.array_equal(found, bits) for found, bits in zip(state.bits, expected, strict=True))
        assert state.fingerprint.hex() == FINGERPRINTS[version]
    (data,) = objects_of(run, 2)
    assert [block["kind"] for block in entries_of(data)[0]["blocks"]] == ["tiles"] * 6
    report = run.verify()
    assert (report.versions, report.head, report.replayed, report.notes) == (4, 3, True, [])
    assert [(item.codec, item.compression, item.reversible) for item in list(run.log())[1:]] == [
        ("tiled", "zstd", False),
        ("tiled", "none", False),
        ("tiled", "none", False),
    ]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_the_specification_reads_the_same(version: int, run: Run) -> None:
    before, after = tiles_versions()[version - 1 : version + 1]
    rows = [(spec.dtype, spec.shape) for spec in run.table]
    found: dict[int, dict[int, int]] = {}
    for data in objects_of(run, version):
        for tensor, steps in read_object(data, rows, lambda tensor: before[tensor]).items():
            assert not found.get(tensor, {}).keys() & steps.keys()
            found[tensor] = found.get(tensor, {}) | steps
    assert len(found) == len(run.table)
    for tensor, steps in found.items():
        assert_moved(run.table[tensor], before[tensor], after[tensor], steps)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_the_writer_writes_what_reads_the_same(version: int, tmp_path: Path, run: Run) -> None:
    # Classes are chosen by logarithms, which the last bit of a library may change, and with them the bytes.
    write_tiles(tmp_path / "run")
    context = DeltaContext(run.info.run, version, version - 1)
    old = tiles_versions()[version - 1]
    first, second = (
        [
            decode(data, run.table, context, lambda tensor: BaseTensor(old[tensor]))
            for data in objects_of(source, version)
        ]
        for source in (open_run(str(tmp_path / "run")), run)
    )
    for one, two in zip(first, second, strict=True):
        assert one.fingerprints == two.fingerprints
        assert all(same_group(left, right) for left, right in zip(one.sparse, two.sparse, strict=True))
