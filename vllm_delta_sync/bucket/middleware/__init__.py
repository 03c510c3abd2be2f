"""Middleware around a bucket: deadlines, retries, limits, metrics, progress, ranged downloads, a mirror, a dry run.

Each module wraps a bucket and forwards every call that it does not change. ``vllm_delta_sync.bucket.factory`` puts them
in order. Start with ``base``.
"""
