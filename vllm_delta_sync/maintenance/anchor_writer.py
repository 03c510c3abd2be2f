"""``make_anchor`` writes a standalone anchor: all tensors of a version as checkpoint shards.

``put_document`` commits an anchor or a merged delta.
"""

from pathlib import Path
from typing import TypeVar

from vllm_delta_sync.bucket.base import create_if_absent, has_object
from vllm_delta_sync.errors import DataError, UnsupportedError
from vllm_delta_sync.format.documents import Anchor, MergedDelta, anchor_key
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.format.safetensors_file import shard_tables, write_anchor
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.maintenance.rolling_weights import OBJECT_BYTES, RollingWeights, Stop, check_stop, never_stop
from vllm_delta_sync.run.checks import check_document_size
from vllm_delta_sync.run.graph import contradiction
from vllm_delta_sync.run.objects import scratch_folder
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.tensors.state import ModelState

_Document = TypeVar("_Document", Anchor, MergedDelta)


def make_anchor(
    run: RunReader,
    version: int,
    base: str | Path | None = None,
    *,
    replace: bool = False,
    scratch: str | Path | None = None,
    stop: Stop = never_stop,
) -> Anchor:
    """Write the anchor of a version, unless the bucket has it.

    Rebuilds and verifies the weights like a reader, from the bucket and the base, in memory or in a scratch file, and
    writes shard by shard. Objects are put before the document that names them, and again after it if they are missing.

    Args:
        base: as ``run.restore.restore``. replace: write it even if there is one, for example with damaged shards.
        scratch: folder for the weights and one shard at a time; None for the system's temporary directory.
        stop: polled during the work; True stops it.

    Returns:
        the document in the bucket, which another writer may have written.

    Raises:
        NotFoundError: no such version, or the base is not available. StoppedError: ``stop`` returned True.
        StoreError: the store failed, or there is no room for the scratch files. Otherwise as ``run.restore.restore``.
    """
    target, key = run.manifest(version), anchor_key(version)
    found = None if replace else existing(run, Anchor, key, target)
    if found is not None:
        return found
    state = RollingWeights(run, base, scratch, stop).at(target)
    shards = shard_tables(run.table, OBJECT_BYTES)
    largest = max((shard.full_bytes for shard in shards), default=0)
    with scratch_folder(scratch, f"the anchor of version {version}", largest + largest // 64) as folder:
        refs = []
        for shard in shards:
            check_stop(stop)
            refs.append(_put(run, state, shard, folder))
        declared = {spec.name: value.hex() for spec, value in zip(state.table, state.fingerprints, strict=True)}
        document = run.keyring.signed(Anchor.of(target, declared, refs))
        stored = put_document(run, key, document, replace, target)
        if stored is document:
            for shard, ref in zip(shards, refs, strict=True):
                if not has_object(run.bucket, ref):
                    _put(run, state, shard, folder)
    return stored


def existing(run: RunReader, kind: type[_Document], key: str, *manifests: Manifest) -> _Document | None:
    """Return the document under a key in the bucket, if it is valid and of these versions; else None."""
    try:
        found = run.standalone(key)
    except UnsupportedError:
        raise
    except DataError:
        return None  # missing, damaged or not validly signed
    if not isinstance(found, kind) or contradiction(found, {manifest.version: manifest for manifest in manifests}):
        return None
    return found


def put_document(run: RunReader, key: str, document: _Document, replace: bool, *manifests: Manifest) -> _Document:
    """Put an anchor or merged delta whose objects are stored; return the document in the bucket.

    Args:
        replace: False lets the valid document of another writer stay. manifests: of the versions that it names.
    """
    check_document_size(document, run.document_limit, key)
    if replace or not create_if_absent(run.bucket, key, document.to_bytes()):
        theirs = None if replace else existing(run, type(document), key, *manifests)
        if theirs is not None:
            return theirs
        # The existing document is damaged, lacks a valid signature, or is of replaced versions: readers skip it.
        run.bucket.put(key, document.to_bytes())
    return document


def _put(run: RunReader, state: ModelState, shard: TensorTable, folder: Path) -> ObjectRef:
    path = folder / "shard"
    write_anchor(path, shard, ((spec.name, state.bits[run.table.index(spec.name)]) for spec in shard))
    ref = ObjectRef.of(path)
    run.bucket.put(ref.key, path)
    path.unlink()
    return ref
