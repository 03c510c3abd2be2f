"""Where runs live. ``open_bucket(url)`` picks the implementation; the contract is on ``Bucket``."""

from vllm_delta_sync.bucket.base import Bucket, ObjectInfo, check_key
from vllm_delta_sync.bucket.factory import open_beside, open_bucket
from vllm_delta_sync.settings import StoreOptions
from vllm_delta_sync.urls import check_url, scheme_of, store_of

__all__ = [
    "Bucket",
    "ObjectInfo",
    "StoreOptions",
    "check_key",
    "check_url",
    "open_beside",
    "open_bucket",
    "scheme_of",
    "store_of",
]
