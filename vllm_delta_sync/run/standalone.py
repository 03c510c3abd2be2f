"""``read_standalone`` reads the document beside the chain of manifests that a key names; ``read_each`` several."""

from collections.abc import Iterator, Sequence

from vllm_delta_sync.errors import ChainError, DataError, NotFoundError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import (
    RETENTION_KEY,
    Retention,
    Standalone,
    anchor_of_key,
    claim_of_key,
    merged_delta_of_key,
    tag_of_key,
)
from vllm_delta_sync.run.run_reader import RunReader, read_ahead


def read_standalone(run: RunReader, key: str) -> Standalone | None:
    """Read and check the anchor, merged delta, tag, claim or retention record under a key; None for another key."""
    if (version := anchor_of_key(key)) is not None:
        return run.anchor(version)
    if (pair := merged_delta_of_key(key)) is not None:
        return run.merged_delta(*pair)
    if (name := tag_of_key(key)) is not None:
        return run.tag(name)
    if (epoch := claim_of_key(key)) is not None:
        claim = run.claim(epoch)
        if claim.epoch != epoch:
            raise ChainError(f"{key} is a claim of epoch {claim.epoch}")
        return claim
    if key == RETENTION_KEY:
        record = Retention.from_bytes(run.bucket.get(key, max_bytes=limits.MAX_JSON_BYTES), key)
        if record.run != run.info.run:
            raise ChainError(f"{key} belongs to run {record.run}, this is {run.info.run}")
        return record
    return None


def read_each(run: RunReader, keys: Sequence[str]) -> Iterator[tuple[str, Standalone | DataError]]:
    """Yield each key with its document, or with why it cannot be read; reads in parallel.

    Leaves out documents that were removed since they were listed, and keys of anything else.
    """

    def read(key: str) -> Standalone | DataError | None:
        try:
            return read_standalone(run, key)
        except NotFoundError:
            return None
        except DataError as error:
            return error

    for key, found in zip(keys, read_ahead(read, keys), strict=True):
        if found is not None:
            yield key, found
