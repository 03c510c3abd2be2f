"""Random damage to good bytes: the same content comes out, or exactly one DeltaSyncError. Nothing else may happen.

Objects are damaged and read as if the attacker had also fixed every digest; whole runs are damaged with their digests
left as they were.
"""

import random
from hashlib import sha256

import numpy as np
import pytest

from tests.golden.regenerate import DIRECTORY, versions
from tests.support.collecting import MemoryBucket
from tests.support.samples import state_of
from tests.tools.fuzz.inputs import mutated
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.run.decode import decode_objects
from vllm_delta_sync.tensors.changes import Bits
from vllm_delta_sync.tensors.state import ModelState

OBJECT_MUTATIONS = 300
RUN_MUTATIONS = 500


def run_of(objects: dict[str, bytes]) -> Run:
    bucket = MemoryBucket()
    bucket.held = {key: (data, 0.0) for key, data in objects.items()}
    return Run(bucket)


@pytest.fixture(scope="module")
def golden() -> dict[str, bytes]:
    bucket = open_bucket(str(DIRECTORY))
    return {info.key: bucket.get(info.key) for info in bucket.list()}


@pytest.fixture(scope="module")
def expected() -> list[list[Bits]]:
    return versions()


def refitted(manifest: Manifest, data: bytes) -> Manifest:
    """The manifest an attacker would write for other bytes."""
    digest = sha256(data).hexdigest()
    ref = ObjectRef(key=keys.object_key(digest), bytes=len(data), sha256=digest)
    return manifest.model_copy(update={"objects": [ref], "payload_bytes": len(data)})


@pytest.mark.parametrize("version", [0, 1, 2, 3, 5])
def test_damaged_objects(version: int, golden: dict[str, bytes], expected: list[list[Bits]]) -> None:
    table = open_run(str(DIRECTORY)).table
    manifest = Manifest.from_bytes(golden[keys.version_key(version)])
    good = golden[manifest.objects[0].key]
    dice = random.Random(version)
    outcomes = {"same": 0, "refused": 0}
    before = state_of(table, expected[max(0, version - 1)])
    for _ in range(OBJECT_MUTATIONS):
        data = mutated(good, good, dice)
        state = ModelState.__new__(ModelState)
        state.table, state.fingerprints = table, list(before.fingerprints)
        state.bits = [bits.copy() for bits in before.bits]
        try:
            changes = decode_objects(refitted(manifest, data), table, [data])
            if manifest.kind == "anchor":
                state = ModelState(table, [(table[full.id].name, full.bits) for full in changes.full])
            else:
                state.apply(changes)
            if state.fingerprint != manifest.model_fingerprint:
                raise DeltaSyncError("the fingerprint differs")
        except DeltaSyncError:
            outcomes["refused"] += 1
            continue
        outcomes["same"] += 1
        assert all(np.array_equal(found, bits) for found, bits in zip(state.bits, expected[version], strict=True))
    assert outcomes["refused"] > OBJECT_MUTATIONS // 2


def test_damaged_runs(golden: dict[str, bytes], expected: list[list[Bits]]) -> None:
    dice = random.Random(99)
    documents = [key for key in golden if key.endswith(".json")]
    refused = 0
    for _ in range(RUN_MUTATIONS):
        objects = dict(golden)
        key = dice.choice(documents if dice.random() < 0.7 else sorted(golden))
        if dice.random() < 0.05:
            del objects[key]
        else:
            objects[key] = mutated(golden[key], golden[key], dice)
        try:
            run = run_of(objects)
            report = run.verify()
            state = run.snapshot()
        except DeltaSyncError:
            refused += 1
            continue
        assert (report.head, report.replayed) == (5, True)
        assert all(np.array_equal(found, bits) for found, bits in zip(state.bits, expected[5], strict=True))
    assert refused > RUN_MUTATIONS // 2
