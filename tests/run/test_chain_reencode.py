"""Writing a lost object again: with the digest that is recorded, or not at all."""

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tests.support.collecting import MemoryBucket
from tests.support.damage import TABLE, Whole
from tests.support.running import counted
from tests.support.samples import RUN, RunWriter, changes_between, nudge, random_bits, state_of
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.chain import Run
from vllm_delta_sync.chain.measure import measure
from vllm_delta_sync.chain.verify import verify_run
from vllm_delta_sync.errors import DigestError
from vllm_delta_sync.upkeep.repair import repair
from vllm_delta_sync.upkeep.repair_deltas import difference, lost_object, put_anchor, put_fold, put_lost_shard
from vllm_delta_sync.wire import manifest as keys
from vllm_delta_sync.wire.anchor import shard_tables
from vllm_delta_sync.wire.changes import Changes, Sparse
from vllm_delta_sync.wire.delta import Codec, DeltaContext, encode
from vllm_delta_sync.wire.manifest import Head, Manifest, ObjectRef
from vllm_delta_sync.wire.table import TensorSpec, TensorTable


def halves(changes: Changes) -> list[Changes]:
    """What two ranks would write, each of its half of every tensor."""
    parts = []
    for number in range(2):
        sparse = []
        for group in changes.sparse:
            rows = [(t, p[number::2], d[number::2]) for t, p, d in group.tensors() if p[number::2].size]
            if rows:
                ids = np.array([row[0] for row in rows], np.uint32)
                counts = np.array([row[1].size for row in rows], np.int64)
                positions, data = (np.concatenate([row[place] for row in rows]) for place in (1, 2))
                sparse.append(Sparse(group.dtype, ids, counts, positions, data, group.relative))
        parts.append(Changes(sorted(sparse, key=lambda group: group.dtype)))
    return parts


def shared_version(whole: Whole, codec: Codec) -> Manifest:
    """A version that two ranks wrote."""
    old = whole.writer.bits[-1]
    new = nudge(old, whole.random, 0.5)
    before = state_of(TABLE, old)
    base = whole.writer.manifests[-1]
    context = DeltaContext(RUN, base.version + 1, base.version)
    refs, changed = [], 0
    for rank, part in enumerate(halves(changes_between(TABLE, old, new, codec))):
        part.fingerprints = dict(sorted(measure(before, part).items()))
        changed += part.changed
        data = encode(part, TABLE, codec, "zstd", context)
        digest = sha256(data).hexdigest()
        refs.append(ObjectRef(key=keys.object_key(digest), bytes=len(data), sha256=digest, rank=rank))
        whole.bucket.put(refs[-1].key, data)
    manifest = base.model_copy(
        update={
            "version": context.version,
            "base_version": base.version,
            "parent": base.digest,
            "objects": refs,
            "payload_bytes": sum(ref.bytes for ref in refs),
            "changed": changed,
            "codec": codec,
            "compression": "zstd" if codec == "packed" else "none",
            "requires": sorted({codec, "zstd"}),
            "fingerprint": state_of(TABLE, new).fingerprint.hex(),
            "reversible": codec == "packed",
        }
    )
    whole.bucket.put(keys.version_key(context.version), manifest.to_bytes())
    whole.writer.manifests.append(manifest)
    whole.writer.bits.append(new)
    head = Head(run=RUN, version=manifest.version, manifest=manifest.digest)
    whole.bucket.put(keys.HEAD_KEY, head.to_bytes())
    return manifest


@pytest.mark.parametrize("codec", ["packed", "raw"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_object_of_one_rank_is_what_the_others_leave(codec: Codec, rank: int) -> None:
    whole = Whole(seed=2)
    whole.deltas("packed")
    manifest = shared_version(whole, codec)
    whole.beside(manifest.version)
    assert verify_run(whole.run).replayed
    lost = manifest.objects[rank]
    right = whole.bucket.get(lost.key)
    whole.bucket.delete(lost.key)
    before, after = (state_of(TABLE, bits) for bits in whole.writer.bits[-2:])
    assert lost_object(whole.run, manifest, lost, before, after) == right
    report = repair(whole.run)
    assert (report.lost, whole.bucket.get(lost.key)) == ([], right)
    # With the other one damaged nobody can tell what belongs to which.
    whole.bucket.delete(lost.key)
    whole.flip(manifest.objects[1 - rank].key)
    with pytest.raises(DigestError):
        lost_object(whole.run, manifest, lost, before, after)
    report = repair(whole.run)
    assert (report.lost, len(report.repaired)) == ([], 1)
    assert "stands in for" in report.repaired[0]
    assert verify_run(whole.run).replayed


def test_a_difference_leads_from_one_state_to_the_other() -> None:
    whole = Whole(seed=3)
    whole.deltas("packed", "full")
    for relative in (True, False):
        before, after = (state_of(TABLE, bits) for bits in whole.writer.bits[1:])
        changes = difference(before, after, relative=relative)
        assert measure(before, changes) == changes.fingerprints
        before.apply(changes)
        assert before.fingerprints == after.fingerprints
        assert [bits.tobytes() for bits in before.bits] == [bits.tobytes() for bits in after.bits]


def test_documents_written_from_weights_are_as_those_of_the_chain() -> None:
    whole = Whole(seed=4)
    whole.deltas("packed", "raw", "full", "packed")
    states = [state_of(TABLE, bits) for bits in whole.writer.bits]
    run, manifests = whole.run, whole.writer.manifests
    put_anchor(run, manifests[3], states[3])
    put_fold(run, manifests[1], manifests[4], states[1], states[4])
    report = verify_run(run)
    assert (report.anchors, report.folds) == (1, 1)


WIDE = TensorTable(TensorSpec(f"layers.{layer}.weight", ["BF16", "F32"][layer % 2], (512, 512)) for layer in range(32))
"""24 MiB, of which no tensor has more than 1 MiB."""


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_range_from_weights_takes_the_memory_of_a_few_tensors(
    tmp_path: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_delta_sync.wire.spool.SPOOL_ELEMENTS", 64 * 1024)
    random = np.random.default_rng(9)
    writer = RunWriter(open_bucket(str(tmp_path / "run")), WIDE)
    writer.reference(random_bits(WIDE, random), str(tmp_path))
    writer.delta(nudge(writer.bits[0], random, share))
    before, after = (state_of(WIDE, bits) for bits in writer.bits)
    run = Run(writer.bucket)
    first, last = writer.manifests
    # Once before, with what is loaded and compiled first.
    put_fold(run, first, last, before, after)
    with counted() as most:
        put_fold(run, first, last, before, after, object_bytes=1024 * 1024)
    assert most[0] < 12 * 1024 * 1024, most
    folded = run.folded(0, 1)
    assert len(folded.objects) > 1
    before.apply(run.changes(folded))
    assert before.fingerprints == after.fingerprints
    assert before.fingerprint.hex() == folded.last_fingerprint


def test_a_lost_shard_of_version_0_is_written_again() -> None:
    whole = Whole(seed=6)
    bucket = MemoryBucket()
    bucket.held.update({key: whole.bucket.held[key] for key in (keys.RUN_KEY, keys.TABLE_KEY)})
    assert len(shard_tables(TABLE, 1)) == len(TABLE)
    whole.beside(0, shards=3)
    shards = whole.run.anchor(0).objects
    manifest = whole.writer.manifests[0].model_copy(
        update={"objects": shards, "payload_bytes": sum(ref.bytes for ref in shards)}
    )
    for ref in shards:
        bucket.put(ref.key, whole.bucket.get(ref.key))
    state = state_of(TABLE, whole.writer.bits[0])
    for ref in shards:
        right = bucket.get(ref.key)
        bucket.delete(ref.key)
        assert put_lost_shard(Run(bucket), manifest, ref, state)
        assert bucket.get(ref.key) == right
    other = state_of(TABLE, nudge(whole.writer.bits[0], whole.random, 0.5))
    bucket.delete(shards[0].key)
    assert not put_lost_shard(Run(bucket), manifest, shards[0], other)
    assert shards[0].key not in bucket.held
