"""Write lost objects again from the model states on both sides, or merged deltas and anchors that replace them."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np

from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_reader import decode
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.codec.zstd import COMPRESSIONS
from vllm_delta_sync.format.codecs import CODECS, RELATIVE_CODECS
from vllm_delta_sync.format.documents import Anchor, anchor_key, merged_delta_key
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest, ObjectRef, object_key, timestamp
from vllm_delta_sync.format.safetensors_file import shard_tables, write_anchor
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.maintenance.keys import check_signer
from vllm_delta_sync.maintenance.merge_writer import write_merged_delta
from vllm_delta_sync.maintenance.rolling_weights import OBJECT_BYTES
from vllm_delta_sync.run.checks import check_document_size
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.objects import file_digest, scratch_folder
from vllm_delta_sync.tensors.bits import Bits, Positions, diff
from vllm_delta_sync.tensors.changes import Changes, Full, Sparse
from vllm_delta_sync.tensors.state import ModelState
from vllm_delta_sync.verify.simulate import simulate_fingerprints

SHARD_BYTES = 1024**3

InFullRule = Callable[[TensorSpec, int], bool]
"""Decides, from the number of changed elements, whether a tensor is sent in full."""
_Row = tuple[int, Positions, Bits]


def _if_smaller_than_packed(spec: TensorSpec, changed: int) -> bool:
    return changed * (1 + spec.element.itemsize) + 8 * (spec.numel // 255) >= spec.nbytes


def _if_smaller_than_indexed(spec: TensorSpec, changed: int) -> bool:
    return changed * ((4 if spec.numel <= np.iinfo(np.int32).max else 8) + spec.element.itemsize) >= spec.nbytes


def _never_in_full(spec: TensorSpec, changed: int) -> bool:
    return False


def _always_in_full(spec: TensorSpec, changed: int) -> bool:
    return True


IN_FULL_RULES: tuple[InFullRule, ...] = (
    _if_smaller_than_packed,
    _if_smaller_than_indexed,
    _never_in_full,
    _always_in_full,
)


def difference(
    before: ModelState, after: ModelState, in_full: InFullRule = _if_smaller_than_packed, relative: bool = True
) -> Changes:
    """Return the changes from one state to another. Leaves both unchanged, and copies one tensor at a time.

    Args:
        in_full: which tensors are sent in full. relative: whether the others carry distances or new bits.
    """
    changes = Changes()
    rows: dict[str, list[_Row]] = {}
    for tensor, spec in enumerate(before.table):
        found = _changed(before, after, tensor)
        if found is None:
            continue
        positions, distances, changes.fingerprints[tensor] = found
        new = after.bits[tensor]
        if in_full(spec, positions.size):
            changes.full.append(Full(tensor, new))
        else:
            rows.setdefault(spec.dtype, []).append((tensor, positions, distances if relative else new[positions]))
    changes.sparse = [_group(dtype, rows[dtype], relative) for dtype in sorted(rows)]
    return changes


def _pieces(before: ModelState, after: ModelState, fingerprints: dict[int, Fingerprint]) -> Iterator[Sparse | Full]:
    """Yield the same difference in pieces by dtype, for ``write_merged_delta``. Fills ``fingerprints`` with changes."""
    table = before.table
    for tensor in sorted(range(len(table)), key=lambda tensor: (table[tensor].dtype, tensor)):
        found = _changed(before, after, tensor)
        if found is None:
            continue
        positions, distances, fingerprints[tensor] = found
        if _if_smaller_than_packed(table[tensor], positions.size):
            yield Full(tensor, after.bits[tensor])
        else:
            yield _group(table[tensor].dtype, [(tensor, positions, distances)], relative=True)


def _changed(before: ModelState, after: ModelState, tensor: int) -> tuple[Positions, Bits, Fingerprint] | None:
    """Return a tensor's changed positions, their distances and the change of its fingerprint; None if unchanged."""
    if before.fingerprints[tensor] == after.fingerprints[tensor]:
        return None
    spec = before.table[tensor]
    return diff(spec.name, spec.element, before.bits[tensor].copy(), after.bits[tensor])


def _group(dtype: str, rows: list[_Row], relative: bool) -> Sparse:
    return Sparse(
        dtype,
        np.array([tensor for tensor, _, _ in rows], np.uint32),
        np.array([positions.size for _, positions, _ in rows], np.int64),
        np.concatenate([positions for _, positions, _ in rows]),
        np.concatenate([data for _, _, data in rows]),
        relative,
    )


def lost_object(
    run: RunDocuments, manifest: Manifest, lost: ObjectRef, before: ModelState, after: ModelState
) -> bytes | None:
    """Return the bytes of a delta's only lost object if encoding the change again gives its digest, else None.

    Raises:
        DeltaSyncError: another object of the version is damaged too.
    """
    codec = next((name for name in CODECS if name == manifest.codec), None)
    if manifest.base_version is None or codec is None:
        return None
    context = DeltaContext(manifest.run, manifest.version, manifest.base_version)
    others = [decode(run.fetch(ref), run.table, context, before.base_tensor) for ref in manifest.objects if ref != lost]
    compression = next((name for name in COMPRESSIONS if name == manifest.compression), "none")
    for changes in _candidates(others, before, after, relative=codec in RELATIVE_CODECS):
        if changes.changed + sum(other.changed for other in others) != manifest.changed:
            continue
        data = encode(changes, run.table, codec, compression, context, before.base_tensor)  # type: ignore[arg-type]
        if len(data) == lost.bytes and sha256(data).hexdigest() == lost.sha256:
            return data
    return None


def _candidates(others: list[Changes], before: ModelState, after: ModelState, relative: bool) -> Iterator[Changes]:
    for rule in IN_FULL_RULES:
        changes = _without(difference(before, after, rule, relative), others, before)
        yield changes
        if len(changes.sparse) > 1:
            # Other writers order groups by their first tensor instead of the dtype's name.
            changes.sparse.sort(key=lambda group: int(group.ids[0]))
            yield changes


def _without(changes: Changes, others: list[Changes], before: ModelState) -> Changes:
    """Return the changes that the other objects of the version do not contain."""
    if not others:
        return changes
    full = {item.id for other in others for item in other.full}
    taken: dict[int, list[Positions]] = {}
    for other in others:
        for group in other.sparse:
            for tensor, positions, _ in group.tensors():
                taken.setdefault(tensor, []).append(positions)
    sparse = []
    for group in changes.sparse:
        rows = []
        for tensor, positions, data in group.tensors():
            kept = ~np.isin(positions, np.concatenate([np.empty(0, np.int64), *taken.get(tensor, [])]))
            if tensor not in full and kept.any():
                rows.append((tensor, positions[kept], data[kept]))
        if rows:
            sparse.append(_group(group.dtype, rows, group.relative))
    left = Changes(sparse, [item for item in changes.full if item.id not in full and item.id not in taken])
    left.fingerprints = dict(sorted(simulate_fingerprints(before, left).items()))
    return left


def put_merged_delta(
    run: RunDocuments,
    first: Manifest,
    last: Manifest,
    before: ModelState,
    after: ModelState,
    object_bytes: int = OBJECT_BYTES,
) -> str:
    """Write the merged delta between two versions from their weights; return its key.

    Takes the memory of a few tensors. Replaces a document under that key, which the caller knows to be bad or missing.

    Args:
        object_bytes: size at which an object is full.

    Raises:
        SettingsError: the run is signed, and there is no key to sign with.
        StoreError: the store failed, or there is no room for scratch files.
    """
    check_signer(run)
    fingerprints: dict[int, Fingerprint] = {}
    write_merged_delta(run, (first, last), _pieces(before, after, fingerprints), fingerprints, object_bytes)
    return merged_delta_key(first.version, last.version)


def put_anchor(run: RunDocuments, manifest: Manifest, state: ModelState) -> str:
    """Write the standalone anchor of a version from its weights; return its key. Otherwise as ``put_merged_delta``."""
    check_signer(run)
    refs = []
    with scratch_folder(None, f"the anchor of version {manifest.version}", run.table.full_bytes) as folder:
        for shard in shard_tables(run.table, SHARD_BYTES):
            path, ref = _shard(run, shard, state, folder)
            run.bucket.put(ref.key, path)
            path.unlink()
            refs.append(ref)
    document = Anchor(
        run=manifest.run,
        version=manifest.version,
        manifest=manifest.digest,
        objects=refs,
        payload_bytes=sum(ref.bytes for ref in refs),
        fingerprint=state.fingerprint.hex(),
        tensor_fingerprints={spec.name: value.hex() for spec, value in zip(run.table, state.fingerprints, strict=True)},
        created_at=timestamp(),
    )
    key = anchor_key(manifest.version)
    document = run.keyring.signed(document)
    check_document_size(document, run.document_limit, key)
    run.bucket.put(key, document.to_bytes())
    return key


def put_lost_shard(run: RunDocuments, manifest: Manifest, lost: ObjectRef, state: ModelState) -> bool:
    """Write the only lost shard of an anchor version again; False if that does not give its digest."""
    from vllm_delta_sync.run.checks import read_shard

    present = {
        name for ref in manifest.objects if ref != lost for name, _ in read_shard(run.fetch(ref), run.table, ref.key)
    }
    shard = TensorTable([spec for spec in run.table if spec.name not in present])
    with scratch_folder(None, f"a shard of version {manifest.version}", lost.bytes) as folder:
        path, ref = _shard(run, shard, state, folder)
        if ref.key != lost.key:
            return False
        run.bucket.put(ref.key, path)
    return True


def _shard(run: RunDocuments, shard: TensorTable, state: ModelState, folder: Path) -> tuple[Path, ObjectRef]:
    path = folder / "shard"
    write_anchor(path, shard, ((spec.name, state.bits[run.table.index(spec.name)]) for spec in shard))
    digest = file_digest(path)
    return path, ObjectRef(key=object_key(digest), bytes=path.stat().st_size, sha256=digest)
