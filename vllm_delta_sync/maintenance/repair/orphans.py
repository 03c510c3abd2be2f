"""``bridge`` finds the objects of a version whose manifest is lost, and writes a merged delta that leads across it."""

from vllm_delta_sync.codec.delta_object import DeltaContext, required_features
from vllm_delta_sync.codec.delta_reader import DeltaReader
from vllm_delta_sync.errors import DataError
from vllm_delta_sync.format.codecs import BASE_CODECS, Codec
from vllm_delta_sync.format.documents import MergedDelta, merged_delta_key
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import OBJECTS_PREFIX, Manifest, ObjectRef, object_key, timestamp
from vllm_delta_sync.run.checks import object_limit
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.objects import summarize_changes
from vllm_delta_sync.tensors.changes import Changes
from vllm_delta_sync.tensors.state import ModelState
from vllm_delta_sync.verify.document_audit import DocumentAudit
from vllm_delta_sync.verify.simulate import first_wrong_tensor


def orphans(run: RunDocuments, audit: DocumentAudit) -> list[ObjectRef]:
    """Return objects that no document lists, judging by keys and sizes; their bytes are not read."""
    listed: set[str] = set()
    for version in audit.digests:
        listed.update(ref.key for ref in run.manifest(version).objects)
    for version in audit.anchors:
        listed.update(ref.key for ref in run.anchor(version).objects)
    for pair in audit.merged_deltas:
        listed.update(ref.key for ref in run.merged_delta(*pair).objects)
    found = []
    for item in run.bucket.list(OBJECTS_PREFIX):
        digest = item.key.removeprefix(OBJECTS_PREFIX).removesuffix(".safetensors")
        if item.key not in listed and len(digest) == 64 and item.key == object_key(digest):
            found.append(ObjectRef(key=item.key, bytes=item.bytes, sha256=digest))
    return found


def bridge(
    run: RunDocuments, before: ModelState, first: Manifest, after: Manifest, candidates: list[ObjectRef]
) -> str | None:
    """Write the merged delta into a version whose manifest is lost, from objects that declare that version.

    Uses them only if their declared changes lead from the version before (``first``, with weights ``before``) to the
    state that the version ``after`` builds on, and each tensor changes as declared. ``after`` names the lost manifest.

    The merged delta names ``first`` by the digest of what was read. If that manifest was altered too, which only the
    lost one could show, readers skip the merged delta once both are restored, and the next repair replaces it.

    Does nothing in a signed run: only the lost manifest said which objects belong to it, and objects that add up to the
    right fingerprint are easy to forge.

    Returns:
        key of the merged delta; None if the objects are missing.
    """
    lost = first.version + 1
    if run.info.signature is not None or after.base_version != lost or after.parent is None:
        return None
    context = DeltaContext(first.run, lost, first.version)
    refs: list[ObjectRef] = []
    codecs: set[Codec] = set()
    changes = Changes()
    limit = object_limit(run.table)
    for ref in candidates:
        if ref.bytes > limit:
            continue
        try:
            data = run.fetch(ref)
            reader = DeltaReader(data, run.table, context, before.base_tensor)
            part = reader.rest()
        except DataError:
            continue  # of another version, or damaged
        refs.append(ref)
        codecs.add(reader.codec)
        changes.sparse += part.sparse
        changes.full += part.full
        for tensor, change in part.fingerprints.items():
            changes.fingerprints[tensor] = changes.fingerprints.get(tensor, Fingerprint()) + change
    reached = before.fingerprint + changes.fingerprint
    try:
        declared = summarize_changes(after, run.table, [run.fetch(ref) for ref in after.objects]).changes
        if reached + declared.fingerprint != after.model_fingerprint:
            return None
    except DataError:
        return None
    if first_wrong_tensor(before, changes) is not None:
        return None
    document = MergedDelta(
        requires=sorted({feature for codec in codecs for feature in required_features(codec, "zstd")}),
        run=first.run,
        first=first.version,
        last=lost,
        first_manifest=first.digest,
        last_manifest=after.parent,
        first_fingerprint=before.fingerprint.hex(),
        last_fingerprint=reached.hex(),
        objects=refs,
        changed=changes.changed,
        payload_bytes=sum(ref.bytes for ref in refs),
        reversible=changes.reversible and BASE_CODECS.isdisjoint(codecs),
        created_at=timestamp(),
    )
    key = merged_delta_key(first.version, lost)
    run.bucket.put(key, document.to_bytes())
    return key
