"""What of a run never changes: run.json and tensors.json."""

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import DigestError, FormatError, NotFoundError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.manifest import RUN_KEY, TABLE_KEY, RunInfo
from vllm_delta_sync.format.table import TensorTable


def read_info(bucket: Bucket) -> RunInfo:
    """run.json. Raises NotFoundError (there is no run), FormatError, UnsupportedError, StoreError."""
    try:
        data = bucket.get(RUN_KEY, max_bytes=limits.MAX_JSON_BYTES)
    except NotFoundError as error:
        lacks = "there is no such bucket or folder" if "does not exist" in error.message else "it has no run.json"
        raise NotFoundError(f"no run at {bucket.url!r}: {lacks}; start a publisher there, or check the URL") from error
    return RunInfo.from_bytes(data, RUN_KEY)


def read_table(bucket: Bucket, info: RunInfo) -> TensorTable:
    """tensors.json. Raises NotFoundError, DigestError or FormatError (it is not the one of run.json), StoreError."""
    table = TensorTable.from_bytes(bucket.get(TABLE_KEY, max_bytes=limits.MAX_JSON_BYTES))
    if table.digest != info.tensors:
        raise DigestError(f"{TABLE_KEY} has SHA-256 {table.digest}, run.json says {info.tensors}")
    if info.total != table.total or info.full_bytes != table.full_bytes:
        raise FormatError(f"{RUN_KEY}: total {info.total} or full_bytes {info.full_bytes} contradicts {TABLE_KEY}")
    return table
