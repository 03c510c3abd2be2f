"""Small models, changes and runs that many tests build on; all deterministic."""

import tempfile
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from tests.support.differences import diff
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.codec.delta_object import DeltaContext, required_features
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.format.codecs import RELATIVE_CODECS, Codec
from vllm_delta_sync.format.documents import Anchor, MergedDelta, Tag
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.format.manifest import Break, Head, Manifest, ObjectRef, RunInfo
from vllm_delta_sync.format.safetensors_file import write_anchor
from vllm_delta_sync.format.table import DTYPES, TensorSpec, TensorTable
from vllm_delta_sync.run.read_plan import MERGE_WIDTH
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, Changes, Full, Sparse
from vllm_delta_sync.tensors.state import ModelState
from vllm_delta_sync.trust import Keyring

RUN = "5eed" * 8
CONTEXT = DeltaContext(RUN, 1, 0)
CREATED = "2026-01-02T03:04:05Z"
FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_float]


def flip(file: Path) -> None:
    """Damage one bit of a file, in its last byte."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def patterns(dtype: str) -> st.SearchStrategy[int]:
    """Bit patterns of a dtype, the odd ones often: zeros, ones, infinities, NaNs with payloads, subnormals."""
    width = 8 * DTYPES[dtype].itemsize
    top = 1 << (width - 1)
    exponents = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF0 << 48, "F8_E5M2": 0x7C}
    infinity = exponents.get(dtype, top - 1)
    special = [0, 1, 2, top - 1, top, top + 1, 2 * top - 1, infinity, infinity + 1, infinity | top, top // 2]
    return st.one_of(st.sampled_from([value % (2 * top) for value in special]), st.integers(0, 2 * top - 1))


def every_dtype_table(numel: int = 300) -> TensorTable:
    specs = [TensorSpec(f"layers.{name.lower()}.weight", name, (numel,)) for name in DTYPES]
    return TensorTable([*specs, TensorSpec("empty", "BF16", (0, 4)), TensorSpec("scalar", "F32", ())])


def random_bits(table: TensorTable, random: np.random.Generator) -> list[Bits]:
    """Uniform bit patterns for every tensor."""
    return [np.frombuffer(random.bytes(spec.nbytes), spec.element.uint).copy() for spec in table]


def changes_between(
    table: TensorTable, old: list[Bits], new: list[Bits], codec: Codec = "plain", full: Iterable[int] = ()
) -> Changes:
    """What leads from ``old`` to ``new`` (neither is touched); tensors in ``full`` are sent whole."""
    whole = set(full)
    changes = Changes()
    groups: dict[str, list[tuple[int, np.ndarray, np.ndarray]]] = {}
    for tensor, spec in enumerate(table):
        positions, distances, change = diff(spec.name, spec.element, old[tensor].copy(), new[tensor])
        if tensor in whole:
            changes.full.append(Full(tensor, new[tensor].copy()))
        elif positions.size:
            data = distances if codec in RELATIVE_CODECS else new[tensor][positions]
            groups.setdefault(spec.dtype, []).append((tensor, positions, data))
        if tensor in whole or positions.size:
            changes.fingerprints[tensor] = change
    for dtype, rows in groups.items():
        changes.sparse.append(
            Sparse(
                dtype,
                np.array([row[0] for row in rows], np.uint32),
                np.array([row[1].size for row in rows], np.int64),
                np.concatenate([row[1] for row in rows]),
                np.concatenate([row[2] for row in rows]),
                relative=codec in RELATIVE_CODECS,
            )
        )
    return changes


def state_of(table: TensorTable, bits: list[Bits]) -> ModelState:
    return ModelState(table, [(spec.name, bits[tensor]) for tensor, spec in enumerate(table)])


def nudge(bits: list[Bits], random: np.random.Generator, share: float) -> list[Bits]:
    """A copy in which about ``share`` of the elements moved by a few steps."""
    moved = []
    for old in bits:
        new = old.copy()
        chosen = random.random(old.size) < share
        new[chosen] += random.integers(1, 4, int(chosen.sum())).astype(old.dtype)
        moved.append(new)
    return moved


def whole_object(table: TensorTable, bits: list[Bits]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "whole.safetensors")
        write_anchor(path, table, ((spec.name, bits[tensor]) for tensor, spec in enumerate(table)))
        return path.read_bytes()


def ref_of(data: bytes, rank: int = 0) -> ObjectRef:
    """How a manifest names an object."""
    digest = sha256(data).hexdigest()
    return ObjectRef(key=keys.object_key(digest), bytes=len(data), sha256=digest, rank=rank)


class RunWriter:
    """Writes a run into a bucket version by version, the way a publisher does: objects, manifest, HEAD.

    Attributes:
        manifests: those written, by version. bits: per version, the tensors' bits. epoch: of those written next.
        keyring: signs what is written next. expires_at: of HEAD.json.
        created_at: of the manifests written next; None: one that depends on nothing but the version.
    """

    def __init__(self, bucket: Bucket, table: TensorTable, run: str = RUN, keyring: Keyring | None = None) -> None:
        self.bucket, self.table, self.run = bucket, table, run
        self.keyring = Keyring() if keyring is None else keyring
        self.expires_at: str | None = None if keyring is None else "2126-01-02T03:04:05Z"
        self.manifests: list[Manifest] = []
        self.bits: list[list[Bits]] = []
        self.breaks: list[Break] = []
        self.epoch = 0
        self.created_at: str | None = None
        info = RunInfo(
            run=run, created_at=CREATED, tensors=table.digest, total=table.total, full_bytes=table.full_bytes
        )
        self.info = self.keyring.signed(info)
        bucket.put(keys.RUN_KEY, self.info.to_bytes(), if_absent=True)
        bucket.put(keys.TABLE_KEY, table.to_bytes(), if_absent=True)

    def anchor(self, bits: list[Bits], data: bytes | None = None) -> Manifest:
        """Commit an anchor, whose object is ``data`` if that is given."""
        whole = whole_object(self.table, bits) if data is None else data
        return self._commit(bits, [whole], "anchor", self.table.total, requires=[])

    def reference(self, bits: list[Bits], location: str) -> Manifest:
        """Commit a version 0 that lies at ``location``."""
        return self._commit(bits, [], "reference", 0, requires=[], base={"location": location})

    def branch_of(self, source: "RunWriter", version: int, location: str) -> Manifest:
        """Commit a version 0 that is a version of another run, which lies at ``location``."""
        at = {"run": source.run, "version": version, "manifest": source.manifests[version].digest}
        return self._commit(source.bits[version], [], "reference", 0, requires=[], base={"location": location, **at})

    def delta(
        self,
        bits: list[Bits],
        codec: Codec = "plain",
        compression: Compression = "zstd",
        full: Iterable[int] = (),
        base: int | None = None,
        **fields: object,
    ) -> Manifest:
        """Commit the change to ``bits`` from version ``base``, the last one if None. ``fields``: of the manifest."""
        version = len(self.manifests)
        base = version - 1 if base is None else base
        changes = changes_between(self.table, self.bits[base], bits, codec, full)
        context = DeltaContext(self.run, version, base)
        data = encode(
            changes, self.table, codec, compression, context, lambda tensor: BaseTensor(self.bits[base][tensor])
        )
        stored: Compression = "none" if codec == "raw" else compression
        # What changes nothing has no object.
        carried = changes.changed > 0
        return self._commit(
            bits,
            [data] if carried else [],
            "delta",
            changes.changed,
            requires=required_features(codec, compression) if carried else [],
            base_version=base,
            codec=codec if carried else None,
            compression=stored if carried else None,
            reversible=changes.reversible and (codec != "tiled" or not carried),
            **fields,
        )

    def merge(self, first: int, last: int) -> MergedDelta:
        """Write a merged delta between two versions, whatever lies between them."""
        changes = changes_between(self.table, self.bits[first], self.bits[last])
        data = encode(changes, self.table, "plain", "zstd", DeltaContext(self.run, last, first))
        unsigned = MergedDelta(
            run=self.run,
            requires=required_features("plain", "zstd"),
            first=first,
            last=last,
            first_manifest=self.manifests[first].digest,
            last_manifest=self.manifests[last].digest,
            first_fingerprint=self.manifests[first].fingerprint,
            last_fingerprint=self.manifests[last].fingerprint,
            objects=[self._put(data)],
            changed=changes.changed,
            payload_bytes=len(data),
            reversible=changes.reversible,
            created_at=CREATED,
        )
        merged_delta = self.keyring.signed(unsigned)
        self.bucket.put(side.merged_delta_key(first, last), merged_delta.to_bytes())
        return merged_delta

    def merge_all(self, longest: int = 10**6) -> None:
        """Write every merged delta that readers look for, up to a length."""
        breaks, size = {item.version for item in self.breaks}, MERGE_WIDTH
        while size < len(self.manifests) and size <= longest:
            for first in range(0, len(self.manifests) - size, size):
                if not breaks & set(range(first + 1, first + size + 1)):
                    self.merge(first, first + size)
            size *= MERGE_WIDTH

    def tag(
        self, name: str, version: int, milestone: bool = False, branch: str | None = None, digest: str | None = None
    ) -> None:
        """Set a tag without asking whether it can be."""
        tag = Tag(
            run=self.run,
            name=name,
            version=version,
            manifest=digest or self.manifests[version].digest,
            milestone=milestone,
            branch=branch,
            created_at=self.created_at or CREATED,
        )
        self.bucket.put(side.tag_key(name), self.keyring.signed(tag).to_bytes())

    def beside(self, version: int, folder: Path, shards: int = 2) -> Anchor:
        """Write an anchor beside a version, in so many shards at most."""
        refs = []
        for number in range(min(shards, len(self.table))):
            part = list(range(number, len(self.table), shards))
            path = folder / f"shard-{version}-{number}.safetensors"
            specs = TensorTable(self.table[tensor] for tensor in part)
            write_anchor(path, specs, ((self.table[tensor].name, self.bits[version][tensor]) for tensor in part))
            refs.append(self._put(path.read_bytes()))
        manifest = self.manifests[version]
        per_tensor = {
            spec.name: fingerprint_tensor(spec.name, self.bits[version][tensor]).hex()
            for tensor, spec in enumerate(self.table)
        }
        unsigned = Anchor(
            run=self.run,
            version=version,
            manifest=manifest.digest,
            objects=refs,
            payload_bytes=sum(ref.bytes for ref in refs),
            fingerprint=manifest.fingerprint,
            tensor_fingerprints=per_tensor,
            created_at=CREATED,
        )
        anchor = self.keyring.signed(unsigned)
        self.bucket.put(side.anchor_key(version), anchor.to_bytes())
        return anchor

    def head(self, version: int) -> None:
        """Point HEAD.json at a version."""
        manifest = self.manifests[version]
        head = Head(
            run=self.run,
            version=version,
            manifest=manifest.digest,
            epoch=manifest.epoch,
            parent=manifest.parent,
            created_at=manifest.created_at if self.keyring.has_signing_key else None,
            expires_at=self.expires_at if self.keyring.has_signing_key else None,
        )
        self.bucket.put(keys.HEAD_KEY, self.keyring.signed(head).to_bytes())

    def _commit(self, bits: list[Bits], objects: list[bytes], kind: str, changed: int, **fields: object) -> Manifest:
        version = len(self.manifests)
        per_tensor = [fingerprint_tensor(spec.name, bits[tensor]) for tensor, spec in enumerate(self.table)]
        if kind != "delta":
            names = [spec.name for spec in self.table]
            fields["tensor_fingerprints"] = {name: value.hex() for name, value in zip(names, per_tensor, strict=True)}
        refs = [self._put(data, rank) for rank, data in enumerate(objects)]
        base = fields.get("base_version")
        if version and base != version - 1:
            self.breaks.append(Break(version=version, base_version=base))  # type: ignore[arg-type]
        unsigned = Manifest.model_validate(
            dict(
                run=self.run,
                version=version,
                step=10 * version,
                kind=kind,
                parent=self.manifests[-1].digest if version else None,
                objects=refs,
                changed=changed,
                total=self.table.total,
                payload_bytes=sum(len(data) for data in objects),
                full_bytes=self.table.full_bytes,
                fingerprint=sum(per_tensor, Fingerprint()).hex(),
                created_at=self.created_at or CREATED.replace("05Z", f"{5 + version % 55:02d}Z"),
                breaks=list(self.breaks),
                epoch=self.epoch,
                **fields,
            )
        )
        manifest = self.keyring.signed(unsigned)
        self.bucket.put(keys.version_key(version), manifest.to_bytes(), if_absent=True)
        self.manifests.append(manifest)
        self.bits.append([array.copy() for array in bits])
        self.head(version)
        return manifest

    def _put(self, data: bytes, rank: int = 0) -> ObjectRef:
        ref = ref_of(data, rank)
        self.bucket.put(ref.key, data)
        return ref
