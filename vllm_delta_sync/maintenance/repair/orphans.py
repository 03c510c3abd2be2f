"""A version whose manifest is lost may still have its objects: find them, and let a folded range lead across it."""

from vllm_delta_sync.codec.delta_object import DeltaContext, required_features
from vllm_delta_sync.codec.delta_reader import codec_of, decode
from vllm_delta_sync.errors import DeltaSyncError, LimitError, NotFoundError, StoreError
from vllm_delta_sync.format.codecs import BASE_CODECS, Codec
from vllm_delta_sync.format.documents import MergedDelta, merged_delta_key
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import OBJECTS_PREFIX, Manifest, ObjectRef, object_key, timestamp
from vllm_delta_sync.run.checks import object_limit
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.objects import outline
from vllm_delta_sync.tensors.changes import Changes
from vllm_delta_sync.tensors.state import ModelState
from vllm_delta_sync.verify.document_audit import DocumentAudit
from vllm_delta_sync.verify.simulate import first_wrong, measure


def orphans(run: RunDocuments, census: DocumentAudit) -> list[ObjectRef]:
    """Objects that no document lists, as their names and sizes say; their bytes are not looked at."""
    listed: set[str] = set()
    for version in census.digests:
        listed.update(ref.key for ref in run.manifest(version).objects)
    for version in census.anchors:
        listed.update(ref.key for ref in run.anchor(version).objects)
    for pair in census.folds:
        listed.update(ref.key for ref in run.folded(*pair).objects)
    found = []
    for item in run.bucket.list(OBJECTS_PREFIX):
        digest = item.key.removeprefix(OBJECTS_PREFIX).removesuffix(".safetensors")
        if item.key not in listed and len(digest) == 64 and item.key == object_key(digest):
            found.append(ObjectRef(key=item.key, bytes=item.bytes, sha256=digest))
    return found


def bridge(
    run: RunDocuments, before: ModelState, first: Manifest, after: Manifest, candidates: list[ObjectRef]
) -> str | None:
    """Write the folded range into a version whose manifest is lost, from objects that say they are of it.

    They are taken only if what they declare leads from the version before (``first``, with weights ``before``) to what
    the version ``after`` builds on, and each tensor comes out as declared. ``after`` names the lost manifest.

    Never in a signed run: only the lost manifest said which objects are of it, and objects that merely add up to the
    right fingerprint are easily made.

    Returns:
        key of the folded range; None if the objects are not there.

    Raises:
        StoreError: the store failed.
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
            part = decode(data, run.table, context, before.base_tensor)
            codec = codec_of(data, context)
        except StoreError:
            raise
        except (DeltaSyncError, LimitError, NotFoundError):
            continue  # of another version, or damaged
        refs.append(ref)
        codecs.add(codec)
        changes.sparse += part.sparse
        changes.full += part.full
        for tensor, change in part.fingerprints.items():
            changes.fingerprints[tensor] = changes.fingerprints.get(tensor, Fingerprint()) + change
    reached = before.fingerprint + changes.fingerprint
    try:
        declared = outline(after, run.table, [run.fetch(ref) for ref in after.objects]).changes
        if reached + declared.fingerprint != after.model_fingerprint:
            return None
    except StoreError:
        raise
    except DeltaSyncError:
        return None
    if first_wrong(run.table, changes.fingerprints, measure(before, changes)) is not None:
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
