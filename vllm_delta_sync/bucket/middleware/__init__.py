"""Middleware around a bucket: deadlines, retries, limits, metrics, progress, a mirror and peers, a dry run.

Each module wraps a bucket and overrides ``base.BucketMiddleware._around``, through which every call goes, or the
methods that it changes. ``vllm_delta_sync.bucket.factory`` puts them in order. Start with ``base``.
"""
