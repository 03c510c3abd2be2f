"""What of a run never changes: run.json and tensors.json."""

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import DigestError, FormatError, NotFoundError
from vllm_delta_sync.wire import limits
from vllm_delta_sync.wire import manifest as keys
from vllm_delta_sync.wire.manifest import RunInfo
from vllm_delta_sync.wire.table import TensorTable


def read_info(bucket: Bucket) -> RunInfo:
    """run.json. Raises NotFoundError (there is no run), FormatError, UnsupportedError, StoreError."""
    try:
        data = bucket.get(keys.RUN_KEY, max_bytes=limits.MAX_JSON_BYTES)
    except NotFoundError as error:
        lacks = "there is no such bucket or folder" if "does not exist" in error.message else "it has no run.json"
        raise NotFoundError(f"no run at {bucket.url!r}: {lacks}; start a publisher there, or check the URL") from error
    return RunInfo.from_bytes(data, keys.RUN_KEY)


def read_table(bucket: Bucket, info: RunInfo) -> TensorTable:
    """tensors.json. Raises NotFoundError, DigestError or FormatError (it is not the one of run.json), StoreError."""
    table = TensorTable.from_bytes(bucket.get(keys.TABLE_KEY, max_bytes=limits.MAX_JSON_BYTES))
    if table.digest != info.tensors:
        raise DigestError(f"{keys.TABLE_KEY} has SHA-256 {table.digest}, run.json says {info.tensors}")
    if info.total != table.total or info.full_bytes != table.full_bytes:
        raise FormatError(
            f"{keys.RUN_KEY}: total {info.total} or full_bytes {info.full_bytes} contradicts {keys.TABLE_KEY}"
        )
    return table
