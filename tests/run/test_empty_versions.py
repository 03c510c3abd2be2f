"""A version that changes nothing is a manifest and no object; whoever meets one goes on."""

from pathlib import Path

from tests.support.samples import state_of
from tests.support.written import TABLE, Written, assert_bits
from vllm_delta_sync.maintenance.compact import compact
from vllm_delta_sync.maintenance.merge_writer import make_merged_delta
from vllm_delta_sync.maintenance.rolling_weights import RollingWeights
from vllm_delta_sync.tensors.changes import Changes

CHANGING = {5, 6, 8}
"""Of eight versions, those that change anything."""


def test_a_manifest_is_all_there_is(tmp_path: Path) -> None:
    written = Written(tmp_path / "run")
    for version in range(1, 9):
        written.publish(share=0.01 if version in CHANGING else 0.0)
    run = written.run
    for version in range(1, 9):
        manifest = run.manifest(version)
        assert len(manifest.objects) == (version in CHANGING)
        if version not in CHANGING:
            assert (manifest.changed, manifest.payload_bytes, manifest.codec, manifest.requires) == (0, 0, None, [])
            assert manifest.fingerprint == run.manifest(version - 1).fingerprint
            assert run.changes(manifest) == Changes()
    assert len(list((written.folder / "objects").iterdir())) == 1 + len(CHANGING)
    report = run.verify()
    assert (report.versions, report.replayed, report.notes) == (9, True, [])
    for version, bits in enumerate(written.writer.bits):
        assert_bits(run.snapshot(version), bits)
    # It is merged, also where nothing else is.
    compact(run)
    merged_delta = run.merged_delta(0, 4)
    assert (merged_delta.objects, merged_delta.changed) == ([], 0)
    tiled = make_merged_delta(run, 1, 3, codec="tiled", weights=RollingWeights(run))
    for made in (merged_delta, tiled):
        assert (made.requires, made.reversible) == ([], True)
    assert len(run.merged_delta(4, 8).objects) == 1
    state = state_of(TABLE, written.writer.bits[0])
    for first in (0, 4):
        written.check(first, first + 4)
        state.apply(run.changes(run.merged_delta(first, first + 4)))
    assert state.fingerprint == written.writer.manifests[8].model_fingerprint
