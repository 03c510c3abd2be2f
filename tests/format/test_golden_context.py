"""The committed run in codec context: today's reader and the specification's get the tensors it was made from."""

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import zstandard

from tests.golden.regenerate import CONTEXT, context_table, context_versions, write_context
from tests.support.reference import moved
from tests.support.reference_context import read_block
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_reader import decode
from vllm_delta_sync.format.safetensors_file import Container
from vllm_delta_sync.tensors.bits import BaseTensor

TENSORS = "797004b271f0857796f4b9a57baa01840af9e0c271e69c30076b110feb314a43"
FINGERPRINTS = [
    "c6ae8bc88e9c306621208da2723c14ce",
    "79534fe41a8cde60bf4df970c30ec72d",
    "0ffab87914b1ac5e8db265328bf9e420",
]


@pytest.fixture(scope="module")
def run() -> Run:
    return open_run(str(CONTEXT))


def test_expected_tensors_are_pinned_by_their_bytes() -> None:
    content = b"".join(bits.tobytes() for version in context_versions() for bits in version)
    assert sha256(content).hexdigest() == TENSORS


def test_the_reader_gets_what_was_published(run: Run) -> None:
    for version, expected in enumerate(context_versions()):
        state = run.snapshot(version)
        assert all(np.array_equal(found, bits) for found, bits in zip(state.bits, expected, strict=True))
        assert state.fingerprint.hex() == FINGERPRINTS[version]
    report = run.verify()
    assert (report.versions, report.head, report.replayed, report.notes) == (3, 2, True, [])
    assert [(item.codec, item.compression, item.reversible) for item in list(run.log())[1:]] == [
        ("context", "zstd", False),
        ("context", "none", False),
    ]


@pytest.mark.parametrize("version", [1, 2])
def test_the_specification_reads_the_same(version: int, run: Run) -> None:
    before, after = context_versions()[version - 1 : version + 1]
    container = Container(run.fetch(run.manifest(version).objects[0]))
    blocks = json.loads(container.metadata["delta_sync"])["blocks"]
    assert [block["kind"] for block in blocks] == ["tiles"] * 5
    for number in range(len(blocks)):
        (tensor,) = container.bits(f"@{number}.ids").tolist()
        spec, tables = context_table()[tensor], bytes(container.bits(f"@{number}.tables"))
        tables = zstandard.decompress(tables) if version == 1 else tables
        width, is_float = 8 * spec.element.itemsize, spec.element.is_float
        streams = bytes(container.bits(f"@{number}.streams"))
        (found,) = read_block(tables, streams, [spec.shape], [before[tensor]], width, is_float)
        bits = before[tensor].tolist()
        for place, step in found.items():
            bits[place] = moved(bits[place], step, width, is_float)
        assert bits == after[tensor].tolist(), spec.name


@pytest.mark.parametrize("version", [1, 2])
def test_the_writer_writes_what_reads_the_same(version: int, tmp_path: Path, run: Run) -> None:
    # Frequencies are rounded from logarithms, which the last bit of a library may change, and with them the bytes.
    write_context(tmp_path / "run")
    context = DeltaContext(run.info.run, version, version - 1)
    old = context_versions()[version - 1]
    first, second = (
        decode(source.fetch(source.manifest(version).objects[0]), run.table, context, lambda i: BaseTensor(old[i]))
        for source in (open_run(str(tmp_path / "run")), run)
    )
    assert first.fingerprints == second.fingerprints
    for one, two in zip(first.sparse, second.sparse, strict=True):
        assert np.array_equal(one.positions, two.positions)
        assert np.array_equal(one.data, two.data)
