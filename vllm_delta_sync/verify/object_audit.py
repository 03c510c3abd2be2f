"""The objects that a document lists: read, checked, and held against what it declares."""

import numpy as np

from vllm_delta_sync.errors import (
    ChainError,
    DeltaSyncError,
    DigestError,
    FingerprintError,
    FormatError,
    StoreError,
)
from vllm_delta_sync.format.documents import Anchor, MergedDelta
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.run.checks import decode_objects, read_shard
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.objects import needs_weights, outline
from vllm_delta_sync.run.report import Finding, VerifyReport
from vllm_delta_sync.tensors.changes import Changes
from vllm_delta_sync.tensors.state import ModelState
from vllm_delta_sync.verify.simulate import first_bad_tensor

Listing = Manifest | MergedDelta | Anchor


class ObjectAudit:
    """Reads the objects of one run, and counts them in a report."""

    def __init__(self, run: RunDocuments, report: VerifyReport) -> None:
        self._run, self._report = run, report

    def read(
        self, document: Manifest | MergedDelta, key: str, version: int, state: ModelState | None
    ) -> tuple[Changes | None, list[Finding]]:
        """What a document's objects change; None, and what is wrong, if they are not all good.

        Args:
            state: the weights that the document builds on; without them, objects of codec ``context`` are read as far
                as that goes, and what is returned holds declared changes of fingerprint only.
        """
        objects, lost = [], []
        for ref in document.objects:
            data = self._fetch(ref.key, document, key, version, state)
            if isinstance(data, Finding):
                lost.append(data)
            else:
                objects.append(data)
        if lost:
            return None, lost
        try:
            changes = self._decoded(document, key, objects, state)
            if document.reversible and (needs_weights(document) or not changes.reversible):
                raise FormatError(
                    f"{key} says that it can be taken back, and its objects "
                    + ("take the bits before to read" if needs_weights(document) else "replace bits")
                )
            return changes, []
        except DeltaSyncError as error:
            return None, [Finding(key, error, version)]

    def _decoded(
        self, document: Manifest | MergedDelta, key: str, objects: list[bytes], state: ModelState | None
    ) -> Changes:
        table = self._run.table
        if state is not None or not needs_weights(document):
            return decode_objects(document, table, objects, None if state is None else state.base_tensor)
        found = outline(document, table, objects)
        self._report.undecoded.append(key)
        return found.changes

    def _fetch(
        self, object_key: str, document: Listing, key: str, version: int, state: ModelState | None
    ) -> bytes | Finding:
        ref = next(item for item in document.objects if item.key == object_key)
        try:
            data = self._run.fetch(ref)
        except StoreError:
            raise
        except DigestError as error:
            data = self._run.bucket.get(ref.key)
            tensor = None
            if len(data) == ref.bytes:
                tensor = first_bad_tensor(document, data, self._run.table, state)
            shown = f" ({what_of(document)}" + ("" if tensor is None else f"; first bad tensor {tensor!r}") + ")"
            return Finding(ref.key, type(error)(f"{error.message}{shown}"), version, key, ref, tensor)
        except DeltaSyncError as error:
            return Finding(ref.key, type(error)(f"{error.message} ({what_of(document)})"), version, key, ref)
        self._report.objects += 1
        self._report.bytes += len(data)
        return data

    def undeclared(
        self, document: Manifest | MergedDelta, changes: Changes, before: str | None, after: str
    ) -> DeltaSyncError | None:
        """What is wrong if the declared changes do not lead from one fingerprint to the other."""
        if before is None:
            return None
        reached = Fingerprint.from_hex(before) + changes.fingerprint
        if reached.hex() == after:
            return None
        return FingerprintError(
            f"{what_of(document)}: objects lead to fingerprint {reached.hex()}, the manifest says {after}"
        )

    def check_whole(
        self, document: Manifest | Anchor, key: str, version: int, state: ModelState | None
    ) -> list[Finding]:
        """Hold every tensor of an anchor against what it declares, and against the weights if there are any."""
        table, declared = self._run.table, document.tensor_fingerprints or {}
        seen: set[str] = set()
        found: list[Finding] = []
        for ref in document.objects:
            data = self._fetch(ref.key, document, key, version, None)
            if isinstance(data, Finding):
                found.append(data)
                continue
            try:
                for name, bits in read_shard(data, table, ref.key):
                    if name in seen:
                        raise ChainError(f"{ref.key}: tensor {name!r} is carried twice")
                    seen.add(name)
                    measured = fingerprint_tensor(name, bits).hex()
                    same = state is None or np.array_equal(bits, state.bits[table.index(name)])
                    if measured != declared.get(name) or not same:
                        error = FingerprintError(
                            f"{what_of(document)}: tensor {name!r} of {ref.key} has fingerprint {measured}, the "
                            f"manifest says {declared.get(name)}"
                            + ("" if same else ", and it is not what was replayed")
                        )
                        found.append(Finding(key, error, version, tensor=name))
                        break
            except DeltaSyncError as error:
                found.append(Finding(key, error, version))
        if not found and len(seen) != len(table):
            few = FormatError(f"anchor of version {version} does not hold each of {len(table)} tensors once")
            found.append(Finding(key, few, version))
        return found


def wrong_tensor(what: str, tensor: str) -> FingerprintError:
    return FingerprintError(
        f"{what}: tensor {tensor!r} does not have the declared fingerprint after the change: the object was made "
        "against other weights, or is damaged"
    )


def what_of(document: Listing) -> str:
    if isinstance(document, MergedDelta):
        return f"folded range {document.first} to {document.last}"
    return f"{'anchor of ' if isinstance(document, Anchor) else ''}version {document.version}"
