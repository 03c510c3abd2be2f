"""Where runs live: a directory, an S3-compatible store, a Hugging Face bucket, or memory.

May import ``settings`` and what is below. ``base.Bucket`` is the contract that every store keeps; ``factory`` opens one
from its URL. tests/bucket/contract/ runs over every store.
"""

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
