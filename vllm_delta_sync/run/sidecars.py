"""Sidecars: bytes that a publisher stored beside a version's weights, read and checked."""

from vllm_delta_sync.bucket.verified import fetch_object
from vllm_delta_sync.errors import DeltaSyncError, NotFoundError, StoreError
from vllm_delta_sync.format.manifest import Manifest, Sidecar
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.report import Finding, VerifyReport


def read_sidecar(run: RunDocuments, manifest: Manifest, name: str) -> bytes:
    """The bytes of one sidecar of a version, with size and SHA-256 checked.

    Raises:
        NotFoundError: the version has no sidecar of that name, or retention removed it.
        DigestError, LimitError: it is not what the manifest lists. StoreError: the store failed.
    """
    found = next((item for item in manifest.sidecars if item.name == name), None)
    if found is None:
        names = ", ".join(repr(item.name) for item in manifest.sidecars)
        raise NotFoundError(
            f"version {manifest.version} has no sidecar {name!r}; " + (f"it has {names}" if names else "it has none")
        )
    try:
        return fetch_object(run.bucket, found)
    except NotFoundError as error:
        if _given_up(run, manifest.version):
            raise NotFoundError(
                f"sidecar {name!r} of version {manifest.version} was removed with the version by retention; tag "
                "versions that are to stay (delta-sync tag)"
            ) from error
        raise NotFoundError(
            f"sidecar {name!r} of version {manifest.version}, {found.key}, is gone: {error.message}"
        ) from error


def check_sidecars(run: RunDocuments, manifest: Manifest, report: VerifyReport, good: set[str]) -> list[Finding]:
    """Read the sidecars of a version, count them, and tell what is wrong.

    Args:
        good: keys of those of other versions that hold, which are not read again; these are added.

    Raises:
        StoreError: the store failed.
    """
    findings: list[Finding] = []
    for item in manifest.sidecars:
        if item.key in good:
            continue
        try:
            data = fetch_object(run.bucket, item)
        except StoreError:
            raise
        except DeltaSyncError as error:
            if not isinstance(error, NotFoundError) or not _given_up(run, manifest.version):
                findings.append(_finding(item, manifest.version, error))
            continue
        good.add(item.key)
        report.sidecars += 1
        report.bytes += len(data)
    return findings


def _finding(item: Sidecar, version: int, error: DeltaSyncError) -> Finding:
    shown = type(error)(f"{error.message} (sidecar {item.name!r} of version {version})")
    return Finding(item.key, shown, version, sidecar=item)


def _given_up(run: RunDocuments, version: int) -> bool:
    """Whether a collection let go of the version; asked anew, since one may be at work."""
    record = run.retention()
    return record is not None and record.gave_up(version)
