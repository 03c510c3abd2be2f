"""``ObjectAudit`` reads the objects that a document lists and compares them with what it declares.

``check_files`` and ``check_sidecars`` do the same for the run's files and a version's sidecars.
"""

import numpy as np

from vllm_delta_sync.bucket.verified import fetch_object
from vllm_delta_sync.errors import ChainError, DataError, DeltaSyncError, FingerprintError, FormatError, NotFoundError
from vllm_delta_sync.format.documents import Anchor, MergedDelta
from vllm_delta_sync.format.fingerprint import fingerprint_tensor
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.run.checks import describe_document, read_shard
from vllm_delta_sync.run.decode import decode_objects
from vllm_delta_sync.run.model_files import fetch_run_file
from vllm_delta_sync.run.objects import needs_base_bits, summarize_changes
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.tensors.changes import Changes
from vllm_delta_sync.tensors.state import ModelState
from vllm_delta_sync.verify.early_reads import EarlyReads
from vllm_delta_sync.verify.report import Finding, Findings, VerifyReport


class ObjectAudit:
    """Reads the objects of one run, and counts them in a report."""

    def __init__(self, run: RunReader, early: EarlyReads, report: VerifyReport) -> None:
        self._run, self._early, self._report = run, early, report

    def read(
        self, document: Manifest | MergedDelta, key: str, version: int, state: ModelState | None
    ) -> tuple[Changes | None, list[Finding]]:
        """Read what a document's objects change, and what is wrong with them; the changes are None if any is bad.

        Args:
            state: the base weights of the document. Without them, objects of codec ``tiled`` are checked except for
                their streams, and the returned changes hold only declared changes of fingerprint.
        """
        objects, lost = [], []
        for ref in document.objects:
            data = self._fetch(ref, document, key, version)
            if isinstance(data, Finding):
                lost.append(data)
            else:
                objects.append(data)
        if lost:
            return None, lost
        try:
            if state is not None or not needs_base_bits(document):
                old = None if state is None else state.base_tensor
                changes = decode_objects(document, self._run.table, objects, old)
            else:
                changes = Changes(fingerprints=summarize_changes(document, self._run.table, objects).fingerprints)
                self._report.undecoded.append(key)
            if document.reversible and (needs_base_bits(document) or not changes.reversible):
                raise FormatError(
                    f"{key} declares that it is reversible, but its objects "
                    + ("need base bits for decoding" if needs_base_bits(document) else "replace bits")
                )
            return changes, []
        except DeltaSyncError as error:
            return None, [Finding(key, error, version)]

    def _fetch(
        self, ref: ObjectRef, document: Manifest | MergedDelta | Anchor, key: str, version: int
    ) -> bytes | Finding:
        try:
            data = self._early.fetch(ref)
        except DataError as error:
            shown = type(error)(f"{error.message} ({describe_document(document)})")
            return Finding(ref.key, shown, version, key, stored=ref)
        self._report.objects += 1
        self._report.bytes += len(data)
        return data

    def check_whole(
        self, document: Manifest | Anchor, key: str, version: int, state: ModelState | None
    ) -> list[Finding]:
        """Compare each tensor of an anchor with its declared fingerprint, and with the weights if given."""
        table, declared = self._run.table, document.tensor_fingerprints or {}
        seen: set[str] = set()
        found: list[Finding] = []
        for ref in document.objects:
            data = self._fetch(ref, document, key, version)
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
                            f"{describe_document(document)}: tensor {name!r} of {ref.key} has fingerprint {measured}, "
                            f"the manifest says {declared.get(name)}"
                            + ("" if same else ", and it differs from the replayed weights")
                        )
                        found.append(Finding(key, error, version, tensor=name))
                        break
            except DeltaSyncError as error:
                found.append(Finding(key, error, version))
        if not found and len(seen) != len(table):
            few = FormatError(f"anchor of version {version} does not hold each of {len(table)} tensors once")
            found.append(Finding(key, few, version))
        return found


def check_files(run: RunReader, report: VerifyReport, found: Findings) -> None:
    """Read all files of a run, count them in the report, and add what is wrong."""
    for item in run.info.files:
        try:
            data = fetch_run_file(run, item)
        except DataError as error:
            found.add(Finding(item.key, error, stored=item))
            continue
        report.files += 1
        report.bytes += len(data)


def check_sidecars(run: RunReader, manifest: Manifest, report: VerifyReport, found: Findings, good: set[str]) -> None:
    """Read the sidecars of a version, count them in the report, and add what is wrong.

    Args:
        good: keys of good sidecars, which are not read again; those of this version are added.
    """
    for item in manifest.sidecars:
        if item.key in good:
            continue
        try:
            data = fetch_object(run.bucket, item)
        except DataError as error:
            # A collection may be running, so read retention.json again.
            record = run.retention() if isinstance(error, NotFoundError) else None
            if record is None or not record.gave_up(manifest.version):
                shown = type(error)(f"{error.message} (sidecar {item.name!r} of version {manifest.version})")
                found.add(Finding(item.key, shown, manifest.version, stored=item))
            continue
        good.add(item.key)
        report.sidecars += 1
        report.bytes += len(data)
