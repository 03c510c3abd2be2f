"""Buckets, where runs are stored: a directory, an S3-compatible store, a Hugging Face bucket, or memory.

Start with ``base.Bucket``, the contract of every store, and ``factory``, which opens a store from its URL.
tests/bucket/contract/ tests every store against the contract. May import ``settings`` and what is below.
"""

from vllm_delta_sync.bucket.base import Bucket, ObjectInfo
from vllm_delta_sync.bucket.factory import open_beside, open_bucket
from vllm_delta_sync.settings import StoreOptions

__all__ = ["Bucket", "ObjectInfo", "StoreOptions", "open_beside", "open_bucket"]
