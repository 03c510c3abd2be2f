"""Versions that were signed by a key whose word does not hold for them any more, as they lie in the bucket."""

from vllm_delta_sync.errors import DeltaSyncError, SignatureError, StoreError
from vllm_delta_sync.format.manifest import Manifest, version_key
from vllm_delta_sync.run.documents import RunDocuments


def refused_manifest(run: RunDocuments, version: int) -> Manifest | None:
    """The manifest of a version that ``keys.json`` gave up: its key had signed it, and is retired or revoked since.

    None if it may be believed, or if it is not there, damaged, or signed by anybody else. It is good for its place in
    the chain, where the versions after it name it by digest, and for nothing else.

    Raises:
        StoreError: the store failed.
    """
    key = version_key(version)
    try:
        manifest = run.authentic.gave_up(run.stored(version, run.document_limit), key)
    except StoreError:
        raise
    except DeltaSyncError:
        return None
    if manifest is None:
        return None
    if (manifest.run, manifest.version) != (run.info.run, version):
        return None
    try:
        run.authentic.manifest(manifest, key)
    except SignatureError:
        return manifest
    except StoreError:
        raise
    except DeltaSyncError:
        return None
    return None
