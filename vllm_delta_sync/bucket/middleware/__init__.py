"""What is put around a bucket: deadlines, retries, limits, metrics, progress, ranged downloads, a mirror.

Each passes on what it does not change. ``vllm_delta_sync.bucket.factory`` puts them in order. Begin with ``base``.
"""
